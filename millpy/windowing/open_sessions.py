"""Open sessions of one interval: as `open_windows.py`, for windows that grow and merge.

A session that grows is another window: what was stored of it under its old name goes, and if it had emitted, its row
is deleted and its pane retracted in the same commit. The grown one begins at pane 0. Sessions of a key never intersect.

Stored as one entry a (key, session), kind WINDOW, subkey "<start>/<end>", fire time: when it expires.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence
from heapq import heapify, heappop, heappush
from typing import TypeAlias

from millpy.model.checkpoint import Entries, Kind
from millpy.model.keys import Key, KeyHasher, key_from_text, key_texts
from millpy.model.stage import UNBOUNDED
from millpy.model.time import INSTANT_MAX, Instant
from millpy.windowing.fold import Folds
from millpy.windowing.pane import DuePane, OpenPane, decode_pane, encode_panes
from millpy.windowing.room import AGGREGATE_BYTES, PANE_BYTES, SESSION_BYTES, Weights


class OpenSession:
    """One session of one key."""

    __slots__ = ("alive", "end", "key", "pane", "start")

    def __init__(self, key: Key, start: int, end: int, pane: OpenPane) -> None:
        self.key = key
        self.start = start
        self.end = end
        self.pane = pane
        self.alive = True

    def __lt__(self, other: OpenSession) -> bool:
        return self.start < other.start

    def due(self) -> DuePane:
        """As what is emitted."""
        return self.start, self.end, self.key, self.pane


_VOID_MIN = 1_000
_Heap: TypeAlias = "list[tuple[int, int, OpenSession]]"
"""(end, a number that breaks ties, session): void when the session has another end by now, or is over."""


class OpenSessions:
    """Sessions by key, in order of start; ordered by when they are due."""

    def __init__(self, folds: Folds, allowed_lateness_us: int) -> None:
        self._folds = folds
        self._allowed_us = allowed_lateness_us
        self.by_key: dict[Key, list[OpenSession]] = {}
        self._unfired: _Heap = []
        self._unexpired: _Heap = []
        self._pushed = 0
        self._touched: dict[OpenSession, None] = {}
        self._gone: list[tuple[Key, int, int]] = []
        self._retracted: list[DuePane] = []
        self._hasher = KeyHasher()
        self.weights = Weights(PANE_BYTES + SESSION_BYTES + AGGREGATE_BYTES * len(folds.folds))

    def recover(self, entries: Entries, key_types: tuple[type, ...]) -> None:
        """Take stored sessions, some of several."""
        for text, subkey, value in zip(entries.keys, entries.subkeys, entries.values, strict=True):
            if value is None:
                continue
            start, _, end = subkey.partition("/")
            pane = decode_pane(value, self._folds)
            self._add(OpenSession(key_from_text(text, key_types), int(start), int(end), pane))
            self.weights.weigh([pane], [text], [value])

    def recovered(self) -> None:
        """All stored sessions are here."""

    def open(self, key: Key, start: int, end: int, pane: OpenPane) -> None:
        """Open a session that intersects none."""
        session = OpenSession(key, start, end, pane)
        self._add(session)
        self._touched[session] = None

    def join(self, olds: Sequence[OpenSession], start: int, end: int, pane: OpenPane) -> None:
        """Sessions of one key go on as one, with what has come in this turn."""
        first = olds[0]
        if len(olds) == 1 and (first.start, first.end) == (start, end):
            first.pane.values = self._folds.merge(first.pane.values, pane.values)
            first.pane.late_count += pane.late_count
            self._touched[first] = None
            return
        values = olds[0].pane.values
        for old in olds[1:]:
            values = self._folds.merge(values, old.pane.values)
        pane.values = self._folds.merge(values, pane.values)
        for old in olds:
            pane.late_count += old.pane.late_count
            self._let_go(old)
            if old.pane.pane_index:  # what has failed was counted as emitted and has none
                self._retracted.append(old.due())
        self.open(first.key, start, end, pane)

    def due(self, watermark: Instant, panes_max: int = UNBOUNDED) -> list[DuePane]:
        """Panes to emit now: those changed since, and of sessions that the watermark has reached, up to panes_max."""
        due = {session: None for session in self._touched if session.end <= watermark}
        panes_max += len(due)
        while (session := self._next(self._unfired)) is not None and session.end <= watermark and len(due) < panes_max:
            heappop(self._unfired)
            if not session.pane.emitted:
                due[session] = None
        self._touched.update(due)
        return [session.due() for session in due]

    def take_retracted(self) -> list[DuePane]:
        """Emitted panes of sessions that others have absorbed."""
        retracted, self._retracted = self._retracted, []
        return retracted

    def take_entries(self, watermark: Instant, bundle: int, panes_max: int = UNBOUNDED) -> Entries | None:
        """Expire what the watermark has passed, up to panes_max; changes of this bundle as entries."""
        while (session := self._next(self._unexpired)) is not None and session.end + self._allowed_us <= watermark:
            if not session.pane.emitted or panes_max <= 0:
                break
            panes_max -= 1
            self._let_go(session)
        sessions, self._touched = list(self._touched), {}
        gone, self._gone = self._gone, []
        if not sessions and not gone:
            return None
        for session in sessions:
            session.pane.bundle = bundle
        names = [*((session.key, session.start, session.end) for session in sessions), *gone]
        entries = Entries(Kind.WINDOW, "")
        entries.keys = key_texts([key for key, _, _ in names])
        entries.key_hashes = self._hasher.hashes([key for key, _, _ in names]).tolist()
        entries.subkeys = [f"{start}/{end}" for _, start, end in names]
        panes = [session.pane for session in sessions]
        values = encode_panes(panes, self._folds)
        self.weights.weigh(panes, entries.keys, values)
        entries.values = [*values, *([None] * len(gone))]
        entries.fire_ats = [end + self._allowed_us for _, _, end in names]
        return entries

    def take_silent(self) -> int:
        """None: a session expires only once it has emitted."""
        return 0

    def oldest_hold(self) -> Instant:
        """Output time of the oldest session without its on-time pane."""
        session = self._next(self._unfired)
        return INSTANT_MAX if session is None else Instant(session.end - 1)

    def next_due(self) -> Instant:
        """When the next session fires or expires."""
        fires, expires = self._next(self._unfired), self._next(self._unexpired)
        return Instant(
            min(
                INSTANT_MAX if fires is None else fires.end,
                INSTANT_MAX if expires is None else expires.end + self._allowed_us,
            )
        )

    def _add(self, session: OpenSession) -> None:
        sessions = self.by_key.get(session.key)
        if sessions is None:
            self.by_key[session.key] = [session]
        else:
            insort(sessions, session)
        self._pushed += 1
        self.weights.panes += 1
        if not session.pane.emitted:
            heappush(self._unfired, (session.end, self._pushed, session))
        heappush(self._unexpired, (session.end, self._pushed, session))
        if len(self._unexpired) > 2 * self.weights.panes + _VOID_MIN:
            self._unfired, self._unexpired = _alive(self._unfired), _alive(self._unexpired)

    def _let_go(self, session: OpenSession) -> None:
        session.alive = False
        self.weights.drop([session.pane])
        sessions = self.by_key[session.key]
        if len(sessions) == 1:
            del self.by_key[session.key]
        else:
            sessions.remove(session)
        self._touched.pop(session, None)
        if session.pane.bundle:
            self._gone.append((session.key, session.start, session.end))

    def _next(self, heap: _Heap) -> OpenSession | None:
        """The first session of a heap that is still what it says; one that has left with a change is not unfired."""
        while heap and (not heap[0][2].alive or (heap is self._unfired and heap[0][2].pane.emitted)):
            heappop(heap)
        return heap[0][2] if heap else None


def _alive(heap: _Heap) -> _Heap:
    """A heap without the sessions that have grown or are over."""
    kept = [item for item in heap if item[2].alive]
    heapify(kept)
    return kept
