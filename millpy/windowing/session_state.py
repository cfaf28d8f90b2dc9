"""Open sessions of one interval: the counterpart of `fixed_state.py` for windows that grow and merge.

A session that grows becomes another window, which begins at pane 0. The commit deletes the entry of the old one, and if
it had emitted, also deletes its result row; a retracting window retracts its pane. Open sessions of a key never
intersect; windows of a user's function (`user_windows.py`) may.

A session may be only in the store: between firing and expiry (`closed_sessions.py`), or before (`unfired_sessions.py`).

The store has one entry per (key, session): kind WINDOW, subkey "<start>/<end>", fire time the time of expiry.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from itertools import islice, takewhile
from operator import attrgetter
from typing import TYPE_CHECKING

from millpy.model.checkpoint import Entries, Kind
from millpy.model.due_queue import DueQueue
from millpy.model.keys import Key, key_from_text, key_texts
from millpy.model.stage import UNBOUNDED
from millpy.model.stored_windows import SessionPlace, span_of
from millpy.model.time import Instant
from millpy.windowing.accumulation import PaneMerger
from millpy.windowing.accumulator import AccumulatorSet
from millpy.windowing.pane_codec import NO_TIME, DuePane, OpenPane, decode_pane, encode_panes
from millpy.windowing.timestamp_combiner import PaneHolds, hold_of
from millpy.windowing.window_memory import HOLD_BYTES, PANE_BYTES, SESSION_BYTES, Weights

if TYPE_CHECKING:
    from millpy.windowing.closed_sessions import ClosedSessions

_START = attrgetter("start")
_LEFT = OpenPane([])
"""The pane of a session that has left memory."""


class OpenSession:
    """An open session of a key.

    Attributes:
        key_hash: the hash of its key.
        alive: false once it has expired, left memory, or was merged into another session.
    """

    __slots__ = ("alive", "end", "key", "key_hash", "pane", "start")

    def __init__(self, key: Key, key_hash: int, start: int, end: int, pane: OpenPane) -> None:
        self.key = key
        self.key_hash = key_hash
        self.start = start
        self.end = end
        self.pane = pane
        self.alive = True

    def __lt__(self, other: OpenSession) -> bool:
        return (self.start, self.end) < (other.start, other.end)

    @property
    def place(self) -> SessionPlace:
        """Where it is in the order in which sessions fire."""
        return SessionPlace(self.end, self.start, self.key_hash)

    def name(self) -> tuple[int, int, Key]:
        """Return what orders the windows with one end: as their places do, then by key."""
        return self.start, self.key_hash, self.key

    def due(self) -> DuePane:
        """Return the session's pane, to be emitted or taken back."""
        return self.start, self.end, self.key, self.pane


