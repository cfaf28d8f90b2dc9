"""Windows that may stay in the store until a record, their end or their expiry needs them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple, TypeAlias

import msgspec

from millpy.model.checkpoint import Entries, Kind

WAITS = b'"waits":true'
"""Text in the stored value of a pane that has reached the end of its window, and may be due without a record."""


class ClosedKind(Enum):
    """The kind of windows of which a new owner leaves those in the store that end by the low watermark.

    Attributes:
        WINDOWS: all panes of a window have fired. It learns the subkeys of those that it leaves.
        PANES: it leaves the panes that do not wait (`WAITS`).
        SESSIONS: as PANES, but an interval has as many sessions as rows. It learns when the first and the last one end.
        UNFIRED: as WINDOWS, but it leaves those that have not fired, too, and learns their subkeys apart.
    """

    WINDOWS = 1
    PANES = 2
    SESSIONS = 3
    UNFIRED = 4


class StoredPane(NamedTuple):
    """A row of a store in memory, in the order of the arguments of `Entries.add`."""

    key: bytes
    key_hash: int
    subkey: str
    value: bytes | None
    fire_at: int


@dataclass(frozen=True, slots=True)
class TouchedSessions:
    """A query for the sessions that records touch, each by the span that its session would have alone.

    Attributes:
        keys: the key of each span, as JSON text.
        starts: its start, in µs.
        ends: its end, in µs. A session [start, end) of the key is read if it intersects the span.
    """

    keys: Sequence[bytes]
    starts: Sequence[int]
    ends: Sequence[int]

    def answer(self, rows: Iterable[StoredPane]) -> Entries:
        """Return what it reads of rows in memory."""
        spans = list(zip(self.keys, self.starts, self.ends, strict=True))
        found = Entries(Kind.WINDOW, "")
        for row in rows:
            start, end = span_of(row.subkey)
            if any(row.key == key and start < hi and lo < end for key, lo, hi in spans):
                found.add(*row)
        return found


class SessionName(NamedTuple):
    """The identity of a stored session: its key as JSON text, the subkey "<start>/<end>", and the hash of the key."""

    key: bytes
    subkey: str
    key_hash: int


@dataclass(frozen=True, slots=True)
class EndedSessions:
    """A query for the next sessions that end by a time, in an order of the store, without values.

    Attributes:
        ended_by: the time, in µs.
        after: the last session of the answer before; None to begin.
        rows_max: the most sessions to read. An answer with fewer is the last one.
    """

    ended_by: int
    after: SessionName | None
    rows_max: int

    def answer(self, rows: Iterable[StoredPane]) -> Entries:
        """Return what it reads of rows in memory, in the order of keys and subkeys."""
        found = Entries(Kind.WINDOW, "")
        for row in sorted(rows, key=lambda row: (row.key, row.subkey)):
            is_next = self.after is None or (row.key, row.subkey) > (self.after.key, self.after.subkey)
            if is_next and span_of(row.subkey)[1] <= self.ended_by and len(found) < self.rows_max:
                found.add(*row._replace(value=None))
        return found


class PanePlace(NamedTuple):
    """The place of a pane in the order in which the panes of a window fire: its key's hash, then its key as JSON."""

    key_hash: int
    key: bytes


FIRST_PLACE = PanePlace(-1, b"")
"""A place before all others."""


@dataclass(frozen=True, slots=True)
class UnfiredPanes:
    """A query for the next panes of a window that have not been emitted, in order of their places.

    Attributes:
        subkey: the window.
        after: the place behind which they are.
        rows_max: the most panes to read.
        bytes_max: about the most bytes of values to read; one pane is read, however large. An answer with fewer rows
            and fewer bytes is the last one.
    """

    subkey: str
    after: PanePlace
    rows_max: int
    bytes_max: int

    def answer(self, rows: Iterable[StoredPane]) -> Entries:
        """Return what it reads of rows in memory."""
        found, size = Entries(Kind.WINDOW, ""), 0
        for row in sorted(rows, key=lambda row: (row.key_hash, row.key)):
            assert row.value is not None, row
            is_next = row.subkey == self.subkey and (row.key_hash, row.key) > self.after
            if is_next and not _is_emitted(row.value) and len(found) < self.rows_max and size < self.bytes_max:
                found.add(*row)
                size += len(row.value)
        return found


WindowQuery: TypeAlias = "TouchedSessions | EndedSessions | UnfiredPanes"
QueryWindows: TypeAlias = "Callable[[int, WindowQuery], Entries]"
"""(folded bundle, query) -> stored windows; see `Store.query_windows`."""


class SpanOfEnds(NamedTuple):
    """Bounds of the ends of stored sessions, in µs: none of them ends before `first` or after `last`."""

    first: int
    last: int


def no_query(folded_bundle: int, query: WindowQuery) -> Entries:
    """Raise: a stage that is stepped without a store must have all of its windows in memory."""
    raise AssertionError(f"{query} asks for windows that are only in the store")


def span_of(subkey: str) -> tuple[int, int]:
    """Return the start and end of a session, in µs, from its subkey."""
    start, _, end = subkey.partition("/")
    return int(start), int(end)


class _PaneFlags(msgspec.Struct):
    emitted: bool = False


def _is_emitted(value: bytes) -> bool:
    """Tell whether a stored pane has been emitted."""
    return msgspec.json.decode(value, type=_PaneFlags).emitted
