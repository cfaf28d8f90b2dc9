"""A deployed graph changed in place, on PostgreSQL: lateness, dedupe horizon, a filter, one more source of a step."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
import psycopg
import pytest

from millpy.admin.audits import record_hours
from millpy.admin.queries import Admin
from millpy.errors import GraphError, GraphVersionError
from millpy.graph import Graph
from millpy.ingest.settings import Dedupe, EventTime
from millpy.limits import Limits
from millpy.model.time import minutes, seconds
from millpy.process.assembly import deploy, run_worker
from millpy.store.postgres.store import PostgresStore
from millpy.windowing.accumulation import Accumulation
from millpy.windowing.aggregates.numeric import Count, Sum
from millpy.windowing.aggregates.quantile import Quantile
from millpy.windowing.window import FixedWindows
from tests.commands import millpy
from tests.crash.graph_files import one, rows
from tests.crash.test_versions import fed
from tests.feed import Feed

LIMITS = Limits(progress_every_s=0.02, fold_every_s=0.2)
MINUTES = "SELECT extract(epoch FROM window_start)::int, n, total, late_count FROM factory.minutes ORDER BY 1"
OVER = "SELECT extract(epoch FROM window_start)::int, is_final FROM factory.minutes_status ORDER BY 1"
REPLAYED = "SELECT millpy.replay_into_window(array_agg(late_record_id)) FROM millpy.late_records WHERE stream = 'north'"
REQUESTED = "SELECT count(*) FROM millpy.late_records WHERE state = 'requested'"
STATES = "SELECT state, detail FROM millpy.late_records ORDER BY 1"
CORRECTED = """
SELECT millpy.correct('factory.minutes',
                      '{"device": "pump", "window_start": "1970-01-01 00:01Z"}', '{"total": -4}', 'x')
