"""A worker frozen past its lease, also between fence and COMMIT: takeover goes on, its next commit is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from millpy.runtime.probe import Point
from tests.crash.freezing import freeze_and_thaw
from tests.crash.harness import LEASE_S
from tests.crash.workload import Expected


@pytest.mark.parametrize("only", ["", "readings"], ids=["anything", "injector"])
@pytest.mark.parametrize("point", [Point.BEFORE_COMMIT, Point.AFTER_FENCE])
def test_frozen_worker_changes_nothing(
    tmp_path: Path, database_url: str, source: Path, expected: Expected, point: Point, only: str
) -> None:
    outcome = freeze_and_thaw(tmp_path, database_url, source, expected, point, only)

    assert outcome.faults == []
    assert outcome.takeover_s < LEASE_S + 1
    assert outcome.uncommitted >= 1, outcome.frozen_log
    if point is Point.BEFORE_COMMIT:
        # Another statement that was on its way when it froze may have failed first: then the refusal is no event.
        assert outcome.refused >= 1 or "statement timeout" in outcome.frozen_log, outcome.frozen_log
    else:
        assert "Error" in outcome.frozen_log  # its transaction was ended for it
