"""Retractions among failures: dead letters and late records that retract are replayed as what they are."""

from __future__ import annotations

import json
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import pytest

from millpy import Accumulation, Computation, Context, Count, EventTime, FixedWindows, Graph, Sum, Value, milliseconds
from millpy.model.checkpoint import Kind
from millpy.model.record import RecordType
from millpy.operators.keyed import ComputationLogic
from millpy.store.memory.tables import overlaid
from tests.conformance.test_retracting_tables import expected, readings, totals
from tests.crash.graph_files import rows
from tests.crash.harness import Worker
from tests.crash.memory_world import LIMITS, World, running_world, until
from tests.feed import Feed
from tests.stage_driver import StageDriver

GRAPH = Path(__file__).with_name("retracting_graph.py")


class Faults:
    """Trouble that lasts until it is repaired."""

    filtering: ClassVar[bool] = False
    computing: ClassVar[bool] = False


@pytest.fixture(autouse=True)
def nothing_is_broken() -> None:
    Faults.filtering = Faults.computing = False


class Reading(msgspec.Struct):
    device: str
    at: int
    value: int


class Balance(msgspec.Struct):
    device: str
    panes: int
    total: int
    retracts: bool


class Balances(Computation):
    """Keeps the sum of the panes that are not retracted."""

    handles_retractions = True
    panes = Value(int, default=0)
    total = Value(int, default=0)

    def process_record(self, context: Context, record: Any) -> None:
        if Faults.computing:
            raise ValueError("not yet")
        sign = -1 if context.retracts else 1
        context[Balances.panes] += sign
        context[Balances.total] += sign * int(record.total)
        balance = Balance(record.device, context[Balances.panes], context[Balances.total], context.retracts)
        context.produce(balance)


def careful(pane: Any) -> bool:
    if Faults.filtering:
        raise ValueError("a bug")
    return True


def a_graph(feed: Feed) -> Graph:
    graph = Graph("world")
    event_time = EventTime("at", unit="us", max_disorder=milliseconds(5))
    readings = graph.inject("readings", feed, schema=Reading, event_time=event_time)
    windows = readings.key_by("device").window(
        FixedWindows(milliseconds(10)),
        allowed_lateness=milliseconds(1_000),
        accumulation=Accumulation.RETRACTING,
        name="inner",
    )
    panes = windows.aggregate(n=Count(), total=Sum("value"))
    outer = (
        panes.filter(careful)
        .key_by("device")
        .window(FixedWindows(milliseconds(20)), allowed_lateness=milliseconds(1_000))
    )
    outer.aggregate(panes=Count(), total=Sum("total")).to_table("outer")
    strict = panes.key_by("device").window(FixedWindows(milliseconds(20)))
    strict.aggregate(panes=Count(), total=Sum("total")).to_table("strict")
    keyed = panes.key_by("device")
    keyed.process(Balances(), name="balances", output=Balance).to_table("balances")
    return graph


def reading(at_ms: int, value: int, device: str = "a") -> bytes:
    return json.dumps({"device": device, "at": at_ms * 1_000, "value": value}).encode()


def running(feed: Feed) -> AbstractAsyncContextManager[World]:
    return running_world(a_graph(feed), LIMITS)


def row(world: World, table: str = "outer", start_ms: int = 0) -> tuple[int, int] | None:
    found = [r for r in world.database.rows(table) if r["device"] == "a" and r["window_start"] == start_ms * 1_000]
    return (found[0]["panes"], int(found[0]["total"])) if found else None


def consumed(world: World) -> int:
    """How many records the windows behind the filter have taken."""
    headers = [header for header in world.database.headers.values() if header.interval.computation == "outer"]
    found = [overlaid(header.keyed, world.database.unfolded(header)) for header in headers]
    counts = [int(row.value) for rows in found for name, row in rows.items() if name[:2] == (Kind.COUNTER, "consumed")]
    return sum(counts)


def letters(world: World) -> list[tuple[str, bool]]:
    return [(letter.computation, letter.retracts) for _, _, letter in world.database.dead_letters]


async def replay(world: World, *numbers: int) -> None:
    for number in numbers:
        assert world.database.requests.replay("dead_letters", number + 1)
    states = [world.database.requests.state_of("dead_letters", number + 1) for number in numbers]
    await until(world, lambda: all(state.state == "replayed" for state in states), "all are taken")


async def test_a_retraction_that_fails_is_replayed_as_a_retraction() -> None:
    feed = Feed()
    async with running(feed) as world:
        feed.push(reading(1, 5), reading(100, 1, "b"))
        await until(world, lambda: row(world) == (1, 5), "the window has its first pane")
        Faults.filtering = True
        feed.push(reading(2, 30))
        await until(world, lambda: len(letters(world)) == 2, "the pane and its successor part from their way")
        assert letters(world) == [("outer", True), ("outer", False)]
        assert row(world) == (1, 5)

        Faults.filtering = False
        await replay(world, 0, 1)

        await until(world, lambda: row(world) == (1, 35), "the sum has the new pane alone")
        assert world.adds_up()


