"""A deployment beneath `run --workers N`: its workers end, and are started with the file as it is by then."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.commands import millpy
from tests.crash.graph_files import DEVICES, GRAPH, MIDDLE, consumed, drop, one
from tests.crash.harness import await_true
from tests.crash.test_interrupt import ended, start
from tests.crash.test_versions import STRUCT, SUMS

LATER = GRAPH.replace("FixedWindows(minutes(1))", "FixedWindows(minutes(1)), allowed_lateness=minutes(9)")
WORKERS = "SELECT count(*) FROM mill.workers WHERE graph_version = {}"


@pytest.mark.parametrize(
    ("old", "new", "how"), [(SUMS, STRUCT, ["--upgrade"]), (GRAPH, LATER, [])], ids=["other state", "other setting"]
)
def test_workers_go_on_with_the_file_that_was_deployed(
    tmp_path: Path, database_url: str, monkeypatch: pytest.MonkeyPatch, old: str, new: str, how: list[str]
) -> None:
    """The graph that a worker has loaded is refused then, as a mistake in its file would be."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "feed").mkdir()
    (tmp_path / "graph.py").write_text(old)
    drop(tmp_path, 0, MIDDLE)
    running = start(database_url, tmp_path, "graph.py", "--workers", "2")
    try:
        await_true(lambda: one(database_url, "SELECT count(*) FROM pg_namespace WHERE nspname = 'factory'") == 1, "up")
        await_true(lambda: one(database_url, WORKERS.format(1)) == 2, "both have registered")
        await_true(consumed(database_url, MIDDLE * DEVICES), "the first part")
        (tmp_path / "graph.py").write_text(new)
        millpy("deploy", "graph.py", *how, "--database", database_url)
        drop(tmp_path, MIDDLE, 120)
        await_true(
            lambda: running.poll() is not None or one(database_url, WORKERS.format(2)) == 2, "both have the new file"
        )
        await_true(lambda: running.poll() is not None or consumed(database_url, 120 * DEVICES)(), "the rest")
    finally:
        running.terminate()
        said = ended(running)

    assert running.returncode == 0, said
    assert said.count("worker ended for another version of the graph") == 2, said
    assert "worker failed" not in said
