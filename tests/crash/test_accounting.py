"""The account sees every record that the engine loses or doubles, wherever that is: real workers, a real PostgreSQL.

Two workers run each graph: one has the source, the other the rest, so records go by segments, polls and memory.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import psycopg
import pyarrow.compute as pc
import pytest

from millpy.computation import Computation, Context, Value
from millpy.errors import PaneOrderError
from millpy.graph import Graph
from millpy.graph.streams import Stream
from millpy.ingest.settings import Dedupe, EventTime
from millpy.limits import Limits
from millpy.model.time import milliseconds, seconds
from millpy.model.timer import Timer
from millpy.process.assembly import deploy, run_worker
from millpy.sources.files.source import File
from millpy.windowing.aggregates.numeric import Count, Sum
from millpy.windowing.window import FixedWindows, SessionWindows, SlidingWindows
from tests.crash.accounting_canaries import CANARIES, Canary, Change

RECORDS = 900
UNBALANCED = """
SELECT coalesce('=' || result_table, stream || coalesce('>' || consumer, '')) FROM millpy.accounting WHERE NOT balanced
"""
COUNTS = "SELECT {} FROM millpy.accounting WHERE {}"


class Reading(msgspec.Struct):
    device: str
    at: int
    number: int
    value: int


class Total(msgspec.Struct):
    device: str
    number: int


class Totals(Computation):
    number = Value(int, default=0)

    def process_record(self, context: Context, record: Any) -> None:
        context[Totals.number] += 1
        context.produce(Total(record.device, context[Totals.number]))


class Timed(Totals):
    def process_record(self, context: Context, record: Any) -> None:
        super().process_record(context, record)
        context.set_timer("soon", at=context.event_time_us + 5_000)

    def process_timer(self, context: Context, timer: Timer) -> None:
        context.produce(Total(context.key, -1))


def readings(path: Path) -> Path:
    """Lines with disorder, records that come twice, records that are far too late, rubbish and blank lines."""
    rng = random.Random(3)
    lines = []
    for number in range(RECORDS):
        at = number * 10_000 - rng.choice([0, 0, 0, 20_000, 900_000]) * (number > 100)
        line = msgspec.json.encode(Reading(f"d{rng.randrange(5)}", at, number, rng.randrange(100)))
        lines.append(line)
        lines += [line] * (number % 40 == 7) + [b"{rubbish"] * (number % 300 == 150) + [b" "] * (number % 200 == 60)
    path.write_bytes(b"\n".join(lines) + b"\n")
    return path


def _after(stream: Stream, name: str = "after") -> None:
    stream.key_by("device").process(Totals(), name=name, output=Total, intervals=2).to_table(name)


def _windowed(stream: Stream, windows: Any, name: str) -> Any:
    keyed = stream.key_by("device").window(windows, allowed_lateness=milliseconds(300), name=name, intervals=2)
    return keyed.aggregate(n=Count(), total=Sum("value"))


def _both(source: Stream) -> None:
    source.union(source.filter(lambda r: r.value > 50)).key_by("device").process(
        Totals(), name="both", output=Total, intervals=2
    ).to_table("both")


def _fixed_and_after(source: Stream) -> None:
    _after(_windowed(source, FixedWindows(seconds(1)), "fixed"))


def _evens(source: Stream) -> None:
    branches = source.split(lambda r: "even" if r.value % 2 == 0 else "odd", into=["even", "odd"])
    _after(branches["even"], "even")
    _after(branches["odd"], "odd")


def _totals(source: Stream) -> None:
    totals = source.key_by("device").process(Totals(), name="totals", output=Total, intervals=2)
    totals.to_table("totals")
    _after(totals)


def _columns_twice(batch: Any) -> Any:
    rows = [row for row in range(len(batch)) for _ in range(row % 3)]
    return {"device": batch.column("device").take(rows), "number": batch.column("value").take(rows)}, rows


GRAPHS: dict[str, Callable[[Stream], object]] = {
    "fixed": lambda s: _windowed(s, FixedWindows(seconds(1)), "fixed").to_table("fixed"),
    "hopping": lambda s: _windowed(s, SlidingWindows(seconds(1), milliseconds(300)), "hopping").to_table("hopping"),
    "sliding": lambda s: _windowed(s, SlidingWindows(seconds(1), milliseconds(250)), "sliding").to_table("sliding"),
    "sessions": lambda s: _windowed(s, SessionWindows(milliseconds(60)), "sessions").to_table("sessions"),
    "joined": lambda s: _windowed(
        s.union(s.filter(lambda r: r.value > 50)), FixedWindows(seconds(1)), "joined"
    ).to_table("joined"),
    "chained": _fixed_and_after,
    "computed": _totals,
    "timed": lambda s: s.key_by("device").process(Timed(), name="timed", output=Total, intervals=2).to_table("timed"),
    "both": _both,
    "unique": lambda s: _after(s.deduplicate(by=["device", "value"], within=milliseconds(500), name="unique")),
    "filtered": lambda s: _after(s.filter(lambda r: r.value > 30)),
    "filtered columns": lambda s: _after(s.filter(lambda b: pc.greater(b.column("value"), 30), columns=True)),
    "mapped": lambda s: _after(s.map(lambda r: Total(r.device, r.value), Total)),
    "flat": lambda s: _after(s.flat_map(lambda r: [Total(r.device, n) for n in range(r.value % 3)], Total)),
    "flat columns": lambda s: _after(s.flat_map(_columns_twice, Total, columns=True)),
    "split": _evens,
}  # fmt: skip


def a_graph(name: str, path: Path) -> Graph:
    graph = Graph("accounts")
    source = graph.inject(
        "readings", File(path), schema=Reading, event_time=EventTime("at", unit="us", max_disorder=milliseconds(30)),
        dedupe=Dedupe("number", within=seconds(60)),
    )  # fmt: skip
    GRAPHS[name](source)
    return graph


def limits(bundle: int) -> Limits:
    return Limits(bundle_records_max=bundle, lease_ttl_s=20, fold_every_s=0.2, progress_every_s=0.02, poll_s_max=0.02)


async def finish(graph: Graph, url: str, bundle: int) -> None:
    """Run it to its end, with the source on one worker and everything else on another."""
    await deploy(graph, url)
    others = [c.name for c in graph.spec().computations if c.name != "readings"]
    async with asyncio.timeout(60):
        async with asyncio.TaskGroup() as workers:
            for only in (["readings"], others):
                workers.create_task(run_worker(graph, url, limits=limits(bundle), only=only))


def fetch(url: str, query: str) -> list[Any]:
    with psycopg.connect(url, autocommit=True) as connection:
        return connection.execute(query).fetchall()  # type: ignore[call-overload]


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("bundle", [20, 200])
@pytest.mark.parametrize("name", GRAPHS)
async def test_accounting_of_the_sound_engine_adds_up(
    name: str, bundle: int, tmp_path: Path, database_url: str
) -> None:
    await finish(a_graph(name, readings(tmp_path / "in.ndjson")), database_url, bundle)

    assert fetch(database_url, UNBALANCED) == []
    ((injected, accepted, duplicate, dead),) = fetch(
        database_url, COUNTS.format("injected, accepted, duplicate, dead_lettered", "source_partition IS NOT NULL")
    )
    assert (injected, accepted, duplicate, dead) == (RECORDS + 23 + 3, RECORDS, 23, 3)
    for produced, consumed in fetch(database_url, COUNTS.format("produced, consumed", "source_partition IS NULL")):
        assert produced > 0
        assert consumed > 0


def _cases() -> list[Any]:
    """Each place with one of its changes, or with all of them: `make accounting`."""
    whole = os.environ.get("ACCOUNTING") == "whole"
    return [
        pytest.param(
            canary, change, id=f"{change.__name__}-{canary.what}-{canary.bundle}".replace(",", "").replace(" ", "_")
        )
        for number, canary in enumerate(CANARIES)
        for change in (canary.changes if whole else [canary.changes[number // 2 % len(canary.changes)]])
    ]


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize(("canary", "change"), _cases())
async def test_record_lost_or_doubled_is_found(
    canary: Canary, change: Change, tmp_path: Path, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph = a_graph(canary.graph, readings(tmp_path / "in.ndjson"))
    sound = getattr(canary.owner, canary.name)
    monkeypatch.setattr(canary.owner, canary.name, canary.broken(change)(sound))

    try:
        await finish(graph, database_url, canary.bundle)
    except* PaneOrderError:
        pass  # the stored data contradict each other by now, and the database stops the worker, too

    assert canary.finds in {name for (name,) in fetch(database_url, UNBALANCED)}