"""
LATE = "SELECT stream, extract(epoch FROM event_time)::int FROM millpy.late_records ORDER BY late_record_id"


class Reading(msgspec.Struct):
    device: str
    id: int
    at: int
    value: int = 1


def positive(reading: Reading) -> bool:
    return reading.value > 0


def graph_of(
    north: Feed, *, lateness: int = 0, within: int = 60, filtered: bool = False, south: Feed | None = None
) -> Graph:
    graph = Graph("factory")
    time = EventTime("at", unit="s", max_disorder=seconds(0))
    dedupe = Dedupe("id", within=seconds(within), time="at", unit="s")
    stream: Any = graph.inject("north", north, schema=Reading, event_time=time, dedupe=dedupe)
    stream = stream.filter(positive) if filtered else stream
    if south is not None:
        other = graph.inject("south", south, schema=Reading, event_time=time)
        stream = stream.union(other.filter(positive) if filtered else other)
    windows = stream.key_by("device").window(FixedWindows(minutes(1)), allowed_lateness=seconds(lateness))
    windows.aggregate(n=Count(), total=Sum("value")).to_table("minutes")
    return graph


def lines(readings: Iterable[tuple[int, int, int]]) -> list[bytes]:
    """Encode (id, event time, value)."""
    return [msgspec.json.encode(Reading("pump", *reading)) for reading in readings]


async def test_each_record_is_judged_by_the_description_of_its_time(database_url: str) -> None:
    """At the change the watermark is at 150 s: the windows from 0 and 60 s are over, that from 120 s is open."""
    north, south = Feed(), Feed()
    north.push(*lines([(1, 10, 5), (2, 70, -5), (3, 130, -7), (4, 150, 1)]))
    await fed(database_url, graph_of(north), north, LIMITS)
    changed = {"lateness": 600, "within": 1_000, "filtered": True, "south": south}
    with pytest.raises(GraphVersionError, match="other settings than deployed version 1"):
        await run_worker(graph_of(north, **changed), database_url, limits=LIMITS)

    await deploy(graph_of(north, **changed), database_url)

    assert rows(database_url, OVER) == [(0, True), (60, True)]
    with pytest.raises(GraphVersionError, match="version 2 of graph 'factory' has more than this file"):
        await run_worker(graph_of(north), database_url, limits=LIMITS)
    with pytest.raises(GraphVersionError, match="has other settings than deployed version 2"):
        await run_worker(graph_of(north, **{**changed, "lateness": 0}), database_url, limits=LIMITS)
    again = [(1, 200, 100), (4, 200, 100)]  # id 1 was forgotten before the change, id 4 was not
    north.push(*lines([(5, 30, 9), (6, 140, 2), (7, 145, -9), *again, (8, 320, 1), (9, 130, 4)]))
    await fed(database_url, graph_of(north, **changed), north, LIMITS)
    south.push(*lines([(1, 100, 9), (2, 135, 3), (3, 330, -9)]))
    await fed(database_url, graph_of(north, **changed), south, LIMITS)
    assert rows(database_url, OVER) == [(0, True), (60, True), (120, False), (180, False)]
    assert one(database_url, REPLAYED) == 1
    await _settled(database_url, graph_of(north, **changed))
    assert rows(database_url, STATES) == [("open", ""), ("replayed", "")], "what was over before the change is over"
    assert one(database_url, CORRECTED)["total"] == -4
    north.end()
    south.end()
    await run_worker(graph_of(north, **changed), database_url, limits=LIMITS)

    assert rows(database_url, MINUTES) == [
        (0, 2, 5 + 9, 1),
        (60, 1, -4, 0),
        (120, 2 + 1 + 1 + 1, -7 + 1 + 2 + 4 + 3, 0),
        (180, 1, 100, 0),
        (300, 1, 1, 0),
    ]
    assert rows(database_url, LATE) == [("north", 30), ("south", 100)]
    assert rows(database_url, "SELECT * FROM millpy.accounting WHERE NOT balanced") == []
    ((detail,),) = rows(database_url, "SELECT detail FROM millpy.events WHERE kind = 'deployed'")
    assert detail["watermarks"]["minutes"].startswith("1970-01-01 00:02:30")
    assert any("for records from now on" in change for change in detail["changes"])


async def test_shorter_lateness_closes_no_window_of_a_site_that_is_behind_the_others(database_url: str) -> None:
    feed = Feed()
    feed.push(*of_sites(("ahead", 1_000), ("ahead", 1_100)))
    await fed(database_url, by_site(feed, lateness=60), feed, LIMITS)

    await deploy(by_site(feed, lateness=0), database_url)

    feed.push(*of_sites(("behind", 130), ("behind", 170), ("behind", 190)))
    await fed(database_url, by_site(feed, lateness=0), feed, LIMITS)
    behind = "SELECT extract(epoch FROM window_start)::int, n, late_count FROM factory.minutes WHERE device = 'behind'"
    assert rows(database_url, behind) == [(120, 2, 0)]
    assert rows(database_url, LATE) == []


def by_site(feed: Feed, lateness: int) -> Graph:
    graph = Graph("factory")
    time = EventTime("at", unit="s", max_disorder=seconds(0), watermark_by="device")
    devices = graph.inject("north", feed, schema=Reading, event_time=time).key_by("device")
    windows = devices.window(FixedWindows(minutes(1)), allowed_lateness=seconds(lateness))
    windows.aggregate(n=Count()).to_table("minutes")
    return graph


def of_sites(*readings: tuple[str, int]) -> list[bytes]:
    """Encode (device, event time)."""
    return [msgspec.json.encode(Reading(device, 1, at)) for device, at in readings]


async def _settled(url: str, graph: Graph) -> None:
    """One worker, until no late record is requested any more."""
    stop = asyncio.Event()
    worker = asyncio.create_task(run_worker(graph, url, limits=LIMITS, stop=stop))
    async with asyncio.timeout(60):
        while not worker.done() and await asyncio.to_thread(one, url, REQUESTED):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    stop.set()
    await worker


async def test_reset_computation_is_neither_corrected_nor_audited(database_url: str) -> None:
    def graph(feed: Feed) -> Graph:
        made = Graph("factory")
        time = EventTime("at", unit="s", max_disorder=seconds(0))
        keyed = made.inject("north", feed, schema=Reading, event_time=time).key_by("device")
        for name in ("minutes", "kept"):
            keyed.window(FixedWindows(minutes(1))).aggregate(n=Count()).to_table(name)
        return made

    feed = Feed()
    feed.push(*lines([(1, 10, 1), (2, 7_000, 1), (3, 20, 1)]))
    await fed(database_url, graph(feed), feed, LIMITS)
    rows(database_url, "SELECT millpy.replay_into_window(array_agg(late_record_id), 'x') FROM millpy.late_records")
    await _settled(database_url, graph(feed))
    forgotten = "INSERT INTO mill.corrected_windows SELECT graph_id, t, '\"a\"', 0, 60 FROM mill.graphs, {} RETURNING 1"
    rows(database_url, forgotten.format("unnest('{minutes,kept}'::text[]) AS t"))
    hours = [{"hour": 0, "rows": 1, "differences": 1, "uncertain": 0, "examples": []}]
    for name in ("minutes", "kept"):
        record_hours(Admin(database_url), "factory", name, hours, engine="native", by_service=True)
    corrected = "SELECT table_name, count(*) FROM millpy.corrected_windows GROUP BY 1 ORDER BY 1"
    assert rows(database_url, corrected) == [("kept", 2), ("minutes", 2)]

    async with PostgresStore(database_url) as store:
        await store.reset(graph(feed).spec(), ["minutes"])

    assert rows(database_url, corrected) == [("kept", 2)]
    assert rows(database_url, "SELECT result_table FROM millpy.audits") == [("kept",)]
    assert one(database_url, "SELECT count(*) FROM millpy.events WHERE kind = 'corrected'") == 2


def archived(feed: Feed, *, lateness: int = 0) -> Graph:
    graph = Graph("factory")
    time = EventTime("at", unit="s", max_disorder=seconds(0))
    keyed = graph.inject("north", feed, schema=Reading, event_time=time).key_by("device")
    keyed.archive()
    windows = keyed.window(FixedWindows(minutes(1)), allowed_lateness=seconds(lateness), name="minutes")
    windows.aggregate(n=Count(), total=Sum("value")).to_table("minutes")
    windows = keyed.window(FixedWindows(minutes(1)), allowed_lateness=seconds(lateness), name="middles")
    windows.aggregate(middle=Quantile("value", 0.5)).to_table("middles")
    return graph


async def test_only_windows_that_need_an_archive_wait_after_a_change_in_place(
    database_url: str, tmp_path: Path
) -> None:
    feed, file = Feed(), tmp_path / "graph.py"
    feed.push(*lines([(1, 10, 5), (2, 130, 1), (3, 20, 6)]))
    await fed(database_url, archived(feed), feed, LIMITS, only=("north", "minutes", "middles"))
    await deploy(archived(feed, lateness=60), database_url)
    file.write_text(
        "from tests.crash.test_changed_in_place import Feed, archived\n\ngraph = archived(Feed(), lateness=60)\n"
    )
    command = ["late", "replay", str(file), "--all", "--into-window", "--archive", str(tmp_path), "--why", "x"]
    done = json.loads(await asyncio.to_thread(millpy, *command, "--json", "--database", database_url))

    assert (done["requested"], done["of"]) == (1, 2)
    ((number, why),) = done["refused"].items()
    assert why.startswith("its window begins before 20")
    assert why.endswith("when the deployed graph was changed in place")
    refused = "SELECT late_record_id, state FROM millpy.late_records WHERE computation = 'middles'"
    assert rows(database_url, refused) == [(int(number), "open")]
    await _settled(database_url, archived(feed, lateness=60))
    assert rows(database_url, MINUTES) == [(0, 2, 11, 1)]


class ShortNames(msgspec.Struct):
    l: str  # noqa: E741
    at: int
    value: int


@pytest.mark.parametrize("history", [False, True])
async def test_rows_with_columns_of_any_name_are_corrected(database_url: str, history: bool) -> None:
    names = "t h s w e i f c g r m p sent found stored row key".split()
    feed, graph = Feed(), Graph("factory")
    time = EventTime("at", unit="s", max_disorder=seconds(0))
    keyed = graph.inject("north", feed, schema=ShortNames, event_time=time).key_by("l")
    windows = keyed.window(FixedWindows(minutes(1)), accumulation=Accumulation.RETRACTING)
    windows.aggregate(**{name: Sum("value") for name in names}).to_table("minutes", history=history)
    feed.push(*(msgspec.json.encode(ShortNames("pump", *reading)) for reading in [(10, 1), (70, 2), (20, 4)]))
    await fed(database_url, graph, feed, LIMITS)

    assert one(database_url, REPLAYED) == 1
    await _settled(database_url, graph)
    where = """{"l": "pump", "window_start": "1970-01-01 00:00Z"}"""
    corrected = one(database_url, f"SELECT millpy.correct('factory.minutes', '{where}', '{{\"t\": 7}}', 'x')")

    assert (corrected["t"], corrected["h"]) == (7, 5)
    query = "SELECT old_row ->> 't', new_row ->> 't' FROM millpy.corrections ORDER BY correction_id"
    assert rows(database_url, query) == [("1", "5"), ("5", "7")]
    if history:
        as_of = "SELECT (row ->> 't')::int FROM millpy.as_of('factory.minutes', now()) AS row"
        assert rows(database_url, as_of) == [(7,)]


async def test_reset_computation_begins_anew_and_the_others_stay(database_url: str) -> None:
    feed = Feed()

    def graph(lateness: int = 0) -> Graph:
        made = Graph("factory")
        time = EventTime("at", unit="s", max_disorder=seconds(0))
        keyed = made.inject("north", feed, schema=Reading, event_time=time).key_by("device")
        keyed.window(FixedWindows(minutes(1)), allowed_lateness=seconds(lateness)).aggregate(n=Count()).to_table("a")
        inner = keyed.window(FixedWindows(minutes(1))).aggregate(n=Count()).to_table("b")
        inner.key_by("device").window(FixedWindows(minutes(5))).aggregate(n=Sum("n")).to_table("c")
        return made

    feed.push(*lines([(1, 10, 1), (2, 70, 1), (3, 130, 1)]))
    await fed(database_url, graph(), feed, LIMITS)
    with psycopg.connect(database_url, autocommit=True) as connection:
        connection.execute("CREATE ROLE reader_of_c")
        connection.execute("GRANT SELECT ON factory.c, factory.c_status, factory.b_live TO reader_of_c")
    async with PostgresStore(database_url) as store:
        with pytest.raises(GraphError, match="c reads b, and would get its records again") as refused:
            await store.reset(graph().spec(), ["b"])
        assert refused.value.hint == "reset it, too: --reset c"
        with pytest.raises(GraphError, match="has no computation 'd'"):
            await store.reset(graph().spec(), ["d"])
        with pytest.raises(GraphError, match="is not deployed as in this file: a: allowed_lateness changed"):
            await store.reset(graph(60).spec(), ["a"])
        await store.reset(graph().spec(), ["c", "b"], dry_run=True)
        assert rows(database_url, "SELECT n FROM factory.b ORDER BY window_start") == [(1,), (1,)]

        deployment = await store.reset(graph().spec(), ["c", "b"])

    assert deployment.version == 3
    assert rows(database_url, "SELECT n FROM factory.b") == []
    for view in ("c_status", "b_live"):
        assert one(database_url, f"SELECT has_table_privilege('reader_of_c', 'factory.{view}', 'SELECT')")
    feed.push(*lines([(4, 140, 1), (5, 300, 1)]))
    feed.end()
    await run_worker(graph(), database_url, limits=LIMITS)
    assert rows(database_url, "SELECT n FROM factory.a ORDER BY window_start") == [(1,), (1,), (2,), (1,)]
    assert rows(database_url, "SELECT n FROM factory.b ORDER BY window_start") == [(1,), (1,)]
    assert rows(database_url, "SELECT n FROM factory.c ORDER BY window_start") == [(1,), (1,)]
    assert rows(database_url, "SELECT * FROM millpy.accounting WHERE NOT balanced") == []
