"""The report's figures against plain Python over the same rows, which shares no code with it."""

from __future__ import annotations

import asyncio
import datetime as dt
import itertools
import json
import math
import os
import random
import re
import statistics
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psycopg
import pyarrow as pa
import pytest
from pyspark.sql import SparkSession

from millpy.embedded import EmbeddedPostgres
from millpy.errors import ConfigError, TableSwitchedError
from millpy.model.deployment import ColumnSpec, ComputationSpec, GraphSpec, StreamSpec, SubscriptionSpec, TableSpec
from millpy.spark import read_table
from millpy.spark import report as reporting
from millpy.spark.drawing import panel
from millpy.spark.findings import JudgedWindow, OutlierReport
from millpy.spark.page import page
from millpy.spark.report import Question, make_report
from millpy.spark.scores import History, judged
from millpy.spark.statistics import Columns
from millpy.spark.words import as_text
from millpy.store.postgres.store import PostgresStore
from tests.commands import millpy, millpy_json
from tests.databases import fresh_database

T0 = dt.datetime(2026, 11, 20, tzinfo=dt.UTC)
MINUTE = dt.timedelta(minutes=1)
HISTORY = History(windows=12, windows_min=5, threshold=4.0)
TABLE = TableSpec(
    "sums_1m",
    "windowed",
    "sums",
    "sums",
    keys=(ColumnSpec("hall", "text", False), ColumnSpec("machine", "bigint", False)),
    values=(ColumnSpec("n", "bigint", False), ColumnSpec("total", "numeric", True), ColumnSpec("peak", "bigint", True)),
)
TALLIES = replace(
    TABLE,
    name="tallies_1m",
    keys=(ColumnSpec("outlier", "text", False), ColumnSpec("score", "bigint", False)),
    values=(
        ColumnSpec("records", "bigint", False),
        ColumnSpec("expected", "numeric", True),
        ColumnSpec("past", "bigint", True),
    ),
)
"""The same, with the names of what is computed."""
GRAPH = GraphSpec(
    name="plant",
    computations=(
        ComputationSpec("readings", "injector", partitions=("a",)),
        ComputationSpec(
            "sums", "stage", intervals=1, identity={"aggregates": [("sum", {"kind": "sum", "field": "x"})]}
        ),
    ),
    streams=tuple(StreamSpec(name, name, pa.schema([("hall", pa.string())])) for name in ("readings", "sums")),
    subscriptions=(SubscriptionSpec("readings", "sums", 0, ("hall",)),),
    tables=(TABLE, TALLIES),
)
Row = tuple[str, int, dt.datetime, dt.datetime, int, float | None, int | None, int]


def rows() -> list[Row]:
    """Four machines: noisy, constant, mostly one value, each with a jump; and one with a null and few windows."""
    rng = random.Random(11)
    made: list[Row] = []
    for machine in range(4):
        for place in range(6 if machine == 3 else 40):
            total: float | None = round(rng.gauss(100, 4), 6)
            if machine == 0 and place in (20, 33):
                total = 160.5
            elif machine == 1:
                total = 55.25 if place == 17 else 0.3
            elif machine == 2 and place % 3:
                total = 1000.0 if place == 31 else 7.0
            elif machine == 3 and place == 2:
                total = None
            start = T0 + MINUTE * (place + machine)
            made.append(
                ("West", machine, start, start + MINUTE, rng.randint(1, 50), total, machine * place, rng.randint(0, 1))
            )
    return made


TOO_LATE = {("West", 0): 3, ('Süd "7"', 9): 2}
"""The second never got into a window at all."""


async def deployed(url: str) -> int:
    """Deploy the graph; the interval of its sums."""
    async with PostgresStore(url) as store:
        found = await store.deploy(GRAPH)
    (interval,) = [one.interval_id for one in found.intervals if one.computation == "sums"]
    return interval


@pytest.fixture(scope="module")
def url(postgres: EmbeddedPostgres) -> Iterator[str]:
    with fresh_database(postgres) as name:
        fill(postgres.url(name), asyncio.run(deployed(postgres.url(name))))
        yield postgres.url(name)


