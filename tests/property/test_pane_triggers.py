"""Triggers that decide pane by pane: when each fires, and that panes add up whatever the trigger, order and crashes."""

from __future__ import annotations

from collections import Counter
from datetime import datetime, timedelta
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
    SessionWindows,
    SlidingWindows,
    TimestampCombiner,
    When,
    WindowFunction,
)
from millpy.errors import GraphError
from millpy.limits import Limits
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
from tests.stage_driver import StageDriver, apply_rows, timedelta_us

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
        else:
            subject.restart()
    return fed


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
@given(
    trigger=triggers,
    schedule=st.lists(moves, max_size=20),
    allowed=st.sampled_from([0, 7, 100]),
    few=st.sampled_from([0, 10_000]),
    panes_max=st.sampled_from([1, 10_000]),
    rules=st.just(DEFAULT_RULES) | rules_of_panes,
    timestamps=st.sampled_from(TimestampCombiner),
)
def test_panes_add_up_to_the_batch_in_every_mode(
    windows: Windows,
    mode: Accumulation,
    trigger: Trigger,
    schedule: list[Any],
    allowed: int,
    few: int,
    panes_max: int,
    rules: PaneRules,
    timestamps: TimestampCombiner,
) -> None:
    """The batch: each record in all of its windows, without the (record, window) pairs that were dropped."""
    how: dict[str, Any] = {"windows": windows, "mode": mode, "rules": rules, "timestamps": timestamps}
    subject = driver(trigger, allowed=allowed, few=few, **how)
    subject.panes_max = panes_max
    fed = played(subject, schedule, columns=few == 0)
    finish(subject)
    subject.check_ended()

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
    if rules.pane_info:
        check_flags(subject, rules)


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


@pytest.mark.parametrize("few", [0, 10_000], ids=["columns", "few"])
def test_a_session_that_an_earlier_late_record_has_joined_gives_its_empty_pane_at_the_end(few: int) -> None:
    rules = PaneRules(on_time_pane=FiringBehavior.ALWAYS, pane_info=True)
    subject = driver(AfterWatermark(early=AfterCount(1)), windows=SESSIONS, allowed=1_000, few=few, rules=rules)
    advance(subject, 39)
    at_once = subject.feed([(Reading("b", 0), 35), (Reading("b", 0), 36)], columns=few == 0)
    at_end = advance(subject, 40)

    assert told(at_once) == ["early 2"]
    assert told(at_end) == ["late 2"]
    finish(subject)
    check_flags(subject, rules)


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


GAP = 4
SESSIONS = SessionWindows(timedelta_us(GAP))
LENGTH = 7
CUT_SESSIONS = SessionWindows(timedelta_us(GAP), max_length=timedelta_us(LENGTH))
FULL_SESSIONS = SessionWindows(timedelta_us(GAP), max_records=3)
lasting = triggers.filter(lambda trigger: not trigger.may_finish)
closing = triggers.filter(lambda trigger: trigger.may_finish)


