"""Spark's own windows over an archive are those of the workers, and a changed, deleted or added row is named."""

from __future__ import annotations

import asyncio
import json
import random
from pathlib import Path
from typing import Any

import psycopg
import pytest
from hypothesis import given, settings
from pyspark.sql import SparkSession
from typer.testing import CliRunner

from millpy.cli.app import app
from millpy.cli.auditor import Auditor, choose_engines
from millpy.config.settings import Settings
from millpy.embedded import EmbeddedPostgres
from millpy.graph.loader import load_graph
from millpy.limits import Limits
from millpy.process.assembly import archives_of, run_worker
from millpy.spark.native import _closes
from millpy.store.postgres.archiving import ArchiveInto
from millpy.windowing.triggers import Trigger
from tests.databases import fresh_database
from tests.property.test_pane_triggers import triggers
from tests.s3_server import S3Server

GRAPH = Path(__file__).with_name("graphs") / "natively.py"
FALSIFIED = (
    "UPDATE natively.fixed SET total = total + 1"
    " WHERE device = 'dev-3' AND place_hall = 1 AND window_start = to_timestamp(45)",
    "DELETE FROM natively.sliding WHERE device = 'dev-1' AND place_hall = 0 AND window_start = to_timestamp(61)",
    "INSERT INTO natively.sliding SELECT 'dev-9', place_hall, window_start, window_end, n, mean, pane_index,"
    " pane_timing, late_count, emitted_at, interval_id, bundle FROM natively.sliding"
    " WHERE device = 'dev-2' AND place_hall = 0 AND window_start = to_timestamp(61)",
)


def write_feed(path: Path, seed: int) -> None:
    """Write readings out of order, some of which are late for the allowed lateness, some without a value."""
    chance = random.Random(seed)
    with path.open("w") as feed:
        for number in range(1_500):
            reading = {
                "device": f"dev-{number % 5}",
                "at": number // 5 - 100 - chance.choice([0, 0, 0, 3, 5, 9, 15, 30]),  # from before 1970 on
                "value": None if number % 11 == 0 else round(chance.uniform(-50, 50), 3),
                "n": number - 700,
                "place": {"hall": number % 2},
            }
            feed.write(json.dumps(reading) + "\n")


def computed(directory: Path, url: str, archiver: Limits | None = None, text: str = "") -> Path:
    """Run worker and archiver over the feeds in a directory; return the graph's file."""
    path = directory / "natively.py"
    path.write_text(text or GRAPH.read_text())
    graph = load_graph(str(path))
    asyncio.run(run_worker(graph, url, limits=Limits(bundle_records_max=100)))
    into = ArchiveInto(directory / "archive", every_s=0.0)
    asyncio.run(run_worker(graph, url, only=archives_of(graph), archive=into, limits=archiver or Limits()))
    return path


def audited(graph: Path, url: str, *more: str, archive: str = "") -> tuple[int, dict[str, Any]]:
    place = archive or str(graph.parent / "archive")
    command = ["audit", str(graph), "--engine", "native", "--archive", place, "--database", url]
    done = CliRunner().invoke(app, [*command, "--json", *more])
    assert done.stdout, (done.output, done.exception)
    return done.exit_code, json.loads(done.stdout)


def test_an_archive_of_several_sources_is_read_for_the_source_of_the_windows(
    spark: SparkSession, postgres: EmbeddedPostgres, tmp_path: Path
) -> None:
    write_feed(tmp_path / "feed.ndjson", seed=3)
    own = 'readings.key_by("device").archive('
    others = 'graph.inject("others", Files(*FEED), schema=Reading, event_time=at)'
    text = GRAPH.read_text().replace(own, f'readings.union({others}).key_by("device").archive("all", ')
    assert "union" in text
    with fresh_database(postgres) as name:
        graph = computed(tmp_path, postgres.url(name), text=text)

        status, document = audited(graph, postgres.url(name))

    assert (status, document["differences"], document["tables"][0]["table"]) == (0, 0, "fixed")
    assert document["tables"][0]["rows"] > 100


@settings(max_examples=200, deadline=None)
@given(trigger=triggers)
def test_a_table_whose_trigger_closes_windows_is_not_computed(trigger: Trigger) -> None:
    assert _closes(trigger.identity()) == trigger.may_finish


