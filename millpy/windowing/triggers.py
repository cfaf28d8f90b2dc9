"""Triggers: when windows fire.

A trigger is a frozen value that composes. What it has seen of a window of a key is its state: nested lists of integers,
the first of which tells whether the trigger is finished. The state is stored with the pane.

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

from collections.abc import Callable, Iterable, Sequence
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
State: TypeAlias = list[Any]
"""The state of a trigger in a window of a key: [1 if it is finished else 0, its own numbers and its parts' states]."""
COUNT_MAX = 2**53
TRIGGERS_MAX = 100
"""The most triggers of which one may be composed: their states are stored with every pane."""


@dataclass(frozen=True, slots=True)
class FiringMoment:
    """When a trigger is asked.

    Attributes:
        now_us: the processing time.
        ended: whether the watermark has reached the end of the window.
    """

    now_us: Instant
    ended: bool


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


@dataclass(frozen=True, slots=True, repr=False)
class AfterWatermark(Trigger):
    """When the watermark reaches the end of the window; before it by another trigger, and behind it by a third.

    Args:
        early: the trigger before the end, again and again. Default: none.
        late: the trigger for late records, again and again. Default: a pane for each bundle with late records. None:
            the trigger is finished at the end, and late records are dropped.
    """

    early: Trigger | None = None
    late: Trigger | None = AfterCount(1)

    def __post_init__(self) -> None:
        _check_parts(self, [part for part in (self.early, self.late) if part is not None])

    def identity(self) -> Identity:
        """Describe the trigger: a change of it is a change of the window."""
        described: dict[str, Any] = {"kind": "after_watermark"}
        if self.early is not None:
            described["early"] = self.early.identity()
        if self.late is None:
            described["late"] = {"kind": "nothing"}
        elif self.late != _EACH_BUNDLE:
            described["late"] = self.late.identity()
        return described

    @property
    def per_pane(self) -> bool:
        """Whether it is not the default trigger, which has no state."""
        return self.early is not None or self.late != _EACH_BUNDLE

    @property
    def parts(self) -> tuple[Trigger, ...]:
        """The triggers before and behind the end."""
        return (self.early or _NEVER, self.late or _NEVER)

    @property
    def may_finish(self) -> bool:
        """Whether late records are dropped."""
        return self.late is None

    def fresh(self) -> State:
        """Return [finished, whether it has fired at the end, state of `early`, state of `late`]."""
        return [0, 0, *(part.fresh() for part in self.parts)]

    def merged(self, states: Sequence[State], moment: FiringMoment) -> State:
        """Begin before the end again, unless the merged session has reached its end and all sessions had."""
        early, late = self.parts
        if moment.ended and all(state[1] for state in states):
            return [int(self.late is None), 1, early.fresh(), late.merged([state[3] for state in states], moment)]
        return [0, 0, early.merged([state[2] for state in states], moment), late.fresh()]

    def _now(self, state: State) -> tuple[Trigger, State]:
        place = state[1]
        return self.parts[place], state[2 + place]

    def add(self, state: State, count: int, moment: FiringMoment) -> None:
        """Take note of records for the trigger before the end, or that behind it."""
        part, own = self._now(state)
        part.add(own, count, moment)

    def ready(self, state: State, moment: FiringMoment) -> bool:
        """Tell whether the end is reached for the first time, or the other trigger is ready."""
        part, own = self._now(state)
        return (moment.ended and not state[1]) or part.ready(own, moment)

    def fire(self, state: State, moment: FiringMoment) -> None:
        """Pass the end, or begin the trigger before or behind it again."""
        if moment.ended and not state[1]:
            self._restart(state, finished=self.late is None)
            state[1] = 1
            return
        part, own = self._now(state)
        part.fire(own, moment)
        if own[0]:
            own[:] = part.fresh()

    def alarm(self, state: State, moment: FiringMoment) -> Instant:
        """Return the alarm of the trigger before the end, or of that behind it."""
        part, own = self._now(state)
        return part.alarm(own, moment)


@dataclass(frozen=True, slots=True, repr=False)
class Repeatedly(Trigger):
    """A trigger again and again: it begins anew when it is finished."""

    trigger: Trigger

    def __post_init__(self) -> None:
        _check_parts(self, [self.trigger])

    def identity(self) -> Identity:
        """Describe the trigger: a change of it is a change of the window."""
        return {"kind": "repeatedly", "trigger": self.trigger.identity()}

    @property
    def parts(self) -> tuple[Trigger, ...]:
        """The trigger."""
        return (self.trigger,)

    def merged(self, states: Sequence[State], moment: FiringMoment) -> State:
        """Merge the states of the trigger; begin anew if that finishes it."""
        (own,) = self._merged_parts(states, moment)
        return [0, self.trigger.fresh() if own[0] else own]

    def ready(self, state: State, moment: FiringMoment) -> bool:
        """Tell whether the trigger is ready."""
        return self.trigger.ready(state[1], moment)

    def fire(self, state: State, moment: FiringMoment) -> None:
        """Fire, and begin anew if that finishes it."""
        self.trigger.fire(state[1], moment)
        if state[1][0]:
            state[1] = self.trigger.fresh()


@dataclass(frozen=True, slots=True, init=False, repr=False)
class _Several(Trigger):
    """A trigger of several."""

    triggers: tuple[Trigger, ...]

    def __init__(self, *triggers: Trigger) -> None:
        object.__setattr__(self, "triggers", triggers)
        if not triggers:
            raise GraphError(f"{type(self).__name__} needs a trigger", hint="for example AfterAny(AfterCount(100))")
        _check_parts(self, triggers)

    @property
    def parts(self) -> tuple[Trigger, ...]:
        """The triggers."""
        return self.triggers

    @property
    def may_finish(self) -> bool:
        """Whether the trigger can be finished: it fires once."""
        return True

    def fire(self, state: State, moment: FiringMoment) -> None:
        """Finish; what the parts know decides when sessions merge."""
        for part, own in self._unfinished(state):
            if part.ready(own, moment):
                part.fire(own, moment)
        state[0] = 1

    def _finished_if(
        self, which: Callable[[Iterable[bool]], bool], states: Sequence[State], moment: FiringMoment
    ) -> State:
        parts = self._merged_parts(states, moment)
        finished = all(state[0] for state in states) or which(bool(part[0]) for part in parts)
        return [int(finished), *parts]

    def _described(self, kind: str) -> Identity:
        return {"kind": kind, "triggers": [part.identity() for part in self.triggers]}


@dataclass(frozen=True, slots=True, init=False, repr=False)
class AfterAny(_Several):
    """Once, when any of several triggers is ready."""

    def identity(self) -> Identity:
        """Describe the trigger: a change of it is a change of the window."""
        return self._described("after_any")

    def ready(self, state: State, moment: FiringMoment) -> bool:
        """Tell whether one is ready."""
        return any(part.ready(own, moment) for part, own in self._unfinished(state))

    def merged(self, states: Sequence[State], moment: FiringMoment) -> State:
        """Merge the parts; it is finished if one of them is."""
        return self._finished_if(any, states, moment)


@dataclass(frozen=True, slots=True, init=False, repr=False)
class AfterAll(_Several):
    """Once, when all of several triggers are ready at the same time."""

    def identity(self) -> Identity:
        """Describe the trigger: a change of it is a change of the window."""
        return self._described("after_all")

    def ready(self, state: State, moment: FiringMoment) -> bool:
        """Tell whether all are ready."""
        return all(part.ready(own, moment) for part, own in self._unfinished(state))

    def merged(self, states: Sequence[State], moment: FiringMoment) -> State:
        """Merge the parts; it is finished if all of them are."""
        return self._finished_if(all, states, moment)

    def alarm(self, state: State, moment: FiringMoment) -> Instant:
        """Return when the last of those that are not ready will be, if all have an alarm."""
        waiting = [(part, own) for part, own in self._unfinished(state) if not part.ready(own, moment)]
        return max((part.alarm(own, moment) for part, own in waiting), default=INSTANT_MAX)


@dataclass(frozen=True, slots=True, init=False, repr=False)
class AfterEach(_Several):
    """One trigger after the other: the next begins when one is finished."""

    def identity(self) -> Identity:
        """Describe the trigger: a change of it is a change of the window."""
        return self._described("after_each")

    @property
    def may_finish(self) -> bool:
        """Whether each can be finished."""
        return all(part.may_finish for part in self.triggers)

    def _unfinished(self, state: State) -> list[tuple[Trigger, State]]:
        """Return the first part that is not finished, with its state."""
        return [next((part, own) for part, own in zip(self.triggers, state[1:], strict=True) if not own[0])]

    def merged(self, states: Sequence[State], moment: FiringMoment) -> State:
        """Go on with the first part that is not finished in the merged session; the parts behind it begin anew."""
        parts: list[State] = []
        for place, part in enumerate(self.triggers, 1):
            begun = all(own[0] for own in parts)
            parts.append(part.merged([state[place] for state in states], moment) if begun else part.fresh())
        return [int(all(own[0] for own in parts)), *parts]

    def ready(self, state: State, moment: FiringMoment) -> bool:
        """Tell whether the trigger whose turn it is is ready."""
        ((part, own),) = self._unfinished(state)
        return part.ready(own, moment)

    def fire(self, state: State, moment: FiringMoment) -> None:
        """Fire; the trigger is finished with its last part."""
        ((part, own),) = self._unfinished(state)
        part.fire(own, moment)
        state[0] = int(all(each[0] for each in state[1:]))


@dataclass(frozen=True, slots=True, repr=False)
class OrFinally(Trigger):
    """A trigger until another one fires, for the last time: `OrFinally(Repeatedly(AfterCount(10)), AfterCount(100))`.

    The second one sees all records of the window.
    """

    trigger: Trigger
    until: Trigger

    def __post_init__(self) -> None:
        _check_parts(self, self.parts)

    def identity(self) -> Identity:
        """Describe the trigger: a change of it is a change of the window."""
        return {"kind": "or_finally", "trigger": self.trigger.identity(), "until": self.until.identity()}

    @property
    def parts(self) -> tuple[Trigger, ...]:
        """The two triggers."""
        return (self.trigger, self.until)

    @property
    def may_finish(self) -> bool:
        """Whether the trigger can be finished: when the second fires."""
        return True

    def ready(self, state: State, moment: FiringMoment) -> bool:
        """Tell whether one is ready."""
        return any(part.ready(own, moment) for part, own in self._unfinished(state))

    def merged(self, states: Sequence[State], moment: FiringMoment) -> State:
        """Merge the parts; it is finished if one of them is."""
        parts = self._merged_parts(states, moment)
        return [int(all(state[0] for state in states) or any(own[0] for own in parts)), *parts]

    def fire(self, state: State, moment: FiringMoment) -> None:
        """Finish if the second trigger is ready, or if the first one is finished."""
        if self.until.ready(state[2], moment):
            self.until.fire(state[2], moment)
            state[0] = 1
        else:
            self.trigger.fire(state[1], moment)
            state[0] = state[1][0]


def _check_parts(trigger: Trigger, parts: Sequence[object]) -> None:
    """Raise a GraphError if the parts of a trigger are no triggers, or too many."""
    name = type(trigger).__name__
    for part in parts:
        if not isinstance(part, Trigger):
            raise GraphError(
                f"{part!r} in {name} is not a trigger", hint="for example AfterWatermark(early=Every(seconds(10)))"
            )
    if _size(trigger) > TRIGGERS_MAX:
        raise GraphError(f"{name} is composed of more than {TRIGGERS_MAX} triggers", hint="compose it of fewer")


def _size(trigger: Trigger) -> int:
    return 1 + sum(map(_size, trigger.parts))


_EACH_BUNDLE, _NEVER = AfterCount(1), Never()
AFTER_WATERMARK = AfterWatermark()
"""The default trigger."""
