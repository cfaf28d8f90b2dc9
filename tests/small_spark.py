"""A Spark for queries of few rows: to compile each of them costs most of the time that it takes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from pyspark.sql import SparkSession

from millpy.spark import session

SMALL_QUERIES = {
    "spark.sql.codegen.factoryMode": "NO_CODEGEN",
    "spark.sql.codegen.wholeStage": "false",
    "spark.sql.shuffle.partitions": "3",
}
"""The settings of a session."""


@contextmanager
def small_spark(**options: str) -> Iterator[SparkSession]:
    """A session for queries that are over before Java's second compiler pays; it would take the cores of all else."""
    before = dict(os.environ)
    os.environ["JAVA_TOOL_OPTIONS"] = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
    spark = session(**options)
    for name, value in SMALL_QUERIES.items():
        spark.conf.set(name, value)
    try:
        yield spark
    finally:
        spark.stop()
        os.environ.clear()
        os.environ.update(before)
