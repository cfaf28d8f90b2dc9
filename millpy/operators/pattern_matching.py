"""Matching a pattern: of each key, the partial matches that are open, and what each record does to them.

Records come in event-time order (`event_time_order.py`), so each is later than all before it, or at the same time. A
record does this, in order:

    1. partial matches whose time is over before it end: with `then_not` as a match at that time, else without one
    2. each other one, in the order in which they began: the step that it waits for takes the record, or what must not
       come ends it, or nothing happens
    3. if the first step takes the record, a partial match begins

After a match, "past_last" ends all partial matches that have begun until then, and the record that completed it begins
none; "to_next" lets them continue, so each first record may have its own match. A record completes at most one match
under "past_last": that of the earliest.

Two timers wake a key: "absence" when a `then_not` is fulfilled, which holds the low watermark at that time, and
"expiry" to forget partial matches whose time is over, which holds nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any

import msgspec

from millpy.computation import Computation, Context, Value
from millpy.errors import GraphError, RefusedValueError
from millpy.model.arguments import is_whole
from millpy.model.record import RecordType
from millpy.model.time import YEARS_HI, Instant, microseconds, to_datetime
from millpy.model.timer import Timer
from millpy.operators.keyed_output import key_values, output_type
from millpy.operators.pattern import AFTER_MATCH, AfterMatch, Pattern

PARTIALS_DEFAULT = 100
"""Maximum of open partial matches of a key, unless a user chooses another."""
PARTIALS_MAX = 1_000
"""The most that a user can choose."""
PARTIALS_BYTES_MAX = 1_000_000
"""Maximum of the bytes of a key's partial matches as JSON."""
_COUNTED_FROM = 8
"""With at least this many partial matches, their bytes are counted."""


