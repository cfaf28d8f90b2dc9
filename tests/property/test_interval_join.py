"""Joins equal those of a batch: in any order, in any bundles, over restarts, whatever is retracted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from random import Random
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from millpy.limits import Limits
from millpy.model.bundle import Bundle
from millpy.model.checkpoint import DedupeRun, Entries, Kind
from millpy.model.keys import KeyHasher
from millpy.model.record import Records, RecordType, retractions_of
from millpy.model.stage import UNBOUNDED, InputBundle, InputSpec, StageBinding, StepResult, StoredInterval, Work
from millpy.model.time import INSTANT_MAX, INSTANT_MIN, Instant
from millpy.operators.as_of_join import AsOfJoinLogic
from millpy.operators.interval_join import IntervalJoin, IntervalJoinLogic
from millpy.operators.join_output import How, JoinedType
from millpy.operators.join_reach import IntervalReach, WindowReach

DISORDER = 5
LEFT, RIGHT = 0, 1


class Order(msgspec.Struct, frozen=True):
    key: str
    number: int
    note: str = ""


class Payment(msgspec.Struct, frozen=True):
    key: str
    number: int


TYPES = (RecordType(Order), RecordType(Payment))


@dataclass(frozen=True)
class Event:
    """A record of one side, or its retraction."""

    side: int
    key: str
    number: int
    at: int
    retracts: bool = False

    @property
    def record(self) -> Any:
        return (
            Order(self.key, self.number, "n" * (self.number % 3))
            if self.side == LEFT
            else Payment(self.key, self.number)
        )


class Join:
    """One interval of a join behind two sources, and what a database would have of it."""

    def __init__(
        self,
        before: int,
        after: int,
        *,
        how: How = "inner",
        lateness: int = 0,
        takes_retractions: bool = False,
        limits: Limits | None = None,
        as_of: bool = False,
        windows: WindowReach | None = None,
    ) -> None:
        joined = JoinedType(TYPES[LEFT], ["key"], TYPES[RIGHT], ["key"], how, "_right")
        us = lambda n: timedelta(microseconds=n)  # noqa: E731
        more: Any = {"how": how, "allowed_lateness": us(lateness), "takes_retractions": takes_retractions}
        logic: IntervalJoinLogic
        if as_of:
            logic = AsOfJoinLogic(joined, 1, us(before), **more)
        else:
            logic = IntervalJoinLogic(joined, 1, windows or IntervalReach(before, after), **more)
        self.logic = logic
        inputs = tuple(
            InputSpec(name, type_, ("key",), (str,), True) for name, type_ in zip(("left", "right"), TYPES, strict=True)
        )
        binding = StageBinding(
            "subject", inputs, {"out": joined.record_type}, {"out": 3}, frozenset(["out"]), limits or Limits()
        )
        self.stage = logic.bind(binding)
        self.hasher = KeyHasher()
        self.runs: list[tuple[int, DedupeRun]] = []
        self.place: Entries | None = None
        self.watermarks = [INSTANT_MIN, INSTANT_MIN]
        self.largest: list[int | None] = [None, None]
        self.watermark = INSTANT_MIN
        self.bundle = 0
        self.panes_max = UNBOUNDED
        self.waits = True  # whether no bundle comes before the turns that one needs
        self.low_watermark = INSTANT_MIN
        self.results: list[StepResult] = []
        self.interval: IntervalJoin = self.stage.open(StoredInterval(1, 1))  # type: ignore[assignment]

    def feed(self, events: Sequence[Event]) -> list[Event]:
        """Step one bundle for each run of events of one side, in one turn. Return the events that were late."""
        before, arrived, late = self.watermark, [], []
        start = 0
        for end in range(1, len(events) + 1):
            if end < len(events) and events[end].side == events[start].side:
                continue
            part, start = events[start:end], end
            arrived.append(self._bundle(part))
            rows = zip(part, arrived[-1].bundle.records.watermarks.tolist(), strict=True)
            in_time = self.logic.reach.in_time_until
            late += [e for e, mark in rows if in_time(e.at) + self._lateness < min(mark, arrived[-1].cap)]
        self.watermark = Instant(max(self.watermark, *([min(self.watermarks)])))
        self._step(arrived, before)
        while self.waits and self.results[-1].unfinished:
            self._step([], self.watermark)
        return late

    @property
    def _lateness(self) -> int:
        return self.logic.allowed_lateness // timedelta(microseconds=1)

    def _bundle(self, events: Sequence[Event]) -> InputBundle:
        side = events[0].side
        marks = []
        for event in events:
            marks.append(self.watermarks[side])
            largest = self.largest[side]
            self.largest[side] = event.at if largest is None else max(largest, event.at)
            self.watermarks[side] = Instant(self.largest[side] - DISORDER)
        records = Records(
            TYPES[side],
            np.array([event.at for event in events], np.int64),
            watermarks=np.array(marks, np.int64),
            retracts=np.array([event.retracts for event in events]) if any(e.retracts for e in events) else None,
            objects=[event.record for event in events],
        )
        keys = records.keys(("key",), self.hasher)
        return InputBundle(
            Bundle(side, 7 + side, self.bundle, self.watermarks[side], records, keys), self.watermarks[1 - side]
        )

    def _step(self, arrived: Sequence[InputBundle], before: Instant) -> None:
        self.bundle += 1
        result = self.interval.step(
            Work(self.bundle, arrived, before, self.watermark, Instant(0), panes_max=self.panes_max)
        )
        oldest = self.interval.oldest_work()
        if result.dedupe_run is not None:
            self.runs.append((self.bundle, result.dedupe_run))
        for entries in result.delta:
            assert entries.kind is Kind.POSITION
            self.place = entries
        for records in result.productions.values():
            # What a consumer would call late came from a record that was late itself, and allowed.
            assert self._lateness or int(records.event_times.min()) >= self.low_watermark
        if not result.unfinished:
            self.low_watermark = max(self.low_watermark, min(oldest, self.watermark))
        self.results.append(result)

    def finish(self) -> None:
        self.waits = True
        self.watermarks = [INSTANT_MAX, INSTANT_MAX]
        self.feed([])

    def live_runs(self) -> list[DedupeRun]:
        clock = max((run.clock for _, run in self.runs), default=INSTANT_MIN)
        return [run for _, run in self.runs if run.expires_at >= clock]

    def restart(self) -> None:
        """Lose all soft state."""
        entries = () if self.place is None else (self.place,)
        self.interval = self.stage.open(StoredInterval(1, 2, entries=entries, dedupe_runs=self.live_runs()))  # type: ignore[assignment]

    def joined(self) -> Counter[tuple[Any, ...]]:
        """What is left of the joined records: (left number, right number, event time) -> how often."""
        found: Counter[tuple[Any, ...]] = Counter()
        for records in (r.productions["out"] for r in self.results if "out" in r.productions):
            marks = retractions_of(records).tolist()
            for one, at, retracted in zip(records.objects(), records.event_times.tolist(), marks, strict=True):
                found[one.key, one.number, one.number_right, at] += -1 if retracted else 1
        return Counter({row: times for row, times in found.items() if times})


def by_a_loop(events: Sequence[Event], before: int, after: int, how: How) -> Counter[tuple[Any, ...]]:
    """The join of a batch."""
    live: list[Event] = []
    for event in events:
        if event.retracts:
            live.remove(replace(event, retracts=False))
        else:
            live.append(event)
    sides = [[event for event in live if event.side == side] for side in (LEFT, RIGHT)]
    found: Counter[tuple[Any, ...]] = Counter()
    matched: set[int] = set()
    for one in sides[LEFT]:
        for other in sides[RIGHT]:
            if one.key == other.key and one.at - before <= other.at <= one.at + after:
                found[one.key, one.number, other.number, max(one.at, other.at)] += 1
                matched |= {id(one), id(other)}
    if how != "inner":
        found.update((e.key, e.number, None, e.at) for e in sides[LEFT] if id(e) not in matched)
    if how == "full":
        found.update((e.key, None, e.number, e.at) for e in sides[RIGHT] if id(e) not in matched)
    return found


drawn_events = st.lists(
    st.tuples(st.sampled_from([LEFT, RIGHT]), st.sampled_from("ab"), st.integers(0, 60), st.integers(0, 4)), max_size=50
)
cuts = st.lists(st.sampled_from(["none", "none", "cut", "restart"]), max_size=60)
bounds = st.tuples(st.integers(-4, 12), st.integers(-4, 12)).filter(lambda pair: -pair[0] <= pair[1])
hows = st.sampled_from(["inner", "left", "full"])


LOSES_ONE_MATCH_OF_TWO = [(RIGHT, "a", 10, 1), (LEFT, "a", 10, 1), (RIGHT, "a", 10, 1), (RIGHT, "a", 10, 0)]
"""The left row has a second match in a bundle of its own; then the first match is retracted."""


def events_of(drawn: Sequence[tuple[int, str, int, int]], *, retract: bool = False) -> list[Event]:
    found: list[Event] = []
    for number, (side, key, at, which) in enumerate(drawn):
        live = [e for e in found if not e.retracts and replace(e, retracts=True) not in found]
        if retract and which == 0 and live:
            found.append(replace(live[number % len(live)], retracts=True))
        else:
            found.append(Event(side, key, number, at))
    return found


def run(subject: Join, events: Sequence[Event], drawn_cuts: Sequence[str]) -> list[Event]:
    """Feed events in bundles, with restarts, to the end. Return those that were not late."""
    late: list[Event] = []
    bundle: list[Event] = []
    for number, event in enumerate(events):
        bundle.append(event)
        cut = drawn_cuts[number] if number < len(drawn_cuts) else "none"
        if cut != "none":
            late += subject.feed(bundle)
            bundle = []
        if cut == "restart":
            subject.restart()
    late += subject.feed(bundle)
    subject.finish()
    kept = list(events)
    for event in late:
        kept.remove(event)
    return kept


def counts(subject: Join, name: str) -> int:
    return sum(sum(getattr(result, name).values()) for result in subject.results)


@settings(max_examples=100, deadline=None)
@given(drawn_events, cuts, bounds, hows, st.sampled_from([0, 3]))
def test_a_join_equals_that_of_a_batch(
    drawn: Any, drawn_cuts: Any, within: tuple[int, int], how: How, lateness: int
) -> None:
    subject = Join(*within, how=how, lateness=lateness)
    events = events_of(drawn)

    kept = run(subject, events, drawn_cuts)

    assert subject.joined() == by_a_loop(kept, *within, how)
    assert counts(subject, "consumed_by_input") == len(kept)
    assert counts(subject, "late_by_input") == len(events) - len(kept)
    made = sum(len(r.productions["out"]) for r in subject.results if "out" in r.productions)
    assert counts(subject, "emitted_by_stream") == counts(subject, "emitted_by_table") == made
    assert subject.interval.buffered == (0, 0)
    assert not subject.live_runs()


@settings(max_examples=60, deadline=None)
@given(drawn_events, cuts, bounds, hows, st.integers(1, 4))
def test_a_bounded_turn_leaves_the_rest_for_the_next(
    drawn: Any, drawn_cuts: Any, within: tuple[int, int], how: How, panes_max: int
) -> None:
    subject = Join(*within, how=how)
    subject.panes_max = panes_max

    kept = run(subject, events_of(drawn), drawn_cuts)

    assert subject.joined() == by_a_loop(kept, *within, how)


@settings(max_examples=60, deadline=None)
@given(drawn_events, bounds, st.integers(1, 3), st.data())
def test_rows_that_are_not_joined_yet_survive_a_restart(
    drawn: Any, within: tuple[int, int], panes_max: int, data: Any
) -> None:
    events = events_of(drawn)
    subject = Join(*within, how="left")
    subject.panes_max = panes_max
    restarts = data.draw(st.lists(st.booleans(), max_size=20))
    step = subject._step

    def step_and_restart(arrived: Any, before: Any) -> None:
        step(arrived, before)
        if restarts and restarts.pop():
            due = subject.interval.next_due()[0] <= subject.watermark
            subject.restart()
            assert not due or subject.interval.next_due()[0] <= subject.watermark

    subject._step = step_and_restart  # type: ignore[method-assign]
    kept = run(subject, events, ["cut", "none", "none"] * 20)

    assert subject.joined() == by_a_loop(kept, *within, "left")


@settings(max_examples=100, deadline=None)
@example(LOSES_ONE_MATCH_OF_TWO, ["cut", "cut", "restart"], (0, 0), "left")
@given(drawn_events, cuts, bounds, hows)
def test_a_retraction_takes_back_what_was_joined(
    drawn: Any, drawn_cuts: Any, within: tuple[int, int], how: How
) -> None:
    events = events_of(drawn, retract=True)
    subject = Join(*within, how=how, takes_retractions=True)

    kept = run(subject, events, drawn_cuts)

    # The retraction of a record that was in time may be late: then the record counts as never retracted.
    assert subject.joined() == by_a_loop(kept, *within, how)
    assert not subject.live_runs()


near = st.lists(st.tuples(st.sampled_from([LEFT, RIGHT]), st.sampled_from("aab"), st.integers(20, 24)), max_size=16)


@settings(max_examples=100, deadline=None)
@given(near, near, st.randoms(use_true_random=False), cuts, hows, st.integers(1, 3), st.integers(1, 3), st.booleans())
def test_retractions_that_a_bounded_turn_leaves_for_the_next_survive_restarts(
    drawn: Any,
    drawn_later: Any,
    random: Random,
    drawn_cuts: Any,
    how: How,
    panes_max: int,
    turns_of_an_owner: int,
    waits: bool,
) -> None:
    first = [Event(side, key, number % 2, at) for number, (side, key, at) in enumerate(drawn)]  # some are equal
    later = [Event(side, key, number, at) for number, (side, key, at) in enumerate(drawn_later, len(first))]
    later += [replace(event, retracts=True) for event in first if random.random() < 0.8]
    random.shuffle(later)
    subject = Join(5, 5, how=how, takes_retractions=True)
    subject.panes_max, subject.waits = panes_max, waits
    step = subject._step

    def step_and_restart(arrived: Any, before: Any) -> None:
        step(arrived, before)
        if subject.bundle % turns_of_an_owner == 0:
            due = subject.interval.next_due()[0] <= subject.watermark
            subject.restart()
            assert not due or subject.interval.next_due()[0] <= subject.watermark

    subject._step = step_and_restart  # type: ignore[method-assign]
    kept = run(subject, [*first, *later], ["none"] * (len(first) - 1) + ["cut"] * bool(first) + drawn_cuts)

    assert subject.joined() == by_a_loop(kept, 5, 5, how)
    assert subject.interval.buffered == (0, 0)
    assert not subject.live_runs()


@settings(max_examples=100, deadline=None)
@given(drawn_events, cuts, bounds)
def test_the_order_does_not_depend_on_bundles(drawn: Any, drawn_cuts: Any, within: tuple[int, int]) -> None:
    one, many = Join(*within), Join(*within)
    events = events_of(drawn)
    for event in events:
        one.feed([event])
    one.finish()
    run(many, events, drawn_cuts)

    def produced(subject: Join) -> list[Any]:
        found = [r.productions["out"] for r in subject.results if "out" in r.productions]
        return [msgspec.structs.astuple(record) for records in found for record in records.objects()]

    assert produced(one) == produced(many)


def as_of_by_a_loop(events: Sequence[Event], within: int, how: How) -> Counter[tuple[Any, ...]]:
    """The as-of join of a batch; of right records with one event time the last to arrive counts."""
    live = [event for event in events if not event.retracts and replace(event, retracts=True) not in events]
    found: Counter[tuple[Any, ...]] = Counter()
    for one in (event for event in live if event.side == LEFT):
        last: Event | None = None
        for other in (event for event in live if event.side == RIGHT and event.key == one.key):
            if one.at - within <= other.at <= one.at and (last is None or other.at >= last.at):
                last = other
        if last is not None or how == "left":
            found[one.key, one.number, None if last is None else last.number, one.at] += 1
    return found


def windowed_by_a_loop(events: Sequence[Event], size: int, offset: int, how: How) -> Counter[tuple[Any, ...]]:
    """The join of a batch, of records of one window; its records happen at the window's end."""
    found: Counter[tuple[Any, ...]] = Counter()
    for start in range(offset - size, 100, size):
        inside = [e for e in events if start <= e.at < start + size]
        ends = [replace(event, at=start + size - 1) for event in inside]
        found.update(by_a_loop(ends, size, size, how))
    return found


