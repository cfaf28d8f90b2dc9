"""Operations on ids of 16 bytes as two columns of unsigned 64-bit numbers (hi, lo).

    tiers     sorted columns, oldest first; FAN_OUT tiers of similar size are merged into one, so that there are
              O(log n) tiers and an id is moved O(log n) times, with a large base
    filter    one bit for each range of hi: most new ids are recognized without a search in any tier

Ids are hashes (xxh3_128 of canonical bytes). Among n ids, two different ones collide with a probability of n² / 2^129:
below 10^-20 for a billion ids within a horizon.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

ID_BYTES = 16
FAN_OUT = 8
_SPARSENESS_BITS = 4

Halves = npt.NDArray[np.uint64]
Mask = npt.NDArray[np.bool_]
Rows = npt.NDArray[np.int64]


def halves_of(ids: bytes) -> tuple[Halves, Halves]:
    """Return the two columns of concatenated ids of 16 bytes."""
    pairs = np.frombuffer(ids, ">u8")
    return pairs[::2].astype(np.uint64), pairs[1::2].astype(np.uint64)


def ids_of(hi: Halves, lo: Halves) -> bytes:
    """Return two columns as concatenated ids of 16 bytes: the inverse of `halves_of`."""
    pairs = np.empty((len(hi), 2), ">u8")
    pairs[:, 0], pairs[:, 1] = hi, lo
    return pairs.tobytes()


def order_of(hi: Halves, lo: Halves) -> Rows:
    """Return the order that sorts ids, stably.

    It comes from a plain sort of integers: the upper bits of each id, with the row number below them. That is ten times
    as fast as a stable sort of pairs, which is left for the rare ids that differ only in their lower bits.
    """
    bits = np.uint64(len(hi).bit_length())
    packed = np.sort((hi >> bits << bits) | np.arange(len(hi), dtype=np.uint64))
    order = (packed & ((np.uint64(1) << bits) - np.uint64(1))).astype(np.int64)
    alike = packed[1:] >> bits == packed[:-1] >> bits
    if alike.any() and (alike & first_of_each(hi[order], lo[order])[1:]).any():
        return np.lexsort((lo, hi))
    return order


def first_of_each(hi: Halves, lo: Halves) -> Mask:
    """Return, per row of sorted ids, whether its id differs from that of the row before."""
    first = np.ones(len(hi), np.bool_)
    first[1:] = (hi[1:] != hi[:-1]) | (lo[1:] != lo[:-1])
    return first


def tiers_to_merge(sizes: Sequence[int]) -> int:
    """Return how many of the newest tiers to merge into one now; 0 if there are too few.

    Args:
        sizes: sizes of all tiers, oldest first.
    """
    if not sizes:
        return 0
    level = _level(sizes[-1])
    count = 0
    for size in reversed(sizes):
        if _level(size) > level:
            break
        count += 1
    return count if count >= FAN_OUT else 0


def _level(size: int) -> int:
    return size.bit_length() // (FAN_OUT.bit_length() - 1)


class IdFilter:
    """A Bloom filter with one bit per id: it passes every id that was added, and at most one in sixteen of the others.

    It takes two to eight bytes per id. Ids are added and looked up in order, so that memory is accessed sequentially.
    """

    def __init__(self, ids_min: int = 4_096) -> None:
        self._ids_min = ids_min
        self._empty(0)

    def _empty(self, count: int) -> None:
        """Replace the filter by an empty one for twice `count` ids, at least for `ids_min`."""
        bits = max(2 * count, self._ids_min).bit_length()
        self._ids_max, self._count = 1 << bits, 0
        self._shift = np.uint64(64 - bits - _SPARSENESS_BITS)
        self._bits = np.zeros(1 << bits + _SPARSENESS_BITS - 3, np.uint8)

    def add(self, hi: Halves, tiers: Iterable[Halves]) -> None:
        """Add ids. If the filter becomes too dense, build a larger one from all live ids.

        Args:
            hi: upper halves of the new ids, ascending.
            tiers: upper halves of all live ids, including `hi`.
        """
        if self._count + len(hi) <= self._ids_max:
            self._add(hi)
            return
        live = list(tiers)
        self._empty(sum(map(len, live)))
        for each in live:
            self._add(each)

    def _add(self, hi: Halves) -> None:
        if not len(hi):
            return
        places = (hi >> self._shift).astype(np.int64)
        cells = places >> 3
        starts = np.flatnonzero(np.append(True, cells[1:] != cells[:-1]))
        bits = np.left_shift(1, places & 7).astype(np.uint8)
        self._bits[cells[starts]] |= np.bitwise_or.reduceat(bits, starts)
        self._count += len(hi)

    def may_hold(self, hi: Halves) -> Mask:
        """Return, per upper half of an id, whether it may have been added; False is certain."""
        places = (hi >> self._shift).astype(np.int64)
        bits: Mask = (self._bits[places >> 3] >> (places & 7).astype(np.uint8) & np.uint8(1)).astype(np.bool_)
        return bits
