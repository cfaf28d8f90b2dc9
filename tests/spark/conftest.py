"""One Spark for all tests of a process: it takes seconds to start."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from tests.small_spark import small_spark

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
    with small_spark(master="local[2,4]") as with_source:  # a lost task is repeated
        yield with_source
