"""How many windows an interval may have open: what they weigh in memory, and which records would open more.

    weight   of a pane: so many bytes for its objects, and for stored text (key and accumulators) beyond a few words
             a multiple of its length; learned whenever panes are written or read
    room     what the weight of the open panes leaves of the interval's bound

A record that would open a window beyond the room is set aside; one whose windows are open goes on being counted. Keys
that come for the first time have three quarters of the room. The rest is for keys that go on: the window before or
after is open, or a session is. So a device that sends ever new keys fills the former, and does not stop the others.
When the panes have outgrown all of it (long lists), no record makes the large ones larger.

The decision is part of the step: it depends on committed state and the turn's input alone, the letter and what the
other records do are one commit, and a turn that is void is decided anew. What the panes weigh is not stored; who takes
over weighs what it reads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from millpy.model.keys import Key
from millpy.windowing.grouping import Integers
from millpy.windowing.pane import OpenPane

REASON = "windows"
"""Of the dead letters."""
PANE_BYTES, AGGREGATE_BYTES, SESSION_BYTES = 600, 100, 300
"""Measured with tracemalloc: 380 for one count, 90 for each more aggregate, 320 more for a session; and what the
allocator adds."""
PLAIN_TEXT, MEMORY_PER_TEXT = 256, 8
"""A pane's text of so many bytes is in PANE_BYTES; a byte beyond it stands for so many in memory."""

Mask = npt.NDArray[np.bool_]


class NoRoomError(Exception):
    """The interval has as many open windows as it may."""


@dataclass(slots=True)
class Weights:
    """What the open panes of an interval weigh.

    Attributes:
        each: bytes of a plain pane.
        panes: how many there are; whoever opens or drops some counts them here.
        large: what panes with more text weigh beyond that, by `id`.
    """

    each: int
    panes: int = 0
    large: dict[int, int] = field(default_factory=dict)
    _beyond: int = 0

    @property
    def total(self) -> int:
        """All of them."""
        return self.panes * self.each + self._beyond

    def weigh(self, panes: Sequence[OpenPane], keys: Sequence[bytes], values: Sequence[bytes]) -> None:
        """Learn what panes weigh from their keys and values as they are stored."""
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
        """Forget panes that are open no more."""
        self.panes -= len(panes)
        if self.large:
            self._beyond -= sum(self.large.pop(id(pane), 0) for pane in panes)


@dataclass(frozen=True, slots=True)
class Openings:
    """Which windows the rows of a turn are in, by number of the window.

    Attributes:
        at: row of each entry.
        windows: number of its window.
        opens: whether the window would have to be opened, and would stay open after the turn.
        goes_on: whether its key has one beside it.
        large: whether it is open, and large.
    """

    at: Integers
    windows: Integers
    opens: Mask
    goes_on: Mask
    large: Mask

    def refused(self, weights: Weights, bytes_max: int) -> npt.NDArray[np.int64]:
        """Rows for which there is no room, rising; of the windows that open, the first to come have it."""
        used = weights.total
        shut = self.large & (used >= bytes_max)
        opening = np.flatnonzero(self.opens)
        if len(opening):
            first = np.full(len(self.opens), len(self.windows), np.int64)
            np.minimum.at(first, self.windows, np.arange(len(self.windows)))
            opening = opening[np.argsort(first[opening], kind="stable")]
            known = self.goes_on[opening]
            fits = known | (np.cumsum(~known) <= (bytes_max * 3 // 4 - used) // weights.each)
            fits &= np.cumsum(fits) <= (bytes_max - used) // weights.each
            shut[opening[~fits]] = True
        return np.unique(self.at[shut[self.windows]]).astype(np.int64)


def openings_of(
    panes: Mapping[int, Mapping[Key, OpenPane]],
    weights: Weights,
    keys: Sequence[Key],
    starts: Integers,
    codes: Integers,
    at: Integers,
    stays: Mask,
    every_us: int,
) -> Openings:
    """Of aligned windows, kept by start and key.

    Args:
        panes: the open ones.
        weights: theirs.
        keys: by code.
        starts: of the window of each entry.
        codes: of the key of each entry.
        at: row of each entry.
        stays: whether the window of each entry would be open after the turn.
        every_us: from one start to the next.
    """
    distinct, ranks = np.unique(starts, return_inverse=True)
    places, first, windows = np.unique(ranks * len(keys) + codes, return_index=True, return_inverse=True)
    opens, goes_on, large = (np.zeros(len(places), np.bool_) for _ in range(3))
    none: Mapping[Key, OpenPane] = {}
    columns = (distinct[places // len(keys)].tolist(), (places % len(keys)).tolist(), stays[first].tolist())
    for window, (start, code, stay) in enumerate(zip(*columns, strict=True)):
        key = keys[code]
        pane = panes.get(start, none).get(key)
        if pane is not None:
            large[window] = id(pane) in weights.large
        elif stay:
            opens[window] = True
            goes_on[window] = key in panes.get(start - every_us, none) or key in panes.get(start + every_us, none)
    return Openings(at, windows, opens, goes_on, large)
