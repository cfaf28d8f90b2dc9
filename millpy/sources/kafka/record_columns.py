"""Records of a Kafka partition as columns.

A client's objects for a record, its headers and its numbers are five and cost the garbage collector more time than
parsing them; here a record is one bytes object, or two with a key.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

import numpy as np
import numpy.typing as npt

from millpy.ingest.payload_column import PayloadColumn

Headers = Sequence[tuple[str, bytes | None]]
_OFFSET, _TIMESTAMP = attrgetter("offset"), attrgetter("timestamp")
_KEY, _VALUE, _HEADERS = attrgetter("key"), attrgetter("value"), attrgetter("headers")


@dataclass(frozen=True, slots=True)
class UnreadableRecord:
    """A range of unreadable offsets, in the form of a record without a value.

    Attributes:
        first: the first offset.
        offset: the last offset.
        detail: why the records are unreadable.
        damaged: whether the checksum is wrong, so that another fetch may return the records intact.
    """

    first: int
    offset: int
    detail: str
    damaged: bool = False
    key: bytes | None = None
    value: bytes | None = None
    headers: Headers = ()
    timestamp: int = -1


@dataclass(slots=True)
class RecordColumns:
    """Records in the order of their offsets.

    Attributes:
        values: the value of each; None without one. As a `PayloadColumn` if each has one.
        offsets: the offset of each, int64; the last one of an unreadable range.
        timestamps: the time of each in ms since the epoch, int64; negative without one.
        keys: the key of each; None if no record has one.
        headers: the headers of each; None if no record has any.
        unreadable: the rows that are not records.
        size: the number of bytes of their content.
    """

    values: Sequence[bytes | None]
    offsets: npt.NDArray[np.int64]
    timestamps: npt.NDArray[np.int64]
    keys: list[bytes | None] | None = None
    headers: list[Headers] | None = None
    unreadable: dict[int, UnreadableRecord] = field(default_factory=dict)
    size: int = -1

    def __post_init__(self) -> None:
        if self.size >= 0:
            return
        self.size = int(self.sizes().sum())

    @classmethod
    def joined(cls, parts: Sequence[RecordColumns]) -> RecordColumns:
        """Return the records of several, in order."""
        if len(parts) == 1:
            return parts[0]
        if not parts:
            return columns_of(())
        begins = np.cumsum([0, *map(len, parts[:-1])]).tolist()
        keys: list[bytes | None] = []
        headers: list[Headers] = []
        if has_keys := any(part.keys is not None for part in parts):
            for part in parts:
                keys += part.keys or [None] * len(part)
        if has_headers := any(part.headers is not None for part in parts):
            for part in parts:
                headers += part.headers or [()] * len(part)
        return cls(
            _joined_values([part.values for part in parts]),
            np.concatenate([part.offsets for part in parts]),
            np.concatenate([part.timestamps for part in parts]),
            keys if has_keys else None,
            headers if has_headers else None,
            {
                begin + row: found
                for begin, part in zip(begins, parts, strict=True)
                for row, found in part.unreadable.items()
            },
            sum(part.size for part in parts),
        )

    def __len__(self) -> int:
        return len(self.values)

    @property
    def first_offset(self) -> int:
        """The first offset of the first row, which may be a range."""
        return self.unreadable[0].first if 0 in self.unreadable else int(self.offsets[0])

    @property
    def next_offset(self) -> int:
        """The offset after the last record."""
        return int(self.offsets[-1]) + 1

    @property
    def damaged(self) -> UnreadableRecord | None:
        """The last row, if it is damaged, so that another fetch may return it intact."""
        found = self.unreadable.get(len(self) - 1)
        return found if found is not None and found.damaged else None

    def rows(self, begin: int, end: int | None = None) -> RecordColumns:
        """Return the rows from `begin` up to `end`."""
        chosen = slice(begin, len(self) if end is None else end)
        return RecordColumns(
            self.values[chosen],
            self.offsets[chosen],
            self.timestamps[chosen],
            None if self.keys is None else self.keys[chosen],
            None if self.headers is None else self.headers[chosen],
            {row - begin: found for row, found in self.unreadable.items() if chosen.start <= row < chosen.stop},
        )

    def drop(self, rows: Sequence[int]) -> RecordColumns:
        """Return the records without some rows, which ascend."""
        ends = [*rows, len(self)]
        begins = [0, *(row + 1 for row in rows)]
        return RecordColumns.joined([self.rows(begin, end) for begin, end in zip(begins, ends, strict=True)])

    def cut_before(self, offset: int) -> RecordColumns:
        """Return the records that begin before an offset."""
        count = int(np.searchsorted(self.offsets, offset))
        if count in self.unreadable and self.unreadable[count].first < offset:
            count += 1
        return self.rows(0, count)

    @property
    def has_missing(self) -> bool:
        """Whether some have no value."""
        return not isinstance(self.values, PayloadColumn) and None in self.values

    def key(self, row: int) -> bytes | None:
        """Return the key of a record."""
        return None if self.keys is None else self.keys[row]

    def sizes(self) -> npt.NDArray[np.int64]:
        """Return the number of bytes of each record's content."""
        if isinstance(self.values, PayloadColumn):
            found = self.values.sizes()
        else:
            found = np.fromiter((len(value or b"") for value in self.values), np.int64, len(self))
        if self.keys is not None:
            found += np.fromiter((len(key or b"") for key in self.keys), np.int64, len(self))
        if self.headers is not None:
            found += np.fromiter(map(_bytes_of, self.headers), np.int64, len(self))
        return found

    def place(self, row: int) -> str:
        """Return a record's offset, or the first and last one of an unreadable range."""
        last = int(self.offsets[row])
        first = self.unreadable[row].first if row in self.unreadable else last
        return f"{last}" if first == last else f"{first}-{last}"


def columns_of(records: Sequence[Any]) -> RecordColumns:
    """Return the columns of a client's records."""
    values, count = list(map(_VALUE, records)), len(records)
    keys, headers = list(map(_KEY, records)), list(map(_HEADERS, records))
    try:
        timestamps = np.fromiter(map(_TIMESTAMP, records), np.int64, count)
    except TypeError:  # the oldest format has none
        timestamps = np.full(count, -1, np.int64)
    unreadable: dict[int, UnreadableRecord] = {}
    if None in values:
        unreadable = {row: found for row, found in enumerate(records) if isinstance(found, UnreadableRecord)}
    return RecordColumns(
        values,
        np.fromiter(map(_OFFSET, records), np.int64, count),
        timestamps,
        None if keys.count(None) == count else keys,
        headers if any(headers) else None,
        unreadable,
    )


def _joined_values(parts: Sequence[Sequence[bytes | None]]) -> Sequence[bytes | None]:
    columns = [part for part in parts if isinstance(part, PayloadColumn)]
    if len(columns) == len(parts):
        return PayloadColumn.joined(columns)
    return [value for part in parts for value in part]


def _bytes_of(headers: Headers) -> int:
    return sum(len(name) + len(value or b"") for name, value in headers)
