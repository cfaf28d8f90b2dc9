"""One input and its expected results for all crash tests."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from millpy.embedded import EmbeddedPostgres
from tests.crash.workload import Expected, expected_of, write_input
from tests.crash.world import Case, Inputs, Skipped, Verdict, play

Survives = Callable[[Case], Verdict]


@pytest.fixture(scope="session")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An NDJSON file; see `workload`."""
    return write_input(tmp_path_factory.mktemp("crash") / "readings.ndjson", 2_500)


@pytest.fixture(scope="session")
def expected(source: Path) -> Expected:
    """The expected results."""
    return expected_of(source)


@pytest.fixture
def inputs(source: Path, expected: Expected) -> Inputs:
    """Both."""
    return Inputs(source, expected)


@pytest.fixture
def survives(tmp_path: Path, postgres: EmbeddedPostgres, inputs: Inputs) -> Survives:
    """Plays a case of the matrix: nothing may be lost, doubled or changed."""

    def play_it(case: Case) -> Verdict:
        try:
            verdict = play(case, tmp_path, postgres, inputs)
        except Skipped as skipped:
            pytest.skip(str(skipped))
        assert verdict.faults == []
        return verdict

    return play_it
