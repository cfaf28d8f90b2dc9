"""From SIGKILL to the next commit of everything that was lost: the lease and, on an idle machine, at most a second."""

from __future__ import annotations

import time
from pathlib import Path

from millpy.hosting.failpoints import Failpoint
from tests.crash.checks import Observer, faults
from tests.crash.harness import LEASE_S, Worker, await_true, committed, owned_by
from tests.crash.workload import Expected


def test_lost_intervals_commit_soon_after_the_lease(
    tmp_path: Path, database_url: str, source: Path, expected: Expected
) -> None:
    with (
        Observer(database_url) as observer,
        Worker(tmp_path, database_url, source, gated=True, bundle_records_max=30) as other,
        Worker(tmp_path, database_url, source, gated=True, bundle_records_max=30) as killed,
    ):
        other.await_ready()
        killed.await_ready()
        for worker in (other, killed):
            worker.begin()
            worker.await_reached(Failpoint.AFTER_CLAIM)
        killed.await_reached(Failpoint.AFTER_ACKNOWLEDGE, 5)
        lost = owned_by(database_url, killed)
        killed.kill()
        died_at = time.monotonic()
        before = committed(database_url)
        assert lost
        await_true(lambda: all(committed(database_url)[i] > before[i] for i in lost), "all lost intervals commit")
        recovery_s = time.monotonic() - died_at
        other.await_finished()

    assert recovery_s < LEASE_S + 4  # on a loaded machine; benchmarks/w5_recovery.py measures an idle one
    assert faults(database_url, expected) == []
    assert observer.faults == []
