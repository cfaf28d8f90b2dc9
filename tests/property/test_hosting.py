"""A hosted graph commits what a worker commits, bit for bit, however its input is bundled and wherever it restarts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, replace
from datetime import datetime, timedelta
from itertools import groupby
from typing import Any

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from millpy.computation import Computation, Context, Value
from millpy.graph import Graph
from millpy.graph.streams import Stream
from millpy.hosting.host import HostedGraph, HostedInterval
from millpy.hosting.plan import plan
from millpy.hosting.routing import Delivery, segment_queries
from millpy.hosting.step import StoreLoader
from millpy.ingest.protocol import SourceBatch
from millpy.ingest.settings import AdvanceWithClock, Dedupe, EventTime, Wait
from millpy.limits import Limits
from millpy.model.checkpoint import Kind
from millpy.model.stage import UNBOUNDED
from millpy.model.timer import Timer
from millpy.operators.pattern import Pattern
from millpy.store.codec import decode_slice
from millpy.store.memory.database import MemoryDatabase
from millpy.store.memory.state import MemoryState
from millpy.store.memory.store import MemoryStore
from millpy.store.memory.tables import overlaid
from millpy.store.protocol import PollResult
from millpy.testing.clock import ManualClock
from millpy.windowing.accumulation import Accumulation
from millpy.windowing.aggregates.numeric import Count, Mean, Sum
from millpy.windowing.calendar_windows import CalendarWindows
from millpy.windowing.composite_triggers import AfterAny, AfterWatermark
from millpy.windowing.global_window import GlobalWindow
from millpy.windowing.pane_rules import FiringBehavior
from millpy.windowing.timestamp_combiner import TimestampCombiner
from millpy.windowing.triggers import AfterCount, Every
from millpy.windowing.window import FixedWindows, SessionWindows, SlidingWindows, Windows
from millpy.windowing.window_function import WindowFunction
from tests.crash.memory_world import started
from tests.feed import Feed

pytestmark = pytest.mark.usefixtures("small_blocks")

OF_WORKERS = Limits(lease_ttl_s=1_000_000, progress_every_s=0.001)
LIMITS = replace(OF_WORKERS, closed_windows_bytes_max=1, unfired_windows_bytes_max=1)
"""A worker that is stepped by hand folds nothing, and would wait for a fold to make room in memory."""
START_US = 1_700_000_000_000_000
STEP_S = 2
FAILS = 9


class Note(msgspec.Struct):
    id: int
    device: str
    at: int
    value: float


class Said(msgspec.Struct):
    device: str = ""
    number: int = 0
    total: float = 0.0


class Silence(Computation):
    """Counts a device's notes, reports its silence, and fails at some notes."""

    said = Value(Said)

    def process_record(self, context: Context, record: Note) -> None:
        if record.value == FAILS:
            raise ValueError(f"note {record.id}")
        said = context[Silence.said]
        said.device, said.number, said.total = record.device, said.number + 1, said.total + record.value
        if record.value == 1:
            context.delete_timer("silent", processing=False)
        elif not context.late:
            context.set_timer("silent", at=context.event_time_us + 15)
        if record.value == 2:
            context.set_timer("later", at=context.now_us + 3 * STEP_S * 1_000_000, processing=True)

    def process_timer(self, context: Context, timer: Timer) -> None:
        context.produce(context[Silence.said])


def us(microseconds: int) -> timedelta:
    return timedelta(microseconds=microseconds)


def source(graph: Graph, feed: Feed, name: str = "notes", **more: Any) -> Stream:
    event_time = EventTime("at", unit="us", max_disorder=us(5))
    return graph.inject(name, feed, schema=Note, event_time=event_time, **more)


def windowed(windows: Windows, lateness: int) -> Callable[[Graph, Sequence[Feed]], None]:
    def build(graph: Graph, feeds: Sequence[Feed]) -> None:
        notes = source(graph, feeds[0], dedupe=Dedupe("id", within=us(60), time="at", unit="us"))
        keyed = notes.key_by("device").window(windows, allowed_lateness=us(lateness), intervals=2, name="panes")
        keyed.aggregate(n=Count(), total=Sum("value"), mean=Mean("value")).to_table("panes")

    return build


