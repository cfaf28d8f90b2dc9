"""Triggers that decide pane by pane: when each fires, and that panes add up whatever the trigger, order and crashes."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import millpy
from millpy import (
    Accumulation,
    AfterAll,
    AfterAny,
    AfterCount,
    AfterEach,
    AfterProcessingTime,
    AfterWatermark,
    Every,
    FiringBehavior,
    FixedWindows,
    Never,
    OrFinally,
    Repeatedly,
    SlidingWindows,
    TimestampCombiner,
    When,
)
from millpy.errors import GraphError
from millpy.model.record import RecordType, retractions_of
from millpy.model.stage import StepResult
from millpy.model.time import INSTANT_MAX, instant
from millpy.store.memory.tables import column_values
from millpy.windowing.aggregates.numeric import Count, Sum
from millpy.windowing.composite_triggers import TRIGGERS_MAX
from millpy.windowing.logic import WindowedLogic
from millpy.windowing.pane_rules import DEFAULT_RULES, PaneRules
from millpy.windowing.triggers import Trigger
from millpy.windowing.window import Windows
from tests.stage_driver import StageDriver, timedelta_us

SIZE, MAX_DISORDER = 10, 5
FIXED = FixedWindows(timedelta_us(SIZE))
SLIDING = SlidingWindows(timedelta_us(SIZE), every=timedelta_us(5))


class Reading(msgspec.Struct):
    key: str
    number: int


def driver(
    trigger: Trigger,
    *,
    windows: Windows = FIXED,
    mode: Accumulation = Accumulation.ACCUMULATING,
    allowed: int = 100,
    few: int = 10_000,
    rules: PaneRules = DEFAULT_RULES,
    timestamps: TimestampCombiner = TimestampCombiner.END_OF_WINDOW,
) -> StageDriver:
    aggregates = {"n": Count(), "total": Sum("number")}
    how = {"few_records_max": few, "trigger": trigger, "accumulation": mode, "rules": rules, "timestamps": timestamps}
    logic = WindowedLogic(windows, timedelta_us(allowed), aggregates, **how)
    outputs = {"panes": logic.output_type(RecordType(Reading), ("key",))}
    return StageDriver(logic, Reading, outputs=outputs, tables={"panes": 1}, max_disorder=MAX_DISORDER)


def told(result: Any) -> list[str]:
    """Panes as "timing n": of window [0, 10)."""
    records = result.productions.get("panes")
    return [] if records is None else [f"{pane.pane_timing} {pane.n}" for pane in records.objects()]


def advance(subject: StageDriver, watermark: int) -> StepResult:
    """Advance the watermark, as a source does that has seen a later record."""
    subject.largest = max(subject.largest or 0, watermark + MAX_DISORDER)
    return subject.feed([], watermark=watermark)


def finish(subject: StageDriver) -> None:
    """End the source; each turn that leaves panes emits or expires some."""
    result = subject.feed([], watermark=INSTANT_MAX)
    for _ in range(1_000):
        if not result.unfinished:
            return
        result = subject.feed([])
    raise AssertionError("panes are left for ever")


Step = tuple[str, int, list[str]]
STEPS: list[tuple[str, Trigger, list[Step]]] = [
    (
        "early counts, once a bundle, then on time and late",
        AfterWatermark(early=AfterCount(2)),
        [
            ("records", 1, []),
            ("records", 4, ["early 5"]),
            ("records", 1, []),
            ("watermark", 10, ["on_time 6"]),
            ("records", 1, ["late 7"]),
        ],
    ),
    (
        "nothing new at the end",
        AfterWatermark(early=AfterCount(2)),
        [("records", 2, ["early 2"]), ("watermark", 10, []), ("records", 1, ["late 3"])],
    ),
    (
        "late records wait for their number, or the end of the lateness",
        AfterWatermark(late=AfterCount(3)),
        [
            ("records", 1, []),
            ("watermark", 10, ["on_time 1"]),
            ("records", 2, []),
            ("records", 1, ["late 4"]),
            ("records", 1, []),
            ("watermark", 110, ["late 5"]),
        ],
    ),
    (
        "late records are dropped",
        AfterWatermark(late=None),
        [("records", 2, []), ("watermark", 10, ["on_time 2"]), ("records", 1, ["dropped 1"])],
    ),
    (
        "delay from the first record, without another one",
        AfterWatermark(early=AfterProcessingTime(timedelta_us(30))),
        [
            ("records", 1, []),
            ("clock", 20, []),
            ("records", 1, []),
            ("clock", 29, []),
            ("clock", 30, ["early 2"]),
            ("clock", 90, []),
            ("records", 1, []),
            ("clock", 120, ["early 3"]),
        ],
    ),
    (
        "aligned",
        Every(timedelta_us(50)),
        [
            ("clock", 20, []),
            ("records", 1, []),
            ("clock", 50, ["early 1"]),
            ("records", 1, []),
            ("clock", 99, []),
            ("clock", 100, ["early 2"]),
        ],
    ),
    (
        "once, then closed",
        AfterCount(3),
        [("records", 2, []), ("records", 2, ["early 4"]), ("records", 1, ["dropped 1"]), ("watermark", 110, [])],
    ),
    (
        "never, until the window is over",
        Never(),
        [("records", 2, []), ("watermark", 109, []), ("watermark", 110, ["on_time 2"])],
    ),
    (
        "any, again and again",
        Repeatedly(AfterAny(AfterCount(3), AfterProcessingTime(timedelta_us(10)))),
        [
            ("records", 3, ["early 3"]),
            ("records", 1, []),
            ("clock", 10, ["early 4"]),
            ("records", 2, []),
            ("records", 1, ["early 7"]),
        ],
    ),
    (
        "all at once",
        AfterAll(AfterCount(2), AfterProcessingTime(timedelta_us(10))),
        [("records", 1, []), ("clock", 10, []), ("records", 1, ["early 2"]), ("records", 1, ["dropped 1"])],
    ),
    (
        "one after the other",
        AfterEach(AfterCount(1), AfterCount(2), Repeatedly(AfterCount(3))),
        [
            ("records", 1, ["early 1"]),
            ("records", 1, []),
            ("records", 1, ["early 3"]),
            ("records", 2, []),
            ("records", 1, ["early 6"]),
            ("records", 3, ["early 9"]),
        ],
    ),
    (
        "until, for the last time",
        OrFinally(Repeatedly(AfterCount(2)), AfterCount(5)),
        [
            ("records", 2, ["early 2"]),
            ("records", 2, ["early 4"]),
            ("records", 1, ["early 5"]),
            ("records", 1, ["dropped 1"]),
        ],
    ),
]


@pytest.mark.parametrize("few", [0, 10_000], ids=["columns", "few"])
@pytest.mark.parametrize("restarts", [False, True], ids=["", "restarted"])
@pytest.mark.parametrize(("trigger", "steps"), [case[1:] for case in STEPS], ids=[case[0] for case in STEPS])
def test_when_triggers_fire(trigger: Trigger, steps: list[Step], few: int, restarts: bool) -> None:
    subject = driver(trigger, few=few)
    for what, number, wanted in steps:
        if what == "records":
            result = subject.feed([(Reading("a", 1), 3)] * number, columns=few == 0)
        elif what == "clock":
            assert not wanted or subject.interval.next_due()[1] <= number
            result = subject.feed([], now_us=number)
        else:
            assert not wanted or subject.interval.next_due()[0] <= number
            result = advance(subject, number)
        dropped = sum(result.late_by_input.values())
        assert told(result) + [f"dropped {dropped}"] * bool(dropped) == wanted, (what, number)
        assert result.consumed_by_input.get(0, 0) + dropped == (number if what == "records" else 0)
        assert not result.unfinished
        if restarts:
            subject.restart()


def test_a_window_holds_the_low_watermark_until_its_records_on_time_are_emitted() -> None:
    subject = driver(AfterWatermark(early=AfterCount(1)))
    subject.feed([(Reading("a", 1), 3)])
    assert subject.interval.oldest_work() == SIZE - 1
    advance(subject, SIZE)
    assert subject.interval.oldest_work() == INSTANT_MAX

    subject = driver(Never())
    subject.feed([(Reading("a", 1), 3)])
    advance(subject, SIZE)
    assert subject.interval.oldest_work() == SIZE - 1
    advance(subject, SIZE + 100)
    assert subject.interval.oldest_work() == INSTANT_MAX


def at_least_three(pane: Any) -> bool:
    return bool(pane.n >= 3)


def negative(pane: Any) -> bool:
    return bool((pane.total or 0) < 0)


def fails_at_two(pane: Any) -> bool:
    assert pane.n != 2
    return bool(pane.n > 2)


behaviors = st.sampled_from(FiringBehavior)
rules_of_panes = st.builds(PaneRules, on_time_pane=behaviors, final_pane=behaviors, pane_info=st.just(True))
durations = st.integers(1, 40).map(timedelta_us)
leaves = st.one_of(
    st.integers(1, 4).map(AfterCount),
    durations.map(AfterProcessingTime),
    durations.map(Every),
    st.just(Never()),
    st.just(AfterWatermark(late=None)),
    st.sampled_from([When(at_least_three), When(negative), When(fails_at_two)]),
)


def composed(inner: st.SearchStrategy[Trigger]) -> st.SearchStrategy[Trigger]:
    some = st.lists(inner, min_size=1, max_size=3)
    return st.one_of(
        inner.map(Repeatedly),
        some.map(lambda parts: AfterAny(*parts)),
        some.map(lambda parts: AfterAll(*parts)),
        some.map(lambda parts: AfterEach(*parts)),
        st.builds(OrFinally, inner, inner),
        st.builds(AfterWatermark, early=inner, late=st.none() | inner),
    )


triggers = st.recursive(leaves, composed, max_leaves=5).filter(lambda trigger: trigger.per_pane)
readings = st.builds(Reading, st.sampled_from("ab"), st.integers(-5, 5))
bundles = st.lists(st.tuples(readings, st.integers(0, 40)), min_size=1, max_size=5)
moves = st.one_of(
    st.tuples(st.sampled_from(["records", "lost"]), bundles),
    st.tuples(st.just("clock"), st.integers(1, 60)),
    st.tuples(st.just("watermark"), st.integers(1, 20)),
    st.tuples(st.just("restart"), st.none()),
    st.tuples(st.sampled_from(["fold", "fold behind"]), st.none()),
)


def played(subject: StageDriver, schedule: list[Any], *, columns: bool) -> list[tuple[Reading, int]]:
    """Drive the subject by a schedule. Return the records of bundles that were committed."""
    fed: list[tuple[Reading, int]] = []
    for what, how in schedule:
        if what == "records":
            fed += how
            subject.feed(how, columns=columns)
        elif what == "lost":
            subject.lose(how, columns=columns)
        elif what == "clock":
            subject.feed([], now_us=subject.now_us + how)
        elif what == "watermark":
            advance(subject, max(subject.watermark, 0) + how)
        elif what.startswith("fold"):
            subject.fold(behind=what == "fold behind")
        else:
            subject.restart()
    return fed


@dataclass(frozen=True)
class Run:
    """A trigger, what is fed to it, and the other settings of its step."""

    trigger: Trigger
    schedule: list[Any]
    few: int
    panes_max: int
    rules: PaneRules
    timestamps: TimestampCombiner

    def play(self, windows: Windows, mode: Accumulation, allowed: int) -> tuple[StageDriver, list[tuple[Reading, int]]]:
        """Run to the end. Return the driver, and the records of bundles that were committed."""
        subject = self.start(windows, mode, allowed)
        fed = played(subject, self.schedule, columns=self.few == 0)
        finish(subject)
        subject.check_ended()
        return subject, fed

    def start(self, windows: Windows, mode: Accumulation, allowed: int) -> StageDriver:
        """Return a driver to which nothing is fed yet."""
        how: dict[str, Any] = {"few": self.few, "rules": self.rules, "timestamps": self.timestamps}
        subject = driver(self.trigger, windows=windows, mode=mode, allowed=allowed, **how)
        subject.panes_max = self.panes_max
        return subject


schedules = st.lists(moves, max_size=20)


def runs(of: st.SearchStrategy[Trigger], schedule: st.SearchStrategy[list[Any]] = schedules) -> st.SearchStrategy[Run]:
    return st.builds(
        Run,
        trigger=of,
        schedule=schedule,
        few=st.sampled_from([0, 10_000]),
        panes_max=st.sampled_from([1, 10_000]),
        rules=st.just(DEFAULT_RULES) | rules_of_panes,
        timestamps=st.sampled_from(TimestampCombiner),
    )


def batch(fed: list[tuple[Reading, int]], every: int) -> Counter[Any]:
    """Return the number and the sum of the records of each window."""
    wanted: Counter[Any] = Counter()
    for reading, at in fed:
        for start in range(at // every * every, at - SIZE, -every):
            wanted[reading.key, start, "n"] += 1
            wanted[reading.key, start, "total"] += reading.number
    return wanted


@pytest.mark.parametrize("mode", Accumulation, ids=lambda mode: mode.value)
@pytest.mark.parametrize("windows", [FIXED, SLIDING], ids=["fixed", "sliding"])
@settings(max_examples=100, deadline=None)
@given(run=runs(triggers), allowed=st.sampled_from([0, 7, 100]))
def test_panes_add_up_to_the_batch_in_every_mode(windows: Windows, mode: Accumulation, run: Run, allowed: int) -> None:
    """The batch: each record in all of its windows, without the (record, window) pairs that were dropped."""
    subject, fed = run.play(windows, mode, allowed)

    wanted = batch(fed, 5 if windows is SLIDING else SIZE)
    sums: Counter[Any] = Counter()
    table: dict[Any, tuple[int, int]] = {}
    indexes: dict[Any, int] = {}
    for result in subject.results:
        for late in result.late:
            for key, start, payload in zip(late.keys, late.window_starts, late.payloads, strict=True):
                name = msgspec.json.decode(key)
                wanted[name, start, "n"] -= 1
                wanted[name, start, "total"] -= msgspec.json.decode(payload)["number"]
        records = result.productions.get("panes")
        for pane, retracts in (
            () if records is None else zip(records.objects(), retractions_of(records).tolist(), strict=True)
        ):
            window = pane.key, instant(pane.window_start)
            if not retracts:
                assert pane.pane_index == indexes.get(window, -1) + 1
                indexes[window] = pane.pane_index
            sign = -1 if retracts else 1
            kept = mode is not Accumulation.ACCUMULATING
            sums[(*window, "n")] = kept * sums[(*window, "n")] + sign * pane.n
            sums[(*window, "total")] = kept * sums[(*window, "total")] + sign * (pane.total or 0)
        for part in result.results:
            for key, start, _, n, total, *_ in zip(*map(column_values, part.columns), strict=True):
                assert ((key, start) in table) != part.first
                table[key, start] = n, total
        assert {name: (sums[(*name, "n")], sums[(*name, "total")]) for name in table} == table
    assert {name: number for name, number in sums.items() if number} == {n: x for n, x in wanted.items() if x}
    if run.rules.pane_info:
        check_flags(subject, run.rules)


def check_flags(subject: StageDriver, rules: PaneRules) -> None:
    """Check that panes count their windows' panes, that none follows a last one, and that empty ones were asked for.

    A session that becomes part of another has neither a last pane nor one on time.
    """
    by_window: dict[Any, list[Any]] = {}
    absorbed: list[list[Any]] = []
    before: dict[Any, Any] = {}
    for result in subject.results:
        absorbed += [by_window.pop(name, []) for name in subject.deleted(result)]
        records = result.productions.get("panes")
        marks = [] if records is None else retractions_of(records).tolist()
        for pane, retracts in zip([] if records is None else records.objects(), marks, strict=True):
            window = pane.key, instant(pane.window_start), instant(pane.window_end)
            if retracts:
                assert pane == before.pop(window)
            else:
                by_window.setdefault(window, []).append(pane)
                before[window] = pane
    for panes in (*by_window.values(), *absorbed):
        since_end = [pane for pane in panes if pane.pane_timing != "early"]
        assert [pane.pane_index for pane in panes] == list(range(len(panes)))
        assert [pane.pane_on_time_index for pane in since_end] == list(range(len(since_end)))
        assert {pane.pane_on_time_index for pane in panes if pane.pane_timing == "early"} <= {-1}
        assert not any(pane.pane_last for pane in panes[:-1])
    for panes in by_window.values():
        since_end = [pane for pane in panes if pane.pane_timing != "early"]
        if rules.final_pane is FiringBehavior.ALWAYS:
            assert panes[-1].pane_last
        if rules.on_time_pane is FiringBehavior.ALWAYS and not (panes[-1].pane_last and not since_end):
            assert since_end, "the trigger was finished early, or the window had a pane since its end"
    assert not any(pane.pane_last for panes in absorbed for pane in panes)


@settings(max_examples=50, deadline=None)
@given(trigger=triggers)
def test_triggers_read_as_their_constructors(trigger: Trigger) -> None:
    assert eval(repr(trigger), {**vars(millpy), **globals(), "timedelta": timedelta}) == trigger
    assert msgspec.json.decode(msgspec.json.encode(trigger.identity())) == trigger.identity()


@pytest.mark.parametrize("restarts", [False, True], ids=["", "restarted"])
def test_panes_of_one_tick_that_exceed_a_turn_leave_in_the_next_turns_by_key(restarts: bool) -> None:
    subject = driver(Every(timedelta_us(50)))
    subject.feed([(Reading(key, 1), 3) for key in "dacb"])
    subject.panes_max = 1
    found = []
    for _ in "abcd":
        if restarts:
            subject.restart()
        result = subject.feed([], now_us=50)
        found += [pane.key for pane in result.productions["panes"].objects()]
        assert result.unfinished == (len(found) < 4)

    assert found == ["a", "b", "c", "d"]


def test_a_trigger_has_a_bound_on_its_parts() -> None:
    trigger: Trigger = AfterCount(1)
    for _ in range(TRIGGERS_MAX - 1):
        trigger = Repeatedly(trigger)

    with pytest.raises(GraphError, match="Repeatedly is composed of more than 100 triggers"):
        Repeatedly(trigger)
