"""One input and its expected results for all crash tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.crash.workload import Expected, expected_of, write_input


@pytest.fixture(scope="session")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An NDJSON file; see `workload`."""
    return write_input(tmp_path_factory.mktemp("crash") / "readings.ndjson", 10_000)


@pytest.fixture(scope="session")
def expected(source: Path) -> Expected:
    """What must come out of it."""
    return expected_of(source)
