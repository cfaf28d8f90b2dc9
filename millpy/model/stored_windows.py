"""Windows that may stay in the store until a record, their end or their expiry needs them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
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
        UNFIRED_SESSIONS: as SESSIONS, but it leaves those that have not fired, too, and learns when the first one ends.
        UNFIRED_PANES: as UNFIRED, for panes with the state of a trigger. It leaves those that wait, too.
    """

    WINDOWS = 1
    PANES = 2
    SESSIONS = 3
    UNFIRED = 4
    UNFIRED_SESSIONS = 5
    UNFIRED_PANES = 6


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
        others_max: how many other sessions are read of each key that have not fired, those that end first.
    """

    keys: Sequence[bytes]
    starts: Sequence[int]
    ends: Sequence[int]
    others_max: int = 0

    def answer(self, rows: Iterable[StoredPane]) -> Entries:
        """Return what it reads of rows in memory."""
        spans: dict[bytes, list[tuple[int, int]]] = {}
        for key, lo, hi in zip(self.keys, self.starts, self.ends, strict=True):
            spans.setdefault(key, []).append((lo, hi))
        others = dict.fromkeys(spans, 0)
        found = Entries(Kind.WINDOW, "")
        for row in sorted(rows, key=place_of):
            start, end = span_of(row.subkey)
            if any(start < hi and lo < end for lo, hi in spans.get(row.key, ())):
                found.add(*row)
            elif row.key in spans and others[row.key] < self.others_max and not is_emitted(row.value):
                others[row.key] += 1
                found.add(*row)
        return found


class SessionPlace(NamedTuple):
    """The place of a session in the order in which sessions fire. Few have the same: those of keys with one hash."""

    end: int
    start: int
    key_hash: int


FIRST_SESSION = SessionPlace(-(2**63), -(2**63), -1)
"""A place before all others."""
LAST_HASH = 2**62
"""A number above the hashes of keys."""


@dataclass(frozen=True, slots=True)
class EndedSessions:
    """A query for the next sessions that end by a time, in order of their places.

    Attributes:
        ended_by: the time, in µs.
        after: the place behind which they are.
        rows_max: the most sessions to read, and those besides that have the place of the last one. An answer with fewer
            is the last one.
        unfired: whether to read those that have not fired, with values; otherwise all, without values.
    """

    ended_by: int
    after: SessionPlace
    rows_max: int
    unfired: bool = False

    def answer(self, rows: Iterable[StoredPane]) -> Entries:
        """Return what it reads of rows in memory."""
        found, last = Entries(Kind.WINDOW, ""), self.after
        for row in sorted(rows, key=place_of):
            place = place_of(row)
            if not self.after < place or place.end > self.ended_by or (self.unfired and is_emitted(row.value)):
                continue
            if len(found) >= self.rows_max and place != last:
                break
            found.add(*(row if self.unfired else row._replace(value=None)))
            last = place
        return found


class PanePlace(NamedTuple):
    """The place of a pane in the order in which the panes of a window fire: its key's hash, then its key as JSON."""

    key_hash: int
    key: bytes


FIRST_PLACE = PanePlace(-1, b"")
"""A place before all others."""


class PaneNeed(Enum):
    """What panes of a window need, by which a query chooses them.

    Attributes:
        EMISSION: they have not been emitted.
        END: their trigger has not been asked since the watermark has reached the end of the window.
        EXPIRY: they have reached that end, and records of them wait for the end of the lateness (`WAITS`).
    """

    EMISSION = "emission"
    END = "end"
    EXPIRY = "expiry"


@dataclass(frozen=True, slots=True)
class UnfiredPanes:
    """A query for the next panes of a window that need something, in order of their places.

    Attributes:
        subkey: the window.
        after: the place behind which they are.
        rows_max: the most panes to read.
        bytes_max: about the most bytes of values to read; one pane is read, however large. An answer with fewer rows
            and fewer bytes is the last one.
        need: what they need.
    """

    subkey: str
    after: PanePlace
    rows_max: int
    bytes_max: int
    need: PaneNeed = PaneNeed.EMISSION

    def answer(self, rows: Iterable[StoredPane]) -> Entries:
        """Return what it reads of rows in memory."""
        found, size = Entries(Kind.WINDOW, ""), 0
        for row in sorted(rows, key=lambda row: (row.key_hash, row.key)):
            is_next = row.subkey == self.subkey and (row.key_hash, row.key) > self.after
            if is_next and has_need(row.value, self.need) and len(found) < self.rows_max and size < self.bytes_max:
                found.add(*row)
                size += len(row.value or b"")
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


def place_of(row: StoredPane) -> SessionPlace:
    """Return the place of a stored session."""
    start, end = span_of(row.subkey)
    return SessionPlace(end, start, row.key_hash)


def panes_of(entries: Entries) -> Iterator[StoredPane]:
    """Return the rows of an answer."""
    columns = entries.keys, entries.key_hashes, entries.subkeys, entries.values, entries.fire_ats
    return map(StoredPane, *columns)


def last_place(entries: Entries) -> SessionPlace:
    """Return the place of the last row of an answer."""
    start, end = span_of(entries.subkeys[-1])
    return SessionPlace(end, start, entries.key_hashes[-1])


class _FiringFlags(msgspec.Struct):
    passed: bool = False
    waits: bool = False


class _PaneFlags(msgspec.Struct):
    emitted: bool = False
    firing: _FiringFlags | None = None


def is_emitted(value: bytes | None) -> bool:
    """Tell whether a stored pane has been emitted."""
    assert value is not None, "a row in the store has a value"
    return msgspec.json.decode(value, type=_PaneFlags).emitted


def has_need(value: bytes | None, need: PaneNeed) -> bool:
    """Tell whether a stored pane needs something."""
    assert value is not None, "a row in the store has a value"
    pane = msgspec.json.decode(value, type=_PaneFlags)
    if need is PaneNeed.EMISSION:
        return not pane.emitted
    firing = pane.firing or _FiringFlags()
    return firing.waits if need is PaneNeed.EXPIRY else not firing.passed
