"""A Spark job on a table of windows, a line a device: `python -m examples.device_profile GRAPH.TABLE`."""

import sys

from pyspark.sql import functions

from millpy.config import Settings
from millpy.spark import read_table, session


def main() -> int:
    """Print a line a device: windows, records, mean and highest of what was measured."""
    spark = session(database_url=Settings.load().database_url)
    windows = read_table(spark, sys.argv[1], columns=["device", "n", "mean", "high"])
    profile = windows.groupBy("device").agg(
        functions.count("*").alias("windows"),
        functions.sum("n").alias("records"),
        functions.round(functions.sum(windows.mean * windows.n) / functions.sum("n"), 2).alias("mean"),
        functions.max("high").alias("high"),
    )
    profile.orderBy("device").show(100, truncate=False)
    spark.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main())
