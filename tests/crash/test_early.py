"""Early panes under SIGKILL on PostgreSQL; and a canary of their checker. All points: `make crash ONLY=early`."""

from __future__ import annotations

from pathlib import Path

import psycopg

from millpy.hosting.failpoints import Failpoint
from tests.crash.cases.early import early_case, faults_of, write_readings
from tests.crash.conftest import Survives
from tests.crash.harness import Worker


def test_no_kill_loses_or_doubles_an_early_pane(survives: Survives) -> None:
    verdict = survives(early_case(Failpoint.AFTER_COMMIT))

    assert (verdict.kills, len(verdict.recovered)) == (1, 1)


def test_the_checker_sees_a_pane_that_is_lost_doubled_or_changed(tmp_path: Path, database_url: str) -> None:
    graph, readings = write_readings(tmp_path)
    with Worker(tmp_path, database_url, graph, graph=graph) as worker:
        worker.await_finished()
    assert faults_of(database_url, readings) == []

    with psycopg.connect(database_url, autocommit=True) as connection:
        connection.execute("DELETE FROM early.fixed_discarding WHERE device = 'd1' AND window_start = to_timestamp(0)")
        connection.execute("UPDATE early.totals_retracting SET n = n + 1 WHERE window_start = to_timestamp(0)")
        connection.execute("UPDATE early.sliding_accumulating SET total = 0 WHERE window_start = to_timestamp(0)")

    found = faults_of(database_url, readings)
    assert {fault.kind for fault in found} == {"lost", "doubled", "changed", "violation"}
    with psycopg.connect(database_url, autocommit=True) as connection:
        connection.execute("DELETE FROM early.fixed_retracting_history WHERE pane_index = 0 AND is_retraction")
    assert len(faults_of(database_url, readings)) > len(found)
