"""Settings of a source's records: event time, dedupe ids, idle policy, error rate.

They are frozen values. Their repr reads like their constructor.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Literal

from millpy.errors import GraphError, SchemaError
from millpy.ingest.local_times import TimeFormat, TimeReader
from millpy.model.arguments import check_flags, is_number, is_whole
from millpy.model.horizons import HORIZON
from millpy.model.identity import Identity
from millpy.model.identity_text import GraphPart
from millpy.model.keys import KEY_TYPES
from millpy.model.record import RecordType
from millpy.model.time import check_length, check_positive, duration_text, microseconds, minutes
from millpy.model.time_zone import time_zone

Unit = Literal["s", "ms", "us", "ns"]
UNITS = ("s", "ms", "us", "ns")
FUTURE_TOLERANCE = minutes(10)
PERCENTILE_MAX = 0.9999
"""A source remembers about 131,072 records: of these, 13 are beyond this percentile."""


def _check_time_field(record_type: RecordType, name: str, unit: Unit | None, setting: str) -> None:
    """Check that a time field exists and is a datetime, or a number with a unit."""
    struct = record_type.struct.__name__
    try:
        kind = record_type.field_type(name)
    except SchemaError as error:
        raise GraphError(f"{setting}: {error.message}", hint=error.hint) from error
    if kind is datetime:
        if unit is not None:
            raise GraphError(f"{setting}: {name!r} of {struct} is a datetime and has no unit", hint="omit unit=")
    elif kind in (int, float):
        if unit is None:
            written = f'EventTime("{name}", unit="ms", …)' if setting == "event time" else f'time="{name}", unit="ms"'
            raise GraphError(
                f"{setting}: {name!r} of {struct} is a number without a unit",
                hint=f"give the unit: {written}; units are {', '.join(UNITS)}",
            )
    else:
        raise SchemaError(
            f"{setting}: {name!r} of {struct} is {kind!r}, not a time", hint="use a datetime, or a number with unit="
        )


def _check_text_form(field: str, unit: Unit | None, format: str | None, zone: str | None) -> None:
    """Check the form of text of an event time."""
    if format is None and zone is None:
        return
    if unit is not None:
        raise GraphError(f"event time {field!r}: unit= is for numbers, format= and zone= are for text", hint="use one")
    if "." in field:
        raise GraphError(
            f"event time {field!r}: format= and zone= need a field of the record itself",
            hint="let the source or a map move the nested field up",
        )
    if zone is not None:
        time_zone(zone)
    zoned = format is not None and TimeFormat.parsed(format).zoned
    if format is not None and zoned == (zone is not None):
        raise GraphError(
            f"event time {field!r}: format={format!r} "
            + (
                "names the zone with %z, so that zone= has no use" if zoned else "has no %z, so that times have no zone"
            ),
            hint="omit zone=" if zoned else 'name it: zone="Europe/Berlin", or zone="UTC"',
        )


def _check_percentile(field: str, percentile: float, max_disorder: timedelta | None) -> None:
    if max_disorder is None:
        raise GraphError(
            f"event time {field!r}: percentile= needs max_disorder=, above which the learned bound never is",
            hint=f'for example EventTime("{field}", max_disorder=minutes(5), percentile=0.99)',
        )
    if not isinstance(percentile, float) or not 0 < percentile <= PERCENTILE_MAX:
        raise GraphError(
            f"event time {field!r}: percentile must be a number above 0 and up to {PERCENTILE_MAX}, not {percentile!r}",
            hint="for example percentile=0.99; without it the bound is max_disorder",
        )


@dataclass(frozen=True, slots=True, init=False, repr=False)
class EventTime:
    """The field that holds a record's event time, and the source's promise about order.

    Pass either `max_disorder` (bounded disorder: the watermark is the largest event time so far minus this bound) or
    `sorted=True` (event times never fall). The injector checks the promise of a sorted source: a record with an earlier
    event time than one before it is dead-lettered with reason "event_time", because a sorted source has no late
    records, only broken ones.

    With a `percentile`, the source learns the disorder bound from its records: that share of the newest 131,072 or so
    was at most the bound behind the largest event time before it. The learned bound is never above `max_disorder`, and
    is `max_disorder` until ten records beyond the percentile have been seen (1,024 records for 0.99). This is a
    heuristic, not a promise: about one record in a hundred is late with 0.99, and `millpy.disorder` counts them.

    A `datetime` must have a time zone: without `zone`, a record with a naive one is dead-lettered. A number needs a
    unit.

    A device whose clock is fast sends records from the future. An event time may be up to `future_tolerance` after the
    record's arrival; beyond that the record is dead-lettered with reason "future". A tolerated record keeps its event
    time but moves the watermark only as far as its arrival, so that one wrong clock does not make other devices'
    records late.

    With `watermark_by="site"`, each value of that field (each *site*) has a watermark of its own, made from its own
    records, and windows whose key contains the field close by it. A silent site then delays only itself; the watermark
    of the source is the least one. The first 1,000 sites (MILLPY_SITES_MAX) have one each; later ones share one.

    Args:
        field: a field of type `datetime`, or a number with `unit`.
        unit: the unit of a number since the epoch: "s", "ms", "us" or "ns".
        format: the format of text in a `datetime` field, with directives of `strftime`: %Y %y %m %b %d %H %I %p %M %S
            %f %z, and %F %T %R for several. RFC 3339 is read as well; any other text is dead-lettered with reason
            "event_time".
        zone: the time zone ("Europe/Berlin") of times that do not name theirs. Of an hour that comes twice when clocks
            are set back, the first is meant. A time that is skipped when they are set forward is read with the offset
            before the change. `millpy.local_times` counts both.
        max_disorder: how far an event time may lie behind the largest one before it and still be on time.
        percentile: the share of records, above 0 and up to 0.9999, that the learned bound covers; None to learn no
            bound, and use `max_disorder`.
        sorted: whether event times never fall; with `watermark_by`, those of one site.
        future_tolerance: how far an event time may lie after the record's arrival.
        watermark_by: a field whose values have a watermark each; None for one watermark for all records.
    """

    field: str
    arrives: bool
    unit: Unit | None
    format: str | None
    zone: str | None
    max_disorder: timedelta | None
    percentile: float | None
    sorted: bool
    future_tolerance: timedelta
    watermark_by: str | None

    def __init__(  # noqa: PLR0913 - keywords of the public interface
        self,
        field: str,
        *,
        unit: Unit | None = None,
        format: str | None = None,
        zone: str | None = None,
        max_disorder: timedelta | None = None,
        percentile: float | None = None,
        sorted: bool = False,
        future_tolerance: timedelta = FUTURE_TOLERANCE,
        watermark_by: str | None = None,
    ) -> None:
        if unit is not None and unit not in UNITS:
            raise GraphError(f"unknown unit {unit!r}", hint=f"units are {', '.join(UNITS)}")
        _check_text_form(field, unit, format, zone)
        check_flags(sorted=sorted)
        if sorted == (max_disorder is not None):
            raise GraphError(
                f"event time {field!r} needs either max_disorder= or sorted=True",
                hint=f'for example EventTime("{field}", max_disorder=seconds(10))',
            )
        if percentile is not None:
            _check_percentile(field, percentile, max_disorder)
            if watermark_by is not None:
                raise GraphError(
                    f"event time {field!r}: percentile= learns one bound, not one for each site of watermark_by=",
                    hint="omit percentile=: the watermark of a site waits for max_disorder",
                )
        check_length("max_disorder", timedelta(0) if max_disorder is None else max_disorder)
        check_length("future_tolerance", future_tolerance)
        if max_disorder is not None and max_disorder < timedelta(0):
            raise GraphError(
                f"event time {field!r}: max_disorder must not be negative: {max_disorder}", hint="seconds(0) for order"
            )
        if future_tolerance < timedelta(0):
            raise GraphError(
                f"event time {field!r}: future_tolerance must not be negative: {future_tolerance}", hint="leave it out"
            )
        object.__setattr__(self, "field", field)
        object.__setattr__(self, "arrives", False)
        object.__setattr__(self, "unit", unit)
        object.__setattr__(self, "format", format)
        object.__setattr__(self, "zone", zone)
        object.__setattr__(self, "max_disorder", max_disorder)
        object.__setattr__(self, "percentile", percentile)
        object.__setattr__(self, "sorted", sorted)
        object.__setattr__(self, "future_tolerance", future_tolerance)
        object.__setattr__(self, "watermark_by", watermark_by)

    @classmethod
    def arrival(cls) -> EventTime:
        """Let the event time of a record be its arrival, for devices without a clock.

        The arrival is the time at which a worker takes the record from the source; of a Kafka record it is the
        timestamp that the broker has stored, but never after the record is taken. It is recorded with the record in the
        commit of its effects, and is never taken again: a record that is delivered again after a crash arrives when it
        is committed, and a replayed dead letter keeps its first arrival.

        Arrivals never fall within a source partition, even if the worker's clock does: a record arrives at the earliest
        with the one before it, and no earlier than the watermark. So no record is late at the source. The record class
        needs no field for the time.

        Use `AdvanceWithClock` as the idle policy to close the last windows of a source that falls silent.
        """
        made = cls("", sorted=True)
        object.__setattr__(made, "arrives", True)
        return made

    def __repr__(self) -> str:
        if self.arrives:
            return "EventTime.arrival()"
        forms = {"unit": self.unit, "format": self.format, "zone": self.zone}
        form = "".join(f", {name}={value!r}" for name, value in forms.items() if value)
        return f"EventTime({self.field!r}{form}, {self.promise})"

    def identity(self) -> Identity:
        """Describe where the event time is, and by what windows close; a change would move or reopen windows."""
        if self.arrives:
            return {"kind": "arrival_time"}
        by = {} if self.watermark_by is None else {"watermark_by": self.watermark_by}
        forms = {"format": self.format, "zone": self.zone}
        form = {name: value for name, value in forms.items() if value is not None}
        return {"kind": "event_time", "field": self.field, "unit": self.unit, **form, **by}

    def settings(self) -> Identity:
        """Describe the promise, which only the future estimate of the watermark depends on."""
        learned = {} if self.percentile is None else {"percentile": self.percentile}
        return {
            "max_disorder_us": None if self.max_disorder is None else microseconds(self.max_disorder),
            **learned,
            "sorted": self.sorted,
            "future_tolerance_us": self.future_tolerance_us,
        }

    def reader(self) -> TimeReader | None:
        """Return a reader of the field's text; None if the field has values as the record class reads them."""
        return None if self.format is None and self.zone is None else TimeReader(self.format, self.zone)

    @property
    def promise(self) -> str:
        """The promise about order and the future, written as arguments."""
        order = (
            f"max_disorder={duration_text(self.max_disorder_us)}" if self.max_disorder is not None else "sorted=True"
        )
        if self.percentile is not None:
            order += f", percentile={self.percentile!r}"
        if self.watermark_by is not None:
            order += f", watermark_by={self.watermark_by!r}"
        if self.future_tolerance == FUTURE_TOLERANCE:
            return order
        return f"{order}, future_tolerance={duration_text(self.future_tolerance_us)}"

    @property
    def max_disorder_us(self) -> int:
        """The largest disorder bound in µs; 0 for a sorted source."""
        return 0 if self.max_disorder is None else microseconds(self.max_disorder)

    @property
    def future_tolerance_us(self) -> int:
        """The future tolerance in µs."""
        return microseconds(self.future_tolerance)

    def validate(self, record_type: RecordType) -> None:
        """Check the field against the record type.

        Raises:
            GraphError: the field does not exist, or is a number without a unit; or the site is no field that can be a
                key.
            SchemaError: the field has another type.
        """
        if self.arrives:
            return
        is_text = self.format is not None or self.zone is not None
        if is_text and self.field in record_type.fields and record_type.field_type(self.field) is not datetime:
            raise GraphError(
                f"event time {self.field!r}: format= and zone= are for text in a field of type datetime",
                hint=f"write {self.field}: datetime in {record_type.struct.__name__}",
            )
        _check_time_field(record_type, self.field, self.unit, "event time")
        if self.watermark_by is not None:
            try:
                record_type.key_types((self.watermark_by,))
            except SchemaError as error:
                raise GraphError(f"watermark_by: {error.message}", hint=error.hint) from error


