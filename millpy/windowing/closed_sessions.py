"""Closed sessions: sessions that have left memory and wait in the store for late records.

    closed    a session that has fired: it no longer holds the watermark, and waits until it expires
    stored    a closed session that is only in the store

What `closed_windows.py` says of panes holds for sessions, too: one may leave once its last change is folded, so that
its row in the store is the session. Sessions merge, and an interval may have as many of them as rows; so all that is
remembered of those in the store is when the first and the last of them end.

    late record   A record before the end of the last stored session reads the sessions that it touches, all records of
                  a turn at once. A closed session that has become part of another has its row until that change is
                  folded: its name is remembered until then, and its row is passed over.
    expiry        Its only effect is the deletion of rows. So stored sessions expire together, up to a sixteenth of the
                  allowed lateness after their own is over, with one pass over the rows of the interval.

A session that is over does not come back, so results do not depend on when its row is deleted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from millpy.model.checkpoint import Entries
from millpy.model.keys import Key, key_from_text, key_texts
from millpy.model.record import Instants
from millpy.model.stage import StoredInterval
from millpy.model.stored_windows import (
    EndedSessions,
    QueryWindows,
    SessionName,
    SpanOfEnds,
    TouchedSessions,
    no_query,
    span_of,
)
from millpy.model.time import INSTANT_MAX, Instant
from millpy.windowing.group_by import Integers
from millpy.windowing.session_state import OpenSession, OpenSessions

PASSES = 16
"""Passes over the stored sessions while a session waits for its allowed lateness."""
PIECE_ROWS = 20_000
"""Expired sessions that one statement reads."""


@dataclass(slots=True)
class _Pass:
    """A pass over the stored sessions, to delete those that end by `ended_by`; it has reached `after`."""

    ended_by: int
    after: SessionName | None = None


class ClosedSessions:
    """The closed sessions of one key interval, of which some may be only in the store.

    Args:
        sessions: the sessions in memory.
        key_types: the Python types of the fields of keys.
        bytes_max: the bound on the memory of closed sessions.
        recovered: the stored state of the interval.

    Attributes:
        waiting: the closed sessions in memory, in the order in which they have closed.
        load: loads sessions from the store, during a step.
    """

    def __init__(
        self,
        sessions: OpenSessions,
        key_types: tuple[type, ...],
        bytes_max: int,
        recovered: StoredInterval,
    ) -> None:
        self._sessions = sessions
        self._key_types = key_types
        self._bytes_max = bytes_max
        self._folded = recovered.folded_bundle
        self._bundle = recovered.bundle
        self._ends = recovered.closed_ends
        self._allowed_us = sessions.allowed_us
        self._pass_us = sessions.allowed_us // PASSES
        self._pass: _Pass | None = None
        self._deleted: dict[tuple[Key, int, int], int] = {}  # with the bundle that deletes it
        self.waiting: dict[OpenSession, None] = {}
        self.load: QueryWindows = no_query

    @property
    def are_stored(self) -> bool:
        """Whether sessions may be only in the store."""
        return self._ends is not None

    @property
    def bytes_in_memory(self) -> int:
        """The memory of the closed sessions in memory."""
        weights = self._sessions.weights
        beyond = sum(weights.large.get(id(session.pane), 0) for session in self.waiting) if weights.large else 0
        return len(self.waiting) * weights.each + beyond

    def fetch(self, codes: Integers, keys: Sequence[Key], starts: Instants, ends: Instants, over_by: Instant) -> None:
        """Load the stored sessions that rows touch.

        Args:
            codes: per row, the index of its key.
            keys: the keys.
            starts: per row, its event time.
            ends: per row, the end of the session that it would have alone.
            over_by: the sessions that end by it are over.
        """
        if self._ends is None:
            return
        rows = np.flatnonzero(starts < self._ends.last)
        if not len(rows):
            return
        order = rows[np.lexsort((starts[rows], codes[rows]))]
        of_row, lo, hi = codes[order], starts[order], ends[order]
        cut = np.ones(len(order), np.bool_)
        cut[1:] = (of_row[1:] != of_row[:-1]) | (lo[1:] > hi[:-1])
        begin = np.flatnonzero(cut)
        asked = [keys[code] for code in of_row[begin].tolist()]
        texts = key_texts(asked)
        spans = lo[begin].tolist(), np.maximum.reduceat(hi, begin).tolist()
        found = self.load(self._folded, TouchedSessions(texts, *spans))
        self._add(found, dict(zip(texts, asked, strict=True)), over_by)

    def _add(self, found: Entries, keys: dict[bytes, Key], over_by: Instant) -> None:
        """Add loaded sessions to those in memory, unless they are there, have become part of others, or are over."""
        for text, subkey, value in zip(found.keys, found.subkeys, found.values, strict=True):
            assert value is not None, subkey
            start, end = span_of(subkey)
            name = keys[text], start, end
            if end > over_by and name not in self._deleted and not self._sessions.is_here(*name):
                self._sessions.load_closed(*name, text, value)

    def note_deleted(self, key: Key, start: int, end: int) -> None:
        """Take note of a session whose row was deleted before the recovery; the row may not be folded away yet."""
        self._deleted[key, start, end] = self._bundle

    def note_stored(self, sessions: Sequence[OpenSession], merged: Sequence[tuple[Key, int, int]], bundle: int) -> None:
        """Take note of what a bundle stores: sessions that may have fired, and closed ones that are part of others."""
        for session in sessions:
            if self._sessions.has_left(session.pane):
                self.waiting[session] = None
            else:
                self.waiting.pop(session, None)
        for name in merged:
            self._deleted.pop(name, None)  # so that they stay in order
            self._deleted[name] = bundle

    def spill(self, folded_bundle: int) -> None:
        """Let closed sessions leave memory, first those that have closed first, if all exceed their bound.

        Args:
            folded_bundle: the last bundle whose changes are rows in the store.
        """
        self._folded = folded_bundle
        for name, bundle in list(self._deleted.items()):
            if bundle > folded_bundle:
                break
            del self._deleted[name]
        left = self.bytes_in_memory
        if left <= self._bytes_max:
            return
        sessions, passed = self._sessions, -1 if self._pass is None else self._pass.ended_by
        large, each = sessions.weights.large, sessions.weights.each
        first, last = self._ends or (INSTANT_MAX, 0)
        for session in list(self.waiting):
            if not 0 < session.pane.bundle <= folded_bundle or session.end <= passed:
                continue
            left -= each + large.get(id(session.pane), 0)
            sessions.leave(session)
            del self.waiting[session]
            first, last = min(first, session.end), max(last, session.end)
            if left <= self._bytes_max * 3 // 4:
                break
        if first < INSTANT_MAX:
            self._ends = SpanOfEnds(first, last)
        sessions.forget_outdated()

    def needs_fold(self) -> bool:
        """Tell whether closed sessions exceed the bound: they leave memory once their changes are folded."""
        return self._sessions.weights.total > self._bytes_max and self.bytes_in_memory > self._bytes_max

    def is_over(self) -> bool:
        """Tell whether closed sessions exceed the bound by half although all that are folded have left memory."""
        limit = self._bytes_max * 3 // 2
        if self._sessions.weights.total <= limit or self.bytes_in_memory <= limit:
            return False
        self.spill(self._folded)  # sessions that were loaded, and have not changed
        return self.bytes_in_memory > limit

    def next_expiry(self) -> Instant:
        """Return when the next pass over the stored sessions is due; INSTANT_MAX if there are none."""
        if self._ends is None:
            return INSTANT_MAX
        delay = 0 if self._pass is not None else self._pass_us
        return Instant(min(self._ends.first + self._allowed_us + delay, INSTANT_MAX - 1))

    def add_expired(self, entries: Entries, watermark: Instant, rows_max: int) -> None:
        """Add the deletions of up to `rows_max` stored sessions to the changes of a bundle, if a pass is due."""
        if self._pass is None and self.next_expiry() <= watermark and self._ends is not None:
            self._pass = _Pass(watermark - self._allowed_us)
        while self._pass is not None and rows_max > 0:
            asked, ended_by = min(rows_max, PIECE_ROWS), self._pass.ended_by
            found = self.load(self._folded, EndedSessions(ended_by, self._pass.after, asked))
            rows_max -= len(found)
            self._delete(found, entries)
            if len(found) == asked:
                self._pass.after = SessionName(found.keys[-1], found.subkeys[-1], found.key_hashes[-1])
            else:
                self._end_pass(ended_by)

    def _delete(self, found: Entries, entries: Entries) -> None:
        """Add the deletions of sessions that are not in memory. Those in memory expire there."""
        written = set(zip(entries.keys, entries.subkeys, strict=True))
        columns = found.keys, found.key_hashes, found.subkeys, found.fire_ats
        for text, hashed, subkey, fire_at in zip(*columns, strict=True):
            start, end = span_of(subkey)
            here = self._sessions.is_here(key_from_text(text, self._key_types), start, end)
            if not here and (text, subkey) not in written:
                entries.add(text, hashed, subkey, None, fire_at)

    def _end_pass(self, ended_by: int) -> None:
        assert self._ends is not None
        self._pass = None
        first, last = self._ends
        self._ends = None if ended_by >= last else SpanOfEnds(max(first, ended_by + 1), last)
