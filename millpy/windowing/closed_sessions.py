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

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np

from millpy.model.checkpoint import Entries
from millpy.model.keys import Key, key_from_text, key_texts
from millpy.model.record import Instants, Mask
from millpy.model.stage import UNBOUNDED, StoredInterval
from millpy.model.stored_windows import (
    FIRST_SESSION,
    EndedSessions,
    QueryWindows,
    SessionPlace,
    SpanOfEnds,
    StoredPane,
    TouchedSessions,
    last_place,
    no_query,
    panes_of,
    span_of,
)
from millpy.model.time import INSTANT_MAX, Instant
from millpy.windowing.group_by import Integers
from millpy.windowing.session_state import OpenSession, OpenSessions

PASSES = 16
"""Passes over the stored sessions while a session waits for its allowed lateness."""
PIECE_ROWS = 20_000
"""Expired sessions that one statement reads."""
LEAVE_MAX = 20_000
"""Sessions that leave memory between two turns, so that the event loop does not wait."""


@dataclass(slots=True)
class _Pass:
    """A pass over the stored sessions, to delete those that end by `ended_by`; it has reached `after`."""

    ended_by: int
    after: SessionPlace = FIRST_SESSION


class ClosedSessions:
    """The closed sessions of one key interval, of which some may be only in the store.

    Args:
        sessions: the sessions in memory.
        key_types: the Python types of the fields of keys.
        bytes_max: the bound on the memory of closed sessions.
        recovered: the stored state of the interval.

    Attributes:
        waiting: the closed sessions in memory, in the order in which they have closed, with their additional weights.
        load: loads sessions from the store, during a step.
        unfired_from: no session that has not fired and is only in the store ends before it; INSTANT_MAX without any.
    """

    unfired_from: Instant = INSTANT_MAX

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
        self._merged: list[tuple[Key, int, int]] = []  # those of this turn
        self._beyond = 0  # the sum of the additional weights of those in `waiting`
        self._leaves = False  # whether more sessions may leave memory before the next fold
        self._searched: tuple[int, int, bool] | None = None
        self.waiting: dict[OpenSession, int] = {}
        self.load: QueryWindows = no_query

    @property
    def are_stored(self) -> bool:
        """Whether sessions may be only in the store."""
        return self._ends is not None

    @property
    def bytes_in_memory(self) -> int:
        """The memory of the closed sessions in memory."""
        return len(self.waiting) * self._sessions.weights.each + self._beyond

    def fetch(self, codes: Integers, keys: Sequence[Key], starts: Instants, ends: Instants, over_by: Instant) -> None:
        """Load the stored sessions that rows touch.

        Args:
            codes: per row, the index of its key.
            keys: the keys.
            starts: per row, its event time.
            ends: per row, the end of the session that it would have alone.
            over_by: the sessions that end by it are over.
        """
        rows = np.flatnonzero(self._may_touch(codes, keys, starts))
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
        found = self.load(self._folded, TouchedSessions(texts, *spans, self._others_max()))
        self._add(found, dict(zip(texts, asked, strict=True)), over_by)

    def _may_touch(self, codes: Integers, keys: Sequence[Key], starts: Instants) -> Mask:
        """Tell of each row whether it may touch a session that is only in the store."""
        found: Mask = np.zeros(len(starts), np.bool_) if self._ends is None else starts < self._ends.last
        return found

    def _rows(self, found: Entries, keys: dict[bytes, Key]) -> Iterator[tuple[StoredPane, OpenSession]]:
        """Yield the rows that are not in memory, and have not become part of other sessions, as rows and sessions."""
        for row in panes_of(found):
            key = keys[row.key] if row.key in keys else key_from_text(row.key, self._key_types)
            name = key, *span_of(row.subkey)
            if name not in self._deleted and not self._sessions.is_here(*name):
                assert row.value is not None, name
                yield row, self._sessions.decoded(key, row.key_hash, *name[1:], row.value)

    def _others_max(self) -> int:
        """Return how many sessions are read of a key beside those that its records touch."""
        return 0

    def _add(self, found: Entries, keys: dict[bytes, Key], over_by: Instant) -> None:
        """Put rows into memory that have left it, and are not over. One that could not have left is out of date."""
        for row, session in self._rows(found, keys):
            if self._is_closed(session, over_by):
                self._put_back(row, session)

    def _is_closed(self, session: OpenSession, over_by: Instant) -> bool:
        return session.end > over_by and self._sessions.has_left(session.pane)

    def _put_back(self, row: StoredPane, session: OpenSession) -> None:
        assert row.value is not None, row
        self._sessions.put_back(session, row.key, row.value)

    def note_merged(self, session: OpenSession) -> None:
        """Take note of a session that becomes part of another in this turn, if its row may be taken for a session."""
        if self._may_have_left(session):
            name = session.key, session.start, session.end
            self._deleted[name] = UNBOUNDED
            self._merged.append(name)

    def _may_have_left(self, session: OpenSession) -> bool:
        """Tell whether the row of a session could be taken for one that has left memory."""
        return self._sessions.has_ended(session.pane)

    def next_due(
        self, latest_end: Instant, sessions: Iterator[OpenSession], panes_max: int
    ) -> tuple[list[OpenSession], list[OpenSession]]:
        """Return the next sessions to emit, and those that were taken of `sessions` and have to wait.

        Args:
            latest_end: the sessions that end by it are due.
            sessions: those of them in memory that have not fired, in order of their places.
            panes_max: the most sessions to return.
        """
        return list(islice(sessions, panes_max)), []

    def has_passed(self, session: OpenSession) -> bool:
        """Tell whether all sessions that are only in the store and are before a session have fired."""
        return True

    def note_recovered(self, session: OpenSession) -> None:
        """Do nothing: a session that was recovered tells nothing of others."""

    def finish_recovery(self) -> None:
        """Do nothing: closed sessions have their places."""

    def note_read(self, session: OpenSession) -> None:
        """Take note of a session that was put into memory."""
        if self._sessions.has_left(session.pane):
            self._note_closed(session)

    def _note_closed(self, session: OpenSession) -> None:
        beyond = self._sessions.weights.large.get(id(session.pane), 0)
        self._beyond += beyond - self.waiting.get(session, 0)
        self.waiting[session] = beyond

    def forget(self, session: OpenSession) -> None:
        """Forget a session that is no longer in memory, or no longer closed."""
        self._beyond -= self.waiting.pop(session, 0)

    def note_fired(self, keys: Iterable[Key], bundle: int) -> None:
        """Do nothing: sessions that have not fired are in memory."""

    def note_deleted(self, key: Key, start: int, end: int) -> None:
        """Take note of a session whose row was deleted before the recovery; the row may not be folded away yet."""
        self._deleted[key, start, end] = self._bundle

    def note_stored(self, sessions: Sequence[OpenSession], bundle: int) -> None:
        """Take note of what a bundle stores: sessions that may have fired, and that some are part of others."""
        for session in sessions:
            if self._sessions.has_left(session.pane):
                self._note_closed(session)
            else:
                self.forget(session)
        for name in self._merged:
            self._deleted.pop(name, None)  # so that they stay in order
            self._deleted[name] = bundle
        self._merged.clear()

    def spill(self, folded_bundle: int) -> None:
        """Let sessions leave memory, if they exceed their bound.

        Args:
            folded_bundle: the last bundle whose changes are rows in the store.
        """
        self._folded = folded_bundle
        for name, bundle in list(self._deleted.items()):
            if bundle > folded_bundle:
                break
            del self._deleted[name]
        self._leave()

    def _leave(self) -> None:
        """Let up to LEAVE_MAX sessions leave memory, and say in `_leaves` whether more may."""
        self._leaves = self._leave_closed()
        self._leaves = self._sessions.forget_outdated() or self._leaves

    def _leave_closed(self) -> bool:
        """Let closed sessions leave memory, first those that have closed first. Return whether more may."""
        left, enough = self.bytes_in_memory, self._bytes_max * 3 // 4
        if left <= (enough if self._leaves else self._bytes_max):
            return False
        passed, each = -1 if self._pass is None else self._pass.ended_by, self._sessions.weights.each
        out: list[OpenSession] = []
        for session, beyond in self.waiting.items():
            if left <= enough or len(out) >= LEAVE_MAX:
                break
            if 0 < session.pane.bundle <= self._folded and session.end > passed:
                left -= each + beyond
                out.append(session)
        first, last = self._ends or (INSTANT_MAX, 0)
        for session in out:
            self._sessions.leave(session)
            self.forget(session)
            first, last = min(first, session.end), max(last, session.end)
        if out:
            self._ends = SpanOfEnds(first, last)
        return left > enough and len(out) >= LEAVE_MAX

    def needs_fold(self) -> bool:
        """Tell whether sessions exceed their bound, or some are leaving: they may once their changes are folded."""
        return self._leaves or self.bytes_in_memory > self._bytes_max

    def is_over(self) -> bool:
        """Tell whether sessions exceed their bound by half although those that are folded have left memory."""
        searched = self._folded, self._sessions.weights.panes, self._pass is None
        if self._leaves or (self._exceeds_by_half() and searched != self._searched):
            self._leave()  # and those that were read, and have not changed
            self._searched = self._folded, self._sessions.weights.panes, self._pass is None
        return self._exceeds_by_half()

    def _exceeds_by_half(self) -> bool:
        return self.bytes_in_memory > self._bytes_max * 3 // 2

    def next_expiry(self) -> Instant:
        """Return when the next pass over the stored sessions is due; INSTANT_MAX if there are none."""
        if self._ends is None:
            return INSTANT_MAX
        delay = 0 if self._pass is not None else self._pass_us
        return Instant(min(self._ends.first + self._allowed_us + delay, INSTANT_MAX - 1))

    def add_expired(self, entries: Entries, watermark: Instant, rows_max: int) -> None:
        """Add the deletions of up to `rows_max` stored sessions to the changes of a bundle, if a pass is due."""
        if self._pass is None and self.next_expiry() <= watermark and self._ends is not None:
            ended_by = min(watermark - self._allowed_us, self.unfired_from - 1)  # the others have fired
            if ended_by < self._ends.first:
                return
            self._pass = _Pass(ended_by)
        while self._pass is not None and rows_max > 0:
            asked, ended_by = min(rows_max, PIECE_ROWS), self._pass.ended_by
            found = self.load(self._folded, EndedSessions(ended_by, self._pass.after, asked))
            rows_max -= len(found)
            self._delete(found, entries)
            if len(found) < asked:
                self._end_pass(ended_by)
            else:
                self._pass.after = last_place(found)

    def _delete(self, found: Entries, entries: Entries) -> None:
        """Add the deletions of sessions that are not in memory. Those in memory expire there."""
        written = set(zip(entries.keys, entries.subkeys, strict=True))
        columns = found.keys, found.key_hashes, found.subkeys, found.fire_ats
        for text, hashed, subkey, fire_at in zip(*columns, strict=True):
            start, end = span_of(subkey)
            name = key_from_text(text, self._key_types), start, end
            is_known = name in self._deleted or self._sessions.is_here(*name)
            if not is_known and (text, subkey) not in written:
                entries.add(text, hashed, subkey, None, fire_at)

    def _end_pass(self, ended_by: int) -> None:
        assert self._ends is not None
        self._pass = None
        first, last = self._ends
        self._ends = None if ended_by >= last else SpanOfEnds(max(first, ended_by + 1), last)