@settings(max_examples=100, deadline=None)
@given(
    drawn_events, cuts, st.integers(1, 20), st.data(), hows, st.sampled_from([0, 3]), st.sampled_from([1, 4, UNBOUNDED])
)
def test_a_join_within_windows_equals_that_of_a_batch(
    drawn: Any, drawn_cuts: Any, size: int, data: Any, how: How, lateness: int, panes_max: int
) -> None:
    offset = data.draw(st.integers(0, size - 1))
    retract = data.draw(st.booleans())
    windows = WindowReach(size, offset)
    subject = Join(0, 0, how=how, lateness=lateness, windows=windows, takes_retractions=retract)
    subject.panes_max = panes_max

    events = events_of(drawn, retract=retract)
    kept = run(subject, events, drawn_cuts)

    live = [event for event in kept if not event.retracts and replace(event, retracts=True) not in kept]
    assert subject.joined() == windowed_by_a_loop(live, size, offset, how)
    assert subject.interval.buffered == (0, 0)
    assert not subject.live_runs()


@settings(max_examples=150, deadline=None)
@given(
    drawn_events,
    cuts,
    st.integers(0, 15),
    st.sampled_from(["inner", "left"]),
    st.sampled_from([0, 3]),
    st.booleans(),
    st.sampled_from([1, 3, UNBOUNDED]),
)
def test_an_as_of_join_equals_that_of_a_batch(
    drawn: Any, drawn_cuts: Any, within: int, how: How, lateness: int, retract: bool, panes_max: int
) -> None:
    subject = Join(within, 0, how=how, lateness=lateness, takes_retractions=retract, as_of=True)
    subject.panes_max = panes_max

    kept = run(subject, events_of(drawn, retract=retract), drawn_cuts)

    assert subject.joined() == as_of_by_a_loop(kept, within, how)
    made = sum(len(r.productions["out"]) for r in subject.results if "out" in r.productions)
    assert counts(subject, "emitted_by_stream") == counts(subject, "emitted_by_table") == made
    assert subject.interval.buffered == (0, 0)
    assert not subject.live_runs()