class PatternMatching(Computation):
    """Emits a record for each match of a pattern.

    Args:
        record_type: the type of the records.
        pattern: the steps.
        key: the fields of the key, and their types.
        after_match: what becomes of other partial matches after a match.
        partials_max: maximum of open partial matches of a key.

    Raises:
        GraphError: a parameter is out of bounds, or a step has the name of a key field.
    """

    def __init__(
        self,
        record_type: RecordType,
        pattern: Pattern,
        key: Mapping[str, type],
        *,
        after_match: AfterMatch = "past_last",
        partials_max: int = PARTIALS_DEFAULT,
    ) -> None:
        if not isinstance(pattern, Pattern) or len(pattern.steps) < 2:
            raise GraphError(
                f"{pattern!r} is no pattern of several steps", hint='Pattern("a", a).then("b", b, within=minutes(5))'
            )
        if after_match not in AFTER_MATCH:
            raise GraphError(f"unknown after_match={after_match!r}", hint='use "past_last" or "to_next"')
        if not is_whole(partials_max, 1, PARTIALS_MAX):
            raise GraphError(
                f"partials_max={partials_max!r} is not between 1 and {PARTIALS_MAX:,}", hint="leave it out for 100"
            )
        self.pattern, self.after_match, self.partials_max = pattern, after_match, partials_max
        self._steps = pattern.steps
        self._within_us = [0 if step.within is None else microseconds(step.within) for step in pattern.steps]
        taken = [step for step in pattern.steps if not step.absent]
        fields: list[tuple[str, Any]] = [(step.name, record_type.struct) for step in taken]
        fields += [(f"{step.name}_at", datetime) for step in taken]
        self.output = output_type("Match", key, fields)
        partial = msgspec.defstruct("PartialMatch", [("times", list[int]), ("records", list[record_type.struct])])  # type: ignore[name-defined]
        self._partial = partial
        self.open: Value[Any] = Value(list[partial], default=[])  # type: ignore[valid-type]

    def parameters(self) -> Mapping[str, Any]:
        """Return the pattern. The bound on partial matches may change at any time."""
        return {"pattern": self.pattern, "after_match": self.after_match}

    def process_record(self, context: Context, record: Any) -> None:
        """Let the open partial matches take the record, and begin one if the first step takes it."""
        at = int(context.event_time_us)
        partials = context[self.open]
        begins = bool(self._steps[0].condition(record))
        if not partials and not begins:
            return
        partials = self._end_before(context, partials, at)
        partials, matched = self._advance(context, partials, record, at)
        if begins and not (matched and self.after_match == "past_last"):
            if len(partials) >= self.partials_max:
                raise RefusedValueError(
                    f"{len(partials)} partial matches of this key are open, as many as partials_max allows"
                )
            partials.append(self._partial([at], [record]))
        if len(partials) >= _COUNTED_FROM and len(msgspec.json.encode(partials)) > PARTIALS_BYTES_MAX:
            raise RefusedValueError(f"the partial matches of this key have more than {PARTIALS_BYTES_MAX:,} bytes")
        self._store(context, partials)

    def process_timer(self, context: Context, timer: Timer) -> None:
        """End the partial matches whose time is over."""
        self._store(context, self._end_before(context, context[self.open], int(context.input_watermark_us)))

    def _advance(self, context: Context, partials: list[Any], record: Any, at: int) -> tuple[list[Any], bool]:
        """Let each partial match take the record; return those that are still open, and whether one was completed."""
        kept: list[Any] = []
        matched = False
        taken: dict[int, bool] = {}
        ended: dict[int, bool] = {}
        for partial in partials:
            place = len(partial.times)
            step = self._steps[place]
            if place not in taken:
                taken[place] = bool(step.condition(record))
            if taken[place]:
                if step.absent:
                    continue
                partial.times.append(at)
                partial.records.append(record)
                if len(partial.times) < len(self._steps):
                    kept.append(partial)
                    continue
                self._match(context, partial, at)
                matched = True
                if self.after_match == "past_last":
                    return [], True
                continue
            if place not in ended:
                ended[place] = any(condition(record) for _, condition in step.without)
            if not ended[place]:
                kept.append(partial)
        return kept, matched

    def _end_before(self, context: Context, partials: list[Any], at: int) -> list[Any]:
        """End the partial matches whose time is over before `at`; return the others."""
        deadlines = [self._deadline(partial) for partial in partials]
        over = sorted((deadline, place) for place, deadline in enumerate(deadlines) if deadline < at)
        for deadline, place in over:
            if self._steps[len(partials[place].times)].absent:
                self._match(context, partials[place], deadline)
                if self.after_match == "past_last":
                    return []  # all of them have begun until then: records come in order
        return [partial for partial, deadline in zip(partials, deadlines, strict=True) if deadline >= at]

    def _deadline(self, partial: Any) -> int:
        """Return the last time at which the next step of a partial match may be taken."""
        last = int(partial.times[-1])
        return max(last, min(last + self._within_us[len(partial.times)], int(YEARS_HI) - 1))

    def _match(self, context: Context, partial: Any, at: int) -> None:
        times = [to_datetime(Instant(time)) for time in partial.times]
        context.produce(self.output(*key_values(context.key), *partial.records, *times), at=at)

    def _store(self, context: Context, partials: list[Any]) -> None:
        """Store the open partial matches, and set the timers for the first of them that end."""
        context[self.open] = partials
        deadlines: dict[bool, int] = {}
        for partial in partials:
            absent, deadline = self._steps[len(partial.times)].absent, self._deadline(partial)
            deadlines[absent] = min(deadline, deadlines.get(absent, deadline))
        for absent, name in ((True, "absence"), (False, "expiry")):
            timer = context.timer(name)
            if absent not in deadlines:
                if timer is not None:
                    context.delete_timer(name)
            elif timer is None or timer.event_time_us != deadlines[absent]:
                due = deadlines[absent]
                context.set_timer(name, at=min(due + 1, int(YEARS_HI)), event_time=due, hold=absent)
