"""A source that knows millpy by its public classes alone (docs/own-source.md): killed, resumed, replayed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import psycopg
import pytest

from millpy.graph.loader import load_graph
from millpy.testing.crash_test.inputs import prepare
from millpy.testing.crash_test.options import Options
from tests.docs.blocks import ROOT, blocks_of

HUNDREDS = [
    (kind, start, 50, sum(range(start + first, start + 100, 2)))
    for first, kind in enumerate(("even", "odd"))
    for start in range(0, 5_000, 100)
]


@pytest.fixture
def ticks(tmp_path: Path) -> Path:
    (block,) = [
        block for block in blocks_of(ROOT / "docs" / "own-source.md") if block.options.get("title") == "ticks.py"
    ]
    file = tmp_path / "ticks.py"
    file.write_text(block.body)
    return file


def run(graph: Path, url: str, *more: str) -> int:
    command = [sys.executable, "-m", "millpy.testing.crash_worker", str(graph), "--database", url, "--lease-s", "1"]
    return subprocess.run([*command, *more], timeout=60, check=False).returncode


def test_every_record_counts_once_when_killed_around_commits(ticks: Path, database_url: str) -> None:
    for trap in ("before_commit:3:kill", "after_commit:4:kill", "after_fence:2:kill"):
        assert run(ticks, database_url, "--failpoint", trap) == -9

    assert run(ticks, database_url) == 0

    with psycopg.connect(database_url) as connection:
        query = "SELECT kind, extract(epoch FROM window_start)::int, n, total FROM ticks.hundreds ORDER BY 1, 2"
        assert connection.execute(query).fetchall() == HUNDREDS


def test_crash_test_reads_an_own_source_that_ends(ticks: Path, tmp_path: Path) -> None:
    (prepared,) = prepare(load_graph(str(ticks)), Options(graph=str(ticks)), tmp_path / "input")

    assert (prepared.total, prepared.origin) == (5_000, "Ticks(count=5000)")


DEFECTIVE = """
SPOILED = [("position", b"x"), ("arrived_at", 1.5), ("payloads", ["{}"]), ("finished", 1), ("watermark", 2**70)]


class Defective(Ticks):
    def connect(self, setup):
        return DefectiveInjector(self.count, setup)


class DefectiveInjector(TicksInjector):
    async def take(self):
        first, taken = self.next, await super().take()
        if taken is not None and self.next > 1_000 and SPOILED:
            setattr(taken, *SPOILED.pop())
        elif taken is not None and first == 1:
            taken.payloads.append(b"{}")
            taken.records += 1
            taken.refused = [RejectedRow(len(taken.payloads) - 1, "no\\0reason", "why \\ud800\\0")]
        return taken


class Tick("""


def test_batches_that_a_step_could_not_read_delay_their_partition_only(ticks: Path, database_url: str) -> None:
    body = ticks.read_text().replace("class Tick(", DEFECTIVE).replace("Ticks(5_000)", "Defective(5_000)")
    ticks.write_text("from millpy.sources import RejectedRow\n" + body)

    assert run(ticks, database_url) == 0

    with psycopg.connect(database_url) as connection:
        query = "SELECT kind, extract(epoch FROM window_start)::int, n, total FROM ticks.hundreds ORDER BY 1, 2"
        assert connection.execute(query).fetchall() == HUNDREDS
        letters = connection.execute("SELECT reason, detail FROM millpy.dead_letters").fetchall()
        assert letters == [("no\\x00reason", "why \\ud800\\x00")]