def computation(on_failure: Any, idle: AdvanceWithClock | Wait) -> Callable[[Graph, Sequence[Feed]], None]:
    def build(graph: Graph, feeds: Sequence[Feed]) -> None:
        notes = source(graph, feeds[0], idle=idle)
        said = notes.key_by("device").process(
            Silence(), name="silence", output=Said, intervals=3, on_failure=on_failure
        )
        said.to_table("said")
        said.key_by("number").window(FixedWindows(us(50)), name="per_number").aggregate(n=Count()).to_table("numbers")

    return build


def operators(graph: Graph, feeds: Sequence[Feed]) -> None:
    def half(note: Note) -> Note:
        return Note(note.id, note.device, note.at, 10 / (note.value - FAILS))

    several = source(graph, feeds[0]).filter(lambda note: note.value != 3).map(half)
    doubled = several.flat_map(lambda note: [note] * (note.id % 3), Note)
    doubled.deduplicate(["id"], us(40), name="once", intervals=2).to_table("once")
    parts = doubled.split(lambda note: "even" if note.id % 2 == 0 else "odd", into=["even", "odd"])
    keyed = parts["odd"].key_by("device").window(FixedWindows(us(30)), name="odds", intervals=2)
    keyed.aggregate(n=Count()).to_table("odds")


def union(graph: Graph, feeds: Sequence[Feed]) -> None:
    both = source(graph, feeds[0], "left").union(source(graph, feeds[1], "right"))
    keyed = both.key_by("device").window(SessionWindows(us(12)), allowed_lateness=us(20), name="panes", intervals=2)
    keyed.aggregate(n=Count(), total=Sum("value")).to_table("panes")


def learned(graph: Graph, feeds: Sequence[Feed]) -> None:
    """A source that learns its disorder bound; see `small_blocks`."""
    event_time = EventTime("at", unit="ms", max_disorder=us(20_000), percentile=0.6)
    keyed = graph.inject("notes", feeds[0], schema=Note, event_time=event_time).key_by("device")
    panes = keyed.window(FixedWindows(us(20_000)), allowed_lateness=us(15_000), intervals=2, name="panes")
    panes.aggregate(n=Count(), total=Sum("value")).to_table("panes")


def joined(graph: Graph, feeds: Sequence[Feed]) -> None:
    left, right = (source(graph, feed, name) for feed, name in zip(feeds, ("left", "right"), strict=True))
    within = us(4), us(12)
    pairs = left.key_by("device").join(
        right.key_by("device"), within=within, how="full", allowed_lateness=us(10), intervals=2
    )
    left.key_by("device").join_as_of(
        right.key_by("device"), within=us(20), how="inner", name="latest", intervals=2
    ).to_table("latest")
    counts = pairs.to_table("pairs").key_by("device").window(FixedWindows(us(40)), intervals=2)
    counts.aggregate(n=Count(), total=Sum("value_right")).to_table("counts")


def levels(graph: Graph, feeds: Sequence[Feed]) -> None:
    """Sessions that are retracted, behind a filter in windows and behind a deduplicate in others; and increments."""
    keyed = source(graph, feeds[0]).key_by("device")
    late = {"allowed_lateness": us(25), "intervals": 2}
    visits = keyed.window(SessionWindows(us(8)), accumulation=Accumulation.RETRACTING, name="visits", **late)
    panes = visits.aggregate(n=Count(), total=Sum("value")).to_table("visits")
    odd = panes.filter(lambda pane: pane.n % 2 == 1).key_by("device")
    odd.window(SlidingWindows(us(40), every=us(20)), name="odd", **late).aggregate(
        visits=Count(), total=Sum("total")
    ).to_table("odd")
    once = panes.union(panes).deduplicate(["device", "n"], us(200), name="once", intervals=2).key_by("n")
    once.window(FixedWindows(us(50)), name="sizes", **late).aggregate(mean=Mean("total")).to_table("sizes")
    parts = keyed.window(FixedWindows(us(20)), accumulation=Accumulation.DISCARDING, name="parts", **late)
    more = parts.aggregate(n=Count(), total=Sum("value")).to_table("parts").key_by("device")
    more.window(FixedWindows(us(60)), name="sums", **late).aggregate(panes=Count(), n=Sum("n")).to_table("sums")