@dataclass(frozen=True, slots=True, init=False, repr=False)
class Dedupe(GraphPart):
    """The fields of a record's dedupe id, and the horizon (I4).

    A record is a duplicate, and is dropped, if its id was last seen at most `within` ago. A duplicate refreshes its id.
    A record in which a field of the id is None has no id and is never a duplicate.

    The horizon slides on the time of arrival, or on the running maximum of field `time` if that is given.

    Args:
        fields: the fields that together form the id; str, int, float, bool, datetime, UUID or bytes.
        within: the horizon.
        time: the field that serves as the clock.
        unit: the unit of that field, if it is a number.
    """

    fields: tuple[str, ...]
    within: timedelta
    time: str | None
    unit: Unit | None

    def __init__(self, *fields: str, within: timedelta, time: str | None = None, unit: Unit | None = None) -> None:
        if not fields:
            raise GraphError("dedupe needs at least one id field", hint='for example Dedupe("id", within=hours(1))')
        check_positive("within", within, 'for example Dedupe("id", within=hours(1))')
        if unit is not None and (time is None or unit not in UNITS):
            raise GraphError(
                f"dedupe: invalid unit={unit!r}",
                hint=f"use it with a number field in time=; units are {', '.join(UNITS)}",
            )
        object.__setattr__(self, "fields", fields)
        object.__setattr__(self, "within", within)
        object.__setattr__(self, "time", time)
        object.__setattr__(self, "unit", unit)

    def identity(self) -> Identity:
        """Describe what makes a record a duplicate of one whose id is stored."""
        return {
            "kind": "dedupe",
            "fields": list(self.fields),
            HORIZON: self.within_us,
            "time": self.time,
            "unit": self.unit,
        }

    def settings(self) -> Identity:
        """Describe the horizon: an id that was forgotten at a change stays forgotten (`model/horizons.py`)."""
        return {HORIZON: self.within_us}

    @property
    def within_us(self) -> int:
        """The horizon in µs."""
        return microseconds(self.within)

    def validate(self, record_type: RecordType) -> None:
        """Check the fields against the record type.

        Raises:
            SchemaError: an id field does not exist, or its type has no canonical bytes.
            GraphError: the clock field does not exist, may be None, or is a number without a unit.
        """
        struct = record_type.struct.__name__
        for name in self.fields:
            if record_type.field_type(name) not in (*KEY_TYPES, datetime, float):
                raise SchemaError(
                    f"dedupe: {name!r} of {struct} cannot be part of an id",
                    hint="use fields of type str, int, float, bool, datetime, UUID or bytes",
                )
        if self.time is None:
            return
        _check_time_field(record_type, self.time, self.unit, "dedupe time")
        if record_type.is_nullable(self.time):
            raise GraphError(f"dedupe time: {self.time!r} may be None and cannot be a clock", hint="omit time=")


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorRate:
    """The rate of dead letters above which a source pauses: more than `share` of its newest records.

    The rate is taken over whole bundles, from the newest backwards until they hold `minimum` records.

    Args:
        share: the share, from 0 to below 1.
        minimum: the number of records below which a share has no meaning.
    """

    share: float
    minimum: int = 100

    def __post_init__(self) -> None:
        hint = "for example ErrorRate(share=0.5, minimum=100)"
        if not is_number(self.share, 0, 1) or self.share == 1:
            raise GraphError(f"ErrorRate: share must be from 0 to below 1, not {self.share!r}", hint=hint)
        if not is_whole(self.minimum, 1):
            raise GraphError(f"ErrorRate: minimum must be a number from 1, not {self.minimum!r}", hint=hint)


@dataclass(frozen=True, slots=True, repr=False)
class AdvanceWithClock(GraphPart):
    """Idle policy: after a silence of `after`, the watermark follows the clock at `after` plus the disorder bound.

    The bound is `max_disorder`, or the one that a percentile has learned.

    It promises that a record arrives within `after` of its event time; a record that takes longer may be late. The
    watermark follows the clock only while the source is connected and its backlog is proven read, so that records which
    queued up during an outage are not late.
    """

    after: timedelta

    def __post_init__(self) -> None:
        check_positive("after", self.after, "for example AdvanceWithClock(after=seconds(30))")

    def identity(self) -> Identity:
        """Describe the policy."""
        return {"kind": "advance_with_clock", "after_us": self.after_us}

    @property
    def after_us(self) -> int:
        """The silence in µs."""
        return microseconds(self.after)


@dataclass(frozen=True, slots=True, repr=False)
class Wait(GraphPart):
    """Idle policy, the default: while no record comes, the watermark waits, and windows stay open."""

    def identity(self) -> Identity:
        """Describe the policy."""
        return {"kind": "wait"}


IdlePolicy = AdvanceWithClock | Wait
