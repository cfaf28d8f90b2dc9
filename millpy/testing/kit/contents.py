"""What a hosted graph has committed, as values that a test compares: panes, late records, watermarks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from millpy.errors import UsageError
from millpy.model.checkpoint import LateRows
from millpy.model.deployment import PANE_INFO
from millpy.model.keys import Key, key_from_text
from millpy.model.record import Records, RecordType, column_name, getter
from millpy.model.time import INSTANT_MIN, YEARS_HI, YEARS_LO, Instant, instant, nearest_datetime, to_datetime

ON_TIME_INDEX, LAST = PANE_INFO
END_OF_TIME = to_datetime(YEARS_HI)
"""What a watermark reads as when its source has ended: the last µs of the year 9999."""
BEGINNING_OF_TIME = to_datetime(YEARS_LO)
"""What a watermark reads as before its source has delivered anything: the first µs of the year 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pane:
    """One result of one window, as the consumers of the windowed stream get it.

    Attributes:
        key: the key; a tuple if there are several key fields.
        window: start and end of the window; the end is exclusive.
        values: the aggregates by column.
        index: 0 for the first pane of the window, one more for each that follows.
        timing: "early", "on_time" or "late".
        late_count: number of late records that it counts.
        event_time: the event time that the pane has as a record of the stream.
        retraction: whether it takes back the pane of its window that it equals, and is no result.
        on_time_index: number of panes of the window that are not early and came before; -1 for an early pane. None
            unless the window has `pane_info=True`.
        last: whether no pane of the window can follow. None unless the window has `pane_info=True`.
    """

    key: Key
    window: tuple[datetime, datetime]
    values: Mapping[str, Any]
    index: int
    timing: str
    late_count: int
    event_time: datetime
    retraction: bool = False
    on_time_index: int | None = None
    last: bool | None = None

    @property
    def first(self) -> bool:
        """Whether it is the first pane of its window."""
        return self.index == 0 and not self.retraction


@dataclass(frozen=True, slots=True, kw_only=True)
class LateRecord:
    """A record that was too late for a window, or to be judged by a `deduplicate` step.

    Attributes:
        stream: the stream of the record.
        computation: the step for which it was too late.
        key: its key there.
        record: the record.
        event_time: its event time.
        watermark: the watermark that judged it.
        window: start and end of the window that it missed; None behind a `deduplicate` step.
        retraction: whether it is the retraction of an equal record.
    """

    stream: str
    computation: str
    key: Key
    record: Any
    event_time: datetime
    watermark: datetime
    window: tuple[datetime, datetime] | None
    retraction: bool = False


@dataclass(frozen=True, slots=True)
class Watermarks:
    """The watermarks of a step or source: the smallest among its key intervals or source partitions.

    Attributes:
        input: by which lateness is judged, and windows and event timers fire.
        low: what it publishes to its consumers, held back by its pending work.
    """

    input: datetime
    low: datetime


@dataclass(frozen=True, slots=True)
class OpenWindow:
    """A window that is still in the state of its step; of a sliding window, one slice."""

    key: Key
    window: tuple[datetime, datetime]


@dataclass(slots=True)
class Production:
    """What one bundle of one interval produced to one stream."""

    stream: str
    records: Records


@dataclass(slots=True)
class ProductionLog:
    """The productions of committed turns, in order. Those of a turn that is not committed are forgotten.

    Attributes:
        committed: the productions.
    """

    committed: list[Production] = field(default_factory=list)
    _stepped: list[Production] = field(default_factory=list)

    def add(self, productions: Mapping[str, Records]) -> None:
        """Add what a step has produced."""
        self._stepped += [Production(stream, records) for stream, records in productions.items() if len(records)]

    def commit(self) -> None:
        """Keep what was stepped."""
        self.committed += self._stepped
        self._stepped = []

    def drop(self) -> None:
        """Forget what was stepped and not committed."""
        self._stepped = []

    def records_of(self, stream: str) -> Iterator[Records]:
        """Return the committed productions to a stream."""
        return (production.records for production in self.committed if production.stream == stream)


def moment(at: datetime | int, what: str) -> Instant:
    """Return a user's time as an instant.

    Raises:
        UsageError: it is a naive datetime, or neither a datetime nor whole µs.
    """
    if isinstance(at, datetime):
        if at.tzinfo is None:
            raise UsageError(f"{what}: {at!r} has no time zone", hint="pass an aware datetime")
        return instant(at)
    if isinstance(at, bool) or not isinstance(at, int) or not INSTANT_MIN < at <= YEARS_HI:
        raise UsageError(f"{what}: {at!r} is not a time", hint="pass an aware datetime, or whole µs since 1970-01-01")
    return Instant(at)


def panes_of(records: Records, key_fields: Sequence[str], columns: Sequence[str]) -> list[Pane]:
    """Return the panes of a windowed stream's records; `columns` are its aggregates."""
    keys = [getter(column_name(name)) for name in key_fields]
    found = []
    retracts = [False] * len(records) if records.retracts is None else records.retracts.tolist()
    for record, at, retraction in zip(records.objects(), records.event_times.tolist(), retracts, strict=True):
        parts = tuple(read(record) for read in keys)
        found.append(
            Pane(
                key=parts[0] if len(parts) == 1 else parts,
                window=(record.window_start.astimezone(UTC), record.window_end.astimezone(UTC)),
                values={name: getattr(record, name) for name in columns},
                index=record.pane_index,
                timing=record.pane_timing,
                late_count=record.late_count,
                event_time=nearest_datetime(at),
                retraction=retraction,
                on_time_index=getattr(record, ON_TIME_INDEX, None),
                last=getattr(record, LAST, None),
            )
        )
    return found


def late_records_of(rows: LateRows, record_type: RecordType, key_types: tuple[type, ...]) -> list[LateRecord]:
    """Return the late records of stored rows."""
    marks = rows.retracts or [False] * len(rows)
    columns = (rows.keys, rows.payloads, rows.event_times, rows.watermarks, rows.window_starts, rows.window_ends, marks)
    return [
        LateRecord(
            stream=rows.stream,
            computation=rows.computation,
            key=key_from_text(key, key_types),
            record=record_type.decode_with_none(payload),
            event_time=nearest_datetime(at),
            watermark=nearest_datetime(watermark),
            window=None if start is None or end is None else (nearest_datetime(start), nearest_datetime(end)),
            retraction=retraction,
        )
        for key, payload, at, watermark, start, end, retraction in zip(*columns, strict=True)
    ]
