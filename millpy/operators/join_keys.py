"""The keys of a join's buffered rows: a code for each key, and the bytes that its rows take."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from millpy.model.keys import Key

Integers = npt.NDArray[np.int64]


class NoRoom(NamedTuple):
    """A row for which there is no room, and the bytes before it: of the rows of its key, and of all."""

    row: int
    of_key: int
    total: int


class JoinKeys:
    """Codes of keys with buffered rows, and the weights of these rows. A code without rows is used again.

    Attributes:
        total: bytes of all rows.
    """

    def __init__(self) -> None:
        self._codes: dict[Key, int] = {}
        self._keys: list[Key | None] = []
        self._free: list[int] = []
        self._bytes = np.zeros(1_024, np.int64)
        self.total = 0

    def codes(self, keys: Sequence[Key]) -> Integers:
        """Return the codes of keys, new ones for new keys."""
        found = list(map(self._codes.get, keys))
        if None in found:
            for place, code in enumerate(found):
                if code is None:
                    found[place] = self._new_code(keys[place])
        return np.array(found, np.int64)

    def _new_code(self, key: Key) -> int:
        known = self._codes.get(key)
        if known is not None:
            return known
        if self._free:
            code = self._free.pop()
            self._keys[code] = key
        else:
            code = len(self._keys)
            self._keys.append(key)
            if code == len(self._bytes):
                self._bytes = np.concatenate([self._bytes, np.zeros(code, np.int64)])
        self._codes[key] = code
        return code

    def without_room(self, codes: Integers, weights: Integers, key_max: int, total_max: int) -> list[NoRoom]:
        """Return which rows find no room, taken one by one: a row that finds none leaves it to those behind it."""
        added = int(weights.sum())
        if self.total + added <= total_max and int(self._bytes[codes].max()) + added <= key_max:
            return []
        full, total, of_key = [], self.total, dict[int, int]()
        for row, (code, weight) in enumerate(zip(codes.tolist(), weights.tolist(), strict=True)):
            used = of_key.get(code)
            if used is None:
                used = int(self._bytes[code])
            if used + weight > key_max or total + weight > total_max:
                full.append(NoRoom(row, used, total))
            else:
                of_key[code] = used + weight
                total += weight
        return full

    def add(self, codes: Integers, weights: Integers) -> None:
        """Count rows that are buffered."""
        np.add.at(self._bytes, codes, weights)
        self.total += int(weights.sum())

    def drop(self, codes: Integers, weights: Integers) -> None:
        """Count rows that have left; `sweep` frees their codes."""
        np.subtract.at(self._bytes, codes, weights)
        self.total -= int(weights.sum())

    def sweep(self, codes: Integers) -> None:
        """Free the codes among these that have no rows."""
        for code in codes[self._bytes[codes] == 0].tolist():
            key = self._keys[code]
            if key is not None:
                self._keys[code] = None
                del self._codes[key]
                self._free.append(code)
