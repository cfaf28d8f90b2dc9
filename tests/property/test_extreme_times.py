"""Every time that can be written down works or is dead-lettered, alone: no window, timer, hold or horizon overflows."""

from __future__ import annotations

import asyncio
from collections import Counter
from datetime import timedelta
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from millpy.computation import Computation, Context
from millpy.computation import _instant as named_instant
from millpy.errors import GraphError, TimerError
from millpy.graph import Graph
from millpy.ingest.settings import AdvanceWithClock, Dedupe, EventTime
from millpy.model.time import INSTANT_MAX, INSTANT_MIN, days, hours, milliseconds, minutes, seconds
from millpy.model.timer import Timer
from millpy.windowing.aggregates.numeric import Count
from millpy.windowing.calendar_windows import CalendarWindows
from millpy.windowing.global_window import GlobalWindow
from millpy.windowing.window import FixedWindows, SessionWindows, SlidingWindows, Windows
from tests.crash.memory_world import LIMITS, World
from tests.feed import Feed

YEAR_1 = -62_135_596_800_000_000
YEAR_9999 = 253_402_300_799_999_999
EDGES = [
    *(YEAR_1 + off for off in (-1, 0, 1, 59_999_999, 7 * 86_400_000_000)),
    *(YEAR_9999 + off for off in (-7 * 86_400_000_000, -60_000_000, -1, 0, 1)),
    *(-1, 0, 1, 1_700_000_000_000_000, 1_700_000_000_000_000_000),
    *(INSTANT_MIN, INSTANT_MIN + 1, INSTANT_MAX - 1, INSTANT_MAX, -(2**63), 2**63 - 1),
]
WINDOWS: list[Windows] = [
    FixedWindows(minutes(1)),
    FixedWindows(days(7)),
    FixedWindows(timedelta(microseconds=1)),
    FixedWindows(days(365 * 400), offset=days(365 * 399)),
    SlidingWindows(minutes(10), every=minutes(1), offset=seconds(59)),
    FixedWindows(days(365 * 400)),
    SlidingWindows(minutes(10), every=minutes(1)),
    SlidingWindows(days(7), every=days(3)),
    SlidingWindows(timedelta(microseconds=2), every=timedelta(microseconds=1)),
    CalendarWindows("hour", zone="Europe/Berlin"),
    CalendarWindows("year", zone="Pacific/Apia", starts_at=days(364)),
    GlobalWindow(),
    SessionWindows(minutes(1)),
    SessionWindows(days(365 * 400)),
]


class Reading(msgspec.Struct):
    id: int
    key: str
    at: int
    names: int | None = None


class Named(Computation):
    """Produces, sets timers and holds at the time that a reading names."""

    def process_record(self, context: Context, record: Reading) -> None:
        if record.names is None:
            context.produce(record)
            return
        context.produce(record, at=record.names)
        context.set_timer("event", at=record.names)
        context.hold("hold", at=record.names)
        context.set_timer("clock", at=record.names, processing=True)

    def process_timer(self, context: Context, timer: Timer) -> None:
        assert timer.at
        context.release("hold")
        context.delete_timer("clock")
        context.produce(Reading(0, context.key, 0))


class Again(Computation):
    """Consumes the productions, and reads every time in them."""

    def process_record(self, context: Context, record: Any) -> None:
        assert context.event_time
        assert context.input_watermark
        context.produce(Reading(0, "", 0))
        context.set_timer("later", at=context.event_time_us)

    def process_timer(self, context: Context, timer: Timer) -> None:
        assert timer.at


def a_graph(feed: Feed, windows: Windows, lateness: timedelta) -> Graph:
    graph = Graph("whole")
    readings = graph.inject(
        "readings",
        feed,
        schema=Reading,
        event_time=EventTime("at", unit="us", max_disorder=milliseconds(1)),
        dedupe=Dedupe("id", within=hours(1), time="at", unit="us"),
    )
    named = readings.key_by("key").process(Named(), name="named", output=Reading, intervals=1)
    named.to_table("named_rows")
    windowed = named.key_by("key").window(windows, allowed_lateness=lateness, intervals=1).aggregate(n=Count())
    windowed.to_table("panes")
    if lateness == timedelta(0):
        windowed.key_by("key").window(windows, intervals=1).aggregate(panes=Count()).to_table("panes_of_panes")
    windowed.key_by("key").process(Again(), name="again", output=Reading, intervals=1).to_table("again_rows")
    named.deduplicate(by=["id"], within=hours(1), name="once", intervals=1).key_by("key").process(
        Again(), name="last", output=Reading, intervals=1
    )
    return graph


