"""The position of a table that is polled: the last row that was read, and which rows of its value were.

Several rows may have the last value, and another one may still come before the last row: its transaction took the same
value and a smaller key, and has not committed yet. So the position has the keys of the rows of that value, up to a
bound. Beyond it, the smaller keys are forgotten, and rows that come before them are not read.

The order of keys is the server's, and unknown here. The floor is therefore always a key that was read in that order.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

Key = tuple[str, ...]
"""The value of the column, and then the primary key, as text."""
KEYS_MAX = 1_000
"""Keys of the last value that a position has."""


class PolledPosition(msgspec.Struct, frozen=True):
    """What was read.

    Attributes:
        key: the last row in the order of the table; () before the first one.
        order: the order of the table (`TableFacts.order`).
        floor: a row of the same value, up to which all rows count as read; None for the first row of the value.
        read: the primary keys of the rows behind the floor that were read, in the order of the table.
        late: those of rows that came before the last one, in the order in which they were read.
    """

    key: Key
    order: tuple[str, ...]
    floor: Key | None = None
    read: tuple[Key, ...] = ()
    late: tuple[Key, ...] = ()

    def unread(self, keys: Sequence[Key]) -> list[int]:
        """Return which of some rows of the last value, behind the floor and not behind the last row, were not read."""
        known = {*self.read, *self.late}
        return [row for row, key in enumerate(keys) if key[1:] not in known]

    def advance(self, keys: Sequence[Key]) -> PolledPosition:
        """Return the position behind rows that follow the last one."""
        *earlier, last = keys
        value, floor, read, late = last[0], self.floor, self.read, self.late
        begin = next((row for row in range(len(keys), 0, -1) if keys[row - 1][0] != value), 0)
        if begin:
            floor, read, late = earlier[begin - 1], (), ()
        elif self.key and self.key[0] != value:  # or its text: two numbers may be equal
            floor, read, late = self.key, (), ()
        read += tuple(key[1:] for key in keys[begin:])
        return PolledPosition(last, self.order, floor, read, late)._bounded()

    def advance_late(self, keys: Sequence[Key]) -> PolledPosition:
        """Return the position when rows were read that `unread` has returned."""
        late = (*self.late, *(key[1:] for key in keys))
        return msgspec.structs.replace(self, late=late)._bounded()

    def _bounded(self) -> PolledPosition:
        excess = len(self.read) + len(self.late) - KEYS_MAX
        if excess <= 0:
            return self
        if len(self.late) > KEYS_MAX // 2:  # their place in the order is unknown
            return msgspec.structs.replace(self, floor=self.key, read=(), late=())
        floor = (self.key[0], *self.read[excess - 1])
        return msgspec.structs.replace(self, floor=floor, read=self.read[excess:])
