"""PySpark over millpy's result tables: `spark.read.format("millpy")`, and helpers that set its options.

    from millpy.spark import read_table, session

    spark = session(database_url="postgresql://reader@db/plant")
    windows = read_table(spark, "factory.temperature_1m", start=datetime(2026, 11, 1, tzinfo=UTC))
    windows.groupBy("device").count().show()

Needs the extra `spark`. Uses the system's Java 17 or 21 if there is one, else the one in a wheel.
"""

from __future__ import annotations

from millpy.config.extras import to_install
from millpy.errors import ConfigError

try:
    from millpy.spark.archive_input import Archive
    from millpy.spark.backfill import BackfillRequest, backfill
    from millpy.spark.batch import BatchResult, run
    from millpy.spark.session import read_table, register, session
    from millpy.spark.source import MillpyDataSource
    from millpy.spark.stream import GraphStream, StreamPlaces, stream
    from millpy.spark.stream_output import read_results
except ModuleNotFoundError as error:
    package = (error.name or "pyspark").partition(".")[0]
    raise ConfigError(f"millpy.spark needs the package {package}", hint=to_install("spark")) from error

__all__ = [
    "Archive",
    "BackfillRequest",
    "BatchResult",
    "GraphStream",
    "MillpyDataSource",
    "StreamPlaces",
    "backfill",
    "read_results",
    "read_table",
    "register",
    "run",
    "session",
    "stream",
]
