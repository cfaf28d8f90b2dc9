"""Ctrl-C: once drains, twice stops. Real processes, because signals are theirs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psycopg
import pytest

ROOT = Path(__file__).resolve().parents[2]
GRAPH = """
import time
import msgspec
from millpy import Count, Directory, EventTime, FixedWindows, Graph, minutes, seconds

class Reading(msgspec.Struct):
    device: str
    at: int

def slow(reading):
    print("holding", flush=True)
    while reading.device == "slow":
        time.sleep(0.05)
    return True

graph = Graph("endless")
readings = graph.inject(
    "readings", Directory("inbox", settle=seconds(0)), schema=Reading, event_time=EventTime("at", unit="s", sorted=True)
)
readings.filter(slow).key_by("device").window(FixedWindows(minutes(1))).aggregate(n=Count()).to_table("per_minute")
"""
OWNED = "SELECT count(*) FROM mill.intervals JOIN mill.workers USING (worker_id) WHERE pid <> %s"


@pytest.fixture
def inbox(tmp_path: Path) -> Path:
    (tmp_path / "graph.py").write_text(GRAPH)
    (tmp_path / "inbox").mkdir()
    return tmp_path / "inbox"


def start(url: str, place: Path, *arguments: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "MILLPY_DATABASE_URL": url}
    return subprocess.Popen(
        [sys.executable, "-m", "millpy", "run", *arguments], cwd=place, env=environment, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, process_group=0,
    )  # fmt: skip


def ended(running: subprocess.Popen[str]) -> str:
    """Return the rest of its output; kill it if it has not ended."""
    try:
        return running.communicate(timeout=60)[1]
    finally:
        running.kill()


def test_worker_drains_at_the_first_interrupt(inbox: Path, database_url: str) -> None:
    running = start(database_url, inbox.parent)
    assert running.stderr is not None
    assert any("claimed" in line for line in running.stderr)

    running.send_signal(signal.SIGINT)
    said = ended(running)

    assert running.returncode == 0, said
    assert "millpy: draining; press Ctrl-C again to stop at once" in said
    assert said.index("finishing the turn") < said.index("folding the state") < said.index("stopped: released")
    assert "Traceback" not in said
    with psycopg.connect(database_url) as connection:
        assert connection.execute(OWNED, [0]).fetchall() == [(0,)]


@pytest.mark.parametrize("arguments", [(), ("--workers", "2")], ids=["one worker", "two workers"])
def test_worker_stops_at_once_at_the_second_interrupt(
    inbox: Path, database_url: str, arguments: tuple[str, ...]
) -> None:
    running = start(database_url, inbox.parent, *arguments)
    assert running.stdout is not None
    assert running.stderr is not None
    (inbox / "one.ndjson").write_text('{"device": "slow", "at": 1}\n')
    assert running.stdout.readline() == "holding\n"

    running.send_signal(signal.SIGINT)
    assert any("draining" in line for line in running.stderr)
    running.send_signal(signal.SIGINT)
    said = ended(running)

    assert running.returncode == 130, said
    assert "stopped at once" in said
    assert "Traceback" not in said


def children_of(process: subprocess.Popen[str]) -> set[int]:
    """Return the ids of a process's children, which any of its threads may have started."""
    lists = Path(f"/proc/{process.pid}/task").glob("*/children")
    return {int(pid) for children in lists for pid in children.read_text().split()}


def test_killed_worker_is_restarted_and_drains_with_the_others(inbox: Path, database_url: str) -> None:
    running = start(database_url, inbox.parent, "--workers", "2")
    assert running.stderr is not None
    try:
        assert any("claimed" in line for line in running.stderr)
        first = children_of(running)
        killed = min(first)
        os.kill(killed, signal.SIGKILL)
        assert any("restarting worker" in line for line in running.stderr)
        while len(second := children_of(running)) < 2:
            time.sleep(0.05)
        running.send_signal(signal.SIGINT)
    finally:
        said = ended(running)

    assert len(first & second) == 1
    assert len(second - first) == 1
    assert running.returncode == 0, said
    assert "millpy: draining; press Ctrl-C again to stop at once" in said
    assert "Traceback" not in said
    with psycopg.connect(database_url) as connection:
        assert connection.execute(OWNED, [killed]).fetchall() == [(0,)], "only its lease may be left"
