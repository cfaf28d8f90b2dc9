"""Broken on purpose: the checks that the other tests rely on must catch each of these."""

from __future__ import annotations

from pathlib import Path

import pytest

from millpy.runtime.probe import Point
from tests.crash.checks import Observer, faults
from tests.crash.freezing import freeze_and_thaw
from tests.crash.harness import Worker
from tests.crash.workload import Expected

CANARIES = Path(__file__).with_name("canaries")


def test_store_that_ignores_the_sequencer_is_caught(
    tmp_path: Path, database_url: str, source: Path, expected: Expected
) -> None:
    graph = CANARIES / "ignores_sequencer.py"
    outcome = freeze_and_thaw(tmp_path, database_url, source, expected, Point.BEFORE_COMMIT, graph=graph)

    assert outcome.faults


def test_store_that_commits_twice_is_caught(
    tmp_path: Path, database_url: str, source: Path, expected: Expected
) -> None:
    with Worker(tmp_path, database_url, source, graph=CANARIES / "commits_twice.py") as worker:
        worker.await_finished()
    found = faults(database_url, expected)

    assert any("marks" in fault for fault in found), found


def test_watermark_ahead_of_its_position_is_caught(
    tmp_path: Path, database_url: str, source: Path, expected: Expected
) -> None:
    graph = CANARIES / "watermark_ahead.py"
    with (
        Observer(database_url, every_s=0.01) as observer,
        Worker(tmp_path, database_url, source, only="readings") as injector,
        Worker(tmp_path, database_url, source, graph=graph, only="per_window,watcher,per_group,tally") as ahead,
    ):
        for worker in (injector, ahead):
            worker.process.wait(60)

    assert any("beyond" in fault for fault in observer.faults), (observer.faults, ahead.log[-2000:])
    assert pytest.approx(ahead.process.returncode) == 0 or "Corruption" in ahead.log
    assert faults(database_url, expected)
