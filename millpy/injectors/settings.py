"""What a graph says about a source's records: event time, dedupe id, what to do when nothing comes.

Frozen values whose repr reads like their constructor, because it is part of the graph's fingerprint.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Literal

from millpy.errors import GraphError, SchemaError
from millpy.model.keys import KEY_TYPES
from millpy.model.record import RecordType
from millpy.model.time import check_length, microseconds, minutes

Unit = Literal["s", "ms", "us", "ns"]
UNITS = ("s", "ms", "us", "ns")
FUTURE_TOLERANCE = minutes(10)
_DURATIONS = (("hours", 3_600_000_000), ("minutes", 60_000_000), ("seconds", 1_000_000), ("milliseconds", 1_000))


def duration_text(duration: timedelta) -> str:
    """A duration as its constructor in `millpy`: `minutes(10)`."""
    us = microseconds(duration)
    for name, size in _DURATIONS:
        if us and us % size == 0:
            return f"{name}({us // size})"
    return f"timedelta(microseconds={us})" if us else "seconds(0)"


def _check_time_field(record_type: RecordType, name: str, unit: Unit | None, setting: str) -> None:
    """A time field exists, is a datetime or a number with a unit."""
    struct = record_type.struct.__name__
    try:
        kind = record_type.field_type(name)
    except SchemaError as error:
        raise GraphError(f"{setting}: {error.message}", hint=error.hint) from error
    if kind is datetime:
        if unit is not None:
            raise GraphError(f"{setting}: {name!r} of {struct} is a datetime and has no unit", hint="leave unit= out")
    elif kind in (int, float):
        if unit is None:
            written = f'EventTime("{name}", unit="ms", …)' if setting == "event time" else f'time="{name}", unit="ms"'
            raise GraphError(
                f"{setting}: {name!r} of {struct} is a number without a unit",
                hint=f"say which: {written}; units are {', '.join(UNITS)}",
            )
    else:
        raise SchemaError(
            f"{setting}: {name!r} of {struct} is {kind!r}, not a time", hint="use a datetime, or a number and unit="
        )


@dataclass(frozen=True, slots=True, init=False, repr=False)
class EventTime:
    """Which field says when a record happened, and what the source promises about order.

    Give either `max_disorder` (bounded disorder: the watermark is the largest event time so far minus this bound) or
    `sorted=True` (perfect: event times never fall). The promise of a sorted source is checked while reading: a record
    with an earlier event time than one before it is set aside as a dead letter with reason "event_time", because a
    perfect source has no late records, only broken ones.

    A `datetime` field must name its zone: naive values are dead-lettered. Numbers need a unit.

    A record may be ahead of its arrival, because its device's clock is, by up to `future_tolerance`; beyond that it is
    dead-lettered with reason "future". It keeps its event time, but moves the watermark no further than a record that
    happens at its arrival: one wrong clock must not make the others' records late.

    Args:
        field: a `datetime`, or a number with `unit`.
        unit: "s", "ms", "us" or "ns" since the epoch, for numbers.
        max_disorder: how far an event time may lie behind the largest one before it and still be on time.
        sorted: event times never fall.
        future_tolerance: how far ahead of its arrival an event time may be.
    """

    field: str
    unit: Unit | None
    max_disorder: timedelta | None
    sorted: bool
    future_tolerance: timedelta

    def __init__(
        self,
        field: str,
        *,
        unit: Unit | None = None,
        max_disorder: timedelta | None = None,
        sorted: bool = False,
        future_tolerance: timedelta = FUTURE_TOLERANCE,
    ) -> None:
        if unit is not None and unit not in UNITS:
            raise GraphError(f"unknown unit {unit!r}", hint=f"units are {', '.join(UNITS)}")
        if sorted == (max_disorder is not None):
            raise GraphError(
                f"event time {field!r}: say either max_disorder= or sorted=True",
                hint=f'EventTime("{field}", max_disorder=seconds(10))',
            )
        check_length("a disorder", max_disorder or timedelta(0))
        check_length("a tolerance", future_tolerance)
        if max_disorder is not None and max_disorder < timedelta(0):
            raise GraphError(f"event time {field!r}: max_disorder is negative")
        if future_tolerance < timedelta(0):
            raise GraphError(f"event time {field!r}: future_tolerance is negative")
        object.__setattr__(self, "field", field)
        object.__setattr__(self, "unit", unit)
        object.__setattr__(self, "max_disorder", max_disorder)
        object.__setattr__(self, "sorted", sorted)
        object.__setattr__(self, "future_tolerance", future_tolerance)

    def __repr__(self) -> str:
        unit = f", unit={self.unit!r}" if self.unit else ""
        return f"EventTime({self.field!r}{unit}, {self.promise})"

    @property
    def promise(self) -> str:
        """What the source promises about order and the future, as it is written."""
        order = "sorted=True" if self.max_disorder is None else f"max_disorder={duration_text(self.max_disorder)}"
        if self.future_tolerance == FUTURE_TOLERANCE:
            return order
        return f"{order}, future_tolerance={duration_text(self.future_tolerance)}"

    @property
    def max_disorder_us(self) -> int:
        """The bound in µs; 0 for a sorted source."""
        return 0 if self.max_disorder is None else microseconds(self.max_disorder)

    @property
    def future_tolerance_us(self) -> int:
        """The tolerance in µs."""
        return microseconds(self.future_tolerance)

    def validate(self, record_type: RecordType) -> None:
        """Refuse a field that does not exist or is no time.

        Raises:
            GraphError: no such field, or a number without a unit.
            SchemaError: a field of another type.
        """
        _check_time_field(record_type, self.field, self.unit, "event time")


@dataclass(frozen=True, slots=True, init=False, repr=False)
class Dedupe:
    """Drop a record whose id was last seen at most `within` ago; a duplicate refreshes its id (I4).

    A record where one of the id's fields is None has no id and is never a duplicate.

    The horizon slides on a named clock: by default the time of arrival, else the running maximum of field `time`.

    Args:
        fields: the fields that together are the id; str, int, bool, UUID or bytes.
        within: the horizon.
        time: the field that is the clock.
        unit: its unit, when it is a number.
    """

    fields: tuple[str, ...]
    within: timedelta
    time: str | None
    unit: Unit | None

    def __init__(self, *fields: str, within: timedelta, time: str | None = None, unit: Unit | None = None) -> None:
        if not fields:
            raise GraphError("dedupe: which fields are the id?", hint='Dedupe("id", within=hours(1))')
        if within <= timedelta(0):
            raise GraphError("dedupe: within must be positive")
        check_length("a horizon", within)
        if unit is not None and (time is None or unit not in UNITS):
            raise GraphError(
                f"dedupe: unit {unit!r} belongs to a number field in time=", hint=f"units are {', '.join(UNITS)}"
            )
        object.__setattr__(self, "fields", fields)
        object.__setattr__(self, "within", within)
        object.__setattr__(self, "time", time)
        object.__setattr__(self, "unit", unit)

    def __repr__(self) -> str:
        fields = ", ".join(map(repr, self.fields))
        time = f", time={self.time!r}" if self.time else ""
        unit = f", unit={self.unit!r}" if self.unit else ""
        return f"Dedupe({fields}, within={duration_text(self.within)}{time}{unit})"

    @property
    def within_us(self) -> int:
        """The horizon in µs."""
        return microseconds(self.within)

    def validate(self, record_type: RecordType) -> None:
        """Refuse fields that cannot be an id or a clock.

        Raises:
            SchemaError: an id field that does not exist or has no canonical bytes.
            GraphError: a clock field that does not exist, may be None, or is a number without a unit.
        """
        struct = record_type.struct.__name__
        for name in self.fields:
            if record_type.field_type(name) not in KEY_TYPES:
                raise SchemaError(
                    f"dedupe: {name!r} of {struct} cannot be part of an id",
                    hint="ids are str, int, bool, UUID or bytes",
                )
        if self.time is None:
            return
        _check_time_field(record_type, self.time, self.unit, "dedupe time")
        if record_type.is_nullable(self.time):
            raise GraphError(f"dedupe time: {self.time!r} may be None and cannot be a clock", hint="leave time= out")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """Too much of a source is set aside: of its newest records, `minimum` or more, a larger share than `share`.

    Whole bundles are counted, from the newest backwards until they have `minimum` records.

    Args:
        share: from 0 to below 1.
        minimum: of how many records at least; below that no share says anything.
    """

    share: float
    minimum: int = 100

    def __post_init__(self) -> None:
        if not 0 <= self.share < 1:
            raise GraphError(f"Rate: a share of {self.share} cannot be exceeded", hint="say Rate(share=0.5)")
        if self.minimum < 1:
            raise GraphError("Rate: minimum must be at least 1")


@dataclass(frozen=True, slots=True, repr=False)
class AdvanceWithClock:
    """When nothing has come for `after`, the watermark follows the clock, `after` plus the disorder bound behind it.

    This says: what happens now is here within `after`. A record that takes longer may be late. Only while the source
    is connected and its backlog is proven read, so that what queued up during an outage is not late.
    """

    after: timedelta

    def __post_init__(self) -> None:
        if self.after <= timedelta(0):
            raise GraphError("AdvanceWithClock: after must be positive")
        check_length("a time of quiet", self.after)

    def __repr__(self) -> str:
        return f"AdvanceWithClock(after={duration_text(self.after)})"

    @property
    def after_us(self) -> int:
        """The time of quiet in µs."""
        return microseconds(self.after)


@dataclass(frozen=True, slots=True)
class Wait:
    """When nothing comes, the watermark waits: windows stay open until the next record. The default."""


IdlePolicy = AdvanceWithClock | Wait
