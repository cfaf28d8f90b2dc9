"""The bound on the memory of an interval's open windows, and the records that would exceed it.

    weight   of a pane: an estimate of its bytes in memory: a fixed number, plus a multiple of the length of its stored
             text (key and accumulators) beyond a few words; measured whenever panes are written or read
    room     the interval's bound minus the weight of its open panes; windows that can wait in the store
             (`closed_windows.py`, `unfired_windows.py`) do not count

A record that would open a window beyond the room is dead-lettered; a record whose windows are open is still added. New
keys may use three quarters of the bound. The rest is for continuing keys: those with an open session, or with an open
window next to the new one. A device that keeps sending new keys therefore does not stop the others. Once the panes
exceed the whole bound (long lists), records of large panes are dead-lettered, too.

The decision is part of the step: it depends only on committed state and the turn's input. The dead letter and the
effects of the other records are one commit, and a voided turn is decided again. Weights are not stored; a new owner
weighs the panes that it reads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from millpy.model.keys import Key
from millpy.windowing.group_by import Integers
from millpy.windowing.pane_codec import OpenPane

REASON = "windows"
"""The reason of these dead letters."""
PANE_BYTES, SESSION_BYTES, FIRING_BYTES, HOLD_BYTES = 600, 300, 700, 400
"""Bytes, besides `Accumulator.memory_bytes`. tracemalloc measures 380 for one count, 90 for each further aggregate (300
for a sum that can subtract) and 320 more for a session; the allocator adds overhead."""
PLAIN_TEXT, MEMORY_PER_TEXT = 256, 8
"""Bytes of a pane's stored text that PANE_BYTES covers; and bytes in memory for each byte of text beyond that."""

Mask = npt.NDArray[np.bool_]


class NoRoomError(Exception):
    """A record needs an open window for which its interval has no room: it becomes a dead letter."""


@dataclass(slots=True)
class Weights:
    """The weight of an interval's open panes, in bytes.

    Attributes:
        each: weight of a pane with short text.
        panes: number of open panes; code that opens a pane must count it here.
        large: `id` of a pane with long text -> its additional weight.
    """

    each: int
    panes: int = 0
    large: dict[int, int] = field(default_factory=dict)
    _beyond: int = 0

    @property
    def total(self) -> int:
        """The weight of all open panes."""
        return self.panes * self.each + self._beyond

    def weigh(self, panes: Sequence[OpenPane], keys: Sequence[bytes], values: Sequence[bytes]) -> None:
        """Update the weights of panes from their stored keys and values."""
        if not panes:
            return
        if not self.large and max(map(len, keys)) + max(map(len, values)) <= PLAIN_TEXT:
            return
        for pane, key, value in zip(panes, keys, values, strict=False):
            beyond = MEMORY_PER_TEXT * (len(key) + len(value) - PLAIN_TEXT)
            if beyond > 0:
                self._beyond += beyond - self.large.get(id(pane), 0)
                self.large[id(pane)] = beyond
            elif self.large:
                self._beyond -= self.large.pop(id(pane), 0)

    def drop(self, panes: Sequence[OpenPane]) -> None:
        """Forget panes that are no longer open."""
        self.panes -= len(panes)
        if self.large:
            self._beyond -= sum(self.large.pop(id(pane), 0) for pane in panes)


@dataclass(frozen=True, slots=True)
class Openings:
    """The windows of a turn's rows, numbered, and which of them the turn would open.

    Attributes:
        at: per entry (a row in one of its windows), the row.
        windows: per entry, the number of the window.
        opens: per window, whether the turn would open it and leave it open.
        extends: per window, whether its key has an open session, or an open window next to it.
        large: per window, whether it is open and its pane is in `Weights.large`.
    """

    at: Integers
    windows: Integers
    opens: Mask
    extends: Mask
    large: Mask

    def rows_without_room(self, used: int, each: int, bytes_max: int) -> npt.NDArray[np.int64]:
        """Return the rows with a window for which there is no room, ascending. The first windows to open get room.

        Args:
            used: the memory in use, in bytes.
            each: the memory of another window.
            bytes_max: the bound.
        """
        shut = self.large & (used >= bytes_max)
        opening = np.flatnonzero(self.opens)
        if len(opening):
            first = np.full(len(self.opens), len(self.windows), np.int64)
            np.minimum.at(first, self.windows, np.arange(len(self.windows)))
            opening = opening[np.argsort(first[opening], kind="stable")]
            known = self.extends[opening]
            fits = known | (np.cumsum(~known) <= (bytes_max * 3 // 4 - used) // each)
            fits &= np.cumsum(fits) <= (bytes_max - used) // each
            shut[opening[~fits]] = True
        return np.unique(self.at[shut[self.windows]]).astype(np.int64)


@dataclass(frozen=True, slots=True)
class WindowEntries:
    """Pairs of a row and one of its windows, as columns.

    Attributes:
        starts: start of the window.
        codes: key code of the row.
        at: the row.
        stays: whether the turn would leave the window open.
    """

    starts: Integers
    codes: Integers
    at: Integers
    stays: Mask


def openings_of(
    panes: Mapping[int, Mapping[Key, OpenPane]],
    weights: Weights,
    keys: Sequence[Key],
    entries: WindowEntries,
    neighbors: Callable[[int], tuple[int, int]],
) -> Openings:
    """Return the openings of windows that do not merge.

    Args:
        panes: window start -> key -> open pane.
        weights: their weights.
        keys: the keys by code.
        entries: the rows and their windows.
        neighbors: window start -> the starts of the windows before and after it.
    """
    distinct, ranks = np.unique(entries.starts, return_inverse=True)
    places, first, windows = np.unique(ranks * len(keys) + entries.codes, return_index=True, return_inverse=True)
    opens, extends, large = (np.zeros(len(places), np.bool_) for _ in range(3))
    none: Mapping[Key, OpenPane] = {}
    columns = (distinct[places // len(keys)].tolist(), (places % len(keys)).tolist(), entries.stays[first].tolist())
    for window, (start, code, stay) in enumerate(zip(*columns, strict=True)):
        key = keys[code]
        pane = panes.get(start, none).get(key)
        if pane is not None:
            large[window] = id(pane) in weights.large
        elif stay:
            opens[window] = True
            extends[window] = any(key in panes.get(other, none) for other in neighbors(start))
    return Openings(entries.at, windows, opens, extends, large)
