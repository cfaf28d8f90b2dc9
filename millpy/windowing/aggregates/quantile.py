"""Approximate quantiles by a DDSketch, a histogram whose buckets grow by a constant factor.

    bucket of x > 0    ceil(log_gamma(x)), gamma = (1 + accuracy) / (1 - accuracy); shifted, so that it is positive
    of x < 0           minus the bucket of -x
    of 0               0

Every value of a bucket is within `accuracy` (relative) of the bucket's representative value. Merging adds counts, so a
sketch depends only on the values, not on their order, on bundles, crashes or merges (I9). That is not so for sketches
that sample or compress (KLL, t-digest). Beyond BUCKETS_MAX buckets the lowest are merged into one, which does not
depend on order either; quantiles in that bucket are then too high.

Reference:
    Masson, Rim, Lee: DDSketch (VLDB 2019). A test compares the results with the `ddsketch` package.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from millpy.errors import SchemaError
from millpy.model.arguments import is_number
from millpy.model.identity import Identity
from millpy.windowing.accumulator import Accumulator, Aggregate, PartialAggregate
from millpy.windowing.group_by import Groups

BUCKETS_MAX = 2_048
"""The most buckets of a sketch; they span 18 powers of ten at an accuracy of 1 %."""
ACCURACY_LEAST, ACCURACY_MOST = 0.001, 0.2
_LARGEST = float(np.finfo(np.float64).max)
_SMALLEST = 5e-324

Buckets = dict[int, int]


@dataclass(frozen=True, repr=False)
class Quantile(Aggregate):
    """The q-quantile, with a relative error of at most `accuracy`: `Quantile("latency_ms", 0.99)`.

    Of n sorted values it is the one at index `q * (n - 1)`, rounded down. Quantiles of one field and accuracy share one
    sketch of at most 2,048 buckets per key and window. An infinity counts as the largest number; NaN is ignored.

    Raises:
        SchemaError: q is not between 0 and 1, or the accuracy is not between 0.001 and 0.2.
    """

    kind = "quantile"
    q: float = 0.5
    accuracy: float = 0.01
    takes = (int, float)
    forgets = "its sketch merges buckets, and cannot divide them again"

    def __post_init__(self) -> None:
        if not is_number(self.q, 0, 1):
            raise SchemaError(
                f"q of a quantile must be between 0 and 1, not {self.q!r}",
                hint='for example Quantile("latency_ms", 0.99)',
            )
        if not is_number(self.accuracy, ACCURACY_LEAST, ACCURACY_MOST):
            raise SchemaError(
                f"accuracy must be between {ACCURACY_LEAST} and {ACCURACY_MOST}, not {self.accuracy!r}",
                hint="accuracy=0.01 is 1 %",
            )

    def identity(self) -> Identity:
        """Describe the aggregate and its parameters."""
        return {**super().identity(), "q": self.q, "accuracy": self.accuracy}

    def bind_field(self, field: str, kind: type) -> Accumulator:
        """Return the operations that keep the counts of buckets."""
        return QuantileAccumulator(field, kind, self.q, self.accuracy)


class Median(Quantile):
    """The median: `Quantile(field, 0.5)`."""


class QuantileAccumulator(Accumulator):
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
        """Return the accumulator of zero records."""
        return {}

    def add(self, accumulator: Buckets, value: Any, at: int) -> Buckets:
        """Add one value."""
        if value == value:
            bucket = int(self._buckets(np.array([value], np.float64))[0])
            accumulator[bucket] = accumulator.get(bucket, 0) + 1
            return self._bounded(accumulator)
        return accumulator

    def merge(self, one: Buckets, other: Buckets) -> Buckets:
        """Add up the counts of two sketches, without changing them."""
        merged = dict(one)
        for bucket, count in other.items():
            merged[bucket] = merged.get(bucket, 0) + count
        return self._bounded(merged)

    def result_of(self, accumulator: Buckets) -> float | None:
        """Return the representative value of the bucket that holds the quantile; None without values (NaN is none)."""
        total = sum(accumulator.values())
        if not total:
            return None
        place, seen = math.floor(self._q * (total - 1)), 0
        for bucket in sorted(accumulator):
            seen += accumulator[bucket]
            if seen > place:
                break
        return self._value(bucket)

    def to_stored(self, accumulator: Buckets) -> Any:
        """Return the accumulator, which JSON can hold."""
        return accumulator

    def from_stored(self, stored: Any) -> Buckets:
        """Convert the accumulator from JSON, where bucket numbers are text."""
        return {int(bucket): count for bucket, count in stored.items()}

    def aggregate(self, groups: Groups) -> PartialAggregate:
        """Count the values of each group by bucket."""
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
        return PartialAggregate([self._bounded(accumulator) for accumulator in accumulators])

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
        """Return at most BUCKETS_MAX buckets, with the lowest ones merged into one."""
        if len(buckets) <= BUCKETS_MAX:
            return buckets
        kept = sorted(buckets, reverse=True)[:BUCKETS_MAX]
        lowest = kept[-1]
        bounded = {bucket: buckets[bucket] for bucket in kept}
        bounded[lowest] += sum(count for bucket, count in buckets.items() if bucket < lowest)
        return bounded
