"""A graph as a streaming query: on a real Spark, whose driver is killed, the rows of a hosted graph."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from uuid import UUID

import psycopg
import pytest
from psycopg.rows import dict_row
from pyspark.sql import SparkSession
from typer.testing import CliRunner

from millpy.cli.app import app
from millpy.errors import MillError
from millpy.limits import Limits
from millpy.spark import GraphStream, StreamPlaces, read_results, stream
from millpy.spark.job import make_job
from tests.property.test_spark_tasks import NOW_US, by_a_host

GRAPHS = Path(__file__).with_name("graphs")
DRIVER = """
import sys
from datetime import timedelta
from millpy.limits import Limits
from millpy.spark import GraphStream, StreamPlaces, session, stream

graph, feed, *places = sys.argv[1:]
places, limits = StreamPlaces(*places), Limits(bundle_records_max=10)
stream(session(master="local[1,4]"), graph, feed, places=places,
       every=timedelta(milliseconds=10), limits=limits).wait()
"""


def killed_after(commits: int, checkpoint: Path, command: list[str]) -> None:
    """Run a driver, and kill it with its JVM and Python workers after this number of commits, within a batch."""
    with subprocess.Popen(command, start_new_session=True, stderr=subprocess.DEVNULL) as driver:
        while len(list(checkpoint.glob("commits/*.json"))) < commits:
            assert driver.poll() is None, "the driver has ended"
            time.sleep(0.01)
        os.killpg(driver.pid, signal.SIGKILL)


def test_a_killed_driver_is_resumed_and_the_rows_are_those_of_a_hosted_graph(
    spark: SparkSession,
    database_url: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(sys.modules["millpy.spark.stream"], "SLOW_S", 0.4)
    feed, graph, limits = tmp_path / "notes.ndjson", str(GRAPHS / "chained.py"), Limits(bundle_records_max=10)
    notes = [("abcd"[i % 4], max(0, 4 * i - 24 * (i % 5 == 0)), 0.5 * i) for i in range(300)]
    lines = (json.dumps(dict(zip(("device", "at", "value"), note, strict=True))) + "\n" for note in notes)
    feed.write_text("".join(lines))
    checkpoint, output = tmp_path / "checkpoint", tmp_path / "output"
    expected = by_a_host(make_job(graph, [str(feed)], limits=limits, now_us=NOW_US, state=False))

    # The first commit is the start itself.
    arguments = [graph, str(feed), str(checkpoint), str(output), database_url]
    killed_after(2, checkpoint, [sys.executable, "-c", DRIVER, *arguments])
    places = StreamPlaces(checkpoint, output, database_url)

    def started() -> GraphStream:
        return stream(spark, graph, str(feed), places=places, every=timedelta(milliseconds=10), limits=limits)

    stopped = started()
    assert stopped.newest.batch >= 0, "the killed driver had committed nothing"
    while not (stopped._running.locked() and stopped.query.recentProgress):  # Spark repeats the last batch first
        assert not stopped.wait(0.01)
    begun_at = stopped.newest.batch
    stopped.stop()
    resumed = started()
    assert resumed.newest.batch == begun_at + 1, "stopping has not waited for the batch"
    assert resumed.wait(120)

    assert re.search(r"batch \d+ has run for 0.4 s; (stage \d+: \d+ of \d+ tasks|no stage)", caplog.text)
    assert all(source["injected"] == 300 for source in resumed.summary()["accounting"]["sources"])
    found = read_results(spark, output)
    for name, stored in expected["rows"].items():
        rows = [row.asDict() for row in found[name].collect()]
        for row in rows:
            row.update({at: round(row[at].timestamp() * 1e6) for at in ("window_start", "window_end")})
        wanted = [{of: value for of, value in row.items() if of != "bundle"} for row in stored]
        assert sorted(rows, key=repr) == sorted(wanted, key=repr)
        with psycopg.connect(database_url) as connection:
            query = f"""SELECT device, extract(epoch FROM window_start) * 1000000, bundle FROM chained.{name}"""
            in_tables = sorted((device, int(start), bundle) for device, start, bundle in connection.execute(query))
        assert in_tables == sorted((row["device"], row["window_start"], row["bundle"]) for row in stored)
    assert found["late_records"].count() == len(expected["late"]) > 0


def test_the_command_streams_every_type_to_the_end_though_a_python_worker_is_killed(
    spark: SparkSession, database_url: str, tmp_path: Path
) -> None:
    graph, feed, output = tmp_path / "types.py", tmp_path / "things.ndjson", tmp_path / "output"
    graph.write_text((GRAPHS / "types.py").read_text())
    thing = {"id": 5, "at": 1, "text": "a", "number": 0.5, "yes": True, "data": "AP8=", "several": [1]}
    thing |= {"moment": "2026-11-20T08:00:00.000001Z", "uuid": f"{5:032x}"}
    feed.write_text(json.dumps(thing) + "\n{\n")
    arguments = ["spark", "run", str(graph), "--input", str(feed), "--stream", "--output", str(output)]
    arguments += ["--checkpoint", str(tmp_path / "checkpoint"), "--every", "0.01", "--json", "--database", database_url]

    done = CliRunner().invoke(app, arguments)

    assert done.exit_code == 0, done.output
    summary = json.loads(done.stdout)
    assert summary["finished"]
    assert (tmp_path / "marker").exists(), "no Python worker was killed"
    assert [source["injected"] for source in summary["accounting"]["sources"]] == [2]
    found = read_results(spark, output)
    assert [row.id for row in found["all_things"].collect()] == [5]
    with psycopg.connect(database_url, row_factory=dict_row) as connection:
        (row,) = connection.execute("SELECT * FROM types.all_things").fetchall()
        (sums,) = connection.execute("SELECT n, total, best FROM types.sums").fetchall()
    decoded = {"data": b"\0\xff", "uuid": UUID(int=5), "moment": datetime(2026, 11, 20, 8, 0, 0, 1, tzinfo=UTC)}
    assert {name: row[name] for name in thing if name != "at"} == {
        n: v for n, v in (thing | decoded).items() if n != "at"
    }
    assert (sums["n"], sums["total"], json.dumps(sums["best"])) == (1, 5, "[5]")
    assert [row.reason for row in found["dead_letters"].collect()] == ["undecodable"]


@pytest.mark.parametrize(
    ("options", "error"),
    [
        (["--stream"], "--stream needs --checkpoint DIR"),
        (["--checkpoint", "{}/checkpoint"], "--checkpoint is for --stream"),
        (["--stream", "--state", "--checkpoint", "{}/checkpoint"], "--state is for a batch"),
        (["--stream", "--checkpoint", "s3://bucket/checkpoint"], "not to URLs"),
        (["--stream", "--checkpoint", "{}/checkpoint"], "source 'left' is neither files nor Kafka"),
    ],
)
def test_a_stream_that_cannot_run_is_refused_before_spark_starts(
    tmp_path: Path, options: list[str], error: str
) -> None:
    arguments = ["spark", "run", str(GRAPHS / "union.py"), "--output", str(tmp_path / "output")]

    refused = CliRunner().invoke(app, [*arguments, *(option.format(tmp_path) for option in options)])

    assert refused.exit_code == 2
    assert error in re.sub(r"\s+", " ", refused.output)


def test_an_error_of_a_batch_ends_the_query_and_commits_nothing(spark: SparkSession, tmp_path: Path) -> None:
    broken = tmp_path / "broken.parquet"
    broken.write_bytes(b"PAR1 this is none PAR1")
    places = StreamPlaces(tmp_path / "checkpoint", tmp_path / "output")
    running = stream(spark, GRAPHS / "types.py", str(broken), places=places)

    with pytest.raises(MillError, match=r"broken\.parquet"):
        running.wait(60)

    assert running.newest.batch == -1
