"""Analytics over a real server and a real Spark: rows against plain Python, and none twice when a driver is killed."""

from __future__ import annotations

import asyncio
import datetime as dt
import json
import math
import random
import signal
import statistics
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psycopg
import pyarrow.parquet as pq
import pytest
from psycopg.rows import dict_row
from pyspark.sql import SparkSession
from typer.testing import CliRunner

from millpy.cli.app import app
from millpy.clock import SystemClock
from millpy.errors import OwnershipError
from millpy.model.deployment import ColumnSpec, TableSpec
from millpy.spark.analytics import AnalyticsPlan, GraphAnalytics
from millpy.store.postgres.analytics import AnalyticsBatch, AnalyticsTables
from millpy.store.postgres.store import PostgresStore
from tests.spark.test_pane_stream import FENCE, GRAPH

HOUR = dt.timedelta(hours=1)
WIDTH = dt.timedelta(minutes=20)
T0 = dt.datetime(2026, 10, 5, tzinfo=dt.UTC)
DAYS = 11
"""Of which ten let something be expected of an hour."""
MEANS = TableSpec(
    "means", "windowed", "sums", "sums",
    keys=(ColumnSpec("site", "text", False), ColumnSpec("device", "text", False)),
    values=(ColumnSpec("n", "bigint", False), ColumnSpec("mean", "double precision", True)),
)  # fmt: skip
LABELS = replace(
    MEANS, name="labels", keys=(ColumnSpec("device", "text", False),), values=(ColumnSpec("label", "text", True),)
)
PLANT = replace(GRAPH, tables=(MEANS, LABELS))
PANE = """
INSERT INTO plant.means (site, device, window_start, window_end, n, mean, late_count, pane_index, pane_timing,
                         interval_id, bundle)
VALUES ('x', %(device)s, %(start)s, %(end)s, %(n)s, %(mean)s, %(late)s, %(index)s, 'on_time', %(interval)s, %(bundle)s)
ON CONFLICT (site, device, window_start, window_end)
DO UPDATE SET n = excluded.n, mean = excluded.mean, late_count = excluded.late_count, pane_index = excluded.pane_index,
              bundle = excluded.bundle, emitted_at = now()
"""
HOURS_QUERY = "SELECT * FROM mill.device_hours ORDER BY device, bucket"
ANOMALIES = "SELECT device, window_start, value, pane_index, baseline FROM millpy.device_anomalies ORDER BY 1, 2"
DRIVER = """
import os, signal, sys
from millpy.clock import SystemClock
from millpy.spark import session
from millpy.spark.analytics import AnalyticsPlan, GraphAnalytics
from millpy.store.postgres import analytics
from pathlib import Path
commit, victim = analytics.AnalyticsOwner.commit, int(sys.argv[3])
def commit_and_die(self, batch):
    commit(self, batch)
    if batch.number == victim:
        os.kill(os.getpid(), signal.SIGKILL)
analytics.AnalyticsOwner.commit = commit_and_die
url = sys.argv[1]
plan = AnalyticsPlan(graph="plant", directory=Path(sys.argv[2]), database_url=url, reader_url=url, batch_rows=1200)
GraphAnalytics(session(master="local[2,4]"), plan, SystemClock()).round()
"""


class Plant:
    """A graph whose interval writes panes as a worker does, in bundles of one day."""

    def __init__(self, url: str) -> None:
        async def deployed() -> int:
            async with PostgresStore(url) as store:
                found = await store.deploy(PLANT)
            return min(one.interval_id for one in found.intervals if one.computation == "sums")

        self.interval = asyncio.run(deployed())
        self.connection = psycopg.connect(url)
        self.newest: dict[tuple[str, dt.datetime], dict[str, Any]] = {}

    def write(self, panes: list[dict[str, Any]]) -> None:
        (bundle,) = self.connection.execute(FENCE, [self.interval]).fetchone()  # type: ignore[misc]
        for pane in panes:
            row = {"n": 10, "late": 0, "index": 0, "end": pane["start"] + WIDTH, **pane}
            self.connection.execute(PANE, {**row, "interval": self.interval, "bundle": bundle})
            self.newest[row["device"], row["start"]] = row
        self.connection.commit()


@pytest.fixture
def plant(database_url: str) -> Iterator[Plant]:
    made = Plant(database_url)
    yield made
    made.connection.close()


def a_day(day: int, rng: random.Random) -> list[dict[str, Any]]:
    """Two devices by the hour of day, one that measures what is no number, one that stops at noon."""
    panes = []
    for step in range(24 * 3):
        start = T0 + day * dt.timedelta(days=1) + step * WIDTH
        usual = 10.0 if start.hour < 6 else 80.0
        panes += [
            {"device": "press", "start": start, "mean": usual + rng.gauss(0, 1)},
            {"device": "odd", "start": start, "mean": [math.nan, math.inf, None, 1e300, 5.0][step % 5]},
        ]
        if step < 36:
            panes.append({"device": "halfday", "start": start, "mean": usual / 2 + rng.gauss(0, 1), "late": 1})
    return panes


