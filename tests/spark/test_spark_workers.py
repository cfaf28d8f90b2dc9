"""examples/spark_workers.py: workers as tasks of a Spark job."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import psycopg
from pyspark.sql import SparkSession

from examples.spark_workers import run_workers

GRAPH = Path(__file__).with_name("graphs") / "killed_once.py"


def test_workers_as_tasks_finish_the_graph_although_one_is_killed(
    spark: SparkSession, database_url: str, tmp_path: Path
) -> None:
    graph = Path(shutil.copy(GRAPH, tmp_path))
    notes = [{"device": "abcd"[number % 4], "at": number, "number": number} for number in range(100)]
    (tmp_path / "notes.ndjson").write_text("".join(json.dumps(note) + "\n" for note in notes))

    run_workers(spark, graph, database_url, 2)

    assert (tmp_path / "marker").exists(), "no worker was killed"
    with psycopg.connect(database_url) as connection:
        rows = connection.execute("SELECT count(*), sum(n), sum(total) FROM killed_once.sums").fetchone()
    assert rows == (20, 100, sum(range(100)))
