"""Windows that have left memory: every turn is the same as if all were there, whatever the trigger and the faults."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millpy import (
    Accumulation,
    AfterCount,
    AfterEach,
    AfterWatermark,
    Count,
    Every,
    Never,
    OrFinally,
    Repeatedly,
    SessionWindows,
    SlidingWindows,
    TimestampCombiner,
    When,
)
from millpy.limits import Limits
from millpy.model.record import RecordType, retractions_of
from millpy.model.stage import StepResult, StoredInterval
from millpy.model.stored_windows import ClosedKind
from millpy.store.memory.tables import column_values
from millpy.windowing import closed_sessions, unfired_sessions
from millpy.windowing.logic import WindowedLogic, WindowedStage
from millpy.windowing.pane_rules import DEFAULT_RULES
from millpy.windowing.triggers import Trigger
from millpy.windowing.window import Windows
from tests.property import test_pane_triggers
from tests.property.test_pane_triggers import FIXED, SLIDING, Reading, Run, played, runs, triggers
from tests.property.test_session_triggers import CUT_SESSIONS, FULL_SESSIONS, SESSIONS
from tests.property.test_windowed import us
from tests.stage_driver import StageDriver, timedelta_us

END_OF_WINDOW = TimestampCombiner.END_OF_WINDOW
MOVES = ["none", "fold", "fold", "fold behind", "restart", "lost", "clock", "watermark"]
KINDS: dict[str, Windows] = {
    "fixed": FIXED,
    "sliding": SLIDING,
    "sessions": SESSIONS,
    "cut sessions": CUT_SESSIONS,
    "full sessions": FULL_SESSIONS,
}


def schedule(seed: int, keys: str = "abc") -> list[Any]:
    """Return moves, of which many are late records for windows that have fired and were folded."""
    rng = random.Random(seed)
    found: list[Any] = []
    for now in range(0, 2 * rng.randrange(10, 40), 2):
        late = [now - rng.randrange(5, 45) for _ in range(rng.choice([0, 0, 1, 1, 3]))]
        times = [*late, *[now + rng.randrange(3)] * rng.randrange(2)]
        for what in rng.sample(["records", "records", rng.choice(MOVES), rng.choice(MOVES)], k=4):
            if what in ("records", "lost") and times:
                found.append((what, [(Reading(rng.choice(keys), rng.randrange(9)), max(0, at)) for at in times]))
            elif what in ("clock", "watermark"):
                found.append((what, rng.randrange(1, 5)))
            elif what not in ("records", "lost", "none"):
                found.append((what, None))
    return found


@pytest.fixture(scope="module", autouse=True)
def rare_passes() -> Iterator[None]:
    """Let sessions that are over stay in the store for long."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(closed_sessions, "PASSES", 2)
        yield


def effects(result: StepResult) -> Any:
    """Return what a turn does beside the stored state, in an order of its own."""
    panes = []
    for stream, records in result.productions.items():
        rows = zip(records.objects(), records.event_times.tolist(), retractions_of(records).tolist(), strict=True)
        panes += [(stream, str(record), at, retracts) for record, at, retracts in rows]
    rows = [row for part in result.results for row in zip(*map(column_values, part.columns), strict=True)]
    gone = [row for part in result.deleted for row in zip(*map(column_values, part.columns), strict=True)]
    late = [
        row
        for part in result.late
        for row in zip(part.keys, part.payloads, part.window_starts, part.window_ends, strict=True)
    ]
    letters = sorted((letter.reason, letter.payload) for letter in result.dead_letters)
    counts = result.consumed_by_input, result.emitted_by_stream, result.late_by_input
    return sorted(panes), sorted(map(str, rows)), sorted(map(str, gone)), sorted(late), letters, counts


def acts(subject: StageDriver) -> list[Any]:
    """Return the effects of the turns that have some: a turn may read panes and find that nothing is due."""
    return [found for found in map(effects, subject.results) if any(found[:-1])]


