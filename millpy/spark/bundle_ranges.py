"""Positions in the commits of a result table: for each interval, the bundle up to which its rows have been read.

Sequences and transaction ids become visible out of order, but an interval's bundles do not: the commit of bundle n + 1
updates the header that the commit of bundle n has updated (the fence, I1), so it waits for the end of that transaction.
A snapshot that shows one row of bundle n therefore shows all rows of the bundles up to n, unless a later bundle has
replaced them. A row of a bundle never comes back, and its number only grows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Self

from millpy.spark.tables import SparkTable

BEFORE_ALL = -1
"""Rows that a deployment has copied have bundle 0."""


@dataclass(frozen=True, slots=True)
class StreamPosition:
    """How far a stream has read; Spark keeps it in the checkpoint, as JSON.

    Attributes:
        database: which database it was, and which history of it: a restored one may lack commits.
        reading: how often the stream has begun from the first row again.
        bundles: interval -> the newest bundle that has been read. Empty before the first batch.
    """

    database: str
    reading: int = 0
    bundles: Mapping[int, int] = field(default_factory=dict)

    @classmethod
    def from_json(cls, offset: Mapping[str, Any]) -> Self:
        """Return the position that Spark has kept."""
        bundles = {int(interval): bundle for interval, bundle in offset["bundles"].items()}
        return cls(offset["database"], offset["reading"], bundles)

    def as_json(self) -> dict[str, Any]:
        """Return what Spark keeps."""
        bundles = {str(interval): bundle for interval, bundle in sorted(self.bundles.items())}
        return {"database": self.database, "reading": self.reading, "bundles": bundles}

    def restarted(self, database: str) -> Self:
        """Return the position before the first row, for another reading of everything."""
        return replace(self, database=database, reading=self.reading + 1, bundles={})

    def moved(self, bundles: Mapping[int, int]) -> Self:
        """Return the position with these bundles, too."""
        return replace(self, bundles={**self.bundles, **bundles})

    def ranges_to(self, end: Self) -> BundleRanges:
        """Return what lies between this position and a later one."""
        begin = self.bundles if self.reading == end.reading else {}
        pairs = {interval: (begin.get(interval, BEFORE_ALL), last) for interval, last in end.bundles.items()}
        return BundleRanges({interval: pair for interval, pair in pairs.items() if pair[0] < pair[1]})


@dataclass(frozen=True, slots=True)
class BundleRanges:
    """The rows of some intervals' bundles.

    Attributes:
        ranges: interval -> (the last bundle before the range, the last bundle in it).
        others: whether the rows of all other intervals belong to it, too.
    """

    ranges: Mapping[int, tuple[int, int]]
    others: bool = False

    def expression(self, table: SparkTable) -> str:
        """Write the condition in SQL."""
        if not self.ranges:
            return "true" if self.others else "false"
        arrays = (self.ranges, *zip(*self.ranges.values(), strict=True))
        listed = ", ".join("'{" + ",".join(map(str, array)) + "}'::bigint[]" for array in arrays)
        within = f"SELECT FROM unnest({listed}) AS r (i, low, high) WHERE r.i = t.interval_id AND"
        if self.others:
            return f"NOT EXISTS ({within} (t.bundle <= r.low OR t.bundle > r.high))"
        # The first condition adds nothing, but an index on bundles serves it.
        lows, highs = zip(*self.ranges.values(), strict=True)
        span = f"t.bundle > {min(lows)} AND t.bundle <= {max(highs)}"
        return f"{span} AND EXISTS ({within} t.bundle > r.low AND t.bundle <= r.high)"
