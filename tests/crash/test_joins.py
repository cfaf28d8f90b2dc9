"""Joins among failures: workers are killed, and the joined records are those of a loop over all pairs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import psycopg

from tests.crash.cases.joins import GRAPH, JOINS
from tests.crash.harness import Worker
from tests.crash.joins import join_faults, write

KILLS = ["after_step:9", "after_fence:6", "after_commit:7"]


def test_joins_of_killed_workers_are_those_of_a_batch(tmp_path: Path, database_url: str) -> None:
    """Real processes: the joins are killed three times, while another worker reads the sources."""
    source = tmp_path / "orders.ndjson"
    drawn = write(source, 5)
    settings: dict[str, Any] = {"graph": GRAPH, "bundle_records_max": 15, "turn_panes_max": 5}
    with Worker(tmp_path, database_url, source, only="orders,payments", **settings) as other:
        for kill in KILLS:
            with Worker(tmp_path, database_url, source, failpoint=f"{kill}:kill", only=JOINS, **settings) as one:
                one.await_killed()
        other.kill()
        with psycopg.connect(database_url, autocommit=True) as connection:
            kept = connection.execute("SELECT sum(runs), sum(bytes) FROM millpy.joins").fetchone()
            held = connection.execute("SELECT DISTINCT held_by FROM millpy.explain_watermark('counts')").fetchall()

    with Worker(tmp_path, database_url, source, **settings) as last:
        last.await_finished()

    assert kept is not None
    assert kept[0] > 3
    assert kept[1] > 1_000
    assert held
    assert join_faults(database_url, drawn) == []
