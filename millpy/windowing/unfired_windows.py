"""Unfired windows: panes that have left memory before their window fires.

    unfired   a window that the watermark has not reached, or that has more panes than a turn may emit
    unread    an unfired window with panes that are only in the store

If the unfired panes of an interval exceed their bound, those that have not changed for longest leave memory once they
are folded, as panes of closed windows do (`closed_windows.py`). A record brings its pane back before the step changes
anything. When the watermark reaches the end of a window, its panes are read from the store in the order of their
places, in each turn as many as it emits. The window holds the low watermark until the last one is emitted.

    place     the hash of a pane's key, then the key: panes in memory and in the store fire in this order, so that what
              a turn emits does not depend on where they are
    progress  only the emitted panes tell which are left. A new owner reads from the first place on, and the store
              leaves out what was emitted. Panes that an earlier owner has deleted have their rows until the next fold;
              a new owner knows them by their tombstones.

Only panes of a few words leave memory before they fire: the records of a turn may bring back one pane each, so these
must fit into memory. The bound on open windows then counts what a turn opens; all others can leave.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from millpy.model.checkpoint import Entries
from millpy.model.keys import Key, KeyHasher, key_from_text, key_texts
from millpy.model.stored_windows import FIRST_PLACE, PaneNeed, PanePlace, QueryWindows, UnfiredPanes, no_query
from millpy.windowing.closed_windows import ClosedWindows
from millpy.windowing.pane_codec import OpenPane

READ_BYTES_MAX = 32_000_000
"""Bytes of stored panes that are read at once."""
EMISSION_PARTS = 4
"""What a turn emits may take one of these parts of the room, because its rows take memory, too."""
HASHES_MAX = 100_000
"""Keys of an interval whose hashes are remembered: those in the store do not count."""
PANES_MIN = 1_000
"""Panes that a turn may read to emit them, however little memory is left."""


class NextPanes(NamedTuple):
    """The panes of a window that a turn emits.

    Attributes:
        keys: their keys; all of them are in memory.
        is_last: whether no other pane of the window is left.
    """

    keys: list[Key]
    is_last: bool


class UnfiredWindows(ClosedWindows):
    """The closed and unfired windows of one key interval that are not, or not all, in memory.

    Args:
        of_closed: the arguments of `ClosedWindows`.
        unfired_bytes_max: the bound on the memory of unfired windows.
        key_types: the Python types of the fields of keys.
        hasher: hashes keys.
        recovered_bundle: the last bundle that the recovery has read.

    Attributes:
        unread: the starts of unread windows -> the place up to which their panes have been emitted.
        query: asks the store for panes, during a step.
    """

    def __init__(
        self,
        *of_closed: Any,
        unfired_bytes_max: int,
        key_types: tuple[type, ...],
        hasher: KeyHasher,
        recovered_bundle: int,
    ) -> None:
        super().__init__(*of_closed)
        self._unfired_bytes_max = unfired_bytes_max
        self._key_types = key_types
        self._recovered_bundle = recovered_bundle
        self._deleted: set[tuple[str, bytes]] = set()
        self._hasher = hasher
        self._passed: dict[int, list[Key]] = {}
        self.unread: dict[int, PanePlace] = {}
        self._unread_by_need = {PaneNeed.EMISSION: self.unread}
        self.query: QueryWindows = no_query

    def note_deleted(self, entries: Entries) -> None:
        """Take note of panes that were deleted before the recovery; their rows may not be folded away yet."""
        columns = zip(entries.subkeys, entries.keys, entries.values, strict=True)
        self._deleted.update((subkey, key) for subkey, key, value in columns if value is None)

    def is_unread(self, start: int) -> bool:
        """Tell whether a window has panes that are only in the store, and have to be read before it expires."""
        return any(start in places for places in self._unread_by_need.values())

    def recover_window(self, start: int, *, closed: bool) -> None:
        """Take note of a window of which a new owner has read only what has changed since the last fold."""
        self.stored.add(start)
        if not closed:
            self.unread[start] = FIRST_PLACE

    def next_panes(
        self, start: int, waiting: Iterable[Key], panes_max: int, need: PaneNeed = PaneNeed.EMISSION
    ) -> NextPanes:
        """Return the next panes of an unread window in order of their places, and bring them into memory.

        Args:
            start: the start of the window.
            waiting: the keys of its panes in memory that need it, too.
            panes_max: the most panes to return.
            need: what the panes need.
        """
        unread = self._unread_by_need[need]
        panes, subkey, after = self._panes[start], self._subkey(start), unread[start]
        room = (self._unfired_bytes_max - self._weights.total) // self._weights.each // EMISSION_PARTS
        panes_max = min(panes_max, max(PANES_MIN, room))
        found = self.query(self._folded, UnfiredPanes(subkey, after, panes_max + 1, READ_BYTES_MAX, need))
        is_last = len(found) <= panes_max and sum(map(len, filter(None, found.values))) < READ_BYTES_MAX
        upto = None if is_last else PanePlace(found.key_hashes[-1], found.keys[-1])
        keys = [key_from_text(text, self._key_types) for text in found.keys]
        # What is in memory is newer than its row.
        stored = {
            PanePlace(hashed, text): (row, key)
            for row, (hashed, text, key) in enumerate(zip(found.key_hashes, found.keys, keys, strict=True))
            if key not in panes and (subkey, text) not in self._deleted
        }
        places = places_of(list(waiting), self._hasher, upto) | {place: key for place, (_, key) in stored.items()}
        chosen = sorted(places)
        if len(chosen) > panes_max:
            chosen, is_last = chosen[:panes_max], False
            upto = chosen[-1]
        rows = [stored[place][0] for place in chosen if place in stored]
        if rows:
            self._absorb(found.take(rows))
        if is_last:
            del unread[start]
        elif upto is not None:
            unread[start] = upto
        next_keys = [places[place] for place in chosen]
        self._passed.setdefault(start, []).extend(next_keys)
        return NextPanes(next_keys, is_last)

    def take_passed(self, start: int) -> list[Key]:
        """Return the keys of the panes of a window that `next_panes` has returned in this turn."""
        return list(dict.fromkeys(self._passed.pop(start, [])))

    def end_turn(self) -> None:
        """Forget which panes `next_panes` has returned."""
        self._passed.clear()

    def spill(self, folded_bundle: int, first_open_end: int) -> None:
        """Let panes leave memory: of closed windows as before, of unfired ones those that changed first."""
        super().spill(folded_bundle, first_open_end)
        if folded_bundle >= self._recovered_bundle:
            self._deleted.clear()
        over = self._unfired_bytes(first_open_end) - self._unfired_bytes_max
        if over <= 0:
            return
        weights = self._weights
        unfired = dict(self._unfired_panes(first_open_end))
        changed = [pane.bundle for panes in unfired.values() for pane in panes.values()]
        bundles = np.array(changed, np.int64)
        bundles = bundles[(bundles > 0) & (bundles <= folded_bundle)]
        left = min(len(bundles), (over + self._unfired_bytes_max // 4) // weights.each + 1)
        if not left:
            return
        last = int(np.partition(bundles, left - 1)[left - 1])
        of_last = left - int(np.count_nonzero(bundles < last))  # of the panes that changed in that bundle, only these
        for start in sorted(unfired):
            out = []
            for key, pane in unfired[start].items():
                if 0 < pane.bundle < last or (pane.bundle == last and of_last > 0):
                    out.append(key)
                    of_last -= pane.bundle == last
            if out:
                self._leave_unfired(start, out)

    def _unfired_panes(self, first_open_end: int) -> Iterator[tuple[int, Mapping[Key, OpenPane]]]:
        """Yield the start of each window with unfired panes in memory, and these."""
        for start, panes in self._panes.items():
            if panes and self._end_of(start) >= first_open_end:
                yield start, panes

    def _leave_unfired(self, start: int, keys: list[Key]) -> None:
        """Let unfired panes of a window leave memory."""
        self._leave(start, keys)
        self.unread.setdefault(start, FIRST_PLACE)

    def needs_fold(self, first_open_end: int) -> bool:
        """Tell whether closed or unfired windows exceed their bound."""
        return super().needs_fold(first_open_end) or self._unfired_is_above(self._unfired_bytes_max, first_open_end)

    def expire(self, start: int, bundle: int) -> None:
        """Forget a window that expires in a bundle; see `ClosedWindows.expire`."""
        super().expire(start, bundle)
        for places in self._unread_by_need.values():
            places.pop(start, None)

    def _exceeds_by_half(self, first_open_end: int) -> bool:
        limit = self._unfired_bytes_max * 3 // 2
        return super()._exceeds_by_half(first_open_end) or self._unfired_is_above(limit, first_open_end)

    def _unfired_is_above(self, bytes_max: int, first_open_end: int) -> bool:
        return self._weights.total > bytes_max and self._unfired_bytes(first_open_end) > bytes_max

    def _unfired_bytes(self, first_open_end: int) -> int:
        """Return the memory of unfired panes."""
        weights = self._weights
        unfired = (weights.panes - self._closed_panes(first_open_end)) * weights.each
        if weights.large:
            found = (panes for _, panes in self._unfired_panes(first_open_end))
            unfired += sum(weights.large.get(id(pane), 0) for panes in found for pane in panes.values())
        return unfired


def places_of(keys: list[Key], hasher: KeyHasher, upto: PanePlace | None = None) -> dict[PanePlace, Key]:
    """Return place -> key of the keys whose places are not behind `upto`."""
    hashes = hasher.hashes(keys).tolist() if keys else []
    if upto is not None:
        keys = [key for key, hashed in zip(keys, hashes, strict=True) if hashed <= upto.key_hash]
        hashes = [hashed for hashed in hashes if hashed <= upto.key_hash]
    found = dict(zip(map(PanePlace, hashes, key_texts(keys)), keys, strict=True))
    return found if upto is None else {place: key for place, key in found.items() if place <= upto}


def is_unread(windows: ClosedWindows | None, start: int) -> bool:
    """Tell whether a window has panes that are only in the store, and have to be read before it expires."""
    return isinstance(windows, UnfiredWindows) and windows.is_unread(start)
