"""Late records and the rows of their finished windows: an operator adds them once, whatever happens to the workers."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from datetime import date
from decimal import Decimal
from enum import Enum
from typing import Any

import msgspec
import pytest

from millpy.admin.queries import Admin
from millpy.graph import Graph
from millpy.ingest.settings import EventTime
from millpy.model.time import milliseconds, seconds
from millpy.process.assembly import run_worker
from millpy.windowing.accumulation import Accumulation
from millpy.windowing.aggregates.numeric import Count, Max, Mean, Min, StandardDeviation, Sum
from millpy.windowing.aggregates.quantile import Quantile
from millpy.windowing.window import FixedWindows, SessionWindows, SlidingWindows
from tests.commands import millpy
from tests.crash.memory_world import LIMITS, World, running_world, until
from tests.feed import Feed

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


def a_graph(feed: Feed) -> Graph:
    graph = Graph("world")
    source = graph.inject(
        "readings", feed, schema=Reading, event_time=EventTime("at", unit="us", max_disorder=milliseconds(1))
    )
    keyed = source.key_by("device")
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
    keyed.window(FixedWindows(seconds(1))).aggregate(middle=Quantile("value", 0.5)).to_table("middles")
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
        before = [row_of(world, "middles"), *world.database.rows("sessions")]
        asked = await corrected(world, "middles") + await corrected(world, "sessions")

        assert states(world, asked) == {"open"}
        details = {world.database.requests.state_of("late_records", number).detail for number in asked}
        assert len(details) == 2
        assert any("middle cannot be added to: its aggregate keeps more than its result" in d for d in details)
        assert [row_of(world, "middles"), *world.database.rows("sessions")] == before
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
                replace(r, window=r.window and replace(r.window, row=None, dropped=True)) for r in found.requests
            ]
            return replace(found, requests=tuple(dropped))

        requests.read_requests = without_rows  # type: ignore[method-assign]
        (_, number) = await corrected(world, "windows")

        assert requests.state_of("late_records", number).detail.startswith("its row was dropped")
        assert row_of(world, "windows")["n"] == 3
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


async def test_corrections_on_postgresql_are_audited_and_in_the_history(database_url: str) -> None:
    feed, stop, admin = Feed(), asyncio.Event(), Admin(database_url)
    worker = asyncio.create_task(run_worker(a_graph(feed), database_url, limits=LIMITS, stop=stop))

    async def until_true(query: str) -> None:
        async with asyncio.timeout(30):
            while not admin.ask(f"SELECT ({query}) AS holds")[0]["holds"]:
                assert not worker.done(), worker.result()
                await asyncio.sleep(0.02)

    try:
        feed.push(*(payload(*record) for record in ON_TIME), payload(*AHEAD))
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
        await until_true("SELECT count(*) = 4 FROM millpy.late_records WHERE attempts = 1 AND detail <> ''")
        assert not admin.ask("SELECT FROM millpy.accounting WHERE NOT balanced")
    finally:
        stop.set()
        await worker


PANE_1 = (
    "device, window_start, window_end, n, total, mean, high, spread, levels, level, cost, price, cheapest, day, state,"
    " pane_index + 1, pane_timing, late_count, emitted_at, interval_id, bundle"
)
