"""Open sessions of one interval: the counterpart of `fixed_state.py` for windows that grow and merge.

A session that grows becomes another window, which begins at pane 0. The commit deletes the entry of the old one, and if
it had emitted, also deletes its result row; a retracting window retracts its pane. Open sessions of a key never
intersect; windows of a user's function (`user_windows.py`) may.

The store has one entry per (key, session): kind WINDOW, subkey "<start>/<end>", fire time the time of expiry.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence
from typing import TYPE_CHECKING

from millpy.model.checkpoint import Entries, Kind
from millpy.model.due_queue import DueQueue
from millpy.model.keys import Key, KeyHasher, key_from_text, key_texts
from millpy.model.stage import UNBOUNDED
from millpy.model.stored_windows import span_of
from millpy.model.time import Instant
from millpy.windowing.accumulation import PaneMerger
from millpy.windowing.accumulator import AccumulatorSet
from millpy.windowing.pane_codec import NO_TIME, DuePane, OpenPane, decode_pane, encode_panes
from millpy.windowing.timestamp_combiner import PaneHolds, hold_of
from millpy.windowing.window_memory import HOLD_BYTES, PANE_BYTES, SESSION_BYTES, Weights

if TYPE_CHECKING:
    from millpy.windowing.closed_sessions import ClosedSessions


class OpenSession:
    """An open session of a key.

    Attributes:
        alive: false once it has expired or was merged into another session.
    """

    __slots__ = ("alive", "end", "key", "pane", "start")

    def __init__(self, key: Key, start: int, end: int, pane: OpenPane) -> None:
        self.key = key
        self.start = start
        self.end = end
        self.pane = pane
        self.alive = True

    def __lt__(self, other: OpenSession) -> bool:
        return (self.start, self.end) < (other.start, other.end)

    def name(self) -> tuple[Key, int]:
        """Return what orders the windows with one end: the key, and the start (those of a user may overlap)."""
        return self.key, self.start

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
        spilled: the closed sessions, of which some are only in the store; None if all sessions are in memory.
    """

    def __init__(self, accumulators: AccumulatorSet, merger: PaneMerger, allowed_lateness_us: int) -> None:
        self._accumulators = accumulators
        self._merger = merger
        self.allowed_us = allowed_lateness_us
        self.spilled: ClosedSessions | None = None
        self.by_key: dict[Key, list[OpenSession]] = {}
        self._unfired: DueQueue[OpenSession] = _UnfiredSessions()
        self._unexpired = UnexpiredSessions()
        self._touched: dict[OpenSession, None] = {}
        self._gone: list[tuple[Key, int, int]] = []
        self._merged: list[tuple[Key, int, int]] = []  # closed sessions that have become part of others
        self._absorbed: list[DuePane] = []
        self._hasher = KeyHasher()
        self.holds: PaneHolds[OpenSession] | None = None
        self.weights = Weights(PANE_BYTES + SESSION_BYTES + accumulators.memory_bytes)

    def hold_times(self, *, retracts: bool) -> None:
        """Let panes hold the low watermark at their event time; `retracts` says whether they are retracted."""
        self.holds = PaneHolds(lambda session: hold_of(session.pane, retracts=retracts) if session.alive else NO_TIME)
        self.weights.each += HOLD_BYTES

    def recover(self, entries: Entries, key_types: tuple[type, ...]) -> None:
        """Load stored sessions; called for each part of the stored state."""
        for text, subkey, value in zip(entries.keys, entries.subkeys, entries.values, strict=True):
            key, (start, end) = key_from_text(text, key_types), span_of(subkey)
            if value is not None:
                self._recover_one(OpenSession(key, start, end, decode_pane(value, self._accumulators)), text, value)
            elif self.spilled is not None:
                self.spilled.note_deleted(key, start, end)

    def _recover_one(self, session: OpenSession, text: bytes, value: bytes) -> None:
        self._add(session)
        self.weights.weigh([session.pane], [text], [value])
        if self.spilled is not None and self.has_left(session.pane):
            self.spilled.waiting[session] = None

    def has_left(self, pane: OpenPane) -> bool:
        """Tell whether a session that has fired needs nothing more but late records."""
        return pane.emitted

    def is_here(self, key: Key, start: int, end: int) -> bool:
        """Tell whether a session is in memory."""
        return any((session.start, session.end) == (start, end) for session in self.by_key.get(key, ()))

    def load_closed(self, key: Key, start: int, end: int, text: bytes, value: bytes) -> None:
        """Put a stored session back. A row that could not have left memory is out of date, and is passed over."""
        session = OpenSession(key, start, end, decode_pane(value, self._accumulators))
        if self.has_left(session.pane):
            self._recover_one(session, text, value)

    def leave(self, session: OpenSession) -> None:
        """Take a closed session out of memory, which stays in the store."""
        session.alive = False
        self.weights.drop([session.pane])
        self._unlink(session)

    def forget_outdated(self) -> None:
        """Free what queues still keep of sessions that have left."""
        self._unexpired.remove_outdated()

    def finish_recovery(self) -> None:
        """Do nothing: `recover` puts each session in its place."""

    def open(self, key: Key, start: int, end: int, pane: OpenPane) -> None:
        """Open a session that intersects no other."""
        session = OpenSession(key, start, end, pane)
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
            if self.spilled is not None and self._has_ended(old.pane):
                self._merged.append((old.key, old.start, old.end))
            if old.pane.pane_index:  # a pane that failed counts as emitted but has no index
                self._absorbed.append(old.due())
        if same is None:
            self.open(others[0].key, start, end, pane)
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
        panes_max += len(due)
        if len(due) < panes_max:
            for session in self._unfired.take(latest_end):
                due[session] = None
                if len(due) >= panes_max:
                    break
        self._touched.update(due)
        return [session.due() for session in due]

    def _add_to_trigger(self, pane: OpenPane, new: OpenPane) -> None:
        """Do nothing: the default trigger has no state."""

    def _join_triggers(self, pane: OpenPane, olds: Sequence[OpenPane], end: int) -> None:
        """Do nothing: the default trigger has no state."""

    def _take_trigger(self, pane: OpenPane, new: OpenPane) -> None:
        """Do nothing: the default trigger has no state."""

    def _has_ended(self, pane: OpenPane) -> bool:
        """Tell whether a session has fired at its end, so that its row may be that of one that has left memory."""
        return pane.emitted

    def take_absorbed(self) -> list[DuePane]:
        """Return the emitted panes of sessions that were merged into others since the last call."""
        absorbed, self._absorbed = self._absorbed, []
        return absorbed

    def take_entries(self, watermark: Instant, bundle: int, panes_max: int = UNBOUNDED) -> Entries | None:
        """Expire up to `panes_max` sessions, and return the changes of this bundle as entries; None without any."""
        while (session := self._unexpired.first(watermark)) is not None:
            if not self._is_done(session) or panes_max <= 0:
                break
            panes_max -= 1
            self._remove(session)
        sessions, self._touched = list(self._touched), {}
        gone, self._gone = self._gone, []
        spilled = self.spilled
        if not sessions and not gone and (spilled is None or spilled.next_expiry() > watermark):
            return None
        if spilled is not None:
            spilled.note_stored(sessions, self._merged, bundle)
            self._merged = []
        for session in sessions:
            session.pane.bundle = bundle
        names = [(session.key, session.start, session.end) for session in sessions]
        if gone:  # a window of a function may come back in the turn in which it has become part of another
            written = set(names)
            gone = [name for name in gone if name not in written]
            names += gone
        entries = Entries(Kind.WINDOW, "")
        entries.keys = key_texts([key for key, _, _ in names])
        entries.key_hashes = self._hasher.hashes([key for key, _, _ in names]).tolist()
        entries.subkeys = [f"{start}/{end}" for _, start, end in names]
        panes = [session.pane for session in sessions]
        values = encode_panes(panes, self._accumulators)
        self.weights.weigh(panes, entries.keys, values)
        entries.values = [*values, *([None] * len(gone))]
        entries.fire_ats = [end + self.allowed_us for _, _, end in names]
        if spilled is not None:
            spilled.add_expired(entries, watermark, panes_max)
        return entries if entries.keys else None

    def _is_done(self, session: OpenSession) -> bool:
        """Tell whether a session that is over has nothing left to emit."""
        return session.pane.emitted

    def take_expired_without_pane(self) -> int:
        """Return 0: a session expires only after it has emitted."""
        return 0

    def next_end(self) -> Instant:
        """Return the end of the oldest session that has not fired; INSTANT_MAX without one."""
        return self._unfired.next_due()

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
            self.spilled.waiting.pop(session, None)
        self._touched.pop(session, None)
        if session.pane.bundle:
            self._gone.append((session.key, session.start, session.end))

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


class _UnfiredSessions(DueQueue[OpenSession]):
    __slots__ = ()

    def is_current(self, key: Key | None, item: OpenSession) -> bool:
        """Tell whether the session has neither grown, ended nor emitted its pane."""
        return item.alive and not item.pane.emitted
