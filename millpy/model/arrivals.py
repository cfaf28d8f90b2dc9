"""What arrived in one turn, joined: one key column and one column of judging watermarks over all its bundles."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from millpy.model.keys import Key
from millpy.model.record import Instants
from millpy.model.stage import Arrived, Work


def judging_watermarks(arrived: Arrived, work: Work) -> Instants:
    """Per row what lateness and timers go by: its own watermark capped by the other producers', or the turn's.

    Behind a source a bundle has the effect of one record at a time; behind a keyed stage all rows are judged alike
    (I9).
    """
    watermarks = arrived.bundle.records.watermarks
    if watermarks is None:
        return np.full(len(arrived.bundle), work.watermark_before, np.int64)
    return np.minimum(watermarks, arrived.cap)


def joined_keys(arrived: Sequence[Arrived]) -> tuple[npt.NDArray[np.integer], list[Key], list[int]]:
    """(code per row, distinct keys, their hashes) over all bundles, in order; at least one bundle."""
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
