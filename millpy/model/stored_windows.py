"""Windows that have fired, and may stay in the store until a late record or their expiry needs them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import ClassVar, NamedTuple, TypeAlias

from millpy.model.checkpoint import Entries

WAITS = b'"waits":true'
"""Text in the stored value of a pane that has reached the end of its window, and may be due without a record."""


class ClosedKind(Enum):
    """The kind of windows of which a new owner leaves those in the store that end by the low watermark.

    Attributes:
        WINDOWS: all panes of a window have fired. It learns the subkeys of those that it leaves.
        PANES: it leaves the panes that do not wait (`WAITS`).
        SESSIONS: as PANES, but an interval has as many sessions as rows. It learns when the first and the last one end.
    """

    WINDOWS = 1
    PANES = 2
    SESSIONS = 3


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
    rows_max: ClassVar[int] = sys.maxsize
    with_values: ClassVar[bool] = True

    def asks_for(self, key: bytes, subkey: str) -> bool:
        """Tell whether it reads a session."""
        start, end = span_of(subkey)
        spans = zip(self.keys, self.starts, self.ends, strict=True)
        return any(key == of_key and start < hi and lo < end for of_key, lo, hi in spans)


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
    with_values: ClassVar[bool] = False

    def asks_for(self, key: bytes, subkey: str) -> bool:
        """Tell whether it reads a session, in a store that is in the order of keys and subkeys."""
        is_next = self.after is None or (key, subkey) > (self.after.key, self.after.subkey)
        return is_next and span_of(subkey)[1] <= self.ended_by


SessionQuery: TypeAlias = "TouchedSessions | EndedSessions"
LoadSessions: TypeAlias = "Callable[[int, SessionQuery], Entries]"
"""(folded bundle, query) -> stored sessions; see `Store.load_sessions`."""


class SpanOfEnds(NamedTuple):
    """Bounds of the ends of stored sessions, in µs: none of them ends before `first` or after `last`."""

    first: int
    last: int


def no_sessions(folded_bundle: int, query: SessionQuery) -> Entries:
    """Raise: a stage that is stepped without a store must have all of its sessions in memory."""
    raise AssertionError(f"{query} asks for sessions that are only in the store")


def span_of(subkey: str) -> tuple[int, int]:
    """Return the start and end of a session, in µs, from its subkey."""
    start, _, end = subkey.partition("/")
    return int(start), int(end)
