"""A real worker reports its memory and its latencies with the renewals of its lease."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.commands import millpy
from tests.crash.graph_files import DEVICES, GRAPH, MIDDLE, consumed, drop, one, rows
from tests.crash.harness import Worker

USED = "SELECT memory_bytes, turn_p50_s, turn_p99_s, commit_p50_s, commit_p99_s FROM millpy.workers"


def test_a_worker_reports_memory_and_latencies(
    tmp_path: Path, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "feed").mkdir()
    (tmp_path / "graph.py").write_text(GRAPH)
    monkeypatch.chdir(tmp_path)
    drop(tmp_path, 0, MIDDLE)
    with Worker(tmp_path, database_url, tmp_path, graph=tmp_path / "graph.py") as worker:
        worker.await_while_running(consumed(database_url, MIDDLE * DEVICES), "all of it")
        worker.await_while_running(
            lambda: one(database_url, f"SELECT bool_and(u.turn_p50_s > 0) FROM ({USED}) u"), "it says"
        )
        ((memory, turn_p50_s, turn_p99_s, commit_p50_s, commit_p99_s),) = rows(database_url, USED)
        shown = json.loads(millpy("status", "--json", "--database", database_url))["workers"][0]
        status = Path(f"/proc/{worker.process.pid}/status").read_text()

    resident_kb = int(status.partition("VmRSS:")[2].split()[0])
    assert memory == pytest.approx(resident_kb * 1_024, rel=0.5)
    assert 0 < turn_p50_s <= turn_p99_s < 60
    assert 0 < commit_p50_s <= commit_p99_s <= turn_p99_s
    assert shown["memory_bytes"] > 0 and shown["turn_p99_s"] > 0