async def test_replaying_a_pane_whose_retraction_has_passed_makes_the_sum_right() -> None:
    feed = Feed()
    async with running(feed) as world:
        Faults.filtering = True
        feed.push(reading(1, 5), reading(100, 1, "b"))
        await until(world, lambda: letters(world) == [("outer", False)], "the first pane is dead-lettered")
        Faults.filtering = False
        feed.push(reading(2, 30))
        await until(world, lambda: consumed(world) == 2, "its retraction and its successor have come")
        assert row(world) is None, "records minus retractions are none"

        await replay(world, 0)

        await until(world, lambda: row(world) == (1, 35), "all three have come")
        assert world.adds_up()


async def test_late_retractions_are_counted_and_stay_late() -> None:
    feed = Feed()
    async with running(feed) as world:
        feed.push(reading(1, 5), reading(100, 1, "b"))
        await until(world, lambda: row(world, "strict") == (1, 5), "the window without lateness is over")
        feed.push(reading(2, 30))
        await until(world, lambda: row(world) == (1, 35), "the other is amended")
        await until(world, lambda: len(world.database.late_records) > 0, "both are late for the first")

        (late,) = [rows for _, _, rows in world.database.late_records]
        assert (late.computation, late.retracts) == ("strict", [True, False])
        assert row(world, "strict") == (1, 5)
        assert all(world.database.requests.replay("late_records", number) for number in (1, 2))
        states = [world.database.requests.state_of("late_records", number) for number in (1, 2)]
        await until(world, lambda: all(state.state == "open" for state in states), "both are late again")
        assert [rows.retracts for _, _, rows in world.database.late_records] == [[True, False]]
        assert world.adds_up()


async def test_a_computation_sees_retractions_after_it_has_failed() -> None:
    feed = Feed()

    def balances() -> list[tuple[int, int, bool]]:
        rows = world.database.rows("balances")
        return [(r["panes"], r["total"], r["retracts"]) for r in rows if r["device"] == "a"]

    async with running(feed) as world:
        feed.push(reading(1, 5), reading(100, 1, "b"))
        await until(world, lambda: balances() == [(1, 5, False)], "the first pane has come")
        Faults.computing = True
        feed.push(reading(2, 30))
        await until(world, lambda: len(letters(world)) == 2, "the pane and its successor are dead-lettered")
        assert letters(world) == [("balances", True), ("balances", False)]
        Faults.computing = False
        await replay(world, 0, 1)

        await until(world, lambda: len(balances()) == 3, "both have come")
        assert sorted(balances()) == [(0, 0, True), (1, 5, False), (1, 35, False)]
        assert world.adds_up()


class Pane(msgspec.Struct):
    device: str
    total: int


@pytest.mark.parametrize("restart", [False, True])
def test_a_parked_retraction_waits_as_a_retraction(restart: bool) -> None:
    outputs = {"balances": RecordType(Balance)}
    subject = StageDriver(ComputationLogic(Balances(), parks=True), Pane, key=("device",), outputs=outputs)
    first, second = (Pane("a", 5), 0), (Pane("a", 35), 0)
    subject.feed([first])
    Faults.computing = True
    subject.feed([first, second], retracts=[True, False])
    subject.feed([second], retracts=[True])
    if restart:
        subject.restart()
    Faults.computing = False

    subject.release()

    found = [(balance.panes, balance.total, balance.retracts) for balance, _ in subject.produced("balances")]
    assert found == [(1, 5, False), (0, 0, True), (1, 35, False), (0, 0, True)]
    Faults.computing = True
    subject.feed([first], retracts=[True])
    (letter,) = subject.release(discard=True).dead_letters
    assert letter.retracts


KILLS = ["after_step:6", "after_fence:4", "after_commit:5"]


def test_totals_of_killed_workers_are_those_of_a_batch(tmp_path: Path, database_url: str) -> None:
    """Real processes: the sessions are killed three times, then their totals, which another one has made meanwhile."""
    records, source = readings(11), tmp_path / "readings.ndjson"
    source.write_bytes(b"".join(msgspec.json.encode(record) + b"\n" for record in records))
    settings: dict[str, Any] = {"graph": GRAPH, "bundle_records_max": 15}
    with Worker(tmp_path, database_url, source, only="totals", **settings) as other:
        for kill in KILLS:
            with Worker(
                tmp_path, database_url, source, failpoint=f"{kill}:kill", only="readings,visits", **settings
            ) as one:
                one.await_killed()
        other.kill()

    with Worker(tmp_path, database_url, source, **settings) as last:
        last.await_finished()

    assert totals(database_url) == expected(records)
    assert rows(database_url, "SELECT * FROM millpy.accounting WHERE NOT balanced") == []
    assert rows(database_url, "SELECT max(pane_index) FROM factory.totals")[0][0] > 1, "totals were amended"
