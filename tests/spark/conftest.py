"""One Spark for all tests of a process: it takes seconds to start."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from millpy.spark import session

SMALL_QUERIES = {
    "spark.sql.codegen.factoryMode": "NO_CODEGEN",
    "spark.sql.codegen.wholeStage": "false",
    "spark.sql.shuffle.partitions": "3",
}
"""A test's queries have few rows: to compile each of them costs a seventh of the time of all tests."""
TEST_S_MAX = 1_200
"""A JVM starts first. A limit that is reached breaks the gateway for all tests behind, so it is wide."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give each test of Spark its limit."""
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.timeout(TEST_S_MAX))


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    """A local Spark with our data source, without a default database."""
    before = dict(os.environ)
    # A test's queries are over before the second compiler pays, and on two cores it takes the time of all other tests.
    os.environ["JAVA_TOOL_OPTIONS"] = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
    with_source = session(master="local[2,4]")  # a lost task is repeated
    for name, value in SMALL_QUERIES.items():
        with_source.conf.set(name, value)
    yield with_source
    with_source.stop()
    os.environ.clear()
    os.environ.update(before)