def test_records_beyond_the_room_of_a_key_become_dead_letters() -> None:
    subject = Join(1_000, 1_000, limits=Limits(join_key_bytes_max=1_000))
    orders = [Event(LEFT, "a", number, 0) for number in range(20)]

    subject.feed([*orders, Event(LEFT, "b", 99, 0)])
    subject.restart()
    subject.feed([Event(LEFT, "a", 100, 1), Event(RIGHT, "b", 101, 1)])

    letters = [letter for result in subject.results for letter in result.dead_letters]
    joined = counts(subject, "consumed_by_input") - 2
    assert 0 < joined < 10
    assert len(letters) == 21 - joined == counts(subject, "dead_lettered_by_input")
    assert {letter.reason for letter in letters} == {"join"}
    assert "MILLPY_JOIN_KEY_BYTES_MAX" in letters[0].detail
    assert subject.joined() == Counter({("b", 99, 101, 1): 1})


def test_records_beyond_the_room_of_all_keys_become_dead_letters() -> None:
    subject = Join(1_000, 1_000, limits=Limits(join_bytes_max=1_000))

    subject.feed([Event(side, str(number), number, 0) for side in (LEFT, RIGHT) for number in range(20)])

    (result,) = subject.results
    kept = counts(subject, "consumed_by_input")
    assert subject.interval._keys.total <= 1_000
    assert 0 < kept < 20
    assert len(result.dead_letters) == 40 - kept
    assert "MILLPY_JOIN_BYTES_MAX" in result.dead_letters[-1].detail


