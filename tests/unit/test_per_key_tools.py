"""Per-key tools in graphs: what is refused, and what happens at their bounds."""

from __future__ import annotations

import math
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import msgspec
import pytest

from millpy import (
    Accumulation,
    AfterCount,
    AfterWatermark,
    Computation,
    Context,
    Count,
    EventTime,
    FixedWindows,
    GlobalWindow,
    Graph,
    KeyedStream,
    Max,
    Mean,
    Pattern,
    SessionWindows,
    SlidingWindows,
    Stream,
    Sum,
    Timer,
    TimestampCombiner,
    minutes,
    seconds,
)
from millpy.errors import GraphError, SchemaError
from millpy.operators.gap_filling import POINTS_A_CALL, POINTS_AT_ONCE, SEGMENTS_MAX, GapFilling
from millpy.operators.pattern import STEPS_MAX
from millpy.operators.pattern_matching import PARTIALS_BYTES_MAX
from millpy.testing import GraphDriver, ManualSource
from millpy.windowing.aggregates.ranking import KEPT_MAX, Ranking
from tests.per_key_events import DOOR, DOOR_ALARM, GRID, Event, at, driver_of, event, events_of, grid, is_alarm, is_door

# Refusals.


@pytest.mark.parametrize(
    ("add", "message"),
    [
        (lambda keyed: keyed.match(DOOR, name="m"), "is no pattern of several steps"),
        (lambda keyed: keyed.match("door", name="m"), "is no pattern of several steps"),
        (lambda keyed: keyed.match(DOOR_ALARM, name="m", after_match="next"), "unknown after_match='next'"),
        (lambda keyed: keyed.match(DOOR_ALARM, name="m", partials_max=0), "not between 1 and 1,000"),
        (lambda keyed: keyed.match(DOOR_ALARM, name="M"), "is not a plain name"),
        (
            lambda keyed: keyed.match(Pattern("device", is_door).then("b", is_alarm, within=minutes(1)), name="m"),
            "the result has a field 'device', and so has the key",
        ),
        (lambda keyed: keyed.changes("at", name="c"), "cannot compare field 'at'"),
        (lambda keyed: keyed.changes("kind", by=1, name="c"), "it is no number"),
        (lambda keyed: keyed.changes("value", by=-1, name="c"), "use finite numbers that are not negative"),
        (lambda keyed: keyed.changes("value", by=math.nan, name="c"), "use finite numbers"),
        (lambda keyed: keyed.changes("value", by=1, by_ratio=0.1, name="c"), "not both"),
        (lambda keyed: keyed.changes("value", max_silence=seconds(0), name="c"), "must be positive"),
        (lambda keyed: keyed.rates("kind", name="r"), "cannot be a counter"),
        (lambda keyed: keyed.rates("count", wraps_at=0, name="r"), "is not a positive int"),
        (lambda keyed: keyed.rates("count", wraps_at=2.0**32, name="r"), "is not a positive int"),
        (lambda keyed: keyed.rates("count", max_gap=seconds(-1), name="r"), "must be positive"),
        (
            lambda keyed: keyed.stream.key_by("count").fill_gaps("count", **GRID),
            "has a field 'count', and so has the key",
        ),
        (lambda keyed: grid(keyed, every=seconds(0)), "at least one step long"),
        (lambda keyed: grid(keyed, limit=seconds(1)), "at least one step long"),
        (lambda keyed: grid(keyed, limit=timedelta(days=3 * 365)), "of at most 100,000"),
        (lambda keyed: grid(keyed, method="cubic"), "unknown method='cubic'"),
        (lambda keyed: grid(keyed, "kind", method="linear"), "cannot fill in field 'kind'"),
        (lambda keyed: grid(keyed, "tags"), "cannot fill in field 'tags'"),
        (lambda keyed: grid(keyed, offset=minutes(1)), "must be from zero to every"),
        (lambda keyed: keyed.fill_gaps(every=seconds(1), limit=seconds(1), name="g"), "needs the fields"),
    ],
)
def test_a_tool_that_could_not_work_is_refused(add: Callable[[Any], Any], message: str) -> None:
    with pytest.raises(GraphError, match=message):
        driver_of(add)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Pattern("no name", is_door), "invalid name of a step"),
        (lambda: Pattern("door", 5), "needs a function"),  # type: ignore[arg-type]
        (lambda: DOOR.unless("reset", is_alarm), r"must follow a then\(…\)"),
        (lambda: DOOR.then("door", is_door, within=minutes(1)), "named after step 'door'"),
        (lambda: DOOR.then("door_at", is_door, within=minutes(1)), "named after step 'door_at'"),
        (lambda: DOOR.then("alarm", is_alarm, within=seconds(0)), "of step 'alarm' must be positive"),
        (
            lambda: DOOR.then_not("a", is_alarm, within=minutes(1)).then("b", is_door, within=minutes(1)),
            "the last step",
        ),
        (lambda: DOOR.then_not("a", is_alarm, within=minutes(1)).unless("b", is_door), r"must follow a then\(…\)"),
        (lambda: long_pattern(STEPS_MAX + 1), "has at most 16 steps"),
    ],
)
def test_a_pattern_that_says_nothing_is_refused(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(GraphError, match=message):
        make()


def long_pattern(steps: int) -> Pattern:
    pattern = Pattern("s0", is_door)
    for number in range(1, steps):
        pattern = pattern.then(f"s{number}", is_door, within=minutes(1))
    return pattern


def test_a_condition_that_awaits_is_refused() -> None:
    async def waits(event: Event) -> bool:
        return True

    with pytest.raises(GraphError, match="cannot await"):
        Pattern("door", waits)


def test_patterns_are_values() -> None:
    assert DOOR_ALARM == Pattern("door", is_door).then("alarm", is_alarm, within=minutes(5))
    assert DOOR_ALARM != DOOR_ALARM.unless("reset", is_door)
    assert len(DOOR.steps) == 1, "a method must return a new pattern"
    assert repr(DOOR_ALARM.unless("reset", is_door)) == (
        "Pattern('door', is_door).then('alarm', is_alarm, within=minutes(5)).unless('reset', is_door)"
    )
    assert repr(DOOR.then_not("alarm", is_alarm, within=seconds(1))).endswith(
        "then_not('alarm', is_alarm, within=seconds(1))"
    )


def counted(graph: Graph, windows: Any = None, **options: Any) -> Stream:
    stream = events_of(graph).key_by("device", "kind")
    return stream.window(windows or FixedWindows(minutes(1)), name="counts", **options).aggregate(
        n=Count(), best=Max("kind"), part=Count()
    )


@pytest.mark.parametrize(
    ("rank", "message"),
    [
        (lambda graph: events_of(graph).top_n(3, by="value", name="t"), "has no panes that top_n could rank"),
        (lambda graph: counted(graph).map(lambda pane: pane).top_n(3, by="n", name="t"), "has no panes"),
        (lambda graph: counted(graph).top_n(3, by="m", name="t"), "has no aggregate 'm'"),
        (lambda graph: counted(graph).top_n(3, by="n", per="site", name="t"), "per='site' is no field of the key"),
        (lambda graph: counted(graph).top_n(3, by="n", per=("device", "kind"), name="t"), "has no keys to rank"),
        (lambda graph: counted(graph).top_n(3, by="n", parts=0, name="t"), "parts=0"),
        (lambda graph: counted(graph).top_n(3, by="part", name="t"), "a field 'part' of its own"),
        (lambda graph: counted(graph, SessionWindows(minutes(1))).top_n(3, by="n", name="t"), "share no window"),
        (
            lambda graph: counted(graph, GlobalWindow(), trigger=AfterWatermark(early=AfterCount(1))).top_n(
                3, by="n", name="t"
            ),
            "share no window",
        ),
        (lambda graph: counted(graph, allowed_lateness=minutes(1)).top_n(3, by="n", name="t"), "several panes"),
        (
            lambda graph: counted(graph, allowed_lateness=minutes(1), accumulation=Accumulation.DISCARDING).top_n(
                3, by="n", name="t"
            ),
            "only what is new",
        ),
        (
            lambda graph: counted(
                graph,
                SlidingWindows(minutes(2), every=minutes(1)),
                timestamp_combiner=TimestampCombiner.EARLIEST,
            ).top_n(3, by="n", name="t"),
            "have the time of a record",
        ),
    ],
)
def test_a_ranking_that_would_be_wrong_is_refused(rank: Callable[[Graph], Any], message: str) -> None:
    with pytest.raises(GraphError, match=message):
        rank(Graph("ranks"))


@pytest.mark.parametrize("n", [0, 1_001, True, 2.5])
def test_a_ranking_of_no_number_of_keys_is_refused(n: Any) -> None:
    with pytest.raises(SchemaError, match="n of top_n must be between"):
        counted(Graph("ranks")).top_n(n, by="n", name="t")


def test_a_ranking_by_text_is_refused() -> None:
    with pytest.raises(SchemaError, match="it is no number"):
        counted(Graph("ranks")).top_n(1, by="best", name="t")


# Order.


def test_tools_of_one_ordered_stream_share_its_step() -> None:
    graph = Graph("tools")
    ordered = events_of(graph).key_by("device").in_order(name="ordered")
    ordered.changes("value", name="c")
    ordered.rates("count", name="r")
    ordered.stream.key_by("kind").changes("value", name="by_kind")
    ordered.stream.filter(is_door).key_by("device").changes("value", name="of_doors")

    assert [node.name for node in graph.nodes][1:] == [
        *("ordered", "c", "r", "by_kind_in_order", "by_kind", "of_doors_in_order", "of_doors")
    ]


def test_a_late_record_goes_to_the_late_records_and_does_not_change_the_order() -> None:
    driver = driver_of(lambda keyed: keyed.changes("value", name="c"))

    driver.feed("events", [event(0, value=1.0), event(10, value=2.0), event(5, value=3.0)])
    driver.end()

    assert [record.value for record in driver.records("c")] == [1.0, 2.0]
    assert [(late.computation, late.record.value) for late in driver.late_records()] == [("c_in_order", 3.0)]
    driver.check_accounting()


@pytest.mark.parametrize("crashes", [False, True])
def test_a_retraction_in_time_takes_its_record_back_before_a_tool_sees_it(crashes: bool) -> None:
    graph = Graph("tools")
    events = events_of(graph, disorder=60)
    counts = (
        events.key_by("device")
        .window(
            FixedWindows(seconds(10)),
            trigger=AfterWatermark(early=AfterCount(1)),
            allowed_lateness=minutes(10),
            accumulation=Accumulation.RETRACTING,
            name="counts",
        )
        .aggregate(n=Count())
    )
    counts.key_by("device").changes("n", name="c")
    driver = GraphDriver(graph)
    driver.loses_turns = crashes

    driver.feed("events", [event(1)])
    driver.feed("events", [event(2), event(12), event(13)])  # the early pane of 1 becomes one of 2
    driver.advance_watermark("events", at(30))
    driver.feed("events", [event(3)])  # corrects a pane that has passed
    driver.end()

    assert [pane.n for pane in driver.records("c")] == [2]
    late = [record for record in driver.late_records() if record.computation == "c_in_order"]
    assert [record.record.n for record in late] == [2, 3]
    driver.check_accounting()


def test_panes_that_repeat_are_refused() -> None:
    counts = counted(Graph("tools"), allowed_lateness=minutes(1))
    with pytest.raises(GraphError, match="cannot put in order the panes of 'counts'"):
        counts.key_by("device").changes("n", name="c")


# Bounds.


def test_a_record_that_finds_no_room_for_a_partial_match_is_dead_lettered() -> None:
    driver = driver_of(lambda keyed: keyed.match(DOOR_ALARM, name="m", partials_max=3))

    driver.feed("events", [event(second, kind="door") for second in range(5)])
    driver.feed("events", [event(10, kind="alarm")])
    driver.end()

    assert [letter.payload for letter in driver.dead_letters()] == [
        msgspec.json.encode(event(second, kind="door")) for second in (3, 4)
    ]
    assert "3 partial matches" in driver.dead_letters()[0].detail
    assert [match.door_at for match in driver.records("m")] == [at(0)]
    driver.check_accounting()


def test_the_bytes_of_partial_matches_are_bounded() -> None:
    driver = driver_of(lambda keyed: keyed.match(DOOR_ALARM, name="m"))
    large = PARTIALS_BYTES_MAX // 10

    driver.feed("events", [event(second, kind="door", tags=["x" * large]) for second in range(12)])
    driver.advance_watermark("events", at(20))

    assert len(driver.dead_letters()) == 3
    assert "bytes" in driver.dead_letters()[0].detail
    assert len(driver.state("m")["pump"]["open"]) == 9


def test_a_device_that_is_back_after_three_years_gives_a_bounded_number_of_records() -> None:
    driver = driver_of(lambda keyed: grid(keyed, every=seconds(1), limit=seconds(1_000)))

    driver.feed("events", [event(0), event(3 * 365 * 86_400)])
    driver.end()

    assert len(driver.records("g")) == 2 * 1_001
    assert driver.state("g") == {}


def test_one_call_emits_a_bounded_number_of_points() -> None:
    made: list[int] = []

    class Counting(GapFilling):
        def process_timer(self, context: Context, timer: Timer) -> None:
            before = len(context._produced)
            super().process_timer(context, timer)
            made.append(len(context._produced) - before)

    graph = Graph("tools")
    events = events_of(graph)
    tool = Counting(events.record_type, ["value"], {"device": str}, every=seconds(1), limit=seconds(1_000))
    events.key_by("device").in_order(name="o").process(tool, name="g", output=tool.output)
    driver = GraphDriver(graph)

    driver.feed("events", [event(0), event(900.5)])
    driver.end()

    assert max(made) == POINTS_A_CALL
    assert sum(made) == 901 + 1_000
    assert POINTS_AT_ONCE < POINTS_A_CALL


def test_a_key_has_a_bounded_number_of_waiting_gaps() -> None:
    driver = driver_of(lambda keyed: grid(keyed, every=seconds(1), limit=seconds(100)))
    step = POINTS_AT_ONCE + 1

    driver.feed("events", [event(number * step) for number in range(SEGMENTS_MAX + 3)])
    driver.end()

    assert len(driver.dead_letters()) == 1
    assert "gaps of this key wait" in driver.dead_letters()[0].detail
    assert len(driver.records("g")) == (SEGMENTS_MAX + 2) * step + 101, "a gap over the refused record is filled, too"


def test_a_ranking_never_has_a_wrong_entry_after_its_bound() -> None:
    class Row(msgspec.Struct):
        key: int
        n: int

    ranking = Ranking("n", {"key": int}, int, 3, retracts=True)
    rows = [Row(number, number) for number in range(KEPT_MAX + 5)]
    kept = ranking.create()
    for row in rows:
        kept = ranking.add(kept, row)
    assert len(kept.entries) == KEPT_MAX

    for row in rows[:2]:
        kept = ranking.subtract(kept, row)  # dropped already: nothing to take back
    for row in rows[7:]:
        kept = ranking.subtract(kept, row)

    assert [entry.key for entry in ranking.result(kept)] == [6, 5], "shorter, but not wrong"
    assert ranking.merge(ranking.create(), kept) == kept


def test_times_at_both_ends_of_the_calendar() -> None:
    end = datetime(9999, 12, 31, 23, 59, 59, 999_999, tzinfo=UTC)

    def add(keyed: KeyedStream) -> Stream:
        keyed.match(DOOR.then_not("alarm", is_alarm, within=minutes(1)), name="m")
        for method in ("previous", "linear", "null"):
            grid(keyed, method=method, name=method)
        return keyed.rates("count", name="r")

    driver = driver_of(add, now=end)
    times = [datetime(1, 1, 1, tzinfo=UTC), end - minutes(0.5), end - timedelta(microseconds=1), end]
    driver.feed("events", [Event("pump", time, kind="door", count=1) for time in times])
    driver.end()

    assert not driver.dead_letters()
    assert len(driver.records("r")) == 3
    assert len(driver.records("null")) > 5
    driver.check_accounting()


# Values.


class Measured(msgspec.Struct):
    device: str
    at: datetime
    value: float | None


@pytest.mark.parametrize("unstorable", [math.nan, math.inf])
def test_a_value_that_cannot_be_stored_makes_a_dead_letter_and_no_gap(unstorable: float) -> None:
    numbers = [1.0, unstorable, None, 5.0]

    def numbered(batch: Any) -> Any:
        columns = {"device": batch.column("device"), "at": batch.column("at")}
        return columns | {"value": [numbers[count] for count in batch.column("count").to_pylist()]}

    def add(keyed: KeyedStream) -> Stream:
        mapped = keyed.stream.map(numbered, Measured, columns=True).key_by("device")
        grid(mapped, every=seconds(1), limit=seconds(1))
        return mapped.changes("value", by=1, name="c")

    driver = driver_of(add)
    for number in range(len(numbers)):
        driver.feed("events", [event(number, count=number)])
        driver.crash()
    driver.end()

    assert [record.value for record in driver.records("c")] == [1.0, None, 5.0]
    assert [record.value for record in driver.records("g")] == [1.0, 1.0, None, 5.0, 5.0]
    assert driver.dead_letters()
    driver.check_accounting()


@pytest.mark.parametrize(
    ("last", "reading", "increase", "reset"),
    [(5, 5, 0, False), (250, 5, 11, False), (200, 72, 128, False), (200, 71, 127, False), (200, 73, 73, True)],
)
def test_a_fall_is_a_wrap_up_to_half_of_the_range_and_a_reset_beyond(
    last: int, reading: int, increase: int, reset: bool
) -> None:
    driver = driver_of(lambda keyed: keyed.rates("count", wraps_at=256, name="r"))

    driver.feed("events", [event(0, count=last), event(2, count=reading)])
    driver.end()

    assert [(rate.increase, rate.per_second, rate.reset) for rate in driver.records("r")] == [
        (increase, increase / 2, reset)
    ]


@pytest.mark.parametrize("reading", [-1, 256])
def test_a_reading_that_cannot_be_the_counters_is_dead_lettered(reading: int) -> None:
    driver = driver_of(lambda keyed: keyed.rates("count", wraps_at=256, name="r"))

    driver.feed("events", [event(0, count=5), event(1, count=reading), event(2, count=9)])
    driver.end()

    assert len(driver.dead_letters()) == 1
    assert [(rate.since, rate.increase, rate.per_second) for rate in driver.records("r")] == [(at(0), 4, 2.0)]


def test_a_condition_that_raises_makes_a_dead_letter_and_keeps_the_partial_match() -> None:
    def strict(event: Event) -> bool:
        return 10 // event.count > 0

    pattern = DOOR.then("next", strict, within=minutes(1))
    driver = driver_of(lambda keyed: keyed.match(pattern, name="m"))

    driver.feed("events", [event(0, kind="door"), event(1, count=0), event(2, count=1)])
    driver.end()

    assert "ZeroDivisionError" in (driver.dead_letters()[0].traceback or "")
    assert [match.next_at for match in driver.records("m")] == [at(2)]


class Place(msgspec.Struct):
    site: str


class Tagged(msgspec.Struct):
    id: UUID
    raw: bytes
    flag: bool
    n: int
    place: Place
    at: datetime
    value: float


def test_keys_of_every_type_and_of_several_fields() -> None:
    graph = Graph("tools")
    events = graph.inject("events", ManualSource(), schema=Tagged, event_time=EventTime("at", max_disorder=seconds(0)))
    key = ("id", "raw", "flag", "n", "place.site")
    ordered = events.key_by(*key).in_order(name="o")
    always = Pattern("one", lambda event: True).then("two", lambda event: True, within=minutes(1))
    ordered.match(always, name="m")
    ordered.rates("value", name="r")
    ordered.fill_gaps("value", every=seconds(1), limit=seconds(1), name="g")
    counts = events.key_by(*key).window(FixedWindows(minutes(1)), name="counts").aggregate(mean=Mean("value"))
    counts.top_n(2, by="mean", name="top")
    counts.top_n(2, by="mean", per=("id", "place_site"), name="top_of_id")
    driver = GraphDriver(graph)
    things = [UUID(int=1), UUID(int=2)]

    def tagged(number: int, second: int) -> Tagged:
        return Tagged(things[number], bytes([number, 255]), bool(number), -number, Place('"ä'), at(second), second)

    driver.feed("events", [tagged(number, second) for second in range(3) for number in range(2)])
    driver.crash()
    driver.end()

    assert not driver.dead_letters()
    keys = {(thing, bytes([number, 255]), bool(number), -number, '"ä') for number, thing in enumerate(things)}
    for stream in ("m", "r", "g"):
        found = driver.records(stream)
        assert {(record.id, record.raw, record.flag, record.n, record.place_site) for record in found} == keys
    assert driver.records("m")[0].two.id in things
    (pane,) = driver.panes("top")
    assert [(each.id, each.raw, each.mean) for each in pane.values["top"]] == [
        (things[0], b"\x00\xff", 1.0),
        (things[1], b"\x01\xff", 1.0),
    ]
    assert [pane.key for pane in driver.panes("top_of_id")] == [(thing, '"ä') for thing in things]


# The context.


class Backdating(Computation):
    """Emits at the time of the record before, which a hold or timer keeps open."""

    def __init__(self, way: str) -> None:
        self.way = way

    def process_record(self, context: Context, record: Event) -> None:
        if self.way == "timer" and record.count:
            context.set_timer("next", at=context.event_time + seconds(1), event_time=at(0))
        elif record.count:
            context.produce(record, at=at(0))
        elif self.way == "unheld":
            context.set_timer("later", at=at(60), event_time=at(0), hold=False)
        elif self.way != "nothing":
            context.hold("first", at(0))

    def process_timer(self, context: Context, timer: Timer) -> None:
        if timer.name == "next":
            context.produce(Event("pump", at(0)))
            context.release("first")


@pytest.mark.parametrize("way", ["hold", "timer"])
def test_a_record_may_be_produced_at_a_time_that_a_hold_keeps_open(way: str) -> None:
    graph = Graph("tools")
    made = events_of(graph).key_by("device").process(Backdating(way), name="made", output=Event)
    made.key_by("device").window(FixedWindows(seconds(1)), name="counts").aggregate(n=Count())
    driver = GraphDriver(graph)

    driver.feed("events", [event(0)])
    driver.advance_watermark("events", at(20))
    driver.crash()
    driver.feed("events", [event(30, count=1)])
    driver.end()

    assert [time for time, _ in driver.timed_records("made")] == [at(0)]
    assert not driver.late_records()
    assert not driver.dead_letters()


@pytest.mark.parametrize("way", ["nothing", "unheld"])
def test_a_record_before_its_cause_is_refused_without_a_hold(way: str) -> None:
    graph = Graph("tools")
    events_of(graph).key_by("device").process(Backdating(way), name="made", output=Event)
    driver = GraphDriver(graph)

    driver.feed("events", [event(0), event(30, count=1)])

    assert "its cause is later" in driver.dead_letters()[0].detail


def test_a_corrected_total_amends_its_ranking_and_what_is_built_on_it() -> None:
    graph = Graph("ranks")
    counts = (
        events_of(graph)
        .key_by("kind")
        .window(
            FixedWindows(minutes(1)),
            allowed_lateness=minutes(5),
            accumulation=Accumulation.RETRACTING,
            name="totals",
        )
        .aggregate(total=Sum("count"))
    )
    top = counts.top_n(2, by="total", name="top", accumulation=Accumulation.RETRACTING)
    driver = GraphDriver(graph)
    assert top.producer is not None

    driver.feed("events", [event(n, kind=kind, count=n) for n, kind in enumerate("abcd")])
    driver.advance_watermark("events", at(120))
    driver.feed("events", [event(5, kind="d", count=-2)])  # d falls from 3 to 1

    panes = [
        ([(each.kind, each.total) for each in pane.values["top"]], pane.retraction) for pane in driver.panes("top")
    ]
    assert panes == [
        ([("d", 3), ("c", 2)], False),
        ([("d", 3), ("c", 2)], True),
        ([("c", 2), ("b", 1)], False),
    ]
