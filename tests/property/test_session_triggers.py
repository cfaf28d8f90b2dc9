"""Sessions whose trigger decides pane by pane: they merge, close and fill, and lose only what they count as late."""

from __future__ import annotations

from collections import Counter
from datetime import datetime
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings

from millpy import (
    Accumulation,
    AfterAll,
    AfterAny,
    AfterCount,
    AfterEach,
    AfterProcessingTime,
    AfterWatermark,
    FiringBehavior,
    Repeatedly,
    SessionWindows,
    WindowFunction,
)
from millpy.limits import Limits
from millpy.model.record import RecordType, retractions_of
from millpy.model.stage import StepResult
from millpy.model.time import INSTANT_MAX, instant
from millpy.windowing.aggregates.numeric import Count
from millpy.windowing.logic import WindowedLogic
from millpy.windowing.pane_rules import PaneRules
from millpy.windowing.triggers import Trigger
from millpy.windowing.window import Windows
from tests.property.test_pane_triggers import (
    Reading,
    Run,
    advance,
    check_flags,
    driver,
    finish,
    runs,
    told,
    triggers,
)
from tests.stage_driver import StageDriver, apply_rows, timedelta_us

GAP = 4
SESSIONS = SessionWindows(timedelta_us(GAP))
LENGTH = 7
CUT_SESSIONS = SessionWindows(timedelta_us(GAP), max_length=timedelta_us(LENGTH))
FULL_SESSIONS = SessionWindows(timedelta_us(GAP), max_records=3)
lasting = triggers.filter(lambda trigger: not trigger.may_finish)


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
@given(runs(lasting))
def test_sessions_with_triggers_merge_to_those_of_a_batch_in_every_mode(
    windows: SessionWindows, mode: Accumulation, run: Run
) -> None:
    """After every commit retracting panes leave those of the table; in the end each mode has what a batch has."""
    subject, fed = run.play(windows, mode, 1_000)
    assert not any(result.late for result in subject.results)
    table, by_key = check_sessions(subject, mode)
    assert table == (sessions_of(fed) if windows is SESSIONS else sessions_of(fed, LENGTH))
    if mode is Accumulation.DISCARDING:
        assert by_key == totals(fed)
    if run.rules.pane_info:
        check_flags(subject, run.rules)


@pytest.mark.parametrize("mode", Accumulation, ids=lambda mode: mode.value)
@pytest.mark.parametrize("windows", [SESSIONS, FULL_SESSIONS], ids=["", "full"])
@settings(max_examples=75, deadline=None)
@given(runs(triggers))
def test_sessions_that_close_or_fill_lose_only_what_they_count_as_late(
    windows: SessionWindows, mode: Accumulation, run: Run
) -> None:
    """Closed sessions stay as they are, so that the table and the late records have each record once."""
    subject, fed = run.play(windows, mode, 1_000)

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
    if run.rules.pane_info:
        check_flags(subject, run.rules)


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


@pytest.mark.parametrize("restarts", [False, True], ids=["", "restarted"])
def test_an_alarm_is_that_of_the_open_session_not_of_a_closed_one_with_its_start(restarts: bool) -> None:
    subject = driver(AfterAny(AfterCount(4), AfterProcessingTime(timedelta_us(30))), windows=SESSIONS)
    assert len(told(subject.feed([(Reading("a", 1), 1)] * 4))) == 1
    subject.feed([(Reading("a", 1), at) for at in (1, 3, 6)])
    if restarts:
        subject.restart()

    assert told(subject.feed([], now_us=30)) == ["early 3"]


@pytest.mark.parametrize("few", [0, 10_000], ids=["columns", "few"])
@pytest.mark.parametrize("restarts", [False, True], ids=["", "restarted"])
def test_a_record_that_would_make_a_closed_session_again_is_late_and_any_other_is_not(few: int, restarts: bool) -> None:
    subject = driver(AfterCount(2), windows=SESSIONS, few=few, allowed=50)

    def feed(*times: int) -> StepResult:
        return subject.feed([(Reading("a", 1), at) for at in times], columns=few == 0)

    assert told(feed(1, 1)) == ["early 2"]
    if restarts:
        subject.restart()
    again = feed(1, 1)
    assert told(again) == []
    assert again.late_by_input == {0: 2}
    assert {(part.window_starts[0], part.window_ends[0]) for part in again.late} == {(1, 1 + GAP)}

    beside = feed(2, 2)
    assert told(beside) == ["early 2"], "another session, although it overlaps the closed one"
    assert not beside.late
    open_beside = feed(1, 3)
    assert told(open_beside) == ["early 2"]
    assert len(subject.stored) == 3
    if restarts:
        subject.restart()
    assert told(advance(subject, 7 + 50)) == []
    assert not subject.stored, "closed sessions expire, too"


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