def test_the_native_engine_agrees_and_names_what_was_falsified_with_its_records(
    spark: SparkSession,
    postgres: EmbeddedPostgres,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    s3_login: S3Server,
) -> None:
    write_feed(tmp_path / "feed.ndjson", seed=1)
    with fresh_database(postgres) as name, psycopg.connect(postgres.url(name), autocommit=True) as connection:
        graph = computed(tmp_path, postgres.url(name))
        late = connection.execute(
            "SELECT computation, count(*) FROM millpy.late_records GROUP BY 1 ORDER BY 1"
        ).fetchall()
        assert {"fixed", "sliding"} <= {computation for computation, _ in late}

        status, document = audited(graph, postgres.url(name))

        found = {table["table"]: table for table in document["tables"]}
        assert {name: (table["differences"], table["uncertain"]) for name, table in found.items()} == {
            "fixed": (0, 0),
            "sliding": (0, 0),
        }
        assert status == 0
        assert document["not_audited"].keys() == {"sessions", "filtered"}
        assert found["fixed"]["left_out"] == ["last"]
        for table, of in found.items():
            assert (of["rows"],) == connection.execute(f"SELECT count(*) FROM natively.{table}").fetchone()

        monkeypatch.setenv("MILLPY_DATABASE_URL", postgres.url(name))
        monkeypatch.setattr("millpy.cli.auditor.subprocess.Popen", InThisProcess)
        monkeypatch.setattr("millpy.cli.audit.end_with_auditor", lambda: None)
        each_hour_is_audited_once_by_the_service(graph)
        for statement in FALSIFIED:
            assert connection.execute(statement).rowcount == 1, statement
        hours = "--from", "1969-12-31T23:00:00Z", "--to", "1970-01-01T01:00:00Z"
        monkeypatch.setattr(spark.sparkContext, "environment", s3_login.environment)  # as spark.executorEnv does
        in_bucket = s3_login.upload(tmp_path / "archive")
        status, document = audited(graph, postgres.url(name), *hours, archive=in_bucket)
        the_hours_are_remembered(graph, postgres.url(name))

    assert (status, document["differences"]) == (1, 3)
    fixed, sliding = (table["examples"] for table in document["tables"])
    ((changed,), (deleted, added)) = fixed, sliding
    assert (changed["kind"], changed["row"]["device"], list(changed["expected"])) == ("changed", "dev-3", ["total"])
    assert (deleted["kind"], deleted["row"]["device"], deleted["stored"]) == ("missing", "dev-1", {})
    assert (added["kind"], added["row"]["device"], added["records"]) == ("added", "dev-9", [])
    records = [json.loads(record) for record in deleted["records"]]
    assert len(records) >= deleted["expected"]["n"] > 0
    assert all(one["device"] == "dev-1" and 61 <= one["at"] < 71 and one["place"]["hall"] == 0 for one in records)


class InThisProcess:
    """An audit where Spark runs already, in place of a process."""

    def __init__(self, command: list[str], **_: Any) -> None:
        self._command = command[3:]

    def communicate(self, timeout: float) -> tuple[str, str]:
        done = CliRunner().invoke(app, self._command)
        return done.stdout, done.stderr

    def poll(self) -> int:
        return 0


def each_hour_is_audited_once_by_the_service(graph: Path) -> None:
    settings = Settings.load(archive=str(graph.parent / "archive"))
    spans = {}
    for choice in choose_engines(load_graph(str(graph)).spec(), settings.archive):
        auditor = Auditor(str(graph), settings, (), None)
        spans[choice.engine, choice.tables] = auditor.next_span(choice)
        assert auditor.audit_next(choice)
        while auditor.audit_next(choice):
            pass
        assert auditor.next_span(choice) is None
    before = -3_600_000_000
    assert {tables: span and span[0] for tables, span in spans.items()} == {
        ("native", ("fixed",)): before,
        ("native", ("sliding",)): before,
        ("hosted", ("sessions", "filtered")): before,
    }


def the_hours_are_remembered(graph: Path, url: str) -> None:
    done = CliRunner().invoke(app, ["audit", str(graph), "--list", "--json", "--database", url])
    rows = json.loads(done.stdout)
    assert all(row["by_service"] for row in rows)
    assert {row["result_table"]: row["differences"] for row in rows if row["engine"] == "hosted"} == {
        "sessions": 0, "filtered": 0
    }  # fmt: skip
    listed = [(row["result_table"], row["hour"][:13], row["differences"]) for row in rows if row["engine"] == "native"]
    assert listed[:4] == [
        ("fixed", "1969-12-31T23", 0), ("sliding", "1969-12-31T23", 0),
        ("fixed", "1970-01-01T00", 1), ("sliding", "1970-01-01T00", 2),
    ]  # fmt: skip
    with psycopg.connect(url) as connection:
        (kept,) = connection.execute("SELECT examples FROM millpy.audits WHERE differences = 2").fetchone() or ([],)
        events = connection.execute("SELECT detail->>'table', detail->'differences' FROM millpy.events"
                                    " WHERE kind = 'audit_differs' ORDER BY 1").fetchall()  # fmt: skip
    assert [one["kind"] for one in kept] == ["missing", "added"]
    assert events == [("fixed", 1), ("sliding", 2)]
    findings = json.loads(CliRunner().invoke(app, ["doctor", "--json", "--database", url]).stdout)
    assert [one["severity"] for one in findings if one["check"] == "audit"] == ["error", "error"]


def test_windows_that_a_record_may_have_missed_are_not_compared_but_counted(
    spark: SparkSession, postgres: EmbeddedPostgres, tmp_path: Path
) -> None:
    for number in range(2):  # two partitions: a record is judged by the watermark of both
        write_feed(tmp_path / f"feed{number}.ndjson", seed=number)
    with fresh_database(postgres) as name:
        graph = computed(tmp_path, postgres.url(name))

        status, document = audited(graph, postgres.url(name))

        assert (status, document["differences"]) == (0, 0)
        assert all(table["uncertain"] > 0 and table["rows"] > 10 for table in document["tables"])


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ((), "no directory is set for the archive"),
        (("--archive", "there", "--input", "a.csv"), "reads archives, not files"),
    ],
)
def test_the_native_engine_says_what_it_needs(given: tuple[str, ...], reason: str) -> None:
    done = CliRunner(env={"MILLPY_ARCHIVE": ""}).invoke(app, ["audit", str(GRAPH), "--engine", "native", *given])

    assert done.exit_code == 2
    assert reason in done.output
