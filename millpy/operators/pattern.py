"""Patterns: steps that the records of one key take one after the other, as values that a user composes.

The words are those of Flink's CEP library and of MATCH_RECOGNIZE in SQL:2016. A step takes the first record after the
step before for which its condition is true; records in between are ignored (Flink: `followedBy`, relaxed contiguity).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, Literal

from millpy.errors import GraphError
from millpy.model.arguments import check_function
from millpy.model.identity import Identity, identity_of_value
from millpy.model.identity_text import GraphPart
from millpy.model.time import check_positive

Condition = Callable[[Any], Any]
AfterMatch = Literal["past_last", "to_next"]
AFTER_MATCH = ("past_last", "to_next")
STEPS_MAX = 16
"""Maximum of steps in a pattern."""


@dataclass(frozen=True, slots=True)
class PatternStep:
    """One step of a pattern.

    Attributes:
        name: name of the step's field in the match.
        condition: takes a record, returns whether the step takes it.
        within: how long after the step before; None for the first step.
        absent: whether the step is taken when no such record comes within `within`.
        without: what must not come before this step: names, and functions that take a record.
    """

    name: str
    condition: Condition
    within: timedelta | None = None
    absent: bool = False
    without: tuple[tuple[str, Condition], ...] = ()

    def identity(self) -> Identity:
        """Describe the step: its functions by their names."""
        described: dict[str, Any] = {"name": self.name, "condition": identity_of_value(self.condition)}
        if self.within is not None:
            described["within"] = identity_of_value(self.within)
        if self.absent:
            described["absent"] = True
        if self.without:
            described["without"] = [[name, identity_of_value(condition)] for name, condition in self.without]
        return described


@dataclass(frozen=True, slots=True, init=False, repr=False)
class Pattern(GraphPart):
    """Records of one key in a certain order: A, then B within 5 minutes with no C between.

    A pattern is a frozen value: each method returns a new one. Conditions take a record and depend on nothing else.

    Args:
        name: name of the first step, and of its field in a match.
        condition: takes a record, returns whether the step takes it.

    Examples:
        >>> opened = Pattern("door", lambda event: event.kind == "door")
        >>> opened.then("alarm", lambda event: event.kind == "alarm", within=minutes(5)).unless(
        ...     "reset", lambda event: event.kind == "reset"
        ... )
        >>> opened.then_not("closed", lambda event: event.kind == "closed", within=minutes(5))
    """

    steps: tuple[PatternStep, ...]

    def __init__(self, name: str, condition: Condition) -> None:
        _check(name, condition)
        object.__setattr__(self, "steps", (PatternStep(name, condition),))

    def then(self, name: str, condition: Condition, *, within: timedelta) -> Pattern:
        """Add a step: the first record for which the condition is true, at most `within` after the step before.

        Args:
            name: name of the step, and of its field in a match.
            condition: takes a record, returns whether the step takes it.
            within: the longest time since the step before, in event time; the bound belongs to it.

        Raises:
            GraphError: the name is taken or no identifier, `within` is not positive, the pattern ends with `then_not`,
                or has 16 steps already.
        """
        return self._extended(_step(name, condition, within))

    def then_not(self, name: str, condition: Condition, *, within: timedelta) -> Pattern:
        """Add a last step: for `within` after the step before, the condition is true for no record.

        The pattern then matches when the watermark has passed that time, which is the event time of the match.

        Args:
            name: name of the step.
            condition: takes a record, returns whether it is the one that must not come.
            within: how long after the step before, in event time; the bound belongs to it.

        Raises:
            GraphError: as for `then`.
        """
        return self._extended(replace(_step(name, condition, within), absent=True))

    def unless(self, name: str, condition: Condition) -> Pattern:
        """Require that between the last step and the one before it the condition is true for no record.

        A record that the step takes is not between.

        Args:
            name: what must not come between; for the reader.
            condition: takes a record, returns whether it is one.

        Raises:
            GraphError: the pattern has only one step, or ends with `then_not`.
        """
        last = self.steps[-1]
        if len(self.steps) == 1 or last.absent:
            raise GraphError(
                f"unless({name!r}) must follow a then(…): it is about the time between two steps",
                hint='for example Pattern("a", a).then("b", b, within=minutes(5)).unless("c", c)',
            )
        _check(name, condition)
        return self._made_of((*self.steps[:-1], replace(last, without=(*last.without, (name, condition)))))

    def identity(self) -> Identity:
        """Describe the steps."""
        return {"kind": "pattern", "steps": [step.identity() for step in self.steps]}

    def _extended(self, step: PatternStep) -> Pattern:
        if self.steps[-1].absent:
            raise GraphError(f"step {step.name!r} cannot follow then_not(…)", hint="then_not must be the last step")
        if any(step.name in (own.name, f"{own.name}_at") or own.name == f"{step.name}_at" for own in self.steps):
            raise GraphError(f"two fields of a match are named after step {step.name!r}", hint="rename the step")
        if len(self.steps) >= STEPS_MAX:
            raise GraphError(f"a pattern has at most {STEPS_MAX} steps")
        return self._made_of((*self.steps, step))

    @staticmethod
    def _made_of(steps: tuple[PatternStep, ...]) -> Pattern:
        made = object.__new__(Pattern)
        object.__setattr__(made, "steps", steps)
        return made


def _step(name: str, condition: Condition, within: timedelta) -> PatternStep:
    _check(name, condition)
    check_positive(f"within= of step {name!r}", within, "for example within=minutes(5)")
    return PatternStep(name, condition, within)


def _check(name: str, condition: Condition) -> None:
    if not isinstance(name, str) or not name.isidentifier() or name.startswith("_"):
        raise GraphError(f"invalid name of a step: {name!r}", hint='use a plain identifier such as "door"')
    check_function(f"step {name!r}", condition, 'for example Pattern("door", lambda event: event.kind == "door")')
