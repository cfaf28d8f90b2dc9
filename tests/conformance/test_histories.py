"""Histories on PostgreSQL: every pane and retraction, once, and what a table had at any time."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

import msgspec
import psycopg
import pytest

from millpy import (
    Accumulation,
    AfterCount,
    AfterWatermark,
    Count,
    EventTime,
    FixedWindows,
    Graph,
    SessionWindows,
    Sum,
    days,
    seconds,
)
from millpy.admin.diagnosis import read_facts
from millpy.admin.doctor import examine
from millpy.clock import SystemClock
from millpy.errors import GraphError
from millpy.limits import Limits
from millpy.model.time import Instant
from millpy.process.assembly import run_worker
from millpy.store.postgres import retention
from millpy.store.postgres.deployment.migrate import migrate
from millpy.store.postgres.store import PostgresStore
from tests.commands import millpy
from tests.conformance.store_builders import Owner, a_graph, panes
from tests.crash.graph_files import rows
from tests.crash.test_versions import fed
from tests.feed import Feed

LIMITS = Limits(progress_every_s=0.02, fold_every_s=0.05, lease_ttl_s=1)
AT = EventTime("at", unit="s", max_disorder=seconds(2))
NAMES = "device, window_start, window_end"
VALUES = f"{NAMES}, n, total, pane_index, pane_timing, late_count, emitted_at, interval_id, bundle"


class Reading(msgspec.Struct):
    device: str
    at: int
    value: int


def graph_of(
    feed: Feed,
    windows: Any,
    mode: Accumulation = Accumulation.ACCUMULATING,
    *,
    history: Any = True,
    generation: int = 1,
    lateness: timedelta = timedelta(hours=1),
    early: int = 3,
    **more: Any,
) -> Graph:
    graph = Graph("factory", generation=generation)
    source = graph.inject("readings", feed, schema=Reading, event_time=AT)
    retention = days(90) if isinstance(windows, SessionWindows) else None
    windowed = source.key_by("device").window(
        windows,
        allowed_lateness=lateness,
        accumulation=mode,
        trigger=AfterWatermark(early=AfterCount(early)),
        intervals=2,
    )
    windowed.aggregate(n=Count(), total=Sum("value"), **more).to_table("sums", history=history, retention=retention)
    return graph


def readings(seed: int, count: int, devices: int) -> list[Reading]:
    rng = random.Random(seed)
    return [
        Reading(f"d{rng.randrange(devices)}", max(0, n * 200 // count - rng.choice([0, 0, 1, 40])), rng.randrange(9))
        for n in range(count)
    ]


async def run_parts(url: str, feed: Feed, make: Any, records: Sequence[Reading], parts: int) -> None:
    """Run the records in parts, each by a new worker, which takes the state over from the one before."""
    size = -(-len(records) // parts)
    for start in range(0, len(records), size):
        feed.push(*map(msgspec.json.encode, records[start : start + size]))
        await fed(url, make(), feed, LIMITS)


def believed(history: Sequence[tuple[Any, ...]], until: Any) -> dict[Any, tuple[Any, ...]]:
    """The rows of a table at a time, by adding up its history in order."""
    found: dict[Any, tuple[Any, ...]] = {}
    for *row, retraction in history:
        if row[8] > until:
            break
        if retraction:
            assert found.pop(tuple(row[:3]))[:8] == tuple(row[:8])
        else:
            found[tuple(row[:3])] = tuple(row)
    return found


def history_of(url: str) -> list[tuple[Any, ...]]:
    return rows(url, f"SELECT {VALUES}, is_retraction FROM factory.sums_history ORDER BY emitted_at, pane_index")


@pytest.mark.parametrize(
    ("windows", "mode"),
    [
        (FixedWindows(seconds(10)), Accumulation.RETRACTING),
        *((SessionWindows(seconds(4)), mode) for mode in Accumulation),
    ],
)
async def test_a_history_adds_up_to_what_its_table_had_at_every_time(
    database_url: str, windows: Any, mode: Accumulation
) -> None:
    feed = Feed(batch_max=37)

    await run_parts(database_url, feed, lambda: graph_of(feed, windows, mode), readings(3, 200, 3), 2)

    history = history_of(database_url)
    table = {row[:3]: row for row in rows(database_url, f"SELECT {VALUES} FROM factory.sums")}
    times = sorted({row[8] for row in history})
    assert len(times) > 5
    assert believed(history, times[-1]) == table
    for at in times[::3]:
        query = f"SELECT {VALUES} FROM millpy.as_of(NULL::factory.sums, '{at.isoformat()}')"
        assert {row[:3]: row for row in rows(database_url, query)} == believed(history, at)
    retractions = [row for row in history if row[-1]]
    replaced = sum(row[5] > 0 for row in history if not row[-1])
    gone = 0 if isinstance(windows, FixedWindows) else len({row[:3] for row in history} - table.keys())
    assert gone or isinstance(windows, FixedWindows)
    assert replaced
    assert len(retractions) == gone + (replaced if mode is Accumulation.RETRACTING else 0)


@pytest.mark.parametrize(
    ("count", "batch_max"), [(1, 1), (300, 300), (1, 9)], ids=["inserted", "copied", "in the turn in which it vanishes"]
)
async def test_a_window_that_comes_back_has_a_history_of_both_times(
    database_url: str, count: int, batch_max: int
) -> None:
    feed = Feed(batch_max=batch_max)
    devices = [f"d{number}" for number in range(count)]
    # The second reading makes the session [0, 10) another one, which the third one fills: it ends at 3 s. It is over
    # before the last reading, which is not late for a session of its own, [0, 10).
    times = [0, 3, 3, 11, 0]
    records = [Reading("other" if at == 11 else device, at, n) for n, at in enumerate(times) for device in devices]
    windows = SessionWindows(seconds(10), max_records=3)

    def make() -> Graph:
        return graph_of(feed, windows, lateness=seconds(0), early=1, panes=Count())

    await run_parts(database_url, feed, make, records[:count], 1)
    await run_parts(database_url, feed, make, records[count:], 1)

    names = "SELECT extract(epoch FROM window_end)::int, n, pane_index, is_retraction FROM factory.sums_history"
    found = rows(database_url, f"{names} WHERE device = 'd0' ORDER BY 1, 3, 4")
    back = [(10, 1, -1, False), (10, 1, -1, True), (10, 1, 0, False)]
    assert [row for row in found if row[0] == 10] == back
    table = {row[:3]: row for row in rows(database_url, f"SELECT {VALUES} FROM factory.sums")}
    history = history_of(database_url)
    assert believed(history, history[-1][8]) == table
    query = f"SELECT {VALUES} FROM millpy.as_of(NULL::factory.sums, {{}})"
    assert {row[:3]: row for row in rows(database_url, query.format("now()"))} == table
    first = "(SELECT min(emitted_at) FROM factory.sums_history)"
    assert [row[3] for row in rows(database_url, query.format(first) + " WHERE device = 'd0'")] == [1]
    while rows(database_url, "SELECT millpy.trim_history('factory.sums', '0 s')") != [(0,)]:
        pass
    assert {row[:3]: row[:-1] for row in history_of(database_url)} == table


async def test_many_panes_are_copied(database_url: str) -> None:
    feed = Feed(batch_max=10_000)
    records = [Reading(f"d{n}", at, n) for at in (5, 30) for n in range(900)]

    await run_parts(database_url, feed, lambda: graph_of(feed, FixedWindows(seconds(10))), records, 1)

    count = "SELECT count(*), sum(total) FROM factory.{} WHERE window_start = to_timestamp(0)"
    assert rows(database_url, count.format("sums_history")) == rows(database_url, count.format("sums"))
    assert rows(database_url, count.format("sums")) == [(900, 900 * 899 // 2)]


async def test_a_table_can_be_named_by_text(database_url: str) -> None:
    feed = Feed()
    await run_parts(database_url, feed, lambda: graph_of(feed, FixedWindows(seconds(10))), readings(1, 50, 1), 1)

    typed = rows(database_url, "SELECT to_jsonb(t) FROM millpy.as_of(NULL::factory.sums, now()) AS t ORDER BY 1")
    assert rows(database_url, "SELECT * FROM millpy.as_of('factory.sums', now()) ORDER BY 1") == typed
    assert typed
    of_key = "SELECT * FROM millpy.as_of('factory.sums', now(), '{}') ORDER BY 1"
    start = typed[0][0]["window_start"]
    for key, expected in (
        ({"device": "d0"}, typed),
        ({"device": "d0", "window_start": start}, typed[:1]),
        ({"device": "d1"}, []),
    ):
        asked = of_key.format(msgspec.json.encode(key).decode())
        assert rows(database_url, asked) == [row for row in expected if row[0]["device"] == "d0"]
    with psycopg.connect(database_url) as connection:  # a user's columns, which the history lacks
        connection.execute("ALTER TABLE factory.sums ADD note varchar(9) DEFAULT 'x', ADD twice int DEFAULT 2")
    wider = rows(database_url, "SELECT to_jsonb(t) FROM millpy.as_of(NULL::factory.sums, now()) AS t ORDER BY 1")
    assert wider == [(row | {"note": None, "twice": None},) for (row,) in typed]
    for query, error in (
        ("SELECT * FROM millpy.as_of(NULL::mill.graphs, now())", psycopg.errors.UndefinedTable),
        ("SELECT * FROM millpy.as_of(3, now())", psycopg.errors.DatatypeMismatch),
        ("SELECT * FROM millpy.as_of('sums', now())", psycopg.errors.UndefinedTable),
        (of_key.format('{"n": 1}'), psycopg.errors.UndefinedColumn),
        (of_key.format("[]"), psycopg.errors.InvalidParameterValue),
        ("SELECT millpy.trim_history('factory.sums', '-1 s')", psycopg.errors.InvalidParameterValue),
        ("SELECT millpy.trim_history('factory.sums', '1 s', 0)", psycopg.errors.InvalidParameterValue),
    ):
        with pytest.raises(error):
            rows(database_url, query)


@pytest.mark.parametrize("mode", [Accumulation.ACCUMULATING, Accumulation.RETRACTING])
async def test_a_trimmed_history_still_answers_for_the_time_that_is_kept(database_url: str, mode: Accumulation) -> None:
    feed = Feed(batch_max=29)
    windows = SessionWindows(seconds(4))
    await run_parts(database_url, feed, lambda: graph_of(feed, windows, mode), readings(5, 200, 3), 1)
    before = history_of(database_url)
    times = sorted({row[8] for row in before})
    middle = times[len(times) // 2]

    def trim() -> int:
        keep = f"now() - '{middle.isoformat()}'"
        ((deleted,),) = rows(database_url, f"SELECT millpy.trim_history('factory.sums', {keep}, 1)")
        query = f"SELECT {VALUES} FROM millpy.as_of(NULL::factory.sums, '{middle.isoformat()}')"
        assert {row[:3]: row for row in rows(database_url, query)} == believed(before, middle)
        return int(deleted)

    deleted = [trim()]
    while deleted[-1]:
        deleted.append(trim())

    after = history_of(database_url)
    assert len(before) - len(after) == sum(deleted)
    assert len(deleted) > 2, "in pieces"
    for at in times[len(times) // 2 :]:
        query = f"SELECT {VALUES} FROM millpy.as_of(NULL::factory.sums, '{at.isoformat()}')"
        assert {row[:3]: row for row in rows(database_url, query)} == believed(before, at)
    left = [row for row in after if row[8] < middle]
    assert len({row[:3] for row in left}) == len(left)  # one pane of each window at most
    assert not any(row[-1] for row in left)


async def test_a_trim_in_pieces_deletes_what_one_commit_has_replaced_in_many_windows(database_url: str) -> None:
    graph = a_graph()
    sums = replace(graph.tables[0], history="accumulating")
    async with PostgresStore(database_url) as store:
        owner = Owner(store, await store.deploy(replace(graph, tables=(sums, *graph.tables[1:]))))
        await owner.register()
        await owner.claim()
        table, interval = owner.deployment.table_ids["sums_1m"], owner.deployment.intervals_of("sums")[0]
        for pane in range(3):
            found = panes(table, *((f"d{n}", float(pane), pane) for n in range(5)), first=pane == 0)
            await owner.commit(owner.checkpoint(interval, results=[found]))
    while rows(database_url, "SELECT millpy.trim_history('factory.sums_1m', '0 s', 2)") != [(0,)]:
        pass
    assert rows(database_url, "SELECT device, total FROM factory.sums_1m_history ORDER BY 1") == [
        (f"d{n}", 2.0) for n in range(5)
    ]


async def test_workers_trim_a_history_that_is_kept_for_some_time(
    database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    migrate(database_url, "millpy")
    feed = Feed(batch_max=29)
    graph = graph_of(feed, FixedWindows(seconds(10)), history=timedelta(microseconds=1))
    await run_parts(database_url, feed, lambda: graph, readings(5, 200, 2), 1)
    ages = {"dead_letter_kept_s": 1e6, "settled_kept_s": 1e6, "events_kept_s": 1e6}

    async with PostgresStore(database_url.replace("//millpy@", "//millpy_worker@")) as store:
        await store.deploy(graph.spec())
        trimmed = [await store.forget_old(now_us=Instant(0), **ages) for _ in range(3)]
    monkeypatch.setattr(retention, "TRIM_ROWS", 5)
    async with PostgresStore(database_url) as store:  # looks at what is left again, in pieces
        await store.deploy(graph.spec())
        pieces = 0
        while await store.forget_old(now_us=Instant(0), **ages):
            pieces += 1
        with psycopg.connect(database_url) as connection:
            connection.execute("DROP TABLE factory.sums_history")
        assert not await store.forget_old(now_us=Instant(0), **ages)

    assert trimmed[0] > 20
    assert trimmed[1:] == [0, 0]
    assert pieces > 2


async def test_a_row_that_the_history_refuses_is_in_neither_table(database_url: str) -> None:
    feed = Feed(batch_max=50)
    records = readings(4, 200, 3)
    await run_parts(database_url, feed, lambda: graph_of(feed, FixedWindows(seconds(10))), records[:100], 1)
    with psycopg.connect(database_url) as connection:
        connection.execute("ALTER TABLE factory.sums_history ADD CHECK (device <> 'd1' OR n < 3) NOT VALID")
    await run_parts(database_url, feed, lambda: graph_of(feed, FixedWindows(seconds(10))), records[100:], 1)

    letters = rows(database_url, "SELECT DISTINCT reason FROM millpy.dead_letters")
    table = {row[:3]: row for row in rows(database_url, f"SELECT {VALUES} FROM factory.sums")}
    assert letters == [("refused",)]
    history = history_of(database_url)
    assert believed(history, history[-1][8]) == table


async def test_a_history_under_row_level_security_is_written_with_inserts(database_url: str) -> None:
    migrate(database_url, "millpy")
    feed = Feed(batch_max=10_000)
    worker = database_url.replace("//millpy@", "//millpy_worker@")
    async with PostgresStore(database_url) as store:
        await store.deploy(graph_of(feed, FixedWindows(seconds(10))).spec())
    with psycopg.connect(database_url) as connection:
        connection.execute("ALTER TABLE factory.sums_history ENABLE ROW LEVEL SECURITY")
    records = [Reading(f"d{n}", at, n) for at in (5, 30) for n in range(300)]

    await run_parts(worker, feed, lambda: graph_of(feed, FixedWindows(seconds(10))), records, 1)

    assert rows(database_url, "SELECT count(*) FROM factory.sums_history") == [(300,)]
    with psycopg.connect(database_url) as connection:
        connection.execute("DROP TABLE factory.sums_history")
    assert any(
        "factory.sums_history is gone" in f.found for f in examine(read_facts(database_url, SystemClock()), LIMITS)
    )


async def test_who_may_read_a_table_may_ask_what_it_had(database_url: str) -> None:
    migrate(database_url, "millpy")
    feed = Feed()
    await run_parts(database_url, feed, lambda: graph_of(feed, FixedWindows(seconds(10))), readings(1, 60, 2), 1)
    query = "SELECT count(*) FROM millpy.as_of(NULL::factory.sums, now())"

    reader = rows(database_url.replace("//millpy@", "//millpy_reader@"), query)

    assert reader == rows(database_url, "SELECT count(*) FROM factory.sums") != [(0,)]
    with pytest.raises(psycopg.errors.InsufficientPrivilege):
        rows(
            database_url.replace("//millpy@", "//millpy_reader@"), "SELECT millpy.trim_history('factory.sums', '1 day')"
        )


async def test_a_history_follows_its_table_through_changes_and_generations(database_url: str) -> None:
    feed = Feed()
    windows = FixedWindows(seconds(10))
    await run_parts(database_url, feed, lambda: graph_of(feed, windows), readings(1, 60, 2), 1)
    feed.end()
    await run_worker(graph_of(feed, windows, low=Sum("value")), database_url, limits=LIMITS)

    history = "SELECT low IS NULL, count(*) FROM {} GROUP BY 1 ORDER BY 1"
    assert rows(database_url, history.format("factory.sums_history"))[-1][0]
    with pytest.raises(GraphError, match="it has a history, and would keep none"):
        await run_worker(graph_of(feed, windows, low=Sum("value"), history=False), database_url, limits=LIMITS)
    async with PostgresStore(database_url) as store:
        await store.deploy(graph_of(feed, windows).spec(), on_purpose=True, back=True)
    with pytest.raises(psycopg.errors.UndefinedColumn):
        rows(database_url, history.format("factory.sums_history"))


async def test_a_generation_has_a_history_of_its_own(database_url: str) -> None:
    windows = FixedWindows(seconds(10))
    for generation in (1, 2):
        feed = Feed()
        feed.push(*map(msgspec.json.encode, readings(generation, 60, generation)))
        feed.end()
        await run_worker(graph_of(feed, windows, generation=generation), database_url, limits=LIMITS)
    keys = "SELECT count(DISTINCT device) FROM {}"
    assert rows(database_url, keys.format("factory_2.sums_history")) == [(2,)]
    with psycopg.connect(database_url) as connection:
        connection.execute("CREATE VIEW public.mine AS SELECT count(*) FROM millpy.as_of(NULL::factory.sums, now())")

    out = await asyncio.to_thread(millpy, "switch", "factory", "2", "--database", database_url)

    assert "view public.mine still reads it" in out
    with psycopg.connect(database_url) as connection:
        connection.execute("DROP VIEW public.mine")
    assert rows(database_url, keys.format("factory.sums_history")) == [(2,)]
    assert rows(database_url, keys.format("factory_1.sums_history")) == [(1,)]
    now = "SELECT count(DISTINCT device) FROM millpy.as_of(NULL::{}.sums, now())"
    assert rows(database_url, now.format("factory")) == [(2,)]
    await asyncio.to_thread(millpy, "drop", "factory_1", "--yes", "--database", database_url)
    assert rows(database_url, "SELECT to_regclass('factory_1.sums_history')") == [(None,)]


async def test_a_worker_that_does_not_know_of_a_switch_trims_only_its_own_history(database_url: str) -> None:
    windows, ages = FixedWindows(seconds(10)), {"dead_letter_kept_s": 1e6, "settled_kept_s": 1e6, "events_kept_s": 1e6}
    graphs = {}
    for generation in (1, 2):
        feed = Feed(batch_max=20)
        feed.push(*map(msgspec.json.encode, readings(generation, 100, 2)))
        feed.end()
        kept = timedelta(microseconds=1) if generation == 1 else True
        graphs[generation] = graph_of(feed, windows, generation=generation, history=kept)
        await run_worker(graphs[generation], database_url, limits=LIMITS)
    count = "SELECT count(*) FROM {}.sums_history"
    whole = rows(database_url, count.format("factory_2"))

    async with PostgresStore(database_url) as store:
        await store.deploy(graphs[1].spec())
        await asyncio.to_thread(millpy, "switch", "factory", "2", "--database", database_url)
        await store.forget_old(now_us=Instant(0), **ages)

    assert rows(database_url, count.format("factory")) == whole
    newest = rows(database_url, "SELECT count(*) FROM factory_1.sums")
    assert rows(database_url, count.format("factory_1")) == newest


async def test_a_trim_that_waits_for_a_switch_deletes_nothing_of_the_other_table(database_url: str) -> None:
    windows = FixedWindows(seconds(10))
    for generation in (1, 2):
        feed = Feed(batch_max=20)
        feed.push(*map(msgspec.json.encode, readings(generation, 100, 2)))
        feed.end()
        await run_worker(graph_of(feed, windows, generation=generation), database_url, limits=LIMITS)
    whole = rows(database_url, "SELECT count(*) FROM factory_2.sums_history")
    waiting = "SELECT count(*) FROM pg_stat_activity WHERE query ~ 'trim_history' AND wait_event_type = 'Lock'"

    with psycopg.connect(database_url) as switching:
        switching.execute("CREATE SCHEMA elsewhere; ALTER TABLE factory.sums_history SET SCHEMA elsewhere")
        trim = asyncio.create_task(
            asyncio.to_thread(rows, database_url, "SELECT millpy.trim_history('factory.sums', '0 s')")
        )
        async with asyncio.timeout(60):
            while not trim.done() and await asyncio.to_thread(rows, database_url, waiting) == [(0,)]:
                pass
        switching.execute("ALTER TABLE factory_2.sums_history SET SCHEMA factory")

    assert await trim == [(0,)]
    assert rows(database_url, "SELECT count(*) FROM factory.sums_history") == whole


def test_only_windows_have_a_history() -> None:
    graph = Graph("factory")
    source = graph.inject("readings", Feed(), schema=Reading, event_time=AT)
    sums = source.key_by("device").window(FixedWindows(seconds(10))).aggregate(n=Count())

    for wrong in (seconds(0), 3):
        with pytest.raises(GraphError, match="history="):
            sums.to_table("sums", history=wrong)
    assert sums.to_table("sums", history=days(90)).table == "sums"