@pytest.mark.parametrize("windows", KINDS.values(), ids=KINDS)
@settings(max_examples=12, deadline=None)
@given(
    run=runs(st.just(AfterWatermark()) | triggers, st.integers(0, 2**32).map(schedule)),
    mode=st.sampled_from(Accumulation),
    allowed=st.sampled_from([7, 30, 1_000]),
)
def test_a_turn_does_not_depend_on_what_is_in_memory(
    windows: Windows, run: Run, mode: Accumulation, allowed: int
) -> None:
    spilling, resident = run.start(windows, mode, allowed), run.start(windows, mode, allowed)
    resident.fold = lambda **how: None  # type: ignore[method-assign]
    for subject in (spilling, resident):
        played(subject, run.schedule, columns=run.few == 0)
        subject.feed([])  # until its first turn, a new owner may wait for a session that has become longer

    for one, other in zip(spilling.results, resident.results, strict=True):
        assert effects(one) == effects(other)
    reached, wanted = (min(subject.watermark, subject.interval.oldest_work()) for subject in (spilling, resident))
    assert reached <= wanted
    assert reached == wanted or one.unfinished
    for subject in (spilling, resident):
        subject.finish()
        subject.check_ended()


@pytest.mark.parametrize("windows", [FIXED, SlidingWindows(timedelta_us(10), every=timedelta_us(4))], ids=repr)
@settings(max_examples=12, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    mode=st.sampled_from(Accumulation),
    allowed=st.sampled_from([0, 7, 30]),
    few=st.sampled_from([0, 10_000]),
    panes_max=st.sampled_from([1, 2, 3, 10_000]),
)
def test_a_turn_does_not_depend_on_which_unfired_windows_are_in_memory(
    windows: Windows, seed: int, mode: Accumulation, allowed: int, few: int, panes_max: int
) -> None:
    run = Run(AfterWatermark(), schedule(seed, "abcdefgh"), few, panes_max, DEFAULT_RULES, END_OF_WINDOW)
    spilling, resident = run.start(windows, mode, allowed), run.start(windows, mode, allowed)
    resident.fold = lambda **how: None  # type: ignore[method-assign]
    for subject in (spilling, resident):
        played(subject, run.schedule, columns=few == 0)

    assert [effects(result) for result in spilling.results] == [effects(result) for result in resident.results]
    for subject in (spilling, resident):
        subject.finish()
        subject.check_ended()


AT_THE_END = [
    AfterWatermark(early=AfterCount(2)),
    AfterWatermark(early=AfterEach(AfterCount(1), AfterCount(3)), late=AfterCount(2)),
    AfterWatermark(early=When(lambda pane: pane.n % 3 == 0), late=Never()),
    AfterWatermark(late=AfterCount(2)),
    AfterWatermark(early=OrFinally(Repeatedly(AfterCount(2)), AfterCount(5)), late=None),
]


@pytest.mark.parametrize("windows", [FIXED, SlidingWindows(timedelta_us(10), every=timedelta_us(4))], ids=repr)
@settings(max_examples=20, deadline=None)
@given(
    trigger=st.sampled_from(AT_THE_END),
    seed=st.integers(0, 2**32),
    mode=st.sampled_from(Accumulation),
    allowed=st.sampled_from([0, 7, 30, 1_000]),
    few=st.sampled_from([0, 10_000]),
    panes_max=st.sampled_from([1, 2, 3, 10_000]),
)
def test_a_turn_does_not_depend_on_which_panes_of_a_trigger_are_in_memory(
    windows: Windows, trigger: Trigger, seed: int, mode: Accumulation, allowed: int, few: int, panes_max: int
) -> None:
    run = Run(trigger, schedule(seed, "abcdefgh"), few, panes_max, DEFAULT_RULES, END_OF_WINDOW)
    spilling, resident = run.start(windows, mode, allowed), run.start(windows, mode, allowed)
    assert cast("WindowedStage", spilling.stage).closed_kind is ClosedKind.UNFIRED_PANES
    resident.fold = lambda **how: None  # type: ignore[method-assign]
    for subject in (spilling, resident):
        played(subject, run.schedule, columns=few == 0)

    assert acts(spilling) == acts(resident)
    for subject in (spilling, resident):
        subject.finish()
        subject.check_ended()
    assert acts(spilling) == acts(resident)


