"""Triggers that are composed of others: `AfterWatermark`, `Repeatedly`, `AfterAny` and so on; see `triggers.py`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from millpy.errors import GraphError
from millpy.model.identity import Identity
from millpy.model.time import INSTANT_MAX, Instant
from millpy.windowing.triggers import AfterCount, FiringMoment, Never, State, Trigger

TRIGGERS_MAX = 100
"""The most triggers of which one may be composed: their states are stored with every pane."""
_EACH_BUNDLE, _NEVER = AfterCount(1), Never()


@dataclass(frozen=True, slots=True, repr=False)
class AfterWatermark(Trigger):
    """When the watermark reaches the end of the window; before it by another trigger, and behind it by a third.

    Args:
        early: the trigger before the end, again and again. Default: none.
        late: the trigger for late records, again and again. Default: a pane for each bundle with late records. None:
            the trigger is finished at the end, and late records are dropped.
    """

    early: Trigger | None = None
    late: Trigger | None = _EACH_BUNDLE

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
    def fires_at_end(self) -> bool:
        """Whether it fires at the end of the window whatever it knows: it does."""
        return True

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
        """Tell whether all are ready. Each is asked, because `alarm` needs the answers of predicates."""
        return all([part.ready(own, moment) for part, own in self._unfinished(state)])

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
    if len(trigger.percentiles) > 1:
        found = ", ".join(map(str, sorted(trigger.percentiles)))
        raise GraphError(f"{name} has several percentiles: {found}", hint="use the same one in all parts of a trigger")
    if _size(trigger) > TRIGGERS_MAX:
        raise GraphError(f"{name} is composed of more than {TRIGGERS_MAX} triggers", hint="compose it of fewer")


def _size(trigger: Trigger) -> int:
    return 1 + sum(map(_size, trigger.parts))


AFTER_WATERMARK = AfterWatermark()
"""The default trigger."""
