"""What a worker tells of its sources: rows when they change, one event for what changes together, repeats that grow."""

from __future__ import annotations

from itertools import pairwise
from typing import Any
from uuid import UUID

from millpy.ingest.connection_state import WHY_CHARACTERS_MAX, ConnectionState
from millpy.model.time import Instant
from millpy.runtime.database_health import OUTAGES_MAX, DatabaseHealth
from millpy.runtime.events import EventQueue
from millpy.runtime.source_health import ATTEMPTS_EVERY_S, PARTITIONS_TOLD_MAX, REPEAT_S_MAX, SourceHealth
from millpy.sources.mqtt.silence import SILENT_AFTER_S, WATCH_EVERY_S, BrokerSilence
from millpy.testing.clock import ManualClock

WORKER = UUID(int=1)


class Store:
    """Keeps what is reported, and the events."""

    def __init__(self) -> None:
        self.reports: list[Any] = []
        self.events: list[Any] = []

    async def report_sources(self, worker_id: UUID, reports: Any) -> None:
        assert worker_id == WORKER
        self.reports += reports

    async def record_events(self, graph_id: int, events: Any) -> None:
        self.events += events


def health_of(clock: ManualClock) -> tuple[SourceHealth, Store]:
    store: Any = Store()
    return SourceHealth(store, WORKER, clock, clock, EventQueue(store, 7, WORKER)), store


async def test_healthy_sources_cost_one_row_each_and_no_event() -> None:
    clock = ManualClock()
    health, store = health_of(clock)
    health.connection_of(1, "readings", "a").connected()
    health.connection_of(2, "readings", "b")

    for _ in range(100):
        await health.report()
        clock.advance(1)

    assert [(report.interval_id, report.connected) for report in store.reports] == [(1, True)]
    assert store.events == []


async def test_outage_is_told_once_for_all_partitions_then_at_growing_intervals_and_when_it_is_over() -> None:
    clock = ManualClock()
    health, store = health_of(clock)
    connections = [health.connection_of(number, "readings", f"readings/{number}") for number in range(12)]
    for connection in connections:
        connection.connected()
    await health.report()
    store.reports.clear()

    told: list[tuple[str, float]] = []
    for second in range(3 * 3_600):
        for connection in connections:
            connection.disconnected("nothing listens", attempted=True)
        await health.report()
        told += [(event.kind, second) for event in store.events[len(told) :]]
        clock.advance(1)
    for connection in connections:
        connection.connected()
    await health.report()

    assert [second for _, second in told[:6]] == [0, 30, 90, 210, 450, 930]
    assert max(after[1] - before[1] for before, after in pairwise(told)) == REPEAT_S_MAX
    assert {kind for kind, _ in told[1:]} == {"source_still_disconnected"}
    first, last = store.events[0], store.events[-1]
    assert first.kind == "source_disconnected"
    assert first.detail["partition"].count("readings/") == PARTITIONS_TOLD_MAX
    assert first.detail["partition"].endswith(" and 2 more")
    assert last.kind == "source_connected"
    assert (last.detail["seconds"], last.detail["attempts"]) == (3 * 3_600, 12 * 3 * 3_600)
    assert len(store.reports) <= 12 * (3 * 3_600 / ATTEMPTS_EVERY_S + 3), "attempts are not worth a row a second"


async def test_outage_between_two_looks_is_told() -> None:
    clock = ManualClock()
    health, store = health_of(clock)
    connection = health.connection_of(1, "readings", "a")
    connection.connected()
    await health.report()
    connection.disconnected("it closed the connection")
    connection.connected()
    await health.report()

    assert [event.kind for event in store.events] == ["source_connected"]
    assert store.events[0].detail["why"] == "it closed the connection"


def test_reason_of_any_length_is_kept_short() -> None:
    connection = ConnectionState(lambda: Instant(0))
    connection.disconnected("x" * 1_000_000)

    assert len(connection.why) == WHY_CHARACTERS_MAX


async def test_outage_of_the_database_is_told_afterwards() -> None:
    clock = ManualClock()
    health, store = health_of(clock)
    database: DatabaseHealth = health.database
    database.answered()
    database.failed("no route")
    clock.advance(5)
    database.failed("connection refused")
    assert (database.answers, database.failing_s) == (False, 5)
    clock.advance(2)
    database.answered()
    await health.report()

    (event,) = store.events
    assert event.kind == "database_restored"
    assert (event.detail["seconds"], event.detail["why"]) == (7, "connection refused")
    for _ in range(2 * OUTAGES_MAX):
        database.failed("again")
        database.answered()
    assert len(database.outages) == OUTAGES_MAX


def test_broker_is_silent_only_while_this_process_listens() -> None:
    silence, now, reads = BrokerSilence(0.0), 0.0, 0

    def look(*, heard: bool = False, paused: bool = False, after: float = WATCH_EVERY_S) -> float:
        nonlocal now, reads
        now, reads = now + after, reads + heard
        silence.look(reads, paused=paused, now=now)
        return silence.seconds(now)

    assert [look(heard=True), look(), look()] == [0, 2, 4]
    assert silence.answers(now)
    assert look() >= SILENT_AFTER_S
    assert not silence.answers(now)
    assert look(paused=True) == 0, "nothing can be heard"
    assert [look(), look(after=60)] == [2, 0], "what has arrived in this minute was not read yet"