def fill(url: str, interval: int) -> None:
    with psycopg.connect(url, autocommit=True) as connection, connection.cursor() as cursor:
        cursor.executemany(
            "INSERT INTO plant.sums_1m (hall, machine, window_start, window_end, n, total, peak, late_count,"
            " pane_index, pane_timing, interval_id, bundle)"
            " VALUES (%s, %s, %s, %s, %s, %s, %s, %s, 0, 'on_time', %s, 1)",
            [(*row, interval) for row in rows()],
        )
        cursor.execute("INSERT INTO plant.tallies_1m TABLE plant.sums_1m")
        at = int(T0.timestamp()) * 1_000_000
        gone = [(key, "open") for key, count in TOO_LATE.items() for _ in range(count)]
        cursor.executemany(
            "INSERT INTO mill.late_records (interval_id, bundle, stream, computation, input, key, event_time,"
            " watermark, window_start, window_end, whole, payload, state)"
            " VALUES (%s, 1, 'readings', 'sums', 0, %s, %s, %s, %s, %s, true, '', %s)",
            [
                (interval, json.dumps(list(key), ensure_ascii=False), at, at, at, at + 60_000_000, state)
                for key, state in [*gone, (("West", 1), "replayed")]
            ],
        )


def expected_outliers(made: list[Row]) -> dict[tuple[str, dt.datetime], tuple[float, float]]:
    """(machine, window) -> (expected, score), straight from the definition; the time is too short for hours of day."""
    values = {m: [(row[2], row[5]) for row in made if row[1] == m and row[5] is not None] for m in range(4)}
    spreads = {m: (nearest(own, 0.75) - nearest(own, 0.25)) / 1.349 for m, own in values.items()}
    fleet = min(one for one in spreads.values() if one)  # the lower quartile of at most four
    found = {}
    for machine, own in values.items():
        steps = [abs(b - a) for (_, a), (_, b) in itertools.pairwise(own) if a != b]
        finest = sorted(steps)[math.ceil(len(steps) / 20) - 1] if len(steps) >= 20 else 0.0
        floor = max(finest, fleet / 10, nearest(own, 0.5) / 1000, spreads[machine] / 3)
        for place, (start, value) in enumerate(own):
            past = [one for _, one in own[max(0, place - HISTORY.windows) : place]]
            if len(past) < HISTORY.windows_min:
                continue
            middle = statistics.median(past)
            apart = [abs(one - middle) for one in past]
            scale = statistics.median(apart) * 1.4826 or statistics.fmean(apart) * 1.2533
            scale = max(scale, floor) * (1 + 8 / len(past))
            if abs(value - middle) / scale >= HISTORY.threshold:
                found[f"West / {machine}", start] = (middle, abs(value - middle) / scale)
    return found


def nearest(points: list[tuple[dt.datetime, float]], share: float) -> float:
    return sorted(value for _, value in points)[math.ceil(share * len(points)) - 1]


@pytest.fixture(scope="module")
def report(spark: SparkSession, url: str) -> OutlierReport:
    return make_report(spark, url, Question(table="plant.sums_1m", history=HISTORY))


def test_the_figures_are_those_of_plain_python(report: OutlierReport) -> None:
    made = rows()
    outliers = expected_outliers(made)
    devices = {one.name: one for one in report.devices}

    assert (report.keys, report.value, report.count) == (("hall", "machine"), "total", "n")
    assert {"West / 0", "West / 1", "West / 2"} == {name for name, _ in outliers}
    assert {(o.name, o.start): (o.expected, pytest.approx(o.score, rel=1e-6)) for o in report.outliers} == outliers
    assert [o.score for o in report.outliers] == sorted((o.score for o in report.outliers), reverse=True)  # type: ignore[type-var]
    for machine in range(4):
        own = [row for row in made if row[1] == machine]
        values = [row[5] for row in own if row[5] is not None]
        one = devices[f"West / {machine}"]
        records, late, too_late = sum(row[4] for row in own), sum(row[7] for row in own), 3 if machine == 0 else 0
        assert (one.windows, one.records, one.late, one.too_late) == (len(own), records, late, too_late)
        assert (one.low, one.high) == (min(values), max(values))
        assert one.mean == pytest.approx(statistics.fmean(values))
        assert one.stddev == pytest.approx(statistics.stdev(values), abs=1e-12)
        assert one.late_share == pytest.approx(late / (records + too_late))
        assert one.too_late_share == pytest.approx(too_late / (records + too_late))
        assert one.outliers == sum(name == one.name for name, _ in outliers)
    lost = devices['Süd "7" / 9']
    assert (lost.windows, lost.records, lost.too_late, lost.too_late_share) == (0, 0, 2, 1.0)


def test_columns_may_have_the_names_of_figures(spark: SparkSession, url: str, report: OutlierReport) -> None:
    found = make_report(spark, url, Question(table="plant.tallies_1m", count="records", history=HISTORY))

    assert (found.keys, found.value, found.count) == (("outlier", "score"), "expected", "records")
    assert replace(found, table=report.table, keys=report.keys, value=report.value, count=report.count) == report
    with pytest.raises(ConfigError, match="have a column 'expected' already"):
        judged(read_table(spark, "plant.tallies_1m", database_url=url), Columns(("outlier",), "past"))


