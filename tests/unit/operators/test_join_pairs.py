"""Which buffered rows of a join its retractions take back."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from millpy.operators.join_pairs import rows_taken_back
from millpy.operators.join_reach import IntervalReach
from millpy.operators.join_rows import BufferedSide, Rows


def rows(codes: Sequence[int], times: Sequence[int], values: Sequence[float], first: int = 0) -> Rows:
    numbers = np.arange(first, first + len(values))
    batch = pa.RecordBatch.from_pydict({"site": ["s"] * len(values), "value": pa.array(values, pa.float64())})
    return Rows(np.array(codes, np.int64), np.array(times, np.int64), numbers, batch)


def a_side(*parts: Rows) -> BufferedSide:
    side = BufferedSide(0, IntervalReach(0, 0), 0, outer=False, holds_matched=True)
    for part in parts:
        side.add(part)
    return side


def test_a_retraction_takes_back_the_last_of_equal_rows_with_its_key_and_time() -> None:
    side = a_side(
        rows([1, 1, 1, 2], [5, 5, 6, 5], [7.0, 7.0, 7.0, 7.0]), rows([1, 1, 1], [5, 5, 5], [8.0, -0.0, 7.0], first=4)
    )
    assert side.remove(np.array([6])) is not None

    taken = rows_taken_back(side, rows([1, 1, 1, 1, 2, 1], [5, 5, 5, 5, 6, 5], [7.0, 9.0, 0.0, 7.0, 7.0, 7.0]))

    assert taken.tolist() == [0, 1, 5]


def test_many_retractions_of_one_key_and_time_take_linear_time_and_memory() -> None:
    count = 1_500
    panes = rows([1] * count, [5] * count, [float(value) for value in range(count)])

    begun = time.process_time()
    taken = rows_taken_back(a_side(panes), panes)

    assert taken.tolist() == list(range(count))
    assert time.process_time() - begun < 1.0
