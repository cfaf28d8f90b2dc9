"""Unfired sessions: sessions that have left memory before they fire.

    unfired   a session that the watermark has not reached, or that waits because more are due than a turn may emit
    unread    an unfired session that is only in the store
    whole     a key that has no unread session

If the unfired sessions of an interval exceed their bound, those leave memory whose keys have not changed for longest:
all of a key at once, when all changes of the key are folded. All that is remembered of them is a time before which none
ends. A record of a key that may not be whole reads the sessions that it touches before the step changes anything, and
the few others that the key has; of a key with many it reads some, and the key stays as it is. When the watermark
reaches the end of unread sessions, they are read and emitted in the order of their places, in each turn as many as it
emits. The first of them holds the low watermark.

    place     end, start and hash of the key: sessions in memory and in the store fire in this order, so that what a
              turn emits does not depend on where they are
    outdated  a row that has not fired, but is no unread session, because what has become of it is not folded yet. Its
              key is whole; or its name is remembered (`ClosedSessions`), or is that of a session in memory; or its
              place has been passed.

A new owner reads all changes that are not folded. A key that has some may have unread sessions beside them, and its
deletions are known by name. Only sessions of a few words leave memory before they fire, because those that the records
of a turn read must fit.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from itertools import islice
from operator import itemgetter

import numpy as np

from millpy.model.checkpoint import Entries
from millpy.model.keys import Key
from millpy.model.record import Instants, Mask
from millpy.model.stage import StoredInterval
from millpy.model.stored_windows import (
    FIRST_SESSION,
    LAST_HASH,
    EndedSessions,
    SessionPlace,
    StoredPane,
    last_place,
)
from millpy.model.time import INSTANT_MAX, Instant
from millpy.windowing.closed_sessions import LEAVE_MAX, PIECE_ROWS, ClosedSessions
from millpy.windowing.group_by import Integers
from millpy.windowing.session_state import OpenSession, OpenSessions
from millpy.windowing.unfired_windows import EMISSION_PARTS, PANES_MIN

OTHERS_MAX = 4
"""Sessions that are read of a key with those that its records touch."""


class UnfiredSessions(ClosedSessions):
    """The closed and unfired sessions of one key interval, of which some may be only in the store.

    Args:
        sessions, key_types, bytes_max, recovered: as of `ClosedSessions`.
        unfired_bytes_max: the bound on the memory of unfired sessions.
    """

    def __init__(
        self,
        sessions: OpenSessions,
        key_types: tuple[type, ...],
        bytes_max: int,
        recovered: StoredInterval,
        unfired_bytes_max: int,
    ) -> None:
        super().__init__(sessions, key_types, bytes_max, recovered)
        self._unfired_bytes_max = unfired_bytes_max
        self._upto = FIRST_SESSION  # the place up to which no session is unread
        self._many: set[Key] = set()  # keys with sessions in memory that may have unread ones, too
        self._fired: dict[Key, int] = {}  # whole keys of which a session has fired, with the bundle; until it is folded
        self._read: set[Key] = set()  # keys of which this turn emits unread sessions
        self._asked: set[Key] = set()  # keys of which this turn has read as many rows as it may
        self._changed: OrderedDict[Key, int] = OrderedDict()  # keys with unfired sessions -> bundle of the last change
        self.unfired_from = recovered.unfired_from

    @property
    def are_stored(self) -> bool:
        """Whether sessions may be only in the store."""
        return super().are_stored or self.unfired_from < INSTANT_MAX

    def note_recovered(self, session: OpenSession) -> None:
        """Take note of a session that has changed since the last fold: others of its key may be unread."""
        if self.unfired_from < INSTANT_MAX:
            self._many.add(session.key)

    def note_read(self, session: OpenSession) -> None:
        """Take note of a session that was put into memory: one that no record changes may leave first."""
        super().note_read(session)
        if not session.pane.emitted:
            is_known = session.key in self._changed
            self._changed[session.key] = max(self._changed.get(session.key, 0), session.pane.bundle)
            if not is_known:
                self._changed.move_to_end(session.key, last=False)

    def finish_recovery(self) -> None:
        """Order the keys by their last change."""
        self._changed = OrderedDict(sorted(self._changed.items(), key=itemgetter(1)))

    def note_stored(self, sessions: Sequence[OpenSession], bundle: int) -> None:
        """Take note of what a bundle stores."""
        super().note_stored(sessions, bundle)
        for session in sessions:
            if not session.pane.emitted:
                self._note_changed(session.key, bundle)

    def _note_changed(self, key: Key, bundle: int) -> None:
        self._changed[key] = bundle
        self._changed.move_to_end(key)

    def has_passed(self, session: OpenSession) -> bool:
        """Tell whether no unread session is before a session."""
        return session.place <= self._upto

    def _may_have_left(self, session: OpenSession) -> bool:
        """Tell whether the row of a session could be taken for one that has left memory."""
        return super()._may_have_left(session) or (session.pane.bundle > 0 and session.key in self._many)

    def note_fired(self, keys: Iterable[Key], bundle: int) -> None:
        """Take note of keys of which a session has fired: whole ones are whole until its row says so."""
        for key in keys:
            if self._has_unfired(key):
                self._note_changed(key, bundle)
            else:
                self._changed.pop(key, None)
            if key not in self._many and key not in self._read:
                self._fired.pop(key, None)  # so that they stay in order
                self._fired[key] = bundle
        self._read.clear()
        self._many -= {key for key in self._asked if not self._has_unfired(key)}  # nothing of them was put into memory
        self._asked.clear()

    def _is_whole(self, key: Key) -> bool:
        """Tell whether a key has no unread sessions, as far as is known."""
        if key in self._many:
            return False
        return key in self._fired or self._has_unfired(key)

    def _has_unfired(self, key: Key) -> bool:
        return any(not session.pane.emitted for session in reversed(self._sessions.by_key.get(key, ())))

    def _may_touch(self, codes: Integers, keys: Sequence[Key], starts: Instants) -> Mask:
        found = super()._may_touch(codes, keys, starts)
        if self.unfired_from == INSTANT_MAX:
            return found
        asked = np.array([not self._is_whole(key) for key in keys], np.bool_)
        result: Mask = found | asked[codes]
        return result

    def _others_max(self) -> int:
        return OTHERS_MAX if self.unfired_from < INSTANT_MAX else 0

    def _add(self, found: Entries, keys: dict[bytes, Key], over_by: Instant) -> None:
        """Put rows into memory: of closed sessions as before, and unread sessions."""
        if self.unfired_from == INSTANT_MAX:
            super()._add(found, keys, over_by)
            return
        unknown = {key for key in keys.values() if not self._is_whole(key)}
        counts = Counter(found.keys)
        for row, session in self._rows(found, keys):
            if self._is_closed(session, over_by) or (session.key in unknown and self._is_unread(session)):
                self._put_back(row, session)
        for text, key in keys.items():
            if counts[text] >= OTHERS_MAX:  # there may be more
                self._many |= {key} & unknown
                self._asked.add(key)
            else:
                self._many.discard(key)

    def _is_unread(self, session: OpenSession) -> bool:
        """Tell whether a row that has not fired, of a key that is not whole, is an unread session."""
        return not session.pane.emitted and session.place > self._upto and session.end >= self.unfired_from

    def next_due(
        self, latest_end: Instant, sessions: Iterator[OpenSession], panes_max: int
    ) -> tuple[list[OpenSession], list[OpenSession]]:
        """Return the next sessions to emit, and those that were taken of `sessions` and have to wait."""
        done = SessionPlace(latest_end, INSTANT_MAX, LAST_HASH)
        if latest_end < self.unfired_from or self.unfired_from == INSTANT_MAX:
            self._upto = max(self._upto, done)
            return super().next_due(latest_end, sessions, panes_max)
        weights = self._sessions.weights
        room = (self._unfired_bytes_max - weights.total) // weights.each // EMISSION_PARTS
        panes_max = min(panes_max, max(PANES_MIN, room))
        here = list(islice(sessions, panes_max + 1))
        unread = self._unread_upto(here[-1].place if len(here) > panes_max else done, panes_max)
        due = sorted([*here, *unread], key=lambda session: session.place)
        last = due[panes_max - 1].place if len(due) > panes_max else done
        chosen = [session for session in due if session.place <= last]
        for session in chosen:
            if session in unread:
                self._put_back(unread.pop(session), session)
                self._read.add(session.key)
        self._upto = max(self._upto, last)
        later = [Instant(session.end) for session in unread]
        self.unfired_from = min(later) if later else self._next_end(self._upto)
        return chosen, [session for session in here if session.place > last]

    def _unread_upto(self, last: SessionPlace, sessions_max: int) -> dict[OpenSession, StoredPane]:
        """Read the next unread sessions: at least all up to a place, or more than `sessions_max`."""
        found: dict[OpenSession, StoredPane] = {}
        is_whole = cache(self._is_whole)
        after = self._upto
        while len(found) <= sessions_max and after < last:
            asked = min(max(sessions_max + 1 - len(found), PANES_MIN), PIECE_ROWS)  # some may be rows of what is here
            page = self.load(self._folded, EndedSessions(Instant(last.end), after, asked, unfired=True))
            rows = self._rows(page, {})
            found.update((s, row) for row, s in rows if not is_whole(s.key) and self._is_unread(s))
            if len(page) < asked:
                break
            after = last_place(page)
        return found

    def _next_end(self, after: SessionPlace) -> Instant:
        """Return a time before which no session behind a place ends that is unread."""
        found = self.load(self._folded, EndedSessions(INSTANT_MAX, after, 1, unfired=True))
        return Instant(last_place(found).end) if len(found) else INSTANT_MAX

    def spill(self, folded_bundle: int) -> None:
        """Let sessions leave memory, closed and unfired ones."""
        for key, bundle in list(self._fired.items()):
            if bundle > folded_bundle:
                break
            del self._fired[key]
        self._many = {key for key in self._many if self._has_unfired(key)}
        super().spill(folded_bundle)

    def _leave(self) -> None:
        """Let up to LEAVE_MAX sessions of either kind leave memory, and say in `_leaves` whether more may."""
        left = self._leave_unfired()
        super()._leave()
        self._leaves = self._leaves or left

    def _leave_unfired(self) -> bool:
        """Let unfired sessions leave memory, those of the keys that have changed first. Return whether more may."""
        sessions, bytes_max = self._sessions, self._unfired_bytes_max
        enough = bytes_max * 3 // 4
        if self._unfired_bytes() <= (enough if self._leaves else bytes_max):
            return False
        reached = int(self._upto.end)
        if self._pass is not None:  # it would take their rows for those of sessions that have fired
            reached = max(reached, self._pass.ended_by)
        most = LEAVE_MAX
        while self._changed and self._unfired_bytes() > enough:
            key, bundle = next(iter(self._changed.items()))
            if bundle > self._folded:
                return False
            if most <= 0:
                return True
            del self._changed[key]
            ends = [session.end for session in sessions.by_key[key] if not session.pane.emitted]
            most -= len(ends)
            if min(ends) <= reached:
                continue  # one of them is due: `note_stored` is going to add the key again
            sessions.leave_unfired(key)
            self._many.discard(key)
            self.unfired_from = min(self.unfired_from, Instant(min(ends)))
        return False

    def needs_fold(self) -> bool:
        """Tell whether closed or unfired sessions exceed their bound, or some are leaving."""
        return super().needs_fold() or self._unfired_bytes() > self._unfired_bytes_max

    def _exceeds_by_half(self) -> bool:
        return super()._exceeds_by_half() or self._unfired_bytes() > self._unfired_bytes_max * 3 // 2

    def _unfired_bytes(self) -> int:
        """Return the memory of unfired sessions."""
        return self._sessions.weights.total - self.bytes_in_memory
