"""Payloads that lie in larger pieces of bytes, and are cut out only if they are asked for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import overload

import numpy as np
import numpy.typing as npt

Places = npt.NDArray[np.int64]

GAP_BYTES_MAX = 64
"""The most bytes between two payloads that are left out in bulk."""


@dataclass(frozen=True, slots=True)
class PayloadPiece:
    """Payloads of one piece of bytes, in order; there is at least one byte between two of them.

    Attributes:
        data: the bytes.
        begins, ends: where each payload is.
        compacted: whether all that is between two payloads is one newline.
    """

    data: bytes
    begins: Places
    ends: Places
    compacted: bool = False

    def __len__(self) -> int:
        return len(self.begins)

    def __getitem__(self, rows: slice) -> PayloadPiece:
        return PayloadPiece(self.data, self.begins[rows], self.ends[rows], self.compacted)

    def cut(self) -> list[bytes]:
        """Return the payloads."""
        data = self.data
        return [data[begin:end] for begin, end in zip(self.begins.tolist(), self.ends.tolist(), strict=True)]

    def compact(self) -> PayloadPiece:
        """Return the payloads in a piece of their own, of which `lines` has nothing to leave out."""
        ends = np.cumsum(self.ends - self.begins + 1) - 1
        return PayloadPiece(self.lines(), ends - (self.ends - self.begins), ends, compacted=True)

    def lines(self) -> bytes:
        """Return the payloads joined by newlines."""
        first, last = int(self.begins[0]), int(self.ends[-1])
        if self.compacted:
            return self.data[first:last]
        newlines, behind = self.ends[:-1], self.begins[1:]
        gap_max = int((behind - newlines).max(initial=1))
        if gap_max > GAP_BYTES_MAX:
            return b"\n".join(self.cut())
        found = np.frombuffer(self.data, np.uint8)[first:last].copy()
        found[newlines - first] = ord("\n")
        kept = np.ones(len(found), bool)
        for width in range(1, gap_max):
            place = newlines + width
            kept[place[place < behind] - first] = False
        return found[kept].tobytes()


class PayloadColumn(Sequence[bytes]):
    """Payloads of some pieces, one after the other."""

    def __init__(self, pieces: Sequence[PayloadPiece]) -> None:
        self._pieces = [piece for piece in pieces if len(piece)]
        self._behind = np.cumsum([0, *map(len, self._pieces)]).tolist()

    @classmethod
    def joined(cls, columns: Sequence[PayloadColumn]) -> PayloadColumn:
        """Return the payloads of several, in order."""
        return cls([piece for column in columns for piece in column._pieces])

    def __len__(self) -> int:
        return int(self._behind[-1])

    @overload
    def __getitem__(self, row: int) -> bytes: ...

    @overload
    def __getitem__(self, row: slice) -> PayloadColumn: ...

    def __getitem__(self, row: int | slice) -> bytes | PayloadColumn:
        if isinstance(row, slice):
            begin, end, step = row.indices(len(self))
            assert step == 1, "a column is cut, not thinned out"
            return PayloadColumn([
                piece[max(0, begin - behind) : max(0, end - behind)]
                for piece, behind in zip(self._pieces, self._behind, strict=False)
            ])  # fmt: skip
        if not -len(self) <= row < len(self):
            raise IndexError(row)
        row %= len(self)
        number = int(np.searchsorted(self._behind, row, side="right")) - 1
        piece, place = self._pieces[number], row - self._behind[number]
        return piece.data[int(piece.begins[place]) : int(piece.ends[place])]

    def __iter__(self) -> Iterator[bytes]:
        for piece in self._pieces:
            yield from piece.cut()

    def sizes(self) -> Places:
        """Return the number of bytes of each payload."""
        return np.concatenate([np.zeros(0, np.int64), *(piece.ends - piece.begins for piece in self._pieces)])

    def lines(self) -> bytes:
        """Return the payloads joined by newlines."""
        return b"\n".join([piece.lines() for piece in self._pieces])
