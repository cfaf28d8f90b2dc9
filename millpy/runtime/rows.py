"""Rows: all records of one turn of one interval, grouped by key, each with the watermark that judges it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from millpy.model.keys import Key
from millpy.model.record import Instants
from millpy.model.stage import Arrived, Work
from millpy.model.time import Instant


def judging_watermarks(arrived: Arrived, work: Work) -> Instants:
    """Per row what lateness and timers go by: its own watermark capped by the other producers', or the turn's.

    Behind a source a bundle has the effect of one record at a time; behind a keyed stage all rows are judged alike
    (I9).
    """
    watermarks = arrived.bundle.records.watermarks
    if watermarks is None:
        return np.full(len(arrived.bundle), work.watermark_before, np.int64)
    return np.minimum(watermarks, arrived.cap)


@dataclass(slots=True)
class Rows:
    """Columns over the rows of a turn, in the order in which they arrived.

    Attributes:
        keys, hashes: the distinct keys; a key's index is its code in this turn.
        order: row numbers by key; those of code c are `order[bounds[c]:bounds[c + 1]]`, in order of arrival.
        inputs: input index per row, or None when all rows have `input`.
    """

    keys: list[Key] = field(default_factory=list)
    hashes: list[int] = field(default_factory=list)
    order: list[int] = field(default_factory=list)
    bounds: list[int] = field(default_factory=lambda: [0])
    objects: list[Any] = field(default_factory=list)
    times: list[Instant] = field(default_factory=list)
    watermarks: list[Instant] = field(default_factory=list)
    inputs: list[int] | None = None
    input: int = 0

    def __len__(self) -> int:
        return len(self.objects)

    def of(self, code: int) -> list[int]:
        """Row numbers of a key."""
        return self.order[self.bounds[code] : self.bounds[code + 1]]

    def input_of(self, row: int) -> int:
        """The input that a row came on."""
        return self.input if self.inputs is None else self.inputs[row]


def gather(work: Work) -> Rows:
    """Join what arrived, in order, and group it by key."""
    arrived = [arrival for arrival in work.arrived if len(arrival.bundle)]
    if not arrived:
        return Rows()
    rows = Rows(input=arrived[0].bundle.input)
    if len(arrived) == 1:
        bundle = arrived[0].bundle
        codes, rows.keys, rows.hashes = bundle.keys.codes, list(bundle.keys.keys), bundle.keys.hashes.tolist()
    else:
        codes = _joined_codes(arrived, rows)
    if any(arrival.bundle.input != rows.input for arrival in arrived):
        rows.inputs = [arrival.bundle.input for arrival in arrived for _ in range(len(arrival.bundle))]
    for arrival in arrived:
        records = arrival.bundle.records
        rows.objects.extend(records.objects())
        rows.times.extend(records.event_times.tolist())
        rows.watermarks.extend(judging_watermarks(arrival, work).tolist())
    rows.order = np.argsort(codes, kind="stable").tolist()
    rows.bounds = [0, *np.cumsum(np.bincount(codes, minlength=len(rows.keys))).tolist()]
    return rows


def _joined_codes(arrived: Sequence[Arrived], rows: Rows) -> Any:
    """Codes over all bundles: the same key may have come in several."""
    code_of: dict[Key, int] = {}
    parts = []
    for arrival in arrived:
        keys = arrival.bundle.keys
        for key, hashed in zip(keys.keys, keys.hashes.tolist(), strict=True):
            if key not in code_of:
                code_of[key] = len(code_of)
                rows.hashes.append(hashed)
        parts.append(np.array([code_of[key] for key in keys.keys], np.int64)[keys.codes])
    rows.keys = list(code_of)
    return np.concatenate(parts)