def test_a_key_without_room_leaves_that_of_others() -> None:
    subject = Join(1_000, 1_000, limits=Limits(join_bytes_max=5_000, join_key_bytes_max=1_000))
    hot = [Event(LEFT, "a", number, 0) for number in range(200)]

    subject.feed(
        [*hot, Event(LEFT, "long" * 250, 200, 0), *(Event(LEFT, "b", number, 0) for number in range(201, 204))]
    )

    (result,) = subject.results
    letters = {msgspec.json.decode(letter.payload)["number"]: letter.detail for letter in result.dead_letters}
    kept = counts(subject, "consumed_by_input")
    assert letters.keys() == set(range(kept - 3, 201))
    assert letters[199] == letters[198] != letters[200]
    assert "record: 0 bytes" not in letters[199]


def test_keys_without_room_take_none() -> None:
    subject = Join(1_000, 1_000, limits=Limits(join_bytes_max=1_000))

    subject.feed([Event(LEFT, str(number), number, 0) for number in range(1_000)])

    assert len(subject.interval._keys._codes) == counts(subject, "consumed_by_input") < 20


def test_room_is_free_again_when_the_watermark_has_passed() -> None:
    subject = Join(10, 10, limits=Limits(join_bytes_max=1_000))
    for at in range(0, 2_000, 100):
        subject.feed([Event(LEFT, str(at), at, at), Event(RIGHT, str(at), at, at)])

    assert not [letter for result in subject.results for letter in result.dead_letters]
    assert subject.interval._keys.total < 1_000


