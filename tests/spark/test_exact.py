"""An exact batch over archives and takes gives the rows of workers that were killed, over several partitions."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import psycopg
from psycopg.rows import dict_row
from pyspark.sql import SparkSession

from tests.crash.takes import LATE, write_feeds
from tests.spark.test_archive_input import run_spark, sorted_rows

TABLES = ("fixed", "sessions", "said", "per_number")
RECORDS = 900


def test_an_exact_batch_gives_the_rows_of_killed_workers(
    spark: SparkSession, database_url: str, tmp_path: Path
) -> None:
    graph = write_feeds(tmp_path, 1, RECORDS)
    command = [sys.executable, "-m", "tests.crash.killed_run", str(graph), database_url, str(tmp_path / "archive")]
    ended = subprocess.run(command, check=False, timeout=200, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    for path in tmp_path.glob("feed-*"):
        path.unlink()

    status, text = run_spark(graph, "--output", str(tmp_path / "out"), "--database", database_url, "--exact")

    assert status == 0, text
    with psycopg.connect(database_url, row_factory=dict_row) as connection:
        for table in TABLES:
            rows: list[dict[str, Any]] = connection.execute(f"SELECT * FROM replayed.{table}").fetchall()
            found = [row.asDict() for row in spark.read.parquet(str(tmp_path / "out/tables" / table)).collect()]
            assert sorted_rows(found) == sorted_rows(rows), table
            assert len(rows) >= 10, table
        late = connection.execute(f"SELECT {LATE} FROM millpy.late_records").fetchall()  # type: ignore[call-overload]
        frame = spark.read.parquet(str(tmp_path / "out/late_records")).select(*late[0])
        assert sorted_rows([row.asDict() for row in frame.collect()]) == sorted_rows(late)
        last = connection.execute(
            "SELECT computation || '/' || p.place AS place, i.bundle"
            " FROM mill.intervals AS i JOIN mill.places AS p USING (interval_id) WHERE computation = 'silence'"
        ).fetchall()
    assert {row["place"]: row["bundle"] for row in last}.items() <= json.loads(text)["through"].items()