def early(graph: Graph, feeds: Sequence[Feed]) -> None:
    """Panes by the clock and by records, in every mode, with sums of what is retracted; and windows that close."""
    keyed = source(graph, feeds[0]).key_by("device")
    ticks = AfterWatermark(early=AfterAny(AfterCount(3), Every(timedelta(seconds=2.5 * STEP_S))))
    for name, kind, trigger, mode in (
        ("retracting", FixedWindows(us(20)), ticks, Accumulation.RETRACTING),
        ("visits", SessionWindows(us(8)), ticks, Accumulation.DISCARDING),
        ("closing", SlidingWindows(us(30), every=us(10)), AfterCount(2), Accumulation.ACCUMULATING),
    ):
        late = {"allowed_lateness": us(25), "intervals": 2}
        windows = keyed.window(kind, trigger=trigger, accumulation=mode, name=name, **late)
        panes = windows.aggregate(n=Count(), total=Sum("value")).to_table(name)
        if mode is Accumulation.RETRACTING:
            sums = panes.key_by("device").window(FixedWindows(us(60)), name="sums", **late)
            sums.aggregate(panes=Count(), n=Sum("n")).to_table("sums")


class Spread(WindowFunction):
    """Windows that merge, of a length of their own."""

    merges = True
    length_max = timedelta(microseconds=60)

    def assign(self, record: Note, at: datetime, key: Any) -> list[tuple[datetime, datetime]]:
        return [(at, at + us(4 + record.id % 9))]


def bounded(graph: Graph, feeds: Sequence[Feed]) -> None:
    """Windows of a function and full sessions, whose panes have times of their own and may be empty."""
    keyed = source(graph, feeds[0]).key_by("device")
    late = {"allowed_lateness": us(25), "intervals": 2}
    spread = keyed.window(
        Spread(),
        accumulation=Accumulation.RETRACTING,
        timestamp_combiner=TimestampCombiner.EARLIEST,
        name="spread",
        **late,
    )
    panes = spread.aggregate(n=Count(), total=Sum("value")).to_table("spread").key_by("device")
    panes.window(FixedWindows(us(40)), name="outer", **late).aggregate(n=Sum("n")).to_table("outer")
    full = keyed.window(
        SessionWindows(us(12), max_records=4, max_length=us(50)),
        accumulation=Accumulation.RETRACTING,
        on_time_pane=FiringBehavior.ALWAYS,
        final_pane=FiringBehavior.ALWAYS,
        pane_info=True,
        name="full",
        **late,
    )
    full.aggregate(n=Count(), total=Sum("value")).to_table("full")


def tools(graph: Graph, feeds: Sequence[Feed]) -> None:
    """Event-time order, and the tools behind it."""
    keyed = source(graph, feeds[0]).key_by("device").in_order(name="in_order", intervals=2)

    def small(note: Note) -> bool:
        return note.value < 4

    def large(note: Note) -> bool:
        return note.value > 6

    keyed.match(Pattern("small", small).then("large", large, within=us(20)), name="rises", intervals=2).to_table(
        "rises"
    )
    keyed.match(Pattern("small", small).then_not("large", large, within=us(20)), name="stays", intervals=2).to_table(
        "stays"
    )
    keyed.changes("value", by=2.0, name="changes", intervals=2).to_table("changes")
    keyed.rates("id", name="rates", intervals=2).to_table("rates")
    keyed.fill_gaps("value", every=us(7), limit=us(30), name="filled", intervals=2).to_table("filled")


SILENT = AdvanceWithClock(after=timedelta(seconds=3 * STEP_S))
GRAPHS = {
    "fixed": windowed(FixedWindows(us(20)), 15),
    "sliding": windowed(SlidingWindows(us(30), every=us(10)), 15),
    "session": windowed(SessionWindows(us(8)), 15),
    "dead-letters": computation("dead_letter", SILENT),
    "parks": computation("park", SILENT),
    "timers": computation("dead_letter", Wait()),
    "operators": operators,
    "union": union,
    "learned": learned,
    "levels": levels,
    "joined": joined,
    "early": early,
    "bounded": bounded,
}
"""These run on Spark, too, hundreds of times."""
ALL_GRAPHS = GRAPHS | {
    "gaps": windowed(SessionWindows(us(8), by_field="value", max_gap=timedelta(seconds=10)), 15),
    "calendar": windowed(CalendarWindows("hour", zone="Europe/Berlin"), 15),
    "global": windowed(GlobalWindow(), 15),
}
HOSTED = ALL_GRAPHS | {"tools": tools}
"""The records of the last one have times and nested records, which Spark writes in other types."""
TWO_SOURCES = ("union", "joined")