def test_a_hot_key_is_joined_in_bounded_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("millpy.operators.join_pairs.PAIRS_AT_ONCE", 500)
    subject = Join(1_000, 1_000)
    subject.panes_max = 1_000
    lefts = [Event(LEFT, "a", number, 0) for number in range(100)]

    subject.feed([*lefts, *(Event(RIGHT, "a", number, 0) for number in range(100))])

    made = [len(r.productions["out"]) for r in subject.results if "out" in r.productions]
    assert sum(made) == 10_000
    assert max(made) <= 1_000
    assert all(result.unfinished for result in subject.results[:-1])


@pytest.mark.parametrize("restarts", [False, True], ids=["one owner", "an owner a turn"])
def test_what_a_hot_key_has_joined_is_retracted_in_bounded_turns(
    monkeypatch: pytest.MonkeyPatch, restarts: bool
) -> None:
    monkeypatch.setattr("millpy.operators.join_pairs.PAIRS_AT_ONCE", 500)
    subject = Join(1_000, 1_000, takes_retractions=True)
    lefts = [Event(LEFT, "a", number, 0) for number in range(100)]
    subject.feed([*lefts, *(Event(RIGHT, "a", number, 0) for number in range(100))])
    subject.results.clear()
    subject.panes_max = 1_000
    step = subject._step

    def step_and_restart(arrived: Any, before: Any) -> None:
        step(arrived, before)
        if restarts:
            subject.restart()

    subject._step = step_and_restart  # type: ignore[method-assign]
    subject.feed([replace(event, retracts=True) for event in lefts] + [Event(LEFT, "a", 100, 0)])

    made = [records for r in subject.results if (records := r.productions.get("out")) is not None]
    marks = np.concatenate([retractions_of(records) for records in made]).tolist()
    assert marks == [True] * 10_000 + [False] * 100
    assert max(len(records) for records in made) <= 1_000
    assert all(result.unfinished for result in subject.results[:-1])
    assert subject.interval.buffered == (1, 100)


@pytest.mark.parametrize("text", ["\x00", "a\x00b"])
def test_a_record_that_no_table_can_hold_is_refused_when_it_comes(text: str) -> None:
    subject = Join(10, 10)

    bundle = subject._bundle([Event(LEFT, "a", 1, 0)])
    records = Records(
        TYPES[LEFT], np.zeros(1, np.int64), watermarks=np.array([INSTANT_MIN]), objects=[Order("a", 1, text)]
    )
    bundle.bundle = Bundle(LEFT, 7, 1, INSTANT_MIN, records, records.keys(("key",), subject.hasher))
    subject._step([bundle], INSTANT_MIN)

    (letter,) = subject.results[-1].dead_letters
    assert letter.reason == "refused"
    assert subject.interval.buffered == (0, 0)