@pytest.mark.parametrize("windows", [SESSIONS, CUT_SESSIONS, FULL_SESSIONS], ids=["sessions", "cut", "full"])
@settings(max_examples=20, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    how=st.tuples(st.sampled_from(Accumulation), st.sampled_from([0, 7, 30]), st.sampled_from([0, 10_000])),
    panes_max=st.sampled_from([1, 2, 3, 10_000]),
    keys=st.sampled_from(["a", "abc", "abcdefgh"]),
    read=st.tuples(st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 20_000])),
    room=st.sampled_from([0, 0, 2, 5]),
    disorder=st.sampled_from([0, 5, 20, 40]),
)
def test_a_turn_does_not_depend_on_which_unfired_sessions_are_in_memory(
    windows: Windows,
    seed: int,
    how: tuple[Accumulation, int, int],
    panes_max: int,
    keys: str,
    read: tuple[int, int],
    room: int,
    disorder: int,
) -> None:
    mode, allowed, few = how
    run = Run(AfterWatermark(), schedule(seed, keys), few, panes_max, DEFAULT_RULES, END_OF_WINDOW)
    spilling, resident = run.start(windows, mode, allowed), run.start(windows, mode, allowed)
    limits = Limits(closed_windows_bytes_max=1 + room * 500, unfired_windows_bytes_max=1 + room * 1_200)
    spilling.binding = replace(spilling.binding, limits=limits)
    spilling.stage = WindowedStage(cast("WindowedStage", spilling.stage).logic, spilling.binding)
    spilling.interval = spilling.stage.open(StoredInterval(1, 1))
    resident.fold = lambda **how: None  # type: ignore[method-assign]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(unfired_sessions, "OTHERS_MAX", read[0])
        for module in (unfired_sessions, closed_sessions):
            patch.setattr(module, "PIECE_ROWS", read[1])
        patch.setattr(test_pane_triggers, "MAX_DISORDER", disorder)  # by which the watermark is advanced
        for subject in (spilling, resident):
            subject.max_disorder = disorder
            played(subject, run.schedule, columns=few == 0)

        assert [effects(result) for result in spilling.results] == [effects(result) for result in resident.results]
        for subject in (spilling, resident):
            subject.finish()
            subject.check_ended()


def test_a_session_that_is_over_stays_in_memory_while_stored_ones_are_deleted() -> None:
    """Panes of other sessions hold it up, and its row would be behind the place that the deletions have reached."""
    trigger = AfterWatermark(early=Every(10 * us), late=AfterCount(2))
    logic = WindowedLogic(SessionWindows(3 * us), 10 * us, {"n": Count()}, trigger=trigger)
    outputs = {"windows": logic.output_type(RecordType(Reading), ("key",))}
    subject = StageDriver(logic, Reading, outputs=outputs, max_disorder=1_000)

    subject.feed([(Reading("x", 1), 0), (Reading("y", 1), 1), (Reading("z", 1), 2)])
    subject.feed([], watermark=6)
    subject.feed([(Reading("x", 1), 0), (Reading("y", 1), 1)])
    subject.fold()  # the late panes of x and y wait for another record
    subject.feed([(Reading("y", 1), 1), (Reading("v", 1), 100), (Reading("w", 1), 100)])
    subject.panes_max = 1
    for _ in "vw":  # its early pane is the only one of a turn, and the deletions pass over a row: of x, then of y
        subject.feed([], watermark=30, now_us=10)
    assert sorted(name[2] for name in subject.stored) == [b'"v"', b'"w"', b'"x"', b'"y"', b'"z"']
    subject.fold()
    for _ in range(4):
        subject.feed([])

    assert sorted(name[2] for name in subject.stored) == [b'"v"', b'"w"']