notes = st.tuples(st.integers(0, 60), st.sampled_from("abcd"), st.integers(-25, 10), st.integers(0, 12))
crashes = st.sampled_from(["no", "no", "no", "between", "stepped"])


@dataclass(frozen=True)
class Turn:
    """A source's bundle, and the crash before it: none, one between two turns, or one before the commit."""

    feed: int
    payloads: list[bytes]
    crash: str


IDLE = {"dead-letters", "parks"}
"""Graphs with an idle policy: after a restart, a source proves anew that it is silent."""


def scripted(drawn: list[tuple[int, list[tuple[int, str, int, int]], str]]) -> list[Turn]:
    """Turns whose event times rise, with some disorder; a value of 12 does not decode."""
    script, at = [], 0
    for feed, turn, crash in drawn:
        at += 2 * len(turn)
        made = [Note(id_, device, max(0, at + offset), float(value)) for id_, device, offset, value in turn]
        script.append(Turn(feed, [b"{" if note.value == 12 else msgspec.json.encode(note) for note in made], crash))
    return script


turns = st.lists(st.tuples(st.integers(0, 1), st.lists(notes, max_size=20), crashes), max_size=10).map(scripted)


def graph_of(kind: str) -> tuple[Graph, list[Feed]]:
    feeds = [Feed(batch_max=10**6), Feed(batch_max=10**6)]
    graph = Graph("hosted")
    HOSTED[kind](graph, feeds)
    return graph, feeds if kind in TWO_SOURCES else feeds[:1]


def turn_of(*devices_and_times: str | int) -> Turn:
    """A turn of records of these devices (a letter each) at these times."""
    pairs = zip(devices_and_times[::2], devices_and_times[1::2], strict=True)
    notes = [Note(0, device, int(at), 0.0) for devices, at in pairs for device in str(devices)]
    return Turn(0, [msgspec.json.encode(note) for note in notes], "no")


async def by_a_worker(kind: str, script: Sequence[Turn], *, ends: bool) -> Any:
    clock = ManualClock(START_US)
    database = MemoryDatabase(clock)
    graph, feeds = graph_of(kind)
    worker = await started(MemoryStore(database), graph, OF_WORKERS, clock)
    await worker.balance()

    async def turn() -> None:
        clock.advance(STEP_S)
        await worker.step()
        await worker.cycle.await_in_flight()

    for given_ in script:
        feeds[given_.feed % len(feeds)].push(*given_.payloads)
        await turn()
    for feed in feeds if ends else ():
        feed.end()
        await turn()
    await worker.abandon()
    return contents(database)


def by_a_host(kind: str, script: Sequence[Turn], *, ends: bool, crashes: bool) -> Any:
    clock = ManualClock(START_US)
    database = MemoryDatabase(clock)
    graph, feeds = graph_of(kind)
    host = HostedGraph(graph, MemoryState(database), LIMITS, clock.now_us())
    names = ["left", "right"] if len(feeds) == 2 else ["notes"]

    for turn in script:
        if crashes and turn.crash == "between":
            host.restart()
        if crashes and turn.crash == "stepped":
            host.step({})
            host.restart()
        clock.advance(STEP_S)
        host.now_us = clock.now_us()
        if turn.payloads:
            host.feed(names[turn.feed % len(names)], turn.payloads)
        else:
            host.advance_clock(host.now_us)
    for name in names if ends else ():
        clock.advance(STEP_S)
        host.now_us = clock.now_us()
        host.end(name)
    return contents(database)