def test_time_bins_add_up_to_the_whole(report: OutlierReport) -> None:
    made = rows()
    records, late = sum(row[4] for row in made), sum(row[7] for row in made)

    assert (report.device_count, report.windows, report.records, report.late) == (5, len(made), records, late)
    assert (report.too_late, report.outlier_count) == (5, len(expected_outliers(made)))
    assert report.late_share == pytest.approx(late / (records + 5))
    assert (report.first_at, report.last_at) == (T0, max(row[2] for row in made))
    assert report.bin_width == MINUTE
    assert [one.start for one in report.time_bins] == [T0 + MINUTE * place for place in range(42)]
    for what, total in (("windows", len(made)), ("records", records), ("late", late), ("too_late", 5)):
        assert sum(getattr(one, what) for one in report.time_bins) == total
    drawn = report.series["West / 3"]
    assert [(p.start, p.value) for p in drawn] == [(r[2], r[5]) for r in made if r[1] == 3 and r[5] is not None]


def test_only_the_requested_time_is_reported(spark: SparkSession, url: str) -> None:
    question = Question(table="plant.sums_1m", value="peak", start=T0 + MINUTE, end=T0 + 3 * MINUTE)

    found = make_report(spark, url, question)
    nothing = make_report(spark, url, Question(table="plant.sums_1m", start=T0 + 1000 * MINUTE))

    assert (found.windows, found.too_late) == (5, 0)  # two windows of machines 0 and 1, one of machine 2
    assert found.value == "peak"
    assert as_text(nothing) == "plant.sums_1m has no windows in that time."
    assert "no windows in that time" in page(nothing)


