"""The source of a streaming query: a clock whose readings Spark keeps in its log of offsets.

A batch that is run again after a crash has the same processing time, so the same timers fire in it. What the batch
reads is not in the offset: sources keep their positions in the state that the batch commits.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pyspark.sql.datasource import DataSource, DataSourceStreamReader, InputPartition
from pyspark.sql.types import StructType

from millpy.clock import SystemClock

CLOCK = "millpy_clock"


class ClockSource(DataSource):
    """`spark.readStream.format("millpy_clock")`: one row a batch, its time."""

    @classmethod
    def name(cls) -> str:
        """Return the name of the format."""
        return CLOCK

    def schema(self) -> str:
        """Return the schema."""
        return "now_us bigint"

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802 - Spark's name
        """Return the reader."""
        del schema
        return ClockReader()


class ClockReader(DataSourceStreamReader):
    """Reads the clock; it never goes back."""

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802 - Spark's name
        """Return a time before all others."""
        return {"now_us": 0}

    def latestOffset(self, start: dict[str, Any], limit: Any) -> dict[str, Any]:  # noqa: N802 - Spark's name
        """Return the time now."""
        del limit
        return {"now_us": max(start["now_us"] + 1, SystemClock().now_us())}

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        """Return one partition, which is the time."""
        del start
        return [InputPartition(end["now_us"])]

    def read(self, partition: InputPartition) -> Iterator[tuple[int]]:
        """Yield the time."""
        yield (partition.value,)