def sessions_of(fed: list[tuple[Reading, int]], length: int = 1_000_000) -> dict[Any, tuple[int, int]]:
    """Return the sessions of a batch, cut at the multiples of a length: (key, start, end) -> number and sum."""
    found: dict[Any, tuple[int, int]] = {}
    for key in {reading.key for reading, _ in fed}:
        mine = sorted((at, reading.number) for reading, at in fed if reading.key == key)
        start, before, n, total = mine[0][0], mine[0][0], 0, 0
        for at, number in mine:
            cut = (before // length + 1) * length
            if at >= min(before + GAP, cut):
                found[key, start, min(before + GAP, cut)] = n, total
                start, n, total = at, 0, 0
            before, n, total = at, n + 1, total + number
        found[key, start, min(before + GAP, (before // length + 1) * length)] = n, total
    return found


@pytest.mark.parametrize("mode", Accumulation, ids=lambda mode: mode.value)
@pytest.mark.parametrize("windows", [SESSIONS, CUT_SESSIONS], ids=["", "cut"])
@settings(max_examples=75, deadline=None)
@given(
    trigger=lasting,
    schedule=st.lists(moves, max_size=20),
    few=st.sampled_from([0, 10_000]),
    panes_max=st.sampled_from([1, 10_000]),
    rules=st.just(DEFAULT_RULES) | rules_of_panes,
    timestamps=st.sampled_from(TimestampCombiner),
)
def test_sessions_with_triggers_merge_to_those_of_a_batch_in_every_mode(
    windows: SessionWindows,
    mode: Accumulation,
    trigger: Trigger,
    schedule: list[Any],
    few: int,
    panes_max: int,
    rules: PaneRules,
    timestamps: TimestampCombiner,
) -> None:
    """After every commit retracting panes leave those of the table; in the end each mode has what a batch has."""
    subject = driver(trigger, windows=windows, mode=mode, allowed=1_000, few=few, rules=rules, timestamps=timestamps)
    subject.panes_max = panes_max
    fed = played(subject, schedule, columns=few == 0)
    finish(subject)
    subject.check_ended()
    assert not any(result.late for result in subject.results)
    table, by_key = check_sessions(subject, mode)
    assert table == (sessions_of(fed) if windows is SESSIONS else sessions_of(fed, LENGTH))
    if mode is Accumulation.DISCARDING:
        assert by_key == totals(fed)
    if rules.pane_info:
        check_flags(subject, rules)


@pytest.mark.parametrize("mode", Accumulation, ids=lambda mode: mode.value)
@pytest.mark.parametrize("windows", [SESSIONS, FULL_SESSIONS], ids=["", "full"])
@settings(max_examples=75, deadline=None)
@given(
    trigger=triggers,
    schedule=st.lists(moves, max_size=20),
    few=st.sampled_from([0, 10_000]),
    panes_max=st.sampled_from([1, 10_000]),
    rules=st.just(DEFAULT_RULES) | rules_of_panes,
    timestamps=st.sampled_from(TimestampCombiner),
)
def test_sessions_that_close_or_fill_lose_only_what_they_count_as_late(
    windows: SessionWindows,
    mode: Accumulation,
    trigger: Trigger,
    schedule: list[Any],
    few: int,
    panes_max: int,
    rules: PaneRules,
    timestamps: TimestampCombiner,
) -> None:
    """Closed sessions stay as they are, so that the table and the late records have each record once."""
    subject = driver(trigger, windows=windows, mode=mode, allowed=1_000, few=few, rules=rules, timestamps=timestamps)
    subject.panes_max = panes_max
    fed = played(subject, schedule, columns=few == 0)
    finish(subject)
    subject.check_ended()

    table, by_key = check_sessions(subject, mode)
    wanted = totals(fed)
    for result in subject.results:
        for late in result.late:
            for key, payload in zip(late.keys, late.payloads, strict=True):
                wanted[msgspec.json.decode(key), "n"] -= 1
                wanted[msgspec.json.decode(key), "total"] -= msgspec.json.decode(payload)["number"]
    wanted = Counter({name: number for name, number in wanted.items() if number})
    shown: Counter[Any] = Counter()
    for (key, _, _), (n, total) in table.items():
        shown[key, "n"] += n
        shown[key, "total"] += total
    assert {name: number for name, number in shown.items() if number} == wanted
    if mode is Accumulation.DISCARDING:
        assert by_key == wanted
    if rules.pane_info:
        check_flags(subject, rules)


def totals(fed: list[tuple[Reading, int]]) -> Counter[Any]:
    """Return the number and the sum of the records of each key."""
    found: Counter[Any] = Counter()
    for reading, _ in fed:
        found[reading.key, "n"] += 1
        found[reading.key, "total"] += reading.number
    return Counter({name: number for name, number in found.items() if number})


def check_sessions(subject: StageDriver, mode: Accumulation) -> tuple[dict[Any, tuple[int, int]], Counter[Any]]:
    """Check that retracting panes leave those of the table after each turn. Return it, and sums of panes by key."""
    table: dict[Any, tuple[int, int]] = {}
    standing: dict[Any, Any] = {}
    by_key: Counter[Any] = Counter()
    for result in subject.results:
        apply_rows(table, result)
        records = result.productions.get("panes")
        for pane, retracts in (
            () if records is None else zip(records.objects(), retractions_of(records).tolist(), strict=True)
        ):
            window = pane.key, instant(pane.window_start), instant(pane.window_end)
            if retracts:
                assert standing.pop(window) == pane, "a retraction is the pane that it takes back"
            else:
                assert mode is not Accumulation.RETRACTING or window not in standing
                standing[window] = pane
                by_key[pane.key, "n"] += pane.n
                by_key[pane.key, "total"] += pane.total or 0
        if mode is Accumulation.RETRACTING:
            assert {name: (pane.n, pane.total) for name, pane in standing.items()} == table
    return table, Counter({name: number for name, number in by_key.items() if number})


@pytest.mark.parametrize("few", [0, 10_000], ids=["columns", "few"])
@pytest.mark.parametrize("restarts", [False, True], ids=["", "restarted"])
@pytest.mark.parametrize(
    ("trigger", "steps"),
    [
        (AfterCount(3), [([1], []), ([6], []), ([4], ["early 1-10 3"])]),
        (AfterCount(4), [([1, 1], []), ([3], []), ([5], ["early 1-9 4"])]),
        (AfterProcessingTime(timedelta_us(30)), [([1], []), (10, []), ([6], []), ([4], []), (30, ["early 1-10 3"])]),
        (AfterEach(AfterCount(1), AfterCount(2)), [([1], ["early 1-5 1"]), ([3], []), ([4], ["early 1-8 3"])]),
        (AfterAll(AfterCount(2), AfterProcessingTime(timedelta_us(9))), [([1], []), ([3], []), (9, ["early 1-7 2"])]),
        (
            AfterWatermark(early=AfterCount(2), late=AfterCount(2)),
            [([1, 2], ["early 1-6 2"]), ([3], []), ("end", ["on_time 1-7 3"]), ([4], []), ([5], ["late 1-9 5"])],
        ),
    ],
)
def test_what_triggers_know_survives_a_merge_of_sessions(
    trigger: Trigger, steps: list[Any], few: int, restarts: bool
) -> None:
    repeated = trigger if isinstance(trigger, AfterWatermark) else Repeatedly(trigger)
    subject = driver(repeated, windows=SESSIONS, few=few, allowed=1_000)
    for what, wanted in steps:
        if isinstance(what, list):
            result = subject.feed([(Reading("a", 1), at) for at in what], columns=few == 0)
        elif what == "end":
            result = advance(subject, 9)
        else:
            result = subject.feed([], now_us=what)
        records = result.productions.get("panes")
        assert [
            f"{pane.pane_timing} {instant(pane.window_start)}-{instant(pane.window_end)} {pane.n}"
            for pane in ([] if records is None else records.objects())
        ] == wanted, what
        if restarts:
            subject.restart()


def test_a_session_holds_the_low_watermark_for_records_on_time_that_no_pane_has() -> None:
    subject = driver(Repeatedly(AfterCount(3)), windows=SESSIONS)
    subject.feed([(Reading("a", 1), 3)])
    advance(subject, 50)
    assert subject.interval.oldest_work() == 6
    subject.restart()
    assert subject.interval.oldest_work() == 6
    subject.feed([(Reading("a", 1), 5)])
    assert subject.interval.oldest_work() == 8, "a late record has joined, and the other one still waits"
    result = subject.feed([(Reading("a", 1), 6)])

    assert [pane.n for pane in result.productions["panes"].objects()] == [3]
    assert subject.interval.oldest_work() == INSTANT_MAX


def test_a_trigger_has_a_bound_on_its_parts() -> None:
    trigger: Trigger = AfterCount(1)
    for _ in range(TRIGGERS_MAX - 1):
        trigger = Repeatedly(trigger)

    with pytest.raises(GraphError, match="Repeatedly is composed of more than 100 triggers"):
        Repeatedly(trigger)


@pytest.mark.parametrize("restarts", [False, True], ids=["", "restarted"])
def test_an_alarm_is_that_of_the_open_session_not_of_a_closed_one_with_its_start(restarts: bool) -> None:
    subject = driver(AfterAny(AfterCount(4), AfterProcessingTime(timedelta_us(30))), windows=SESSIONS)
    assert len(told(subject.feed([(Reading("a", 1), 1)] * 4))) == 1
    subject.feed([(Reading("a", 1), at) for at in (1, 3, 6)])
    if restarts:
        subject.restart()

    assert told(subject.feed([], now_us=30)) == ["early 3"]


class Fours(WindowFunction):
    """Windows of 4 µs from each record on."""

    def assign(self, record: Any, at: datetime, key: Any) -> list[tuple[datetime, datetime]]:
        return [(at, at + timedelta_us(GAP))]


@pytest.mark.parametrize("windows", [SESSIONS, Fours()], ids=["sessions", "function"])
def test_closed_sessions_count_against_the_bound_on_open_windows(windows: Windows) -> None:
    logic = WindowedLogic(windows, timedelta_us(100), {"n": Count()}, trigger=AfterCount(1))
    outputs = {"panes": logic.output_type(RecordType(Reading), ("key",))}
    limits = Limits(open_windows_bytes_max=50_000)
    subject = StageDriver(logic, Reading, outputs=outputs, tables={"panes": 1}, limits=limits, max_disorder=1_000)

    refused = []
    for number in range(60):
        refused += subject.feed([(Reading(f"key-{number}", 1), 1)]).dead_letters
        if number % 20 == 19:
            subject.restart()
    assert {letter.reason for letter in refused} == {"windows"}
    assert len(refused) + len(subject.stored) == 60
    assert len(subject.stored) * 1_600 < 50_000

    again = subject.feed([(Reading("key-0", 1), 1)])
    assert not again.dead_letters, "it opens no session"
    assert again.late_by_input == {0: 1}

    advance(subject, 200)
    assert not subject.stored
    assert not subject.feed([(Reading("key", 1), 300)]).dead_letters