def plan_of(url: str, directory: Path, **changes: Any) -> AnalyticsPlan:
    made = AnalyticsPlan(graph="plant", directory=directory, database_url=url, reader_url=url, batch_rows=1200)
    return replace(made, **changes)


def rows(url: str, query: str) -> list[dict[str, Any]]:
    with psycopg.connect(url, row_factory=dict_row) as connection:
        return connection.execute(query).fetchall()


def expected_hours(plant: Plant) -> dict[tuple[str, dt.datetime], tuple[int, int, int, float | None]]:
    found: dict[tuple[str, dt.datetime], list[dict[str, Any]]] = {}
    for (device, start), pane in plant.newest.items():
        found.setdefault((json.dumps(["x", device], separators=(",", ":")), start.replace(minute=0)), []).append(pane)
    return {
        key: (len(panes), sum(p["n"] for p in panes), sum(p["late"] for p in panes), _mean(panes))
        for key, panes in found.items()
    }


def _mean(panes: list[dict[str, Any]]) -> float | None:
    values = [p["mean"] for p in panes if p["mean"] is not None and abs(p["mean"]) < 1e150]
    return statistics.fmean(values) if values else None


def test_rows_are_those_of_plain_python_although_the_driver_is_killed_behind_a_commit(
    spark: SparkSession, database_url: str, plant: Plant, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rng = random.Random(1)
    for day in range(DAYS):
        plant.write(a_day(day, rng))
    last = T0 + DAYS * dt.timedelta(days=1)
    # One value is unusual for two in the morning, not for a press; a later pane takes another anomaly back.
    unusual = [(80.0, last + 2 * HOUR), (10.1, last + 2 * HOUR + WIDTH), (80.5, last + 2 * HOUR + 2 * WIDTH)]
    plant.write([{"device": "press", "start": start, "mean": mean} for mean, start in unusual])
    killed = subprocess.run(
        [sys.executable, "-c", DRIVER, database_url, str(tmp_path), "0"], check=False, capture_output=True, text=True
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert rows(database_url, "SELECT batch FROM millpy.analytics") == [{"batch": 0}]
    before = rows(database_url, HOURS_QUERY)

    analytics = GraphAnalytics(spark, plan_of(database_url, tmp_path), SystemClock())
    assert analytics.round() == 1
    found = [(row["device"], row["window_start"], row["baseline"]) for row in rows(database_url, ANOMALIES)]
    press = '["x","press"]'
    assert found[-2:] == [(press, last + 2 * HOUR, "hour"), (press, last + 2 * HOUR + 2 * WIDTH, "hour")]
    plant.write([{"device": "press", "start": last + 2 * HOUR, "mean": 10.3, "index": 1, "n": 11, "late": 1}])
    directory = ["--to", str(tmp_path), "--database", database_url]
    done = CliRunner().invoke(app, ["analytics", "plant", *directory, "--once", "--json"])
    assert json.loads(done.stdout) == {"graph": "plant", "tables": 1}, done.output

    found = [(row["device"], row["window_start"], row["baseline"]) for row in rows(database_url, ANOMALIES)]
    assert found[-1:] == [(press, last + 2 * HOUR + 2 * WIDTH, "hour")]
    after = rows(database_url, HOURS_QUERY)
    kept = {(row["device"], row["bucket"]): row for row in after}
    assert len(before) > 100 and all((row["device"], row["bucket"]) in kept for row in before)
    expected = expected_hours(plant)
    assert {(r["device"], r["hour"]): (r["windows"], r["records"], r["late"], r["mean"]) for r in after} == {
        key: (*counts, pytest.approx(mean)) for key, (*counts, mean) in expected.items()
    }
    (directory,) = tmp_path.glob("plant.means-*")
    written = pq.read_table(directory / "windows").to_pylist()
    newest: dict[Any, Any] = {}
    for row in sorted(written, key=lambda row: row["pane_index"]):
        assert newest.get((row["device"], row["window_start"]), {}).get("pane_index") != row["pane_index"], "twice"
        newest[row["device"], row["window_start"]] = row
    assert len(newest) == len(plant.newest)
    assert "plant.labels has no numeric column, so it is not analyzed" in caplog.text
    profiles = rows(database_url, "SELECT * FROM millpy.device_profiles")
    (profile,) = [row for row in profiles if "halfday" in row["device"]]
    values = [pane["mean"] for (device, _), pane in plant.newest.items() if device == "halfday"]
    assert profile["stddev"] == pytest.approx(statistics.stdev(values))
    assert profile["completeness"] == 1 and profile["late_share"] == pytest.approx(0.1)

    with AnalyticsTables(database_url) as tables:
        (table_id,) = [table.table_id for table in tables.find("plant") if table.name == "means"]
        query = rows(database_url, "SELECT query FROM mill.analytics")[0]["query"]
        frozen, newer = tables.seize(table_id, query), tables.seize(table_id, query)
        with pytest.raises(OwnershipError, match="another driver analyzes this table"):
            frozen.commit(AnalyticsBatch(frozen.batch + 1, 1))
        with pytest.raises(OwnershipError):
            newer.commit(AnalyticsBatch(newer.batch, 1))
    assert rows(database_url, HOURS_QUERY) == after
