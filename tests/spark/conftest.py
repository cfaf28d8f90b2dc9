"""One Spark for all tests of a process: it takes seconds to start."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from millpy.spark import session


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    """A local Spark with our data source, without a default database."""
    before = dict(os.environ)
    # A test's queries are over before the second compiler pays, and on two cores it takes the time of all other tests.
    os.environ["JAVA_TOOL_OPTIONS"] = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
    os.environ["SPARK_CONF_DIR"] = str(Path(__file__).with_name("conf"))  # of the processes that tests start, too
    with_source = session(master="local[2,4]")  # a lost task is repeated
    with_source.conf.set("spark.sql.shuffle.partitions", "3")
    yield with_source
    with_source.stop()
    os.environ.clear()
    os.environ.update(before)
