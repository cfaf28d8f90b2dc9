"""A batch over an archive gives the rows of the workers that were archived, bit for bit, or says what is missing."""

from __future__ import annotations

import json
import random
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg.rows import dict_row
from pyspark.sql import SparkSession
from typer.testing import CliRunner

from millpy.cli.app import app
from millpy.embedded import EmbeddedPostgres
from millpy.errors import UsageError
from millpy.graph.loader import load_graph
from millpy.limits import Limits
from millpy.model.time import Instant
from millpy.spark import Archive, read_results
from millpy.spark.job import make_job
from tests.databases import fresh_database
from tests.property.test_spark_tasks import by_tasks
from tests.s3_server import S3Server
from tests.spark.test_native import GRAPH, computed, write_feed

NOT_IN_SPARK = ("emitted_at", "interval_id", "bundle")
OTHERS = """
filtered = readings.filter(positive).key_by("device").window(FixedWindows(seconds(20)), name="filtered")
filtered.aggregate(n=Count(), value=Sum("value")).to_table("filtered")
halls = readings.key_by("place.hall").window(FixedWindows(seconds(20)), name="halls")
halls.aggregate(value=Sum("value"), last=Last("device")).to_table("halls")
"""
NOW_US = Instant(1_700_000_000_000_000)


def sorted_rows(rows: list[dict[str, Any]]) -> list[str]:
    """Every digit counts."""
    return sorted(repr({name: plain(value) for name, value in row.items() if name not in NOT_IN_SPARK}) for row in rows)


def plain(value: Any) -> Any:
    if isinstance(value, bytearray):
        return bytes(value)
    return round(value.timestamp() * 1e6) if isinstance(value, datetime) else value


def run_spark(graph: Path, *more: str) -> tuple[int, str]:
    command = ["spark", "run", str(graph), "--archive", str(graph.parent / "archive"), "--json", *more]
    done = CliRunner().invoke(app, command)
    return done.exit_code, done.stdout or done.output


