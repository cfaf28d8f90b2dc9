"""Ids of 16 bytes, as two columns of unsigned 64-bit numbers (hi, lo): what everything that remembers ids shares.

Ids are hashes (xxh3_128 of canonical bytes). Two different ones are taken for one with a probability of n² / 2^129
among n ids: below 10^-20 for a billion ids within a horizon.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

ID_BYTES = 16

Halves = npt.NDArray[np.uint64]
Mask = npt.NDArray[np.bool_]
Rows = npt.NDArray[np.int64]


def halves_of(ids: bytes) -> tuple[Halves, Halves]:
    """The two columns of ids of 16 bytes, concatenated."""
    pairs = np.frombuffer(ids, ">u8")
    return pairs[::2].astype(np.uint64), pairs[1::2].astype(np.uint64)


def ids_of(hi: Halves, lo: Halves) -> bytes:
    """The inverse of `halves_of`."""
    pairs = np.empty((len(hi), 2), ">u8")
    pairs[:, 0], pairs[:, 1] = hi, lo
    return pairs.tobytes()


def order_of(hi: Halves, lo: Halves) -> Rows:
    """Rows by id, and within one id in the order given.

    Sorts the upper bits of the ids with the row number below them: a plain sort of integers is ten times as fast as a
    stable one of pairs. Where two different ids agree in those bits, which does not happen to hashes, pairs it is.
    """
    bits = np.uint64(len(hi).bit_length())
    packed = np.sort((hi >> bits << bits) | np.arange(len(hi), dtype=np.uint64))
    order = (packed & ((np.uint64(1) << bits) - np.uint64(1))).astype(np.int64)
    alike = packed[1:] >> bits == packed[:-1] >> bits
    if alike.any() and (alike & first_of_each(hi[order], lo[order])[1:]).any():
        return np.lexsort((lo, hi))
    return order


def first_of_each(hi: Halves, lo: Halves) -> Mask:
    """Of ids in order, which rows differ from the one before."""
    first = np.ones(len(hi), np.bool_)
    first[1:] = (hi[1:] != hi[:-1]) | (lo[1:] != lo[:-1])
    return first
