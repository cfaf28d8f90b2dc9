"""An audit finds nothing in what workers wrote, and each row that somebody has changed, deleted or added."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
from pyspark.sql import SparkSession
from typer.testing import CliRunner

from millpy.admin.queries import Admin
from millpy.cli.app import app
from millpy.cli.graph_audit import WATERMARKS
from millpy.embedded import EmbeddedPostgres
from millpy.graph.loader import load_graph
from millpy.limits import Limits
from millpy.process.assembly import run_worker
from millpy.spark.audit import AuditScope, audit
from millpy.spark.batch import run_hosted
from millpy.spark.job import HostedPlan, make_job
from tests.databases import fresh_database
from tests.property.test_spark_tasks import NOW_US

GRAPHS = Path(__file__).with_name("graphs")


@pytest.fixture(scope="module")
def graph(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory, chance = tmp_path_factory.mktemp("audited"), random.Random(1)
    with (directory / "notes.ndjson").open("w") as feed:
        for number in range(2_000):
            at = max(0, number // 4 - chance.choice([0, 0, 1, 3, 30]))
            note = {"device": f"dev-{number % 7}", "at": at, "value": chance.random(), "number": number}
            feed.write(json.dumps(note) + "\n")
    path = directory / "audited.py"
    path.write_text((GRAPHS / "audited.py").read_text())
    return path


@pytest.fixture(scope="module")
def url(postgres: EmbeddedPostgres, graph: Path) -> Iterator[str]:
    with fresh_database(postgres) as name:
        url = postgres.url(name)
        asyncio.run(run_worker(load_graph(str(graph)), url))
        yield url


def final_of(url: str) -> dict[str, int]:
    return {row["computation"]: int(row["us"]) for row in Admin(url).ask(WATERMARKS, graph="audited")}


def test_an_audit_finds_nothing_and_then_each_row_that_somebody_has_changed(
    spark: SparkSession, graph: Path, url: str
) -> None:
    hosted = HostedPlan(make_job(str(graph), [], limits=Limits(), now_us=NOW_US, state=False))
    with run_hosted(spark, hosted) as result:
        found = audit(spark, result.tables, hosted.spec.tables, AuditScope("audited", final_of(url), database_url=url))

    rows = {table.table: table.rows for table in found}
    with psycopg.connect(url) as connection:
        stored = {
            name: connection.execute(f"SELECT count(*) FROM audited.{name}").fetchone()[0]  # type: ignore[index]
            for name in rows
        }
    assert {table.table: table.differences for table in found} == {"fixed": 0, "sessions": 0, "largest": 0}
    assert rows == stored
    assert min(rows.values()) > 50
    a_changed_a_deleted_and_an_added_row_are_named(graph, url)
    a_repair_puts_them_right_once(graph, url)


def a_changed_a_deleted_and_an_added_row_are_named(graph: Path, url: str) -> None:
    with psycopg.connect(url, autocommit=True) as connection:
        for statement in (
            "UPDATE audited.fixed SET mean = mean + 0.001 WHERE device = 'dev-3' AND window_start = to_timestamp(40)",
            "DELETE FROM audited.sessions WHERE device = 'dev-1' AND window_start = to_timestamp(0)",
            "INSERT INTO audited.fixed SELECT 'dev-9', window_start, window_end, n, mean, total, best, pane_index,"
            " pane_timing, late_count, emitted_at, interval_id, bundle FROM audited.fixed"
            " WHERE device = 'dev-2' AND window_start = to_timestamp(60)",
            "UPDATE audited.largest SET parts = '[10, -2]' WHERE parts = '[10, -1]'",
        ):
            assert connection.execute(statement).rowcount == 1, statement

    done = CliRunner().invoke(app, ["audit", str(graph), "--database", url, "--json", "--to", "1970-01-01T00:05:00Z"])

    assert done.exit_code == 1 and done.stdout, (done.output, done.exception)
    document = json.loads(done.stdout)
    assert document["differences"] == 5
    of = {
        table["table"]: [(one["kind"], one["row"], one["expected"], one["stored"]) for one in table["examples"]]
        for table in document["tables"]
    }
    (kind, row, expected, stored), (kind_, row_, expected_, _) = of["fixed"]
    assert (kind, row["device"], row["window_start"]) == ("changed", "dev-3", "1970-01-01T00:00:40Z")
    assert stored["mean"] - expected["mean"] == pytest.approx(0.001)
    assert list(expected) == ["mean"]
    assert (kind_, row_["device"], expected_) == ("added", "dev-9", {})
    ((kind, row, _, stored),) = of["sessions"]
    assert (kind, row["device"], stored) == ("missing", "dev-1", {})
    assert document["hours_recorded"] == 0  # less than an hour was compared
    parts = sorted((kind, row["parts"]) for kind, row, _, _ in of["largest"])
    assert parts == [("added", "[10,-2]"), ("missing", "[10,-1]")]


def a_repair_puts_them_right_once(graph: Path, url: str) -> None:
    def repaired(table: str, *options: str) -> tuple[object, int]:
        done = CliRunner().invoke(app, ["repair", str(graph), "--table", table, "--database", url, "--json", *options])
        assert done.exit_code == 0, (done.output, done.exception)
        document = json.loads(done.stdout)
        return document["repaired"], document["found"]["differences"]

    with psycopg.connect(url, autocommit=True) as connection:
        done = connection.execute(
            "DELETE FROM audited.fixed WHERE device = 'dev-1' AND window_start = to_timestamp(80)"
        )
        assert done.rowcount == 1
    assert repaired("fixed", "--from", "1970-01-01T00:01:10Z", "--dry-run") == (None, 2)
    assert repaired("fixed") == ({"replaced": 1, "added": 1, "deleted": 1}, 3)
    refused = CliRunner().invoke(app, ["repair", str(graph), "--table", "largest", "--database", url])
    assert refused.exit_code == 2
    events = CliRunner().invoke(app, ["events", "--kind", "repaired", "--json", "--database", url])
    assert [row["detail"]["table"] for row in json.loads(events.stdout)] == ["fixed"]