def test_an_archive_gives_the_rows_of_its_workers_and_a_missing_bundle_is_refused(
    spark: SparkSession, postgres: EmbeddedPostgres, tmp_path: Path, s3_login: S3Server
) -> None:
    write_feed(tmp_path / "feed.ndjson", seed=4)
    with (
        fresh_database(postgres) as name,
        psycopg.connect(postgres.url(name), autocommit=True, row_factory=dict_row) as connection,
    ):
        url = postgres.url(name)
        graph = computed(
            tmp_path, url, Limits(bundle_records_max=200), GRAPH.read_text().partition("sliding = ")[0] + OTHERS
        )
        tables = ("fixed", "filtered", "halls")
        expected = {table: connection.execute(f"SELECT * FROM natively.{table}").fetchall() for table in tables}
        late = connection.execute("SELECT computation, key, event_time, watermark FROM millpy.late_records").fetchall()
        assert {row["computation"] for row in late} == set(tables)
        (tmp_path / "feed.ndjson").unlink()
        (tmp_path / "feed.ndjson").touch()  # nothing comes from the source

        status, text = run_spark(graph, "--output", str(tmp_path / "out"), "--database", url)

        assert status == 0, text
        for table, rows in expected.items():
            found = [row.asDict() for row in spark.read.parquet(str(tmp_path / "out/tables" / table)).collect()]
            assert sorted_rows(found) == sorted_rows(rows), table
        frame = spark.read.parquet(str(tmp_path / "out/late_records")).select(*late[0])
        assert sorted_rows([row.asDict() for row in frame.collect()]) == sorted_rows(late)
        (source,) = json.loads(text)["accounting"]["sources"]
        assert (source["injected"], source["accepted"]) == (1_500, 1_500)

        more = ("--stream", "--available-now", "--every", "0.1", "--checkpoint", str(tmp_path / "checkpoint"))
        status, text = run_spark(graph, "--output", str(tmp_path / "streamed"), *more)
        assert status == 0, text
        streamed = read_results(spark, tmp_path / "streamed")
        for table, rows in expected.items():
            found = sorted_rows([row.asDict() for row in streamed[table].collect()])
            assert set(found) <= set(sorted_rows(rows)), table
            closed = [row for row in rows if plain(row["window_end"]) <= 170e6]  # an archive has no end
            assert set(sorted_rows(closed)) <= set(found), table
            assert len(closed) > 10
        assert json.loads(text)["accounting"]["sources"][0]["accepted"] == 1_500

        start, end = (datetime.fromtimestamp(second, UTC) for second in (40, 140))
        archive = Archive(tmp_path / "archive", start, end)
        job = make_job(str(graph), archive, limits=Limits(), now_us=NOW_US, state=False)
        parts = by_tasks(job, random.Random(1))["rows"]
        for table in ("fixed", "halls"):
            rows = [row for row in expected[table] if start <= row["window_start"] and row["window_end"] <= end]
            inside = [row for row in parts[table] if row["window_start"] >= 40e6 and row["window_end"] <= 140e6]
            assert len(rows) >= 10
            assert sorted_rows(inside) == sorted_rows(rows)
        assert all(20e6 <= row["window_start"] < 140e6 for row in parts["fixed"])
        in_bucket = Archive(s3_login.upload(tmp_path / "archive"), start, end)
        job = make_job(str(graph), in_bucket, limits=Limits(), now_us=NOW_US, state=False)
        assert by_tasks(job, random.Random(1))["rows"] == parts

        (middle,) = connection.execute(
            "DELETE FROM mill.archive_files WHERE path = ("
            "SELECT path FROM mill.archive_files ORDER BY (partitions -> 'readings/files' ->> 0)::int OFFSET 2 LIMIT 1)"
            " RETURNING path"
        ).fetchall()
        connection.execute(
            "UPDATE mill.cursors SET seq = 0"
            " WHERE consumer IN (SELECT interval_id FROM mill.places WHERE computation = 'readings_archive')"
        )
        # The ring of segments may have turned: what is consumed is truncated, a slot at a time.
        (left,) = connection.execute("SELECT pending FROM millpy.archive").fetchall()
        status, text = run_spark(graph, "--output", str(tmp_path / "gap"), "--database", url)
        told = f"readings_archive: {left['pending']:,} records are not archived yet, and are not read" in text
        assert told == (left["pending"] > 0), text
        assert (status, "what came before bundle" in text) == (2, True), text
        (tmp_path / "archive" / middle["path"]).unlink()
        status, text = run_spark(graph, "--output", str(tmp_path / "gap"))
        assert (status, "what came before bundle" in text) == (2, True), text


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (("--archive", "there", "--input", "a.csv"), "--archive and --input exclude each other"),
        (("--archive", "there", "--stream", "--to", "1h", "--checkpoint", "c"), "--to is for a batch"),
        (("--from", "1h"), "--from and --to are for --archive"),
        (("--archive", "there"), "has no files"),
        (("--archive", "there", "--exact"), "does not archive takes"),
        (("--archive", "there", "--exact", "--from", "1h"), "--exact is for a batch over a whole --archive"),
    ],
)
def test_what_an_archive_cannot_stand_beside_is_refused(given: tuple[str, ...], reason: str, tmp_path: Path) -> None:
    graph = tmp_path / "natively.py"
    graph.write_text(GRAPH.read_text())
    (tmp_path / "feed.ndjson").touch()

    done = CliRunner().invoke(app, ["spark", "run", str(graph), "--output", str(tmp_path / "out"), *given])

    assert done.exit_code == 2
    assert reason in done.output


def test_every_source_needs_an_archive_of_one_interval(tmp_path: Path) -> None:
    (tmp_path / "feed.ndjson").touch()
    for number, (archive, reason) in enumerate({
        'readings.key_by("device").archive(intervals=2)': "2 key intervals, which cut bundles",
        "": "source 'readings' has no archive",
    }.items()):  # fmt: skip
        graph = tmp_path / f"other{number}.py"
        graph.write_text(GRAPH.read_text().replace('readings.key_by("device").archive(buckets=4)', archive))
        with pytest.raises(UsageError, match=reason):
            Archive(tmp_path).histories(load_graph(str(graph)))
