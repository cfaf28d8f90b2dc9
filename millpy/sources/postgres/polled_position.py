"""The position of a table that is polled: the last row that was read, and which rows of its value were.

Several rows may have the last value, and another one may still come before the last row: its transaction took the same
value and a smaller key, and has not committed yet. So the position has the keys of the rows of that value, up to a
bound. Beyond it, the smallest keys are forgotten, and rows that come before them are not read.

A pass reads the late rows, those behind the floor and not behind the last row, and then the rows that follow. A pass
among late rows may end anywhere: the next one begins at the floor again, and knows all that was read.

The order of keys is the server's, and unknown here. So the floor moves only to keys that a pass has seen in that order:
those of `read`, never those of `ahead`, which may be of rows that were deleted.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate, takewhile

import msgspec

Key = tuple[str, ...]
"""The value of the column, and then the primary key, as text."""
KEYS_MAX = 1_000
"""Keys of the last value that a position has."""
KEYS_BYTES_MAX = 65_536
"""Bytes of these keys."""


class PolledPosition(msgspec.Struct, frozen=True):
    """What was read.

    Attributes:
        key: the last row in the order of the table; () before the first one.
        order: the order of the table (`TableFacts.order`).
        floor: the row up to which all count as read; () for none, and None for the last one.
        read: the primary keys of the rows behind the floor that were read, and that this pass has seen, in its order.
        ahead: those that an earlier pass has read, and this one has not seen yet.
        forgets: whether the floor has the value of the last row, so that rows of this value may be missed.
    """

    key: Key
    order: tuple[str, ...]
    floor: Key | None = None
    read: tuple[Key, ...] = ()
    ahead: tuple[Key, ...] = ()
    forgets: bool = False

    def begin_pass(self) -> PolledPosition:
        """Return the position before the late rows."""
        if self.floor is None:  # of a version that did not read late rows
            return PolledPosition(self.key, self.order, self.key, forgets=True)
        return PolledPosition(self.key, self.order, self.floor, (), (*self.read, *self.ahead), self.forgets)

    def pass_late(self, keys: Sequence[Key]) -> PolledPosition:
        """Return the position behind the next late rows: all that are there, those read before, too."""
        seen = [key[1:] for key in keys]
        ahead = self.ahead
        if ahead:
            left = dict.fromkeys(ahead)
            for key in seen:
                left.pop(key, None)
            ahead = tuple(left)
        return self._bounded((*self.read, *seen), ahead)

    def end_late(self) -> PolledPosition:
        """Return the position behind all late rows: those that are still ahead were deleted."""
        return msgspec.structs.replace(self, ahead=())

    def advance(self, keys: Sequence[Key], begins: Sequence[int]) -> PolledPosition:
        """Return the position behind rows that follow the last one.

        Args:
            keys: the rows.
            begins: the places of rows that have another value than the row before, also of rows behind these.
        """
        count = bisect_left(begins, len(keys))
        if count:
            begin = begins[count - 1]
            position = PolledPosition(keys[-1], self.order, keys[begin - 1] if begin else self.key)
        else:
            begin, position = 0, msgspec.structs.replace(self, key=keys[-1])
        return position._bounded((*position.read, *(key[1:] for key in keys[begin:])), position.ahead)

    def _bounded(self, read: tuple[Key, ...], ahead: tuple[Key, ...]) -> PolledPosition:
        """Return the position with these keys, without the first ones of `read` if they are too many."""
        sizes = accumulate(map(_size, reversed(read)), initial=sum(map(_size, ahead)))
        fitting = sum(1 for _ in takewhile(lambda size: size <= KEYS_BYTES_MAX, sizes)) - 1
        kept = max(0, min(len(read), KEYS_MAX - len(ahead), fitting))
        dropped = len(read) - kept
        floor, forgets = self.floor, self.forgets
        if dropped:
            floor, forgets = (self.key[0], *read[dropped - 1]), True
        return PolledPosition(self.key, self.order, floor, read[dropped:], ahead, forgets)


def _size(key: Key) -> int:
    return sum(len(part.encode()) + 3 for part in key)  # with its quotes and comma
