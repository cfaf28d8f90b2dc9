"""Late records and the rows of their finished windows: an operator adds them once, whatever happens to the workers."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from datetime import date, datetime
from decimal import Decimal
from enum import Enum
from pathlib import Path
from typing import Any

import msgspec
import pytest

from millpy.admin.queries import Admin
from millpy.graph import Graph
from millpy.ingest.settings import EventTime
from millpy.model.record import RecordType
from millpy.model.time import INSTANT_MAX, Instant, milliseconds, seconds
from millpy.process.assembly import run_worker
from millpy.store.postgres.archiving import ArchiveInto
from millpy.windowing.accumulation import Accumulation
from millpy.windowing.accumulator import AccumulatorSet
from millpy.windowing.aggregates.numeric import Count, Max, Mean, Min, StandardDeviation, Sum
from millpy.windowing.aggregates.quantile import Quantile
from millpy.windowing.recomputation import stored_form
from millpy.windowing.window import FixedWindows, SessionWindows, SlidingWindows
from millpy.windowing.window_function import WindowFunction
from tests.commands import millpy
from tests.crash.memory_world import LIMITS, World, running_world, until
from tests.feed import Feed

MIDDLE = Quantile("value", 0.5)
ON_TIME = [(1, 10), (3, 20), (4, 30)]
LATE = [(2, 5), (5, 40)]
AHEAD = (30_000, 1)
"""(event time in ms, value)"""
DAY = date(2026, 1, 21)
PRICES = [Decimal(f"{whole}.{'0' * 19}{end}") for whole, end in ((105, 5), (21, 1), (5, 1))]
TYPED = (*PRICES, DAY, "on")


class State(Enum):
    ON = "on"
    OFF = "off"


class Reading(msgspec.Struct):
    device: str
    at: int
    value: int
    level: float | None = None
    price: Decimal = Decimal(0)
    day: date | None = None
    state: State = State.OFF


def payload(at: int, value: int) -> bytes:
    level = value / 8 if value % 20 else None
    typed = {"price": f"{value}.00000000000000000001", "day": f"2026-01-{value % 28 + 1:02}", "state": "on"}
    return json.dumps({"device": "dev-1", "at": at * 1_000, "value": value, "level": level, **typed}).encode()


def a_graph(feed: Feed, *, archived_with: Feed | None = None) -> Graph:
    graph, at = Graph("world"), EventTime("at", unit="us", max_disorder=milliseconds(1))
    source = graph.inject("readings", feed, schema=Reading, event_time=at)
    keyed = source.key_by("device")
    if archived_with is not None:
        others = graph.inject("others", archived_with, schema=Reading, event_time=at)
        source.union(others).key_by("device").archive("all")
    windows = keyed.window(FixedWindows(seconds(1)), allowed_lateness=seconds(1), accumulation=Accumulation.RETRACTING)
    first = windows.aggregate(
        n=Count(),
        total=Sum("value"),
        mean=Mean("value"),
        high=Max("value"),
        spread=StandardDeviation("value"),
        levels=Count("level"),
        level=Mean("level"),
        cost=Sum("price"),
        price=Mean("price"),
        cheapest=Min("price"),
        day=Max("day"),
        state=Min("state"),
    )
    first.to_table("windows", history=True)
    second = first.key_by("device").window(FixedWindows(seconds(10)), allowed_lateness=seconds(1))
    second.aggregate(
        total=Sum("total"),
        n=Sum("n"),
        windows=Count(),
        totals=Count("total"),
        cost=Sum("cost"),
        price=Mean("cost"),
        costs=Count("cost"),
    ).to_table("tens")
    sliding = SlidingWindows(seconds(2), every=seconds(1))
    keyed.window(sliding).aggregate(n=Count(), high=Max("value"), total=Sum("value")).to_table("sliding")
    keyed.window(FixedWindows(seconds(1))).aggregate(middle=MIDDLE).to_table("middles")
    keyed.window(SessionWindows(gap=seconds(1))).aggregate(n=Count()).to_table("sessions")
    return graph


def row_of(world: World, table: str, start: int = 0) -> dict[str, Any]:
    (row,) = [row for row in world.database.rows(table) if row["window_start"] == start]
    return row


def late_rows(world: World) -> list[tuple[int, str, int]]:
    """(number, computation, start of the window) of each late record."""
    found = [(late.computation, start) for _, _, late in world.database.late_records for start in late.window_starts]
    return [(number, *row) for number, row in enumerate(found, 1)]


def replay(world: World, computation: str) -> list[int]:
    """Ask for the open late records of a computation; return their numbers."""
    numbers = [number for number, name, _ in late_rows(world) if name == computation]
    return [number for number in numbers if world.database.requests.replay_into_window(number)]


def states(world: World, numbers: list[int]) -> set[str]:
    return {world.database.requests.state_of("late_records", number).state for number in numbers}


async def fed(world: World, feed: Feed) -> None:
    feed.push(*(payload(*record) for record in ON_TIME), payload(*AHEAD))
    await until(world, lambda: len(world.database.rows("tens")) == 1, "the windows are over")
    feed.push(*(payload(*record) for record in LATE))
    await until(world, lambda: len(late_rows(world)) == 10, "two are late for five windows each")


async def corrected(world: World, computation: str) -> list[int]:
    asked = replay(world, computation)
    await until(world, lambda: "requested" not in states(world, asked), "the requests are settled")
    return asked


async def test_late_records_are_added_to_the_row_of_their_finished_window() -> None:
    feed = Feed()
    async with running_world(a_graph(feed)) as world:
        await fed(world, feed)
        before = row_of(world, "windows")
        asked = await corrected(world, "windows")

        assert states(world, asked) == {"replayed"}
        after = row_of(world, "windows")
        assert (before["n"], before["pane_index"]) == (3, 0)
        assert (after["n"], after["total"], after["mean"], after["high"]) == (5, 105, 21.0, 40)
        assert after["spread"] == pytest.approx(14.317821063276353)
        assert (after["levels"], after["level"]) == (3, pytest.approx((10 + 30 + 5) / 8 / 3))
        assert tuple(after[name] for name in ("cost", "price", "cheapest", "day", "state")) == TYPED
        assert (after["pane_index"], after["pane_timing"], after["late_count"]) == (1, "late", 2)
        assert world.adds_up()
        await corrected(world, "sliding")
        assert row_of(world, "sliding")["n"] == row_of(world, "sliding", -1_000_000)["n"] == 5
        assert row_of(world, "sliding")["total"] == 105
        assert world.adds_up()
        assert replay(world, "windows") == []


async def test_consumers_get_the_correction_as_a_late_pane_that_can_be_added_in_turn() -> None:
    feed = Feed()
    async with running_world(a_graph(feed)) as world:
        await fed(world, feed)
        assert (row_of(world, "tens")["total"], row_of(world, "tens")["n"]) == (60, 3)
        await corrected(world, "windows")
        await until(world, lambda: any(name == "tens" for _, name, _ in late_rows(world)), "it arrives behind them")

        marks = [late.retracts for _, _, late in world.database.late_records if late.computation == "tens"]
        assert marks == [[True, False]]
        await corrected(world, "tens")

        assert (row_of(world, "tens")["total"], row_of(world, "tens")["n"]) == (105, 5)
        assert row_of(world, "tens")["windows"] == 1
        assert row_of(world, "tens")["cost"] == row_of(world, "tens")["price"] == PRICES[0]
        assert world.adds_up()


async def test_what_a_row_does_not_tell_is_refused_with_the_reason() -> None:
    feed = Feed()
    async with running_world(a_graph(feed)) as world:
        await fed(world, feed)
        before = row_of(world, "middles")
        asked = await corrected(world, "middles")

        assert states(world, asked) == {"open"}
        (detail,) = {world.database.requests.state_of("late_records", number).detail for number in asked}
        assert "middle cannot be added to: its aggregate keeps more than its result" in detail
        assert row_of(world, "middles") == before
        assert world.adds_up()


async def test_a_session_takes_the_records_within_its_span_and_a_lone_record_is_one() -> None:
    feed = Feed()
    async with running_world(a_graph(feed)) as world:
        await fed(world, feed)
        feed.push(*(payload(at, 50) for at in (8_000, 8_300, 20_000)))
        await until(world, lambda: len(late_rows(world)) == 25, "these are late, too")
        asked = await corrected(world, "sessions")

        found = [world.database.requests.state_of("late_records", number) for number in asked]
        assert [record.state for record in found] == ["replayed", "open", "replayed", "open", "replayed"]
        assert all("it would make a session longer" in record.detail for record in found if record.state == "open")
        rows = sorted(world.database.rows("sessions"), key=lambda row: row["window_start"])
        assert [(row["window_start"], row["window_end"], row["n"], row["late_count"]) for row in rows[:3]] == [
            (1_000, 1_004_000, 4, 1),
            (8_000_000, 9_000_000, 1, 1),
            (20_000_000, 21_000_000, 1, 1),
        ]
        assert world.adds_up()


async def test_what_an_archive_says_of_a_window_is_used_while_its_row_is_the_same() -> None:
    feed = Feed()
    async with running_world(a_graph(feed)) as world:
        await fed(world, feed)
        requests, accumulators = world.database.requests, AccumulatorSet({"middle": MIDDLE}, RecordType(Reading))
        values = accumulators.empty()
        for at, value in ON_TIME:
            accumulators.add(values, msgspec.json.decode(payload(at, value), type=Reading, strict=False), at)
        stored = stored_form(accumulators, values)

        async def asked_with(number: int, row: bytes, values: bytes = stored) -> str:
            assert requests.replay_into_window(number, (values, row))
            await until(world, lambda: states(world, [number]) != {"requested"}, "it is settled")
            return requests.state_of("late_records", number).detail

        one, other = (number for number, name, _ in late_rows(world) if name == "middles")
        row = json.dumps(row_of(world, "middles"), default=str).encode()
        assert "does not give the row" in await asked_with(one, row, stored_form(accumulators, accumulators.empty()))
        assert await asked_with(one, row) == ""
        assert "its row has changed since an archive was read" in await asked_with(other, row)
        assert (row_of(world, "middles")["late_count"], row_of(world, "middles")["pane_index"]) == (1, 1)
        assert row_of(world, "middles")["middle"] != json.loads(row)["middle"]
        assert world.adds_up()


async def test_a_mended_dead_letter_goes_into_its_finished_windows_once_wherever_the_worker_is_killed() -> None:
    feed = Feed()
    async with running_world(a_graph(feed)) as world:
        feed.push(payload(*ON_TIME[0]), b'{"device": "dev-1", "at": 2000, "value": "x"}', payload(*AHEAD))
        await until(world, lambda: len(world.database.rows("tens")) == 1, "the windows are over")
        mended = payload(2, 6)
        assert world.database.requests.replay("dead_letters", 1, mended, into_window=True)
        for wait_s in (0.0, 0.002, 0.004):
            await asyncio.sleep(wait_s)
            await world.crash(world.running[0])
            world.start()
        feed.push(mended)  # the same record comes from the source, late: nobody asked for that one
        await until(world, lambda: len(late_rows(world)) >= 10, "both are late for five windows each")
        await until(world, lambda: row_of(world, "windows")["n"] == 2, "the mended one is added")
        windows = [number for number, name, _ in late_rows(world) if name == "windows"]
        await until(world, lambda: "requested" not in states(world, windows), "nothing is left to be done")

        assert (row_of(world, "windows")["n"], row_of(world, "windows")["late_count"]) == (2, 1)
        assert states(world, windows) == {"open", "replayed"}
        assert {row_of(world, "sliding", start)["n"] for start in (0, -1_000_000)} == {2}
        assert world.adds_up()


class Seconds(WindowFunction):
    length_max = seconds(1)

    def assign(self, record: Any, at: datetime, key: Any) -> list[tuple[datetime, datetime]]:
        start = at.replace(microsecond=0)
        return [(start, start + seconds(1))]


async def test_windows_by_site_are_over_by_their_site_and_those_of_a_function_are_corrected_too() -> None:
    feed, graph = Feed(), Graph("world")
    times = EventTime("at", unit="us", max_disorder=milliseconds(1), watermark_by="device")
    keyed = graph.inject("readings", feed, schema=Reading, event_time=times).key_by("device")
    keyed.window(FixedWindows(seconds(1))).aggregate(n=Count(), total=Sum("value")).to_table("windows")
    keyed.window(Seconds()).aggregate(n=Count(), high=Max("value")).to_table("assigned")
    behind = [payload(at, 1).replace(b"dev-1", b"dev-2") for at in (500, 700)]
    async with running_world(graph) as world:
        feed.push(payload(*ON_TIME[0]), behind[0], payload(*AHEAD))
        await until(world, lambda: len(world.database.rows("windows")) == 1, "one site is ahead")
        feed.push(payload(*LATE[1]), behind[1])
        await until(world, lambda: len(late_rows(world)) == 2, "the other site is not late")
        await corrected(world, "windows")
        await corrected(world, "assigned")

        (row,), (assigned,) = world.database.rows("windows"), world.database.rows("assigned")
        assert (row["device"], row["n"], row["total"], row["late_count"]) == ("dev-1", 2, 50, 1)
        assert (assigned["n"], assigned["high"], assigned["pane_timing"]) == (2, 40, "late")
        assert world.adds_up()


async def test_correction_computed_from_a_row_that_was_changed_meanwhile_is_computed_again() -> None:
    feed = Feed()
    async with running_world(a_graph(feed)) as world:
        await fed(world, feed)
        requests, reads = world.database.requests, []
        read = requests.read_requests

        def changed_after_it_was_read(*args: Any) -> Any:
            found = read(*args)
            if any(request.window for request in found.requests):
                reads.append(found)
                if len(reads) == 1:  # a repair, between the read and the commit
                    row_of(world, "windows").update(n=7)
            return found

        requests.read_requests = changed_after_it_was_read  # type: ignore[method-assign]
        await corrected(world, "windows")

        assert row_of(world, "windows")["n"] == 9
        assert len(reads) == 2
        assert world.adds_up()


async def test_a_window_whose_row_was_dropped_is_not_begun_anew() -> None:
    feed = Feed()
    async with running_world(a_graph(feed)) as world:
        await fed(world, feed)
        requests = world.database.requests
        read = requests.read_requests

        def without_rows(*args: Any) -> Any:
            found = read(*args)
            dropped = [
                replace(r, window=r.window and replace(r.window, row=None, dropped_to=INSTANT_MAX))
                for r in found.requests
            ]
            return replace(found, requests=tuple(dropped))

        requests.read_requests = without_rows  # type: ignore[method-assign]
        (_, number) = await corrected(world, "windows")

        assert requests.state_of("late_records", number).detail.startswith("its row was dropped")
        assert row_of(world, "windows")["n"] == 3
        assert world.adds_up()


async def test_a_record_that_may_belong_to_a_session_whose_row_was_dropped_begins_none() -> None:
    feed = Feed()
    async with running_world(a_graph(feed)) as world:
        await fed(world, feed)
        feed.push(payload(800, 50))  # of the session that ends at 1.004 s; the record alone would be one until 1.8 s
        await until(world, lambda: len(late_rows(world)) == 15, "it is late, too")
        table = next(table for table in world.database.tables.values() if table.spec.name == "sessions")
        assert len(table.drop_before(Instant(1_500_000))) == 1
        asked = await corrected(world, "sessions")

        assert states(world, asked) == {"open"}
        details = {world.database.requests.state_of("late_records", number).detail for number in asked}
        assert all(detail.startswith("its row was dropped") for detail in details)
        assert world.database.rows("sessions") == []
        assert world.adds_up()


async def test_correction_that_a_constraint_refuses_stays_open_and_the_others_are_made() -> None:
    feed = Feed()
    async with running_world(a_graph(feed)) as world:
        await fed(world, feed)
        world.database.constrain("windows", "few", lambda row: row["n"] < 5)
        asked = await corrected(world, "windows")

        found = [world.database.requests.state_of("late_records", number) for number in asked]
        assert sorted(record.state for record in found) == ["open", "replayed"]
        assert any("few" in record.detail for record in found)
        assert row_of(world, "windows")["n"] == 4
        assert world.adds_up()


async def test_a_crash_adds_a_late_record_once_or_leaves_it_requested() -> None:
    feed = Feed()
    async with running_world(a_graph(feed)) as world:
        await fed(world, feed)
        for wait_s in (0.0, 0.001, 0.003):
            asked = replay(world, "windows")
            await asyncio.sleep(wait_s)
            await world.crash(world.running[0])
            world.start()
            del asked
        numbers = [number for number, name, _ in late_rows(world) if name == "windows"]
        await until(world, lambda: states(world, numbers) == {"replayed"}, "both are added")

        assert row_of(world, "windows")["n"] == 5
        assert world.adds_up()


async def test_corrections_on_postgresql_are_audited_and_in_the_history(database_url: str, tmp_path: Path) -> None:
    feed, others, stop, admin = Feed(), Feed(), asyncio.Event(), Admin(database_url)
    graph, archive = a_graph(feed, archived_with=others), ArchiveInto(tmp_path / "archive", 0.1, in_worker=True)
    limits = replace(LIMITS, lease_ttl_s=5.0)
    worker = asyncio.create_task(run_worker(graph, database_url, limits=limits, stop=stop, archive=archive))

    async def until_true(query: str) -> None:
        async with asyncio.timeout(30):
            while not admin.ask(f"SELECT ({query}) AS holds")[0]["holds"]:
                assert not worker.done(), worker.result()
                await asyncio.sleep(0.02)

    try:
        others.push(payload(1, 70))
        feed.push(*(payload(*record) for record in ON_TIME), b'{"device": "dev-1", "at": 7000}', payload(*AHEAD))
        await until_true("to_regclass('world.tens') IS NOT NULL")
        await until_true("SELECT count(*) = 1 FROM world.tens")
        feed.push(*(payload(*record) for record in LATE))
        await until_true("SELECT count(*) = 10 FROM millpy.late_records")
        # A repair has added a pane to the history, and none to the table.
        panes = "INSERT INTO world.windows_history SELECT w.*, false FROM world.windows AS w"
        admin.change(f"WITH w AS MATERIALIZED ({panes.replace('w.*', PANE_1)} RETURNING 1) SELECT count(*) FROM w")

        asked = ["late", "replay", "--all", "--computation", "windows", "--into-window", "--why", "a gateway"]
        assert "requested 2 of 2" in await asyncio.to_thread(millpy, *asked, "--database", database_url)
        await until_true("SELECT count(*) = 2 FROM millpy.late_records WHERE state = 'replayed'")

        (row,) = admin.ask(
            "SELECT n, total, mean, high, pane_index, cost, price, cheapest, day, state FROM world.windows"
            " WHERE window_start = to_timestamp(0)"
        )
        assert tuple(row.values()) == (5, 105, 21.0, 40, 2, *PRICES, str(DAY), "on")
        history = admin.ask("SELECT n, pane_index, is_retraction FROM world.windows_history ORDER BY 2, 3")
        assert [tuple(row.values()) for row in history] == [(3, 0, False), (3, 1, False), (3, 1, True), (5, 2, False)]
        made = admin.ask(
            "SELECT key, old_row, new_row, why, requested_by = session_user AS by_me FROM millpy.corrections"
        )
        assert [(m["key"], m["old_row"]["n"], m["new_row"]["n"], m["why"], m["by_me"]) for m in made] == [
            ('"dev-1"', 3, 5, "a gateway", True)
        ] * 2
        where = ["--window", "device=dev-1", "--window", "window_start=1970-01-01T00:00:00Z"]
        exact = ["correct", "world.windows", *where, "--only-table", "--why", "exact", "--database", database_url]
        assert f"{PRICES[1]}" in await asyncio.to_thread(millpy, *exact, "--set", f"price={PRICES[1]}", "--set", "n=5")
        for refused in ("middles", "sessions"):
            asked[4] = refused
            await asyncio.to_thread(millpy, *asked, "--database", database_url)
        await until_true("SELECT count(*) = 3 FROM millpy.late_records WHERE attempts = 1 AND detail <> ''")
        await until_true("SELECT min(n) = 4 FROM world.sessions WHERE window_start < to_timestamp(1)")
        file, mended = tmp_path / "graph.py", tmp_path / "mended.json"
        file.write_text(GRAPH_FILE)
        mended.write_bytes(payload(7, 8))
        letter = ["dead-letters", "replay", "1", "--payload", str(mended), "--into-window", "--why", "mended"]
        said = await asyncio.to_thread(millpy, *letter, "--wait", "20s", "--database", database_url)
        assert "too late for finished windows: 2 open, 3 replayed" in said
        recompute = ["late", "replay", str(file), "--all", "--computation", "middles", "--into-window"]
        recompute += ["--archive", str(tmp_path / "archive"), "--wait", "20s", "--json", "--database", database_url]
        done = json.loads(await asyncio.to_thread(millpy, *recompute))
        assert done == {"requested": 3, "of": 3, "states": {"replayed": 3}, "recomputed": 3, "refused": {}}
        (row,) = admin.ask("SELECT middle, late_count FROM world.middles WHERE window_start = to_timestamp(0)")
        assert (row["middle"], row["late_count"]) == (pytest.approx(15, rel=0.4), 3)
        audited = admin.ask(
            "SELECT detail ->> 'table' AS name, detail ->> 'why' AS why, detail ->> 'dead_letter_id' AS letter,"
            " (detail ->> 'recomputed')::boolean AS recomputed, count(*) AS n FROM millpy.events"
            " WHERE kind = 'corrected' AND detail ->> 'by' = session_user AND detail -> 'old' <> detail -> 'new'"
            " GROUP BY 1, 2, 3, 4 ORDER BY 1, 2, 3"
        )
        assert [tuple(row.values()) for row in audited] == [
            ("middles", "", "1", True, 1),
            ("middles", "", None, True, 2),
            ("sessions", "a gateway", None, None, 1),
            ("sliding", "mended", "1", None, 2),
            ("windows", "a gateway", None, None, 2),
            ("windows", "mended", "1", None, 1),
        ]
        assert not admin.ask("SELECT FROM millpy.accounting WHERE NOT balanced")
    finally:
        stop.set()
        await worker


GRAPH_FILE = "from tests.crash.test_corrections import Feed, a_graph\n\ngraph = a_graph(Feed(), archived_with=Feed())\n"
PANE_1 = (
    "device, window_start, window_end, n, total, mean, high, spread, levels, level, cost, price, cheapest, day, state,"
    " pane_index + 1, pane_timing, late_count, emitted_at, interval_id, bundle"
)
