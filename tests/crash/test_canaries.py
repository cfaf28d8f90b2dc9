"""Broken on purpose: the checks that the other tests rely on must catch each of these."""

from __future__ import annotations

from pathlib import Path

from millpy.embedded import EmbeddedPostgres
from millpy.hosting.failpoints import Failpoint
from tests.crash.cases.freezing import freeze_and_thaw
from tests.crash.checks import Observer, faults
from tests.crash.harness import Worker
from tests.crash.workload import Expected, expected_of, write_input
from tests.crash.world import Case, Inputs, World, play

CANARIES = Path(__file__).with_name("canaries")
IN_MEMORY = {"closed_windows_bytes_max": 10**9, "unfired_windows_bytes_max": 10**9}
ATTEMPTS = 4
"""Of which one at least must show it; seldom does one show nothing."""
SEEN_IN_TABLES = (
    "violation: accounting does not add up",
    "violation: beyond what was published",
    "violation: watermark of another position",
)


def test_store_that_ignores_the_sequencer_is_caught(tmp_path: Path, postgres: EmbeddedPostgres) -> None:
    source = write_input(tmp_path / "few.ndjson", 2_000)
    inputs = Inputs(source, expected_of(source))

    def run(world: World) -> None:
        freeze_and_thaw(world, Failpoint.BEFORE_COMMIT, graph=CANARIES / "ignores_sequencer.py")

    # What the stranger's commit does is a matter of chance: results that are wrong at the end, or that the owner fails
    # over it after the observer has seen it, and seldom nothing, when the turn that was frozen had nothing to write.
    # That a worker fails, or a case does not end, shows nothing by itself.
    found, seen = [], []
    for attempt in range(ATTEMPTS):
        case = Case("canary", "ignores the sequencer", run)
        found += play(case, tmp_path / f"case_{attempt}", postgres, inputs).faults
        seen = [fault for fault in found if fault.kind in ("doubled", "lost") or fault.startswith(SEEN_IN_TABLES)]
        if seen:
            break
    assert seen, found


def test_store_that_commits_twice_is_caught(
    tmp_path: Path, database_url: str, source: Path, expected: Expected
) -> None:
    graph = CANARIES / "commits_twice.py"
    # Its bundles have other numbers than the store's, by which windows would leave memory before they are folded.
    with Worker(tmp_path, database_url, source, graph=graph, **IN_MEMORY) as worker:
        worker.await_finished()
    found = faults(database_url, expected)

    assert any("marks" in fault for fault in found), found


def test_watermark_ahead_of_its_position_is_caught(
    tmp_path: Path, database_url: str, source: Path, expected: Expected
) -> None:
    graph = CANARIES / "watermark_ahead.py"
    with (
        Observer(database_url) as observer,
        Worker(tmp_path, database_url, source, only="readings", epoch_s=60),
        # Nobody runs the watcher: segments stay, beside which the cursors of the canary can be read after its end.
        Worker(tmp_path, database_url, source, graph=graph, only="per_window") as ahead,
    ):
        ahead.process.wait(60)
        observer.look_now()

    assert any("another position" in fault for fault in observer.faults), (observer.faults, ahead.log[-2000:])
    assert ahead.process.returncode == 1, "a window has closed before its records came"
    assert "PaneOrderError" in ahead.log
