"""Closed windows: panes that have left memory and wait in the store for late records.

    closed    a window that has fired: it no longer holds the watermark, and waits until it expires
    stored    a closed window with panes that are only in the store

A pane leaves memory once its window is closed and its last change is folded, if the interval's closed panes exceed
their bound. The row in the store is then the pane, whatever commits are in flight. So a read of folded rows finds what
is not in memory, without deltas, and what has changed since the last fold is always in memory. A late record brings
its pane back before the step changes anything.

When a stored window expires, its panes in memory leave as those of any other. The rest, of which the store alone knows,
is deleted by one statement, once the bundle in which it has expired is committed. That deletion needs no delta: a new
owner that finds the rows again knows by its watermark that they have expired.

Results do not depend on what is in memory (I9): a record finds its pane in either place, and the bound on open windows
counts only those that have not fired.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, MutableMapping, Sequence

import numpy as np

from millpy.model.checkpoint import Entries
from millpy.model.keys import Key, key_texts
from millpy.model.record import Instants
from millpy.model.stage import LoadWindows, no_windows
from millpy.windowing.group_by import Integers
from millpy.windowing.pane_codec import OpenPane
from millpy.windowing.window_memory import Weights

Absorb = Callable[[Entries], None]


class ClosedWindows:
    """The closed windows of one key interval that are not, or not all, in memory.

    Args:
        panes: window start -> key -> pane in memory; a stored window is there, too, maybe without panes.
        weights: the memory of the panes.
        end_of: returns the end of the window that begins at a start.
        has_left: tells whether a pane of a closed window has been emitted.
        absorb: adds loaded panes to `panes`.
        bytes_max: the bound on the memory of closed windows.
        folded_bundle: the last bundle whose changes are rows in the store.

    Attributes:
        stored: the starts of stored windows. Nothing else is remembered of them.
        expired: (subkey, bundle) of stored windows that have expired in a bundle, and may have rows.
        load: loads windows from the store, during a step.
    """

    reads_before_expiry = False
    """Whether a window that is over may have panes in the store that are still to be emitted."""

    def __init__(
        self,
        panes: MutableMapping[int, dict[Key, OpenPane]],
        weights: Weights,
        end_of: Callable[[int], int],
        has_left: Callable[[OpenPane], bool],
        absorb: Absorb,
        bytes_max: int,
        folded_bundle: int,
    ) -> None:
        self._panes = panes
        self._weights = weights
        self._end_of = end_of
        self._has_left = has_left
        self._absorb = absorb
        self._bytes_max = bytes_max
        self._folded = folded_bundle
        self._counted = (0, 0, 0)
        self._searched: tuple[int, ...] = ()
        self.stored: set[int] = set()
        self.expired: list[tuple[str, int]] = []
        self.load: LoadWindows = no_windows

    def recover_window(self, start: int, *, closed: bool) -> None:
        """Take note of a window of which a new owner has read only what has changed since the last fold."""
        assert closed, start
        self.stored.add(start)

    def fetch(self, starts: Instants, codes: Integers, keys: Sequence[Key]) -> None:
        """Load the panes of (window, key code) pairs that are only in the store."""
        if not self.stored:
            return
        distinct, ranks = np.unique(starts, return_inverse=True)
        is_stored = np.array([start in self.stored for start in distinct.tolist()], np.bool_)
        if not is_stored.any():
            return
        at = np.flatnonzero(is_stored[ranks])
        pairs = np.unique(ranks[at] * len(keys) + codes[at])
        self.fetch_pairs(
            (start, keys[code])
            for start, code in zip(distinct[pairs // len(keys)].tolist(), (pairs % len(keys)).tolist(), strict=True)
        )

    def fetch_pairs(self, pairs: Iterable[tuple[int, Key]]) -> None:
        """Load the panes of (window, key) pairs that are only in the store."""
        missing = [
            (start, key)
            for start, key in dict.fromkeys(pairs)
            if start in self.stored and key not in self._panes.get(start, ())
        ]
        if not missing:
            return
        names = {start: self._subkey(start) for start in {start for start, _ in missing}}
        texts = key_texts([key for _, key in missing])
        self._absorb(self.load(self._folded, [names[start] for start, _ in missing], texts))

    def fetch_beside(
        self, starts: Instants, codes: Integers, keys: Sequence[Key], neighbors: Callable[[int], tuple[int, int]]
    ) -> None:
        """Load the panes of the windows next to (window, key code) pairs, which tell whether the key continues."""
        if self.stored:
            beside = {start: neighbors(start) for start in np.unique(starts).tolist()}
            pairs = dict.fromkeys(zip(starts.tolist(), codes.tolist(), strict=True))
            self.fetch_pairs((other, keys[code]) for start, code in pairs for other in beside[start])

    def spill(self, folded_bundle: int, first_open_end: int) -> None:
        """Let panes of closed windows leave memory, oldest windows first, if all exceed their bound.

        Args:
            folded_bundle: the last bundle whose changes are rows in the store.
            first_open_end: the end of the first window that has not fired; those that end before it are closed.
        """
        self._folded = folded_bundle
        weights, panes = self._weights, self._panes
        closed = [start for start, of in panes.items() if of and self._end_of(start) < first_open_end]
        open_bytes = (weights.panes - sum(map(self._count, closed))) * weights.each
        if weights.total - open_bytes <= self._bytes_max:
            return
        for start in sorted(closed):
            of_window = panes[start].items()
            out = [key for key, pane in of_window if 0 < pane.bundle <= folded_bundle and self._has_left(pane)]
            if not out:
                continue
            self._leave(start, out)
            if weights.total - open_bytes <= self._bytes_max * 3 // 4:
                return

    def _leave(self, start: int, keys: Sequence[Key]) -> None:
        """Let panes of a window leave memory."""
        self._weights.drop([self._panes[start].pop(key) for key in keys])
        self._forget(start, keys)
        if not self._panes[start]:
            self._panes[start] = {}  # frees the table of the old one
        self.stored.add(start)

    def needs_fold(self, first_open_end: int) -> bool:
        """Tell whether closed windows exceed the bound: they leave memory once their changes are folded."""
        return self._is_above(self._bytes_max, first_open_end)

    def is_over(self, first_open_end: int) -> bool:
        """Tell whether closed windows exceed the bound by half although all that are folded have left memory."""
        if self._scope(first_open_end) != self._searched and self._exceeds_by_half(first_open_end):
            self.spill(self._folded, first_open_end)  # panes that were loaded, and have not changed
            self._searched = self._scope(first_open_end)
        return self._exceeds_by_half(first_open_end)

    def _scope(self, first_open_end: int) -> tuple[int, ...]:
        """Return what decides which panes may leave: while it stays, a search finds no other ones."""
        return self._folded, self._weights.panes, first_open_end

    def _exceeds_by_half(self, first_open_end: int) -> bool:
        return self._is_above(self._bytes_max * 3 // 2, first_open_end)

    def _is_above(self, bytes_max: int, first_open_end: int) -> bool:
        weights = self._weights
        return weights.total > bytes_max and self._closed_panes(first_open_end) * weights.each > bytes_max

    def _closed_panes(self, first_open_end: int) -> int:
        """Return the number of panes of closed windows in memory."""
        panes = self._weights.panes
        if self._counted[:2] != (panes, first_open_end):
            closed = sum(len(of) for start, of in self._panes.items() if self._end_of(start) < first_open_end)
            self._counted = (panes, first_open_end, closed)
        return self._counted[2]

    def expire(self, start: int, bundle: int) -> None:
        """Forget a window that expires in a bundle; the store deletes its rows after the commit, in bulk."""
        if start in self.stored:
            self.stored.discard(start)
            self.expired.append((self._subkey(start), bundle))

    def on_deleted(self, bundle: int) -> None:
        """Forget the windows that have expired at or before `bundle`: their rows are deleted."""
        self.expired = [window for window in self.expired if window[1] > bundle]

    def _count(self, start: int) -> int:
        """Return how many panes of a closed window are in memory and could leave it."""
        return len(self._panes[start])

    def _forget(self, start: int, keys: Sequence[Key]) -> None:
        """Do nothing: nothing else is known of panes that have left memory."""

    def _subkey(self, start: int) -> str:
        return f"{start}/{self._end_of(start)}"
