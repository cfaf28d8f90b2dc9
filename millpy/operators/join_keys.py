"""The keys of a join's buffered rows: a code for each key, and the bytes that its rows take."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from millpy.model.keys import Key

Integers = npt.NDArray[np.int64]


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

    def without_room(self, codes: Integers, weights: Integers, key_max: int, total_max: int) -> Integers:
        """Return which rows exceed the bounds, in order of arrival: of all rows, or of those of their key."""
        added = int(weights.sum())
        fits = self.total + added <= total_max
        if fits and int(self._bytes[codes].max()) + added <= key_max:
            return np.empty(0, np.int64)
        over = self.total + np.cumsum(weights) > total_max
        order = np.argsort(codes, kind="stable")
        sums = np.cumsum(weights[order])
        firsts = np.flatnonzero(np.append(True, np.diff(codes[order]) != 0))
        before = np.repeat((sums - weights[order])[firsts], np.diff(np.append(firsts, len(order))))
        over[order] |= self._bytes[codes[order]] + sums - before > key_max
        return np.flatnonzero(over)

    def bytes_of(self, code: int) -> int:
        """Return the bytes of the rows of a key."""
        return int(self._bytes[code])

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
