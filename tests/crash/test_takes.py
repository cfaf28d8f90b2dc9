"""Archived takes make every bundle again, whoever is killed. All points: `make crash ONLY=takes`."""

from __future__ import annotations

from millpy.hosting.failpoints import Failpoint
from tests.crash.cases.takes import OF_ARCHIVERS, archiver_case, worker_case
from tests.crash.conftest import Survives


def test_no_kill_of_a_worker_changes_what_its_takes_make(survives: Survives) -> None:
    verdict = survives(worker_case(Failpoint.AFTER_FENCE))

    assert (verdict.kills, len(verdict.recovered)) == (1, 1)


def test_no_kill_of_an_archiver_loses_or_doubles_a_take(survives: Survives) -> None:
    verdict = survives(archiver_case(Failpoint.AFTER_COMMIT))

    assert Failpoint.AFTER_COMMIT in OF_ARCHIVERS
    assert verdict.kills + verdict.idle_kills == 1
