"""Whole numbers are summed exactly, also where 64 bits would overflow."""

from __future__ import annotations

import numpy as np
import pytest

from millpy.windowing.group_by import unbounded

LARGE = 2**62


@pytest.mark.parametrize(
    "values",
    [[LARGE, LARGE, 1], [-LARGE, -LARGE, -LARGE], [1, -LARGE, -LARGE - 1, -5], [LARGE, LARGE, -1]],
)
def test_sums_beyond_64_bits_are_exact_python_integers(values: list[int]) -> None:
    assert unbounded(np.array(values, np.int64)).sum() == sum(values)


def test_small_numbers_stay_in_columns() -> None:
    assert unbounded(np.array([1, -2, 3], np.int64)).dtype == np.int64
    assert unbounded(np.array([], np.int64)).dtype == np.int64
    assert unbounded(np.array([0.5, 1e300])).dtype == np.float64
