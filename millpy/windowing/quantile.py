"""Approximate quantiles by a DDSketch: a histogram whose buckets grow by a constant factor.

    bucket of x > 0    ceil(log_gamma(x)), gamma = (1 + accuracy) / (1 - accuracy); shifted, so that it is positive
    of x < 0           minus the bucket of -x
    of 0               0

Every value of a bucket is within `accuracy` (relative) of the value that stands for it. Merging adds counts, so a
sketch depends on the values alone: not on their order, on bundles, crashes or merges (I9), which is not so of sketches
that sample or compress (KLL, t-digest). Of more than BUCKETS_MAX buckets the lowest are counted as one, which does not
depend on order either; then quantiles that fall among those are too high.

Reference:
    Masson, Rim, Lee: DDSketch (VLDB 2019). Held equal to the `ddsketch` package by a test.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from millpy.errors import SchemaError
from millpy.windowing.fold import Aggregate, Fold, Partial
from millpy.windowing.grouping import Groups

BUCKETS_MAX = 2_048
"""So many span 18 powers of ten at an accuracy of 1 %."""
ACCURACY_LEAST, ACCURACY_MOST = 0.001, 0.2
_LARGEST = float(np.finfo(np.float64).max)
_SMALLEST = 5e-324

Buckets = dict[int, int]


@dataclass(frozen=True, repr=False)
class Quantile(Aggregate):
    """The value at a quantile, up to a relative error: `Quantile("latency_ms", 0.99)`.

    Of n values it is the one at place `q * (n - 1)`, rounded down, of their order. Quantiles of one field and accuracy
    share one sketch of at most 2,048 buckets a key and window. An infinity counts as the largest number; NaN is left
    out.

    Raises:
        SchemaError: q is not between 0 and 1, or the accuracy not between 0.001 and 0.2.
    """

    q: float = 0.5
    accuracy: float = 0.01
    takes = (int, float)

    def __post_init__(self) -> None:
        if not 0 <= self.q <= 1:
            raise SchemaError(f"a quantile is between 0 and 1, not {self.q}", hint='Quantile("latency_ms", 0.99)')
        if not ACCURACY_LEAST <= self.accuracy <= ACCURACY_MOST:
            raise SchemaError(f"an accuracy is between {ACCURACY_LEAST} and {ACCURACY_MOST}, not {self.accuracy}")

    def __repr__(self) -> str:
        return f"Quantile({self.field!r}, {self.q}, accuracy={self.accuracy})"

    def fold(self, field: str, kind: type) -> Fold:
        """Keeps the counts of buckets."""
        return QuantileFold(field, kind, self.q, self.accuracy)


class Median(Quantile):
    """`Quantile(field, 0.5)`."""


class QuantileFold(Fold):
    """Keeps {bucket: count}."""

    result = float | None

    def __init__(self, field: str, kind: type, q: float, accuracy: float) -> None:
        super().__init__(field, kind)
        self.shares = ("quantile", field, accuracy)
        self._q = q
        self._gamma = (1 + accuracy) / (1 - accuracy)
        self._multiplier = 1 / math.log(self._gamma)
        self._shift = 1 - math.ceil(math.log(_SMALLEST) * self._multiplier)

    def empty(self) -> Buckets:
        """None yet."""
        return {}

    def add(self, accumulator: Buckets, value: Any, at: int) -> Buckets:
        """One more."""
        if value == value:
            bucket = int(self._buckets(np.array([value], np.float64))[0])
            accumulator[bucket] = accumulator.get(bucket, 0) + 1
            return self._bounded(accumulator)
        return accumulator

    def merge(self, one: Buckets, other: Buckets) -> Buckets:
        """The counts of both."""
        merged = dict(one)
        for bucket, count in other.items():
            merged[bucket] = merged.get(bucket, 0) + count
        return self._bounded(merged)

    def result_of(self, accumulator: Buckets) -> float | None:
        """The value that stands for the bucket in which the quantile falls."""
        total = sum(accumulator.values())
        if not total:
            return None
        place, seen = math.floor(self._q * (total - 1)), 0
        for bucket in sorted(accumulator):
            seen += accumulator[bucket]
            if seen > place:
                break
        return self._value(bucket)

    def stored(self, accumulator: Buckets) -> Any:
        """As it is."""
        return accumulator

    def restored(self, stored: Any) -> Buckets:
        """JSON has names for numbers of buckets."""
        return {int(bucket): count for bucket, count in stored.items()}

    def partial(self, groups: Groups) -> Partial:
        """The counts of every group: one sort of (group, bucket)."""
        assert self.field is not None
        found = groups.by_group(self.field)
        values = found.values.astype(np.float64)
        of_value = np.repeat(found.groups, found.ends() - found.offsets)
        if np.isnan(values).any():
            there = ~np.isnan(values)
            values, of_value = values[there], of_value[there]
        width = 2 * (self._shift + math.ceil(math.log(_LARGEST) * self._multiplier)) + 3
        used, counts = np.unique(of_value * width + (self._buckets(values) + width // 2), return_counts=True)
        accumulators: list[Any] = [{} for _ in range(len(groups))]
        columns = ((used // width).tolist(), (used % width - width // 2).tolist(), counts.tolist())
        for group, bucket, count in zip(*columns, strict=True):
            accumulators[group][bucket] = count
        return Partial([self._bounded(accumulator) for accumulator in accumulators])

    def _buckets(self, values: npt.NDArray[np.float64]) -> npt.NDArray[np.int64]:
        sizes = np.minimum(np.abs(values), _LARGEST)
        above = np.ceil(np.log(np.where(sizes > 0, sizes, 1.0)) * self._multiplier)
        buckets: npt.NDArray[np.int64] = (np.sign(values) * (above + self._shift)).astype(np.int64)
        return buckets

    def _value(self, bucket: int) -> float:
        if not bucket:
            return 0.0
        power = (abs(bucket) - self._shift) * math.log(self._gamma)
        size = math.exp(min(power, math.log(_LARGEST))) * (2 / (1 + self._gamma))
        return math.copysign(size, bucket)

    @staticmethod
    def _bounded(buckets: Buckets) -> Buckets:
        """At most BUCKETS_MAX of them: the lowest are one."""
        if len(buckets) <= BUCKETS_MAX:
            return buckets
        kept = sorted(buckets, reverse=True)[:BUCKETS_MAX]
        lowest = kept[-1]
        bounded = {bucket: buckets[bucket] for bucket in kept}
        bounded[lowest] += sum(count for bucket, count in buckets.items() if bucket < lowest)
        return bounded
