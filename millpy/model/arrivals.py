"""Columns over all bundles of a turn: the keys of the rows, and the watermarks that judge them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from millpy.model.keys import Key
from millpy.model.record import Instants
from millpy.model.stage import InputBundle, Work


def judging_watermarks(arrived: InputBundle, work: Work) -> Instants:
    """Return, for each row of a bundle, the watermark by which the row is late and timers are due.

    Behind a source it is the watermark of the row, but at most `arrived.cap`: a bundle has the same effect as its
    records one at a time (I9). Behind a keyed stage it is `work.watermark_before` for all rows.
    """
    watermarks = arrived.bundle.records.watermarks
    if watermarks is None:
        return np.full(len(arrived.bundle), work.watermark_before, np.int64)
    return np.minimum(watermarks, arrived.cap)


def joined_keys(arrived: Sequence[InputBundle]) -> tuple[npt.NDArray[np.integer], list[Key], list[int]]:
    """Return (key code per row, distinct keys, hash per key) over the bundles, of which there must be at least one."""
    if len(arrived) == 1:
        column = arrived[0].bundle.keys
        return column.codes, list(column.keys), column.hashes.tolist()
    code_of: dict[Key, int] = {}
    hashes: list[int] = []
    parts = []
    for arrival in arrived:
        column = arrival.bundle.keys
        for key, hashed in zip(column.keys, column.hashes.tolist(), strict=True):
            if key not in code_of:
                code_of[key] = len(code_of)
                hashes.append(hashed)
        parts.append(np.array([code_of[key] for key in column.keys], np.int64)[column.codes])
    return np.concatenate(parts), list(code_of), hashes
