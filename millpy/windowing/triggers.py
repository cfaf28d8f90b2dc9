"""Triggers: when windows fire.

A trigger is a frozen value that composes (`composite_triggers.py`). What it has seen of a window of a key is its state:
nested lists of integers, the first of which tells whether the trigger is finished. It is stored with the pane.

    add      records have arrived, in a bundle
    ready    asked at the end of a bundle with records, and when the clock or the watermark makes the window due
    fire     the trigger is ready, and the window gives its pane if it has one
    alarm    the processing time at which the trigger is ready without another record
    merged   the state in a session of which others have become part

As in Beam, a trigger is asked once a bundle: `AfterCount(2)` gives one pane of a bundle with five records. A trigger
that is finished closes its window: records that arrive later are dropped like records that are too late.

`AfterWatermark()` decides for a whole window instead of pane by pane (`per_pane`), and has no state:

    WindowedInterval.step        asks once a turn up to which end windows fire
    WindowedInterval.next_due    asks when the oldest window that has not fired will fire without another record
    SlidingInterval              asks for the end at each row, and for the time at which an end is due
    Emission                     asks for the timing of the panes

Every window that ends by `latest_end` fires in the turn: if it has not fired, or if the turn has changed it. The end of
the allowed lateness is not the trigger's: a window that is over has fired, and does not fire again (I7).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal, TypeAlias, TypeVar

from millpy.errors import GraphError
from millpy.model.identity import Identity
from millpy.model.identity_text import GraphPart
from millpy.model.record import Instants
from millpy.model.time import INSTANT_MAX, Instant, check_length, microseconds

Timing = Literal["early", "on_time", "late"]
Ends = TypeVar("Ends", Instant, Instants)
Predicate: TypeAlias = "Callable[[Any], object]"
"""A function of the record that the next pane of a window would be."""
State: TypeAlias = list[Any]
"""The state of a trigger in a window of a key: [1 if it is finished else 0, its own numbers and its parts' states]."""
COUNT_MAX = 2**53


@dataclass(frozen=True, slots=True)
class FiringMoment:
    """When a trigger is asked.

    Attributes:
        now_us: the processing time.
        ended: whether the watermark has reached the end of the window.
        judge: asks a predicate about the pane; None if the trigger is not asked now.
        expected: whether the percentile watermark has reached the end of the window.
    """

    now_us: Instant
    ended: bool
    judge: Callable[[Predicate], bool] | None = None
    expected: bool = False


@dataclass(frozen=True, slots=True, repr=False)
class Trigger(GraphPart):
    """The rule by which the windows of a step fire: a value without state.

    `latest_end` never falls when the watermark rises, and `due_at` is its inverse: due_at(e) is the smallest watermark
    whose `latest_end` is e or later.
    """

    def latest_end(self, watermark: Ends) -> Ends:
        """Return the latest end of the windows that fire at a watermark, or at each of several."""
        return watermark

    def due_at(self, end: Instant) -> Instant:
        """Return the watermark at which a window that ends at `end` fires without another record."""
        return end

    def timings(self, late_counts: Sequence[int]) -> list[Timing]:
        """Return the timing of each pane that fires, given its number of late records: the default trigger's."""
        if not any(late_counts):
            return ["on_time"] * len(late_counts)
        return ["late" if count else "on_time" for count in late_counts]

    @property
    def per_pane(self) -> bool:
        """Whether the trigger has a state for each pane."""
        return True

    @property
    def parts(self) -> tuple[Trigger, ...]:
        """The triggers of which this one is composed."""
        return ()

    @property
    def may_finish(self) -> bool:
        """Whether the trigger can be finished, so that it closes its window."""
        return False

    @property
    def fires_at_end(self) -> bool:
        """Whether it fires at the end of the window whatever it knows, so that no record on time waits after that."""
        return False

    @property
    def by_clock(self) -> bool:
        """Whether a processing time can make it ready."""
        return any(part.by_clock for part in self.parts)

    @property
    def percentiles(self) -> frozenset[float]:
        """The percentiles that decide when it fires: at most one."""
        return frozenset[float]().union(*(part.percentiles for part in self.parts))

    @property
    def calls_user(self) -> bool:
        """Whether it calls a user's function."""
        return any(part.calls_user for part in self.parts)

    def fresh(self) -> State:
        """Return the state in a window without records."""
        return [0, *(part.fresh() for part in self.parts)]

    def add(self, state: State, count: int, moment: FiringMoment) -> None:
        """Take note of records that have arrived; the trigger is not finished."""
        for part, own in self._unfinished(state):
            part.add(own, count, moment)

    def ready(self, state: State, moment: FiringMoment) -> bool:
        """Tell whether the trigger fires; it is not finished."""
        raise NotImplementedError

    def fire(self, state: State, moment: FiringMoment) -> None:
        """Change the state of a trigger that is ready, and fires."""
        raise NotImplementedError

    def merged(self, states: Sequence[State], moment: FiringMoment) -> State:
        """Return the state in a session of which several, with these states, have become part; as in Beam."""
        return [0, *self._merged_parts(states, moment)]

    def _merged_parts(self, states: Sequence[State], moment: FiringMoment) -> list[State]:
        return [part.merged([state[place] for state in states], moment) for place, part in enumerate(self.parts, 1)]

    def alarm(self, state: State, moment: FiringMoment) -> Instant:
        """Return the processing time at which the trigger is ready without another record; INSTANT_MAX if never."""
        return min((part.alarm(own, moment) for part, own in self._unfinished(state)), default=INSTANT_MAX)

    def _unfinished(self, state: State) -> list[tuple[Trigger, State]]:
        """Return the parts that are not finished, with their states."""
        return [(part, own) for part, own in zip(self.parts, state[1:], strict=True) if not own[0]]

    def _restart(self, state: State, *, finished: bool) -> None:
        state[:] = self.fresh()
        state[0] = int(finished)


@dataclass(frozen=True, slots=True, repr=False)
class AfterCount(Trigger):
    """Once, at the end of the bundle in which the pane has `n` records.

    Raises:
        GraphError: `n` is not a positive integer.
    """

    n: int

    def __post_init__(self) -> None:
        if not isinstance(self.n, int) or isinstance(self.n, bool) or not 1 <= self.n <= COUNT_MAX:
            raise GraphError(f"AfterCount({self.n!r}) does not count records", hint="for example AfterCount(100)")

    def identity(self) -> Identity:
        """Describe the trigger: a change of it is a change of the window."""
        return {"kind": "after_count", "n": self.n}

    @property
    def may_finish(self) -> bool:
        """Whether the trigger can be finished: it fires once."""
        return True

    def fresh(self) -> State:
        """Return [0, number of records]."""
        return [0, 0]

    def add(self, state: State, count: int, moment: FiringMoment) -> None:
        """Count the records."""
        state[1] += count

    def merged(self, states: Sequence[State], moment: FiringMoment) -> State:
        """Add up the records; it is finished if it was in any session."""
        finished = any(state[0] for state in states)
        return [int(finished), 0 if finished else sum(state[1] for state in states)]

    def ready(self, state: State, moment: FiringMoment) -> bool:
        """Tell whether there are enough records."""
        return bool(state[1] >= self.n)

    def fire(self, state: State, moment: FiringMoment) -> None:
        """Finish."""
        self._restart(state, finished=True)

    def alarm(self, state: State, moment: FiringMoment) -> Instant:
        """Return INSTANT_MAX: only records can make it ready."""
        return INSTANT_MAX


@dataclass(frozen=True, slots=True, repr=False)
class _AfterTime(Trigger):
    """A trigger at a processing time that follows from the first record of the pane. State: [0, that time or 0]."""

    def fresh(self) -> State:
        """Return [0, 0]."""
        return [0, 0]

    def add(self, state: State, count: int, moment: FiringMoment) -> None:
        """Choose the time, with the first record."""
        if not state[1]:
            state[1] = min(self.time_after(moment.now_us), INSTANT_MAX - 1)

    def merged(self, states: Sequence[State], moment: FiringMoment) -> State:
        """Choose the earliest time; it is finished if it was in all sessions."""
        if all(state[0] for state in states):
            return [1, 0]
        return [0, min((state[1] for state in states if state[1]), default=0)]

    @property
    def by_clock(self) -> bool:
        """Whether a processing time can make it ready: it can."""
        return True

    def time_after(self, now_us: Instant) -> int:
        """Return the processing time at which a pane fires whose first record arrives now."""
        raise NotImplementedError

    def ready(self, state: State, moment: FiringMoment) -> bool:
        """Tell whether the time has come."""
        return bool(0 < state[1] <= moment.now_us)

    def fire(self, state: State, moment: FiringMoment) -> None:
        """Forget the time, and finish if it fires once."""
        self._restart(state, finished=self.may_finish)

    def alarm(self, state: State, moment: FiringMoment) -> Instant:
        """Return the time."""
        return Instant(state[1]) if state[1] else INSTANT_MAX


@dataclass(frozen=True, slots=True, repr=False)
class AfterProcessingTime(_AfterTime):
    """Once, a time after the first record of the pane has arrived: `AfterProcessingTime(seconds(30))`.

    Raises:
        GraphError: the delay is negative, or no duration of at most a thousand years.
    """

    delay: timedelta

    def __post_init__(self) -> None:
        hint = "for example AfterProcessingTime(seconds(30))"
        if not isinstance(self.delay, timedelta) or self.delay < timedelta(0):
            raise GraphError(
                f"the delay of a trigger must be a duration of zero or more, not {self.delay!r}", hint=hint
            )
        check_length("the delay of a trigger", self.delay)

    def identity(self) -> Identity:
        """Describe the trigger: a change of it is a change of the window."""
        return {"kind": "after_processing_time", "delay_us": microseconds(self.delay)}

    @property
    def may_finish(self) -> bool:
        """Whether the trigger can be finished: it fires once."""
        return True

    def time_after(self, now_us: Instant) -> int:
        """Return the time that is the delay after now."""
        return now_us + microseconds(self.delay)


@dataclass(frozen=True, slots=True, repr=False)
class Every(_AfterTime):
    """At the next multiple of a period, in processing time since the epoch, for a pane with records: again and again.

    All windows fire at the same times: `Every(seconds(10))`.

    Raises:
        GraphError: the period is not a positive duration of at most a thousand years.
    """

    period: timedelta

    def __post_init__(self) -> None:
        if not isinstance(self.period, timedelta) or self.period <= timedelta(0):
            raise GraphError(
                f"the period of a trigger must be a positive duration, not {self.period!r}",
                hint="for example Every(seconds(10))",
            )
        check_length("the period of a trigger", self.period)

    def identity(self) -> Identity:
        """Describe the trigger: a change of it is a change of the window."""
        return {"kind": "every", "period_us": microseconds(self.period)}

    def time_after(self, now_us: Instant) -> int:
        """Return the first multiple of the period after now."""
        period = microseconds(self.period)
        return (now_us // period + 1) * period


@dataclass(frozen=True, slots=True, repr=False)
class Never(Trigger):
    """Never: the window gives one pane, when it is over."""

    def identity(self) -> Identity:
        """Describe the trigger: a change of it is a change of the window."""
        return {"kind": "never"}

    def ready(self, state: State, moment: FiringMoment) -> bool:
        """Return False."""
        return False
