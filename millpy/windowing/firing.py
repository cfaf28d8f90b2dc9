"""Firing pane by pane: a trigger with a state is asked about each pane that has changed or is due.

    the turn has added records        the trigger takes note of them, and is asked
    the clock reaches its alarm       it is asked, without a record
    the watermark reaches the end     it is asked; on-time records that it leaves waiting hold the low watermark
    the window is over                what waits is the last pane, whatever the trigger says

A pane is emitted only if records have come since the one before it, unless the rules of the step say otherwise
(`pane_rules.py`): then its pane on time, or its last one, may be empty.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from heapq import heapify, heappop, heappush
from itertools import islice
from typing import Any, Generic, Protocol, TypeVar

from millpy.model.time import INSTANT_MAX, INSTANT_MIN, Instant
from millpy.windowing.pane_codec import FIRST, DuePane, FiringState, OpenPane
from millpy.windowing.pane_rules import DEFAULT_RULES, FiringBehavior, PaneRules
from millpy.windowing.predicate_trigger import answer_of
from millpy.windowing.triggers import FiringMoment, Predicate, Trigger


class _Sortable(Protocol):
    def __lt__(self, other: Any, /) -> bool: ...

    def __hash__(self) -> int: ...


Item = TypeVar("Item", bound=_Sortable)
_OUTDATED_MIN = 1_000


class Alarms(Generic[Item]):
    """The processing times at which panes are due: for each item at most one."""

    def __init__(self) -> None:
        self._times: list[Instant] = []
        self._items: dict[Instant, dict[Item, None]] = {}
        self._at: dict[Item, Instant] = {}
        self._sorted: set[Instant] = set()  # due times with more items than could leave in a turn

    def set(self, item: Item, at: Instant) -> None:
        """Set the alarm of an item, instead of an earlier one; INSTANT_MAX for none."""
        before = self._at.get(item, INSTANT_MAX)
        if before == at:
            return
        if before != INSTANT_MAX:
            of_time = self._items[before]
            del of_time[item]
            if not of_time:
                del self._items[before]
                self._sorted.discard(before)
        if at == INSTANT_MAX:
            self._at.pop(item, None)
            return
        self._at[item] = at
        found = self._items.get(at)
        if found is not None:
            found[item] = None
            return
        self._items[at] = {item: None}
        heappush(self._times, at)
        if len(self._times) > 2 * len(self._items) + _OUTDATED_MIN:
            self._times = list(self._items)
            heapify(self._times)

    def next_time(self) -> Instant:
        """Return the first time at which an alarm is set; INSTANT_MAX without one."""
        while self._times and self._times[0] not in self._items:
            heappop(self._times)
        return self._times[0] if self._times else INSTANT_MAX

    def due(self, now_us: Instant, items_max: int) -> list[Item]:
        """Return up to `items_max` items whose time has come; they stay until their alarm is set anew.

        Of the items of one time the first ones leave, so that a new owner chooses as the owner before it.
        """
        due: list[Item] = []
        times: list[Instant] = []
        while len(due) < items_max and self.next_time() <= now_us:
            at = heappop(self._times)
            if times and times[-1] == at:
                continue  # its items had left before others came
            times.append(at)
            if at not in self._sorted and len(due) + len(self._items[at]) > items_max:
                self._items[at] = dict.fromkeys(sorted(self._items[at]))
                self._sorted.add(at)
            due += islice(self._items[at], items_max - len(due))
        for at in times:
            heappush(self._times, at)
        return due


class PaneTriggers:
    """Asks the trigger of a step about its panes.

    Args:
        trigger: the trigger.
        rules: which empty panes are emitted.
        view: (pane, timing of its next pane) -> the record that its next pane would be, for predicates.

    Attributes:
        now_us: the processing time of the turn.
        latest_end: the windows that end by it have reached their end.
        expected_end: the percentile watermark has reached the windows that end by it.
    """

    def __init__(
        self,
        trigger: Trigger,
        rules: PaneRules = DEFAULT_RULES,
        view: Callable[[DuePane, str], Any] | None = None,
    ) -> None:
        self._trigger = trigger
        self._view = view
        self._calls_user = trigger.calls_user
        self._always_on_time = rules.on_time_pane is FiringBehavior.ALWAYS
        self._always_final = rules.final_pane is FiringBehavior.ALWAYS
        self.now_us = INSTANT_MIN
        self.latest_end = INSTANT_MIN
        self.expected_end = INSTANT_MIN
        self._failed: list[tuple[DuePane, BaseException]] = []

    def add(self, pane: OpenPane, count: int, late: int) -> None:
        """Take note of records that have been added to a pane, and how many of them are late."""
        firing = pane.firing
        if firing is None:
            firing = pane.firing = FiringState(self._trigger.fresh())
        firing.since += count
        firing.late += late
        if not firing.trigger[0]:
            self._trigger.add(firing.trigger, count, FiringMoment(self.now_us, firing.passed))

    def join(self, pane: OpenPane, olds: Sequence[OpenPane], end: Instant) -> None:
        """Let a pane with the turn's records know what the triggers of sessions knew that are now part of its own.

        Args:
            pane: the pane of the session, of which the trigger has not been asked.
            olds: the panes of the sessions.
            end: the end of its session.
        """
        new, known = firing_of(pane), [firing_of(old) for old in olds]
        moment = FiringMoment(self.now_us, end <= self.latest_end)
        joined = FiringState(self._trigger.merged([firing.trigger for firing in known], moment))
        joined.since = sum(firing.since for firing in known)
        joined.late = sum(firing.late for firing in known)
        pane.firing = joined
        self.add(pane, new.since, new.late)

    def alarm_of(self, pane: OpenPane) -> Instant:
        """Return the processing time at which a pane is due."""
        firing = firing_of(pane)
        if firing.trigger[0]:
            return INSTANT_MAX
        moment = FiringMoment(self.now_us, firing.passed, expected=firing.expected)
        return self._trigger.alarm(firing.trigger, moment)

    def ask(self, due: DuePane, *, ended: bool, over: bool) -> bool:
        """Ask the trigger about a pane, and tell whether the window gives a pane now.

        Args:
            due: the pane, with the records of the turn.
            ended: whether the watermark has reached the end of the window.
            over: whether it has reached the end of the allowed lateness, too.
        """
        pane = due[3]
        firing = firing_of(pane)
        timing = self._timing(pane, firing) if ended else "early"
        firing.expected = due[1] <= self.expected_end
        judge = (lambda predicate: self._judge(predicate, due, timing)) if self._calls_user else None
        moment = FiringMoment(self.now_us, ended, judge, firing.expected)
        fires = over
        if not firing.trigger[0] and self._trigger.ready(firing.trigger, moment):
            self._trigger.fire(firing.trigger, moment)
            fires = True
        last = over or bool(firing.trigger[0])
        emits = fires and (firing.since > 0 or (not firing.closed and self._gives_empty(firing, timing, last)))
        firing.closed = firing.closed or last
        if emits:
            firing.since = firing.late = 0
            firing.before = firing.timing or FIRST
            firing.timing = timing
            firing.on_time_index = -1 if timing == "early" else firing.on_time_index + 1
            firing.last = last
            firing.holds = False
        if ended and not firing.passed:
            firing.passed = True
            firing.holds = firing.since > firing.late
        return emits

    @property
    def by_percentile(self) -> bool:
        """Whether a percentile decides when it fires."""
        return bool(self._trigger.percentiles)

    def take_failed(self) -> list[tuple[DuePane, BaseException]]:
        """Return (pane, error) of predicates that raised since the last call; of a window once until one answers."""
        failed, self._failed = self._failed, []
        return failed

    def waits_for_the_end(self, firing: FiringState) -> bool:
        """Tell whether a pane has to be asked when its window is over."""
        return firing.since > 0 or (not firing.closed and (self._always_final or self._always_on_time))

    def note_waiting(self, pane: OpenPane) -> bool:
        """Note in a pane, of which the trigger has been asked, whether it waits, and return that."""
        firing = firing_of(pane)
        firing.waits = firing.passed and (
            firing.holds
            or (self.by_percentile and not firing.expected)
            or self.waits_for_the_end(firing)
            or self.alarm_of(pane) < INSTANT_MAX
        )
        return firing.waits

    def _gives_empty(self, firing: FiringState, timing: str, last: bool) -> bool:
        """Tell whether an empty pane is emitted: the last one, or the first since the end of the window."""
        first_since_end = timing != "early" and firing.on_time_index < 0
        return (last and self._always_final) or (first_since_end and self._always_on_time)

    def _judge(self, predicate: Predicate, due: DuePane, timing: str) -> bool:
        """Ask a predicate about a pane. One that raises is not true; the first failure in a window is kept."""
        firing = firing_of(due[3])
        assert self._view is not None, predicate
        view = self._view
        answer = answer_of(lambda: predicate(view(due, timing)))
        if isinstance(answer, BaseException) and not firing.failing:
            self._failed.append((due, answer))
        firing.failing = isinstance(answer, BaseException)
        return answer is True

    @staticmethod
    def _timing(pane: OpenPane, firing: FiringState) -> str:
        return "late" if pane.late_count or firing.timing in ("on_time", "late") else "on_time"


def needs_only_records(pane: OpenPane) -> bool:
    """Tell whether a pane has reached the end of its window, and is not due again without another record."""
    firing = firing_of(pane)
    return firing.passed and not firing.waits


def firing_of(pane: OpenPane) -> FiringState:
    """Return the state of a pane's trigger."""
    assert pane.firing is not None, pane
    return pane.firing