def payloads_of(times: list[tuple[int, int | None]]) -> list[bytes]:
    return [msgspec.json.encode(Reading(n, f"k{n % 3}", at, names)) for n, (at, names) in enumerate(times)]


async def played(windows: Windows, lateness: timedelta, bundles: list[list[bytes]]) -> World:
    """Run the graph over some bundles, to its end."""
    feed = Feed()
    world = World(a_graph(feed, windows, lateness), LIMITS)
    feed.batch_max = max(map(len, bundles))
    feed.push(*(payload for bundle in bundles for payload in bundle))
    feed.end()
    world.start()
    try:
        await world.finish()
    finally:
        world.stop.set()
    return world


def check(world: World, count: int) -> None:
    """Assert that every record is in a window, or is a dead letter or a late record."""
    assert world.adds_up()
    (source,) = world.database.accounting(world.graph_id).sources
    assert source.injected == count
    assert all(dead_letter.payload for _, _, dead_letter in world.database.dead_letters)


@pytest.mark.parametrize("lateness", [timedelta(0), minutes(10)], ids=["punctual", "lateness"])
@pytest.mark.parametrize("windows", WINDOWS, ids=repr)
@pytest.mark.parametrize("many", [False, True], ids=["few", "many"])
async def test_every_edge_of_time_works_or_is_dead_lettered_alone(
    windows: Windows, lateness: timedelta, many: bool
) -> None:
    usual = [(1_700_000_000_000_000 + n, None) for n in range(200 if many else 5)]
    edges = [(edge, None) for edge in EDGES] + [(edge, other) for edge in EDGES for other in EDGES[::3]]
    payloads = payloads_of([*edges, *usual] if many else edges)
    bundles = [payloads] if many else [payloads[n : n + 3] for n in range(0, len(payloads), 3)]

    world = await played(windows, lateness, bundles)

    check(world, len(payloads))
    if many:
        ids = Counter(row["id"] for row in world.database.rows("named_rows"))
        assert all(ids[len(edges) + n] == 1 for n in range(len(usual))), "the others are not harmed"


@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_random_times_work_or_are_dead_lettered(data: st.DataObject) -> None:
    at = st.one_of(st.sampled_from(EDGES), st.integers(YEAR_1 - 10, YEAR_9999 + 10), st.integers(-(2**63), 2**63 - 1))
    times = data.draw(st.lists(st.tuples(at, st.none() | at), min_size=1, max_size=120))
    windows = data.draw(st.sampled_from(WINDOWS))
    size = data.draw(st.sampled_from([1, 7, 200]))

    payloads = payloads_of(times)
    bundles = [payloads[n : n + size] for n in range(0, len(payloads), size)]
    world = asyncio.run(played(windows, data.draw(st.sampled_from([timedelta(0), hours(1)])), bundles))

    check(world, len(payloads))


@pytest.mark.parametrize(
    "make",
    [
        lambda far: FixedWindows(far),
        lambda far: SlidingWindows(far, every=far),
        lambda far: SessionWindows(far),
        lambda far: SessionWindows(minutes(1), by_key={"a": far}),
        lambda far: EventTime("at", max_disorder=far),
        lambda far: EventTime("at", max_disorder=seconds(1), future_tolerance=far),
        lambda far: Dedupe("id", within=far),
        lambda far: AdvanceWithClock(after=far),
        lambda far: Graph("g", max_skew=far),
        lambda far: a_graph(Feed(), FixedWindows(minutes(1)), far),
        lambda far: readings_of(Graph("g")).deduplicate(by=["id"], within=far, name="once"),
    ],
)
@pytest.mark.parametrize("far", [timedelta.max, timedelta(days=366 * 1_001)])
def test_a_duration_that_would_overflow_is_refused_when_the_graph_is_built(make: Any, far: timedelta) -> None:
    with pytest.raises(GraphError, match="thousand years"):
        make(far)


def readings_of(graph: Graph) -> Any:
    time = EventTime("at", unit="us", max_disorder=seconds(1))
    return graph.inject("readings", Feed(), schema=Reading, event_time=time)


@pytest.mark.parametrize("at", [YEAR_1 - 1, YEAR_9999 + 1, 1_700_000_000_000_000_000, INSTANT_MAX - 1])
def test_a_time_in_the_wrong_unit_is_refused_where_it_is_named(at: int) -> None:
    with pytest.raises(TimerError, match="pass µs, not ns"):
        named_instant(at)
