"""Any input of a graph becomes lines of a feed, and a feed is read back unchanged."""

from __future__ import annotations

import asyncio
import gzip
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from millpy import Count, EventTime, Files, FixedWindows, Graph, Mqtt, minutes
from millpy.clock import SystemClock
from millpy.errors import UsageError
from millpy.ingest.protocol import Source, SourceBatch, SourceSetup
from millpy.limits import Limits
from millpy.testing.crash_test.feed_source import END_FILE, FeedSource
from millpy.testing.crash_test.feeder import Feeder, write_whole_feed
from millpy.testing.crash_test.inputs import PreparedInput, prepare
from millpy.testing.crash_test.options import Options

LINES = [f'{{"device":"d{n % 3}","at":{n}}}' for n in range(10)]


class Reading(msgspec.Struct):
    device: str
    at: int


def graph_of(**sources: Source) -> Graph:
    graph = Graph("inputs")
    for name, source in sources.items():
        time = EventTime("at", unit="s", sorted=True)
        stream = graph.inject(name, source, schema=Reading, event_time=time)
        stream.key_by("device").window(FixedWindows(minutes(1)), name=f"of_{name}").aggregate(n=Count())
    return graph


def prepared(place: Path, graph: Graph, *inputs: str, generate: int | None = None) -> list[PreparedInput]:
    options = Options(graph="g.py", inputs=inputs, generate=generate)
    with ThreadPoolExecutor(1) as thread:  # it runs an event loop, as some of these tests do
        return thread.submit(prepare, graph, options, place / "input").result()


async def read(directory: Path, position: bytes | None = None, **limits: int) -> list[SourceBatch]:
    """Everything up to the end of the feed."""
    setup = SourceSetup(
        graph="g", stream="s", partition="feed", limits=Limits(**limits), clock=SystemClock(), ready=asyncio.Event()
    )
    injector = FeedSource(directory).connect(setup)
    await injector.open(position)
    found = []
    try:
        while not (found and found[-1].finished):
            taken = await injector.take()
            assert taken is not None
            found.append(taken)
    finally:
        await injector.close()
    return found


def lines_of(found: list[SourceBatch]) -> list[str]:
    return [
        line for taken in found for line in (taken.block.decode().splitlines() or map(bytes.decode, taken.payloads))
    ]


@pytest.fixture
def ndjson(tmp_path: Path) -> Path:
    path = tmp_path / "readings.ndjson"
    path.write_text("\n".join(LINES[:5]) + "\n\n" + "\n".join(LINES[5:]))  # a blank line, and no last newline
    return path


async def test_the_graphs_own_files_are_read(tmp_path: Path, ndjson: Path) -> None:
    (source,) = prepared(tmp_path, graph_of(readings=Files(ndjson)))
    write_whole_feed([source], tmp_path / "feed")

    assert (source.total, source.origin) == (10, "readings.ndjson")
    assert lines_of(await read(tmp_path / "feed" / "readings")) == LINES


async def test_feed_is_read_in_bundles_from_any_position(tmp_path: Path, ndjson: Path) -> None:
    write_whole_feed(prepared(tmp_path, graph_of(readings=Files(ndjson))), tmp_path / "feed")

    found = await read(tmp_path / "feed" / "readings", bundle_records_max=3)

    assert [taken.block.count(b"\n") for taken in found] == [3, 3, 3, 1, 0]
    assert lines_of(await read(tmp_path / "feed" / "readings", found[1].position)) == LINES[6:]
    assert found[1].describe(0) == "readings.ndjson, record 4"


async def test_line_is_not_read_before_its_end_is_written(tmp_path: Path, ndjson: Path) -> None:
    write_whole_feed(prepared(tmp_path, graph_of(readings=Files(ndjson))), tmp_path / "feed")
    feed = tmp_path / "feed" / "readings"
    (feed / END_FILE).unlink()
    (feed / "0").unlink()
    (feed / "0").write_text(LINES[0] + "\n" + LINES[1][:7])
    setup = SourceSetup(
        graph="g", stream="s", partition="feed", limits=Limits(), clock=SystemClock(), ready=asyncio.Event()
    )
    injector = FeedSource(feed).connect(setup)
    await injector.open(None)

    first, second = await injector.take(), await injector.take()

    await injector.close()
    assert first is not None
    assert (first.block.decode(), second) == (LINES[0] + "\n", None)
    assert not injector.quiet()