def by_intervals(kind: str, script: Sequence[Turn], *, decoded: bool) -> Any:
    """Hosts each interval singly, as Spark does, and passes its productions on as slices or records."""
    clock = ManualClock(START_US)
    state = MemoryState(MemoryDatabase(clock))
    graph, _ = graph_of(kind)
    planned = plan(graph, state.deploy(graph.spec()), LIMITS)
    sources = [i.interval_id for computation in planned for i in computation.intervals if computation.stage is None]

    def opened() -> dict[int, HostedInterval]:
        grants = state.claim([i.interval_id for computation in planned for i in computation.intervals])
        return {
            grant.interval_id: HostedInterval(
                planned,
                grant.interval_id,
                LIMITS,
                snapshot=state.read(grant, state_rows_max=3),
                runs=state.load_dedupe_runs(grant),
                load=StoreLoader(state.load_state, state.load_windows, state.query_windows),
            )
            for grant in grants
        }

    hosts = opened()
    for turn in script:
        if turn.crash != "no":
            hosts = opened()
        clock.advance(STEP_S)
        now = clock.now_us()
        batch = SourceBatch("json", now, payloads=turn.payloads) if turn.payloads else None
        for interval_id, host in hosts.items():
            if interval_id in sources:
                is_fed = interval_id == sources[turn.feed % len(sources)]
                checkpoint = host.step(now, taken=batch if is_fed else None, quiet=batch is None or not is_fed)
            else:
                answers = state.poll(segment_queries({interval_id: host.interval}), UNBOUNDED)
                polled = [] if decoded else answers
                delivered = [d for answer in answers if decoded for d in as_records(host, answer)]
                checkpoint = host.step(now, polled=polled, delivered=delivered)
            if checkpoint is not None:
                state.commit([checkpoint], graph_version=planned.deployment.version)
    return contents(state.database)


def as_records(host: HostedInterval, answer: PollResult) -> list[Delivery]:
    found = []
    for (seq, watermark), group in groupby(answer.segments, lambda segment: (segment.seq, segment.watermark)):
        records = {
            segment.subscription_id: decode_slice(
                host.interval.plan.incoming[segment.subscription_id].record_type, segment.payload, segment.checksum
            )
            for segment in group
            if segment.payload is not None
        }
        found += host.delivery(answer.query.producer, seq, watermark, records)
    return [*found, *host.delivery(answer.query.producer, answer.head_seq, answer.head_watermark)]


def contents(database: MemoryDatabase) -> Any:
    """Return everything that is committed, without owners."""
    return {
        # Windows that fire at once leave memory in the order of their first records, which a restart does not keep.
        "rows": {table.spec.name: sorted(table.rows.values(), key=str) for table in database.tables.values()},
        "entries": {
            (interval_id, *name): (row.value, row.fire_at)
            for interval_id, header in database.headers.items()
            for name, row in overlaid(header.keyed, database.unfolded(header)).items()
            if name[0] is not Kind.FLEET  # statistics, which a restart may round; no result depends on them
        },
        "headers": {
            interval_id: (
                *(header.bundle, header.input_watermark, header.low_watermark, header.oldest_work),
                *(header.processing_floor, header.cursors, header.dedupe_clock),
            )
            for interval_id, header in database.headers.items()
        },
        "dead letters": [
            (i, bundle, dead_letter.reason, dead_letter.payload) for i, bundle, dead_letter in database.dead_letters
        ],
        "late": [(i, bundle, astuple(rows)) for i, bundle, rows in database.late_records],
        "balanced": database.accounting(1).balanced,
    }


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(list(HOSTED)), turns, st.booleans())
def test_a_host_commits_what_a_worker_commits(kind: str, script: list[Turn], ends: bool) -> None:
    hosted = by_a_host(kind, script, ends=ends, crashes=False)

    assert hosted["balanced"]
    assert hosted == asyncio.run(by_a_worker(kind, script, ends=ends))


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(sorted(HOSTED.keys() - IDLE)), turns, st.booleans())
@example("early", [turn_of("a" * 5 + "d", 14, "b", 20), turn_of("b", 16), Turn(0, [], "between")], False)
def test_restarts_from_committed_state_change_nothing(kind: str, script: list[Turn], ends: bool) -> None:
    crashed = by_a_host(kind, script, ends=ends, crashes=True)

    assert crashed == by_a_host(kind, script, ends=ends, crashes=False)


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(list(HOSTED)), turns, st.booleans())
@example("dead-letters", [Turn(0, [], "no")] * 3 + [Turn(0, [], "between")], False)
def test_intervals_hosted_singly_commit_the_same(kind: str, script: list[Turn], decoded: bool) -> None:
    assert by_intervals(kind, script, decoded=decoded) == by_a_host(kind, script, ends=False, crashes=True)