def test_windows_of_one_generation_are_not_reported_with_the_late_records_of_another(
    spark: SparkSession, postgres: EmbeddedPostgres, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def switched(url: str) -> None:
        async with PostgresStore(url) as store:
            await store.deploy(replace(GRAPH, generation=2))
            await store.switch("plant", 2)

    monkeypatch.setattr(reporting, "_computed", lambda *_: asyncio.run(switched(url)))
    with fresh_database(postgres) as name:
        url = postgres.url(name)
        fill(url, asyncio.run(deployed(url)))
        with pytest.raises(TableSwitchedError, match=r"plant\.sums_1m was switched to another table"):
            make_report(spark, url, Question(table="plant.sums_1m", history=HISTORY))


def test_the_page_is_self_contained_and_escapes_names(report: OutlierReport) -> None:
    text = page(report)

    assert "Süd &quot;7&quot; / 9" in text
    assert 'Süd "7"' not in text
    assert "<script" not in text
    assert "http" not in text.replace("http://www.w3.org", "")
    assert "$" not in text
    assert text.count('class="outlier"') == report.outlier_count


def test_charts_say_when_they_show_a_part(report: OutlierReport) -> None:
    whole = page(report)
    name = report.outliers[0].name
    drawn = {**report.series, name: tuple(p for p in report.series[name] if not p.outlier)[-20:]}
    device = next(one for one in report.devices if one.name == name)
    late = tuple(replace(device, name=f"d-{n}", late=n + 1) for n in range(20))
    part = page(replace(report, series=drawn, devices=(*report.devices, *late), device_count=90))

    assert "Showing" not in whole
    assert f"20 of {device.windows} windows" in part
    assert f"{device.outliers} outlier{'s' if device.outliers > 1 else ''} (0 drawn)" in part
    assert f"Showing {len(report.series)} of 90 devices." in part
    assert f"Showing 15 of {20 + sum(bool(o.late or o.too_late) for o in report.devices)} devices with late" in part
    assert "Chosen among the 25 devices listed below, of 90." in part


def at(place: int, value: float, **more: Any) -> JudgedWindow:
    given = {"baseline": None, "expected": None, "scale": None, "score": None, "outlier": False, **more}
    return JudgedWindow(name="a", start=T0 + MINUTE * place, records=1, value=value, **given)


def test_extreme_values_are_drawn(report: OutlierReport) -> None:
    constant = panel([at(0, 1.7e18)], 5.0, T0, T0 + MINUTE)
    endless = panel(
        [at(0, 1.0), at(1, math.inf, expected=1.0, scale=0.5, score=math.inf, outlier=True),
         at(2, 1.0, expected=math.inf, scale=math.nan, score=math.nan)], 5.0, T0, T0 + MINUTE,
    )  # fmt: skip
    devices = [replace(one, mean=math.inf, high=math.inf, stddev=math.nan) for one in report.devices[:1]]
    whole = page(replace(report, devices=(*devices, *report.devices[1:])))

    assert "1.7e+18</text>" in constant
    assert "nan" not in endless
    assert endless.count('class="outlier"') == 1
    assert "nan," not in whole
    assert whole.count('class="spread"') == page(report).count('class="spread"') - 1


def test_a_history_of_infinities_flags_no_outlier(spark: SparkSession) -> None:
    rows = [("a", T0 + MINUTE * place, T0 + MINUTE, math.inf if place % 2 else 1.0) for place in range(20)]
    windows = spark.createDataFrame(rows, "device string, window_start timestamp, window_end timestamp, v double")

    assert judged(windows, Columns(("device",), "v")).where("outlier").count() == 0


def test_the_report_is_printed_in_order_of_importance(report: OutlierReport) -> None:
    lines = as_text(report).splitlines()

    assert lines[0].startswith("plant.sums_1m: 5 devices, 126 windows, ")
    assert [line.split()[2] for line in lines[3:6]] == [one.name.split()[2] for one in report.devices[:3]]
    assert [one.outliers for one in report.devices] == sorted((one.outliers for one in report.devices), reverse=True)
    assert lines[-1].endswith("(5).")


def test_the_command_prints_and_writes_the_page(spark: SparkSession, url: str, tmp_path: Path) -> None:
    target = tmp_path / "report.html"

    found = millpy_json(
        "report", "plant.sums_1m", "--value", "peak", "--zone", "Asia/Kolkata", "--html", str(target), "--database", url
    )

    assert (found["value"], found["windows"]) == ("peak", len(rows()))
    assert found["history"]["zone"] == "Asia/Kolkata"
    assert "same hour (Asia/Kolkata)" in target.read_text(encoding="utf-8")
    assert "<title>plant.sums_1m: peak</title>" in target.read_text(encoding="utf-8")
    assert spark.range(3).count() == 3  # a session that was there before is left running


@pytest.mark.parametrize(
    ("arguments", "message", "hint"),
    [
        (["plant.nix"], "there is no table plant.nix", "tables in schema plant: sums_1m"),
        (["millpy.fleet"], "no primary key", ""),
        (["mill.graphs"], "not a table of windows", "windowed stream"),
        (["plant.sums_1m", "--value", "hall"], "column 'hall' is not numeric", "n, total, peak"),
        (["plant.sums_1m", "--count", "total"], "so it is not a count", "Count()"),
        (["plant.sums_1m", "--from", "yesterday"], "'yesterday' is not a time", "for example"),
        (["plant.sums_1m", "--to", "2026-11-21"], "has no zone", ""),
        (["plant.sums_1m", "--zone", "Europe/Nowhere"], "no time zone 'Europe/Nowhere'", "Europe/Berlin"),
        (["plant.sums_1m", "--html", "/nowhere/at/all.html"], "no directory /nowhere/at", "another file"),
    ],
)
def test_a_mistake_is_reported_before_spark_starts(url: str, arguments: list[Any], message: str, hint: str) -> None:
    output = millpy("report", *arguments, "--database", url, status=2)

    assert message in output
    assert hint in output


EXAMPLE = """
CREATE SCHEMA factory;
CREATE TABLE factory.temperature_1m (device text, window_start timestamptz, window_end timestamptz, n bigint,
    mean double precision, late_count bigint, PRIMARY KEY (device, window_start, window_end));
INSERT INTO factory.temperature_1m
SELECT 'pump-1', at, at + interval '1 minute', 5, extract(minute FROM at), 0
  FROM generate_series('2026-11-02 00:00Z', '2026-11-02 00:59Z', interval '1 minute') AS at
"""


def test_the_pages_examples_run_one_after_the_other(
    spark: SparkSession, empty_database_url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with psycopg.connect(empty_database_url, autocommit=True) as connection:
        connection.execute(EXAMPLE)
    for name in ("MILLPY_DATABASE_URL", "JAVA_HOME"):
        monkeypatch.setenv(name, os.environ.get(name, ""))  # so that it is as before afterwards
    blocks = re.findall(
        r"^```python[^\n]*\n(.*?)^```", Path("docs/spark.md").read_text("utf-8"), re.DOTALL | re.MULTILINE
    )
    names: dict[str, Any] = {}

    over_tables = [block for block in blocks if "import run" not in block]  # the other needs a graph and its history

    for block in over_tables:
        exec(block.replace("postgresql://reader@db/plant", empty_database_url), names)

    assert len(over_tables) == 2
    assert "|pump-1|     60|" in capsys.readouterr().out
    assert spark.range(3).count() == 3