async def test_files_of_all_kinds_follow_each_other(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text('device,at\r\nd0,1\r\n"d\n1",2\r\n')
    with gzip.open(tmp_path / "b.ndjson.gz", "wt") as file:
        file.write(LINES[2] + "\n")
    pq.write_table(pa.table({"device": ["d3", "d4"], "at": [3, 4]}), tmp_path / "c.parquet")
    graph = graph_of(readings=Files(tmp_path / "a.csv", tmp_path / "*.gz", tmp_path / "c.parquet"))

    (source,) = prepared(tmp_path, graph)
    write_whole_feed([source], tmp_path / "feed")
    found = await read(tmp_path / "feed" / "readings")

    assert source.total == 5
    assert [taken.format for taken in found if taken.has_records] == ["csv", "json", "json"]
    assert found[0].header == ("device", "at")
    assert [payload.rstrip() for payload in found[0].payloads] == [b"d0,1", b'"d\n1",2']
    assert lines_of(found[1:]) == [LINES[2], '{"device":"d3","at":3}', '{"device":"d4","at":4}']


async def test_input_replaces_the_source_of_an_injector(tmp_path: Path, ndjson: Path) -> None:
    both = graph_of(one=Mqtt("a/b"), other=Files("missing.ndjson"))

    one, other = prepared(tmp_path, both, f"one={ndjson}", f"other={ndjson}")

    assert (one.stream, one.total, other.stream, other.total) == ("one", 10, "other", 10)


def test_single_injector_need_not_be_named(tmp_path: Path, ndjson: Path) -> None:
    assert prepared(tmp_path, graph_of(readings=Mqtt("a/b")), str(ndjson))[0].total == 10


def test_records_are_generated_where_no_input_is_given(tmp_path: Path, ndjson: Path) -> None:
    made, given = prepared(tmp_path, graph_of(one=Mqtt("a/b"), other=Mqtt("c")), f"other={ndjson}", generate=25)

    assert (made.total, made.origin, given.total) == (25, "generated with seed 1", 10)


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ((), "'one' reads from Mqtt"),
        (("{file}",), "several injectors: one, other"),
        (("one={file}", "one={file}"), "'one' has two inputs"),
        (("third=nothing.csv",), "no injector named 'third'"),
        (("one=nothing.csv", "other={file}"), "no such file: 'nothing.csv'"),
        (("one={empty}", "other={file}"), "no records in empty.ndjson"),
    ],
)
def test_missing_or_superfluous_input_is_refused(
    tmp_path: Path, ndjson: Path, inputs: tuple[str, ...], message: str
) -> None:
    (tmp_path / "empty.ndjson").write_text("\n")
    given = [text.format(file=ndjson, empty=tmp_path / "empty.ndjson") for text in inputs]

    with pytest.raises(UsageError, match=message):
        prepared(tmp_path, graph_of(one=Mqtt("a/b"), other=Mqtt("c")), *given)


class Hurry(SystemClock):
    """Each look at it is half a second later."""

    def __init__(self) -> None:
        self._now: Iterator[float] = (0.5 * n for n in range(10_000))

    def monotonic(self) -> float:
        return next(self._now)


async def test_feeder_feeds_everything_in_order_and_ends_the_feeds(tmp_path: Path, ndjson: Path) -> None:
    graph = graph_of(one=Files(ndjson), other=Files(ndjson))
    sources = prepared(tmp_path, graph)
    feeder = Feeder(sources, tmp_path / "feed", Hurry(), remaining_s=lambda since: 2.0 - since, rate_max=float("inf"))
    feeder.start()
    feeder.join(20)

    assert feeder.fed == feeder.total == 20
    for name in ("one", "other"):
        assert lines_of(await read(tmp_path / "feed" / name)) == LINES


def test_feeder_keeps_some_input_until_the_last_fault(tmp_path: Path, ndjson: Path) -> None:
    sources = prepared(tmp_path, graph_of(one=Files(ndjson)))
    feeder = Feeder(sources, tmp_path / "feed", Hurry(), remaining_s=lambda _: 1_000.0, rate_max=float("inf"))
    feeder.start()
    feeder.stop()

    assert feeder.fed < feeder.total
    assert not (tmp_path / "feed" / "one" / END_FILE).exists()
