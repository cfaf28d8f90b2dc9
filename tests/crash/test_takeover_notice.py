"""A worker that takes intervals over notifies, so that a page shows it at once, and not when it looks next."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

from millpy.admin.notices import NoticeListener
from tests.crash.graph_files import one
from tests.crash.harness import Worker, owned_by
from tests.crash.test_interrupt import GRAPH as ENDLESS

OWNED = "SELECT count(*) > 0 AND bool_and(worker_id IS NOT NULL) FROM mill.intervals"


def test_a_takeover_in_an_idle_graph_is_notified(tmp_path: Path, database_url: str) -> None:
    (tmp_path / "graph.py").write_text(ENDLESS)
    (tmp_path / "inbox").mkdir()
    with Worker(tmp_path, database_url, tmp_path, graph=tmp_path / "graph.py") as first:
        first.await_while_running(lambda: one(database_url, OWNED), "it owns all")
        first.kill()
    channels = [one(database_url, "SELECT channel FROM millpy.descriptions")]
    with closing(NoticeListener(database_url)) as listener:
        assert not listener.wait(channels, 0.5)
        with Worker(tmp_path, database_url, tmp_path, graph=tmp_path / "graph.py") as second:
            assert listener.wait(channels, 30.0)
            assert owned_by(database_url, second)
