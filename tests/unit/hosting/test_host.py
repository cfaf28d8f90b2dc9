"""A hosted graph advances only when its caller feeds it."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import msgspec
import pytest

from millpy.computation import Computation, Context, Value
from millpy.errors import PoisonError, StaleSequencerError
from millpy.graph import Graph
from millpy.hosting.host import HostedGraph, HostedInterval
from millpy.ingest.settings import AdvanceWithClock, EventTime
from millpy.limits import Limits
from millpy.model.time import INSTANT_MAX, Instant
from millpy.model.timer import Timer
from millpy.store.memory.database import MemoryDatabase
from millpy.store.memory.state import MemoryState
from millpy.store.protocol import PolledSegment, PollResult, SegmentQuery
from millpy.windowing.aggregates.numeric import Count
from millpy.windowing.window import FixedWindows
from tests.feed import Feed

NOW = Instant(1_700_000_000_000_000)


class Note(msgspec.Struct):
    device: str
    at: int


class Reminder(msgspec.Struct):
    device: str
    notes: int


class Reminders(Computation):
    """Produces the count of a device's notes a minute later, by a processing-time timer."""

    notes = Value(int, default=0)

    def process_record(self, context: Context, record: Note) -> None:
        context[Reminders.notes] += 1
        context.set_timer("remind", at=context.now_us + 60_000_000, processing=True)

    def process_timer(self, context: Context, timer: Timer) -> None:
        context.produce(Reminder(context.key, context[Reminders.notes]))


def hosted(database: MemoryDatabase, idle: AdvanceWithClock | None = None) -> HostedGraph:
    graph = Graph("hosted")
    event_time = EventTime("at", unit="us", max_disorder=timedelta(0))
    notes = graph.inject("notes", Feed(), schema=Note, event_time=event_time, idle=idle)
    windows = notes.key_by("device").window(FixedWindows(timedelta(microseconds=10)), name="panes")
    windows.aggregate(n=Count()).to_table("panes")
    notes.key_by("device").process(Reminders(), name="reminders", output=Reminder).to_table("reminders")
    notes.deduplicate(["device", "at"], timedelta(hours=1), name="once").to_table("once")
    return HostedGraph(graph, MemoryState(database), Limits(), NOW)


def note(device: str, at: int) -> bytes:
    return msgspec.json.encode(Note(device, at))


def panes(database: MemoryDatabase) -> list[tuple[str, int, int]]:
    return sorted((row["device"], row["window_start"], row["n"]) for row in database.rows("panes"))


def test_a_window_closes_when_its_source_advances_the_watermark() -> None:
    database = MemoryDatabase()
    host = hosted(database)

    host.feed("notes", [note("a", 3), note("a", 4)])
    assert panes(database) == []

    host.advance_watermark("notes", Instant(10))
    assert panes(database) == [("a", 0, 2)]
    assert host.low_watermark("panes") == 10

    host.feed("notes", [note("a", 5)])
    assert panes(database) == [("a", 0, 2)]
    assert [rows.event_times for _, _, rows in database.late_records] == [[5]]


def test_a_watermark_does_not_move_back() -> None:
    database = MemoryDatabase()
    host = hosted(database)
    host.advance_watermark("notes", Instant(10))

    host.advance_watermark("notes", Instant(7))
    host.feed("notes", [note("a", 8)])

    assert host.low_watermark("notes") == 10
    assert [rows.watermarks for _, _, rows in database.late_records] == [[10]]


def test_a_processing_time_timer_fires_at_its_time() -> None:
    database = MemoryDatabase()
    host = hosted(database)
    host.feed("notes", [note("a", 3), note("a", 4)])

    host.advance_clock(Instant(NOW + 59_999_999))
    assert database.rows("reminders") == []

    host.advance_clock(Instant(NOW + 60_000_000))
    assert [(row["device"], row["notes"]) for row in database.rows("reminders")] == [("a", 2)]


def test_the_end_of_the_input_closes_everything() -> None:
    database = MemoryDatabase()
    host = hosted(database)
    host.feed("notes", [note("a", 3), note("b", 17)])

    host.end("notes")

    assert panes(database) == [("a", 0, 1), ("b", 10, 1)]
    assert host.low_watermark("panes") == INSTANT_MAX


def test_a_crash_before_the_commit_leaves_no_trace() -> None:
    database = MemoryDatabase()
    host = hosted(database)
    host.feed("notes", [note("a", 3)])
    source = host.intervals[1]
    before = {interval_id: header.bundle for interval_id, header in database.headers.items()}

    host.now_us = Instant(NOW + 60_000_000)
    assert host.step({})
    host.restart()

    assert {interval_id: header.bundle for interval_id, header in database.headers.items()} == before
    assert host.intervals[1] is not source
    host.advance_clock(host.now_us)
    assert [row["notes"] for row in database.rows("reminders")] == [1]


def test_ids_survive_a_crash() -> None:
    database = MemoryDatabase()
    host = hosted(database)
    host.feed("notes", [note("a", 3)])

    host.restart()
    host.feed("notes", [note("a", 3), note("a", 4)])

    assert [row["at"] for row in database.rows("once")] == [3, 4]


def test_a_source_that_is_not_fed_is_idle() -> None:
    database = MemoryDatabase()
    host = hosted(database, idle=AdvanceWithClock(after=timedelta(seconds=1)))
    host.feed("notes", [note("a", 3)])

    host.advance_clock(Instant(NOW + 10_000_000))
    host.advance_clock(Instant(NOW + 20_000_000))

    assert host.low_watermark("notes") == NOW + 19_000_000


def test_a_refused_value_raises_and_the_next_bundle_continues_from_the_last_commit() -> None:
    database = MemoryDatabase()
    host = hosted(database)
    database.constrain("panes", "no_b", lambda row: row["device"] != "b")
    host.feed("notes", [note("a", 3)])

    with pytest.raises(PoisonError):
        host.feed("notes", [note("b", 3), note("a", 20)])

    host.feed("notes", [note("a", 20)])
    assert panes(database) == [("a", 0, 1)]


def test_a_second_host_fences_off_the_first() -> None:
    database = MemoryDatabase()
    first = hosted(database)
    second = hosted(database)

    with pytest.raises(StaleSequencerError):
        first.feed("notes", [note("a", 3)])

    first.feed("notes", [note("a", 3)])  # it has restarted: the last to claim is the owner
    with pytest.raises(StaleSequencerError):
        second.feed("notes", [note("a", 3)])


class CountedSegment(PolledSegment):
    """Counts how often any segment is read."""

    reads = 0

    def __getattribute__(self, name: str) -> Any:
        CountedSegment.reads += 1
        return super().__getattribute__(name)


def test_a_backlog_of_segments_is_received_in_linear_time() -> None:
    plan = hosted(MemoryDatabase()).plan
    (source,), (stage,) = (plan.deployment.intervals_of(name)[:1] for name in ("notes", "reminders"))
    host = HostedInterval(plan, stage.interval_id, Limits())
    (subscription_id,) = host.interval.plan.incoming
    query = SegmentQuery(stage.interval_id, stage.index, source.interval_id, (subscription_id,), 0)
    segments = tuple(CountedSegment(subscription_id, n + 1, n, Instant(n), 0, None, 0) for n in range(1_000))

    host.step(NOW, polled=[PollResult(query, segments, 1_000, Instant(999), truncated=False)])

    assert host.interval.cursors[source.interval_id].seq == 1_000
    assert CountedSegment.reads <= 20 * len(segments)