class OpenSessions:
    """The open sessions of one key interval.

    Attributes:
        by_key: key -> its sessions, by start.
        weights: the memory of the sessions.
        allowed_us: the allowed lateness.
        holds: the times at which sessions hold the low watermark, if they combine the times of their records.
        spilled: the sessions that may be only in the store; None if all sessions are in memory.
    """

    def __init__(self, accumulators: AccumulatorSet, merger: PaneMerger, allowed_lateness_us: int) -> None:
        self._accumulators = accumulators
        self._merger = merger
        self.allowed_us = allowed_lateness_us
        self.spilled: ClosedSessions | None = None
        self.by_key: dict[Key, list[OpenSession]] = {}
        self._unfired: DueQueue[OpenSession] = _SessionEnds()
        self._unexpired = UnexpiredSessions()
        self._touched: dict[OpenSession, None] = {}
        self._gone: list[OpenSession] = []
        self._absorbed: list[DuePane] = []
        self.holds: PaneHolds[OpenSession] | None = None
        self.weights = Weights(PANE_BYTES + SESSION_BYTES + accumulators.memory_bytes)

    def hold_times(self, *, retracts: bool) -> None:
        """Let panes hold the low watermark at their event time; `retracts` says whether they are retracted."""
        self.holds = PaneHolds(lambda session: hold_of(session.pane, retracts=retracts) if session.alive else NO_TIME)
        self.weights.each += HOLD_BYTES

    def recover(self, entries: Entries, key_types: tuple[type, ...]) -> None:
        """Load stored sessions; called for each part of the stored state."""
        columns = entries.keys, entries.key_hashes, entries.subkeys, entries.values
        for text, key_hash, subkey, value in zip(*columns, strict=True):
            key, (start, end) = key_from_text(text, key_types), span_of(subkey)
            if value is not None:
                session = self.decoded(key, key_hash, start, end, value)
                self.put_back(session, text, value)
                if self.spilled is not None:
                    self.spilled.note_recovered(session)
            elif self.spilled is not None:
                self.spilled.note_deleted(key, start, end)

    def decoded(self, key: Key, key_hash: int, start: int, end: int, value: bytes) -> OpenSession:
        """Return a stored session."""
        return OpenSession(key, key_hash, start, end, decode_pane(value, self._accumulators))

    def put_back(self, session: OpenSession, text: bytes, value: bytes) -> None:
        """Put a stored session into memory, given the stored text of its key and its pane."""
        self._add(session)
        self.weights.weigh([session.pane], [text], [value])
        if self.spilled is not None:
            self.spilled.note_read(session)

    def has_left(self, pane: OpenPane) -> bool:
        """Tell whether a session that has fired needs nothing more but late records."""
        return pane.emitted

    def is_here(self, key: Key, start: int, end: int) -> bool:
        """Tell whether a session is in memory."""
        sessions = self.by_key.get(key, ())
        first = bisect_left(sessions, start, key=_START)
        same = takewhile(lambda session: session.start == start, islice(sessions, first, None))
        return any(session.end == end for session in same)

    def leave(self, session: OpenSession) -> None:
        """Take a session out of memory, which stays in the store."""
        session.alive = False
        self.weights.drop([session.pane])
        self._unlink(session)
        session.pane = _LEFT  # a queue may keep the session for long

    def leave_unfired(self, key: Key) -> None:
        """Take the sessions of a key that have not fired out of memory, which stay in the store."""
        fired = [session for session in self.by_key[key] if session.pane.emitted]
        for session in self.by_key[key]:
            session.alive = session.pane.emitted
        left = [session for session in self.by_key[key] if not session.alive]
        self.weights.drop([session.pane for session in left])
        for session in left:
            session.pane = _LEFT
        if fired:
            self.by_key[key] = fired
        else:
            del self.by_key[key]

    def forget_outdated(self) -> bool:
        """Free what one of the queues still keeps of sessions that have left. Return whether that was much."""
        return any(queue.trim(self.weights.panes) for queue in self._queues())

    def _queues(self) -> tuple[DueQueue[OpenSession], ...]:
        return self._unfired, self._unexpired

    def finish_recovery(self) -> None:
        """Order what `recover` has loaded."""
        if self.spilled is not None:
            self.spilled.finish_recovery()

    def open(self, key: Key, key_hash: int, start: int, end: int, pane: OpenPane) -> None:
        """Open a session that intersects no other."""
        session = OpenSession(key, key_hash, start, end, pane)
        self._add(session)
        self._touched[session] = None

    def join(self, olds: Sequence[OpenSession], start: int, end: int, pane: OpenPane) -> None:
        """Merge open sessions of one key, and a pane of this turn's records, into one session.

        A window of a user's function may be as long as one of those that it is merged from: it then continues that one.
        """
        same = next((old for old in olds if (old.start, old.end) == (start, end)), None)
        others = [old for old in olds if old is not same]
        if others:
            self._merger.join(pane, [old.pane for old in others])
            self._join_triggers(pane, [old.pane for old in olds], end)
        for old in others:
            self._remove(old)
            if self.spilled is not None:
                self.spilled.note_merged(old)
            if old.pane.pane_index:  # a pane that failed counts as emitted but has no index
                self._absorbed.append(old.due())
        if same is None:
            self.open(others[0].key, others[0].key_hash, start, end, pane)
            return
        if others:
            self._merger.absorb(same.pane, pane)
            self._take_trigger(same.pane, pane)
        else:
            self._merger.merge(same.pane, pane.values, pane.late_count, pane.at)
            self._add_to_trigger(same.pane, pane)
        if self.holds is not None:
            self.holds.add(same)
        self._touched[same] = None

    def due(self, latest_end: Instant, panes_max: int = UNBOUNDED) -> list[DuePane]:
        """Return the panes to emit of sessions that end by `latest_end`: changed ones, and up to `panes_max` others."""
        due = {session: None for session in self._touched if session.end <= latest_end}
        others = (session for session in self._unfired.take(latest_end) if session not in due)
        if self.spilled is None:
            chosen = list(islice(others, panes_max))
        else:
            chosen, later = self.spilled.next_due(latest_end, others, panes_max)
            for session in later:
                self._unfired.add(session.end, session.name(), session)
        due.update(dict.fromkeys(chosen))
        self._touched.update(due)
        return [session.due() for session in due]

    def _add_to_trigger(self, pane: OpenPane, new: OpenPane) -> None:
        """Do nothing: the default trigger has no state."""

    def _join_triggers(self, pane: OpenPane, olds: Sequence[OpenPane], end: int) -> None:
        """Do nothing: the default trigger has no state."""

    def _take_trigger(self, pane: OpenPane, new: OpenPane) -> None:
        """Do nothing: the default trigger has no state."""

    def has_ended(self, pane: OpenPane) -> bool:
        """Tell whether a session has fired at its end, so that its row may be that of one that has left memory."""
        return pane.emitted

    def take_absorbed(self) -> list[DuePane]:
        """Return the emitted panes of sessions that were merged into others since the last call."""
        absorbed, self._absorbed = self._absorbed, []
        return absorbed

    def take_entries(self, watermark: Instant, bundle: int, panes_max: int = UNBOUNDED) -> Entries | None:
        """Expire up to `panes_max` sessions, and return the changes of this bundle as entries; None without any."""
        spilled = self.spilled
        fired = [] if spilled is None else [session.key for session in self._touched if session.pane.emitted]
        while (session := self._unexpired.first(watermark)) is not None:
            if not self._is_done(session) or panes_max <= 0 or not (spilled is None or spilled.has_passed(session)):
                break
            panes_max -= 1
            self._remove(session)
        sessions, self._touched = list(self._touched), {}
        gone, self._gone = self._gone, []
        if spilled is not None:  # a session that opens, fires and expires within the turn leaves nothing to fold
            stored = {session.key for session in (*sessions, *gone)} if fired else ()
            spilled.note_fired(dict.fromkeys(key for key in fired if key in stored), bundle)
        if not sessions and not gone and (spilled is None or spilled.next_expiry() > watermark):
            return None
        for session in sessions:
            session.pane.bundle = bundle
        if gone:  # a window of a function may come back in the turn in which it has become part of another
            written = {(session.key, session.start, session.end) for session in sessions}
            gone = [one for one in gone if (one.key, one.start, one.end) not in written]
        named = sessions + gone
        entries = Entries(Kind.WINDOW, "")
        entries.keys = key_texts([session.key for session in named])
        entries.key_hashes = [session.key_hash for session in named]
        entries.subkeys = [f"{session.start}/{session.end}" for session in named]
        panes = [session.pane for session in sessions]
        values = encode_panes(panes, self._accumulators)
        self.weights.weigh(panes, entries.keys, values)
        entries.values = [*values, *([None] * len(gone))]
        entries.fire_ats = [session.end + self.allowed_us for session in named]
        if spilled is not None:
            spilled.note_stored(sessions, bundle)
            spilled.add_expired(entries, watermark, panes_max)
        return entries if entries.keys else None

    def _is_done(self, session: OpenSession) -> bool:
        """Tell whether a session that is over has nothing left to emit."""
        return session.pane.emitted

    def take_expired_without_pane(self) -> int:
        """Return 0: a session expires only after it has emitted."""
        return 0

    def next_end(self) -> Instant:
        """Return the end of the oldest session that has not fired, or one before it; INSTANT_MAX without one."""
        due = self._unfired.next_due()
        return due if self.spilled is None else min(due, self.spilled.unfired_from)

    def oldest_end(self) -> Instant:
        """Return the end of the oldest session that holds the low watermark; INSTANT_MAX without one."""
        return self.next_end()

    def next_expiry(self) -> Instant:
        """Return when the next session expires; INSTANT_MAX without one."""
        due = self._unexpired.next_due()
        return due if self.spilled is None else min(due, self.spilled.next_expiry())

    def _add(self, session: OpenSession) -> None:
        sessions = self.by_key.get(session.key)
        if sessions is None:
            self.by_key[session.key] = [session]
        else:
            insort(sessions, session)
        self.weights.panes += 1
        self._queue(session)
        if self.holds is not None:
            self.holds.add(session)

    def _queue(self, session: OpenSession) -> None:
        if not session.pane.emitted:
            self._unfired.add(session.end, session.name(), session, live=self.weights.panes)
        self._unexpired.add(session.end + self.allowed_us, session.name(), session, live=self.weights.panes)

    def _remove(self, session: OpenSession) -> None:
        session.alive = False
        self.weights.drop([session.pane])
        self._unlink(session)
        if self.spilled is not None:
            self.spilled.forget(session)
        self._touched.pop(session, None)
        if session.pane.bundle:
            self._gone.append(session)

    def _unlink(self, session: OpenSession) -> None:
        """Remove a session from those of its key, so that no record joins it."""
        sessions = self.by_key[session.key]
        if len(sessions) == 1:
            del self.by_key[session.key]
        else:
            sessions.remove(session)


class UnexpiredSessions(DueQueue[OpenSession]):
    """Sessions by their expiry."""

    __slots__ = ()

    def is_current(self, key: Key | None, item: OpenSession) -> bool:
        """Tell whether the session has neither grown nor ended."""
        return item.alive


class _SessionEnds(DueQueue[OpenSession]):
    __slots__ = ()

    def is_current(self, key: Key | None, item: OpenSession) -> bool:
        """Tell whether the session has neither grown, ended nor emitted its pane."""
        return item.alive and not item.pane.emitted
