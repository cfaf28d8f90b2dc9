"""A graph as a Spark batch: on a real Spark, with Python workers that are killed, the rows of a hosted graph."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession
from typer.testing import CliRunner

from millpy.cli.app import app
from millpy.errors import CorruptionError, MillError, UsageError
from millpy.limits import Limits
from millpy.spark import run
from millpy.spark.batch import account, run_hosted
from millpy.spark.hosted_task import IntervalEnd
from millpy.spark.job import HostedPlan, make_job
from tests.property.test_spark_tasks import NOW_US, by_a_host

GRAPHS = Path(__file__).with_name("graphs")


def thing(number: int) -> dict[str, Any]:
    return {
        "id": number, "at": number, "text": "abc"[number % 3], "number": number / 4, "yes": number % 2 == 0,
        "data": "AP8=", "moment": "2026-11-20T08:00:00.000001Z", "uuid": f"{number:032x}", "several": [number, -1],
        "missing": None if number % 2 else "there",
    }  # fmt: skip


@pytest.fixture
def types(tmp_path: Path) -> tuple[Path, Path]:
    graph, feed = tmp_path / "types.py", tmp_path / "things.ndjson"
    graph.write_text((GRAPHS / "types.py").read_text())
    feed.write_text("".join(json.dumps(thing(number)) + "\n" for number in range(40)) + "{\n")
    return graph, feed


def test_a_killed_python_worker_is_repeated_and_every_type_comes_out_as_it_is(
    spark: SparkSession, types: tuple[Path, Path], tmp_path: Path
) -> None:
    graph, feed = types
    arguments = ["spark", "run", str(graph), "--input", str(feed), "--output", str(tmp_path / "out"), "--json"]

    done = CliRunner().invoke(app, arguments)

    assert done.exit_code == 0, done.output
    assert (tmp_path / "marker").exists()
    rows = {row.id: row for row in spark.read.parquet(str(tmp_path / "out/tables/all_things")).collect()}
    assert sorted(rows) == list(range(40))
    five = rows[5]
    assert (five.text, five.number, five.yes, bytes(five.data)) == ("c", 1.25, False, b"\0\xff")
    assert five.moment.astimezone(UTC) == datetime(2026, 11, 20, 8, 0, 0, 1, tzinfo=UTC)
    assert (five.uuid, json.loads(five.several)) == ("00000000-0000-0000-0000-000000000005", [5, -1])
    assert (five.missing, rows[6].missing) == (None, "there")
    sums = spark.read.parquet(str(tmp_path / "out/tables/sums")).collect()
    assert sum(row.total for row in sums) == Decimal(sum(range(40)))
    assert {json.dumps(json.loads(row.best)[0]) for row in sums if row.n}
    (letter,) = spark.read.parquet(str(tmp_path / "out/dead_letters")).collect()
    assert (letter.reason, bytes(letter.payload)) == ("undecodable", b"{")
    (summary,) = spark.read.parquet(str(tmp_path / "out/summary")).collect()
    assert json.loads(summary.summary) == json.loads(done.stdout)
    (source,) = json.loads(done.stdout)["accounting"]["sources"]
    assert (source["injected"], source["accepted"], source["dead_lettered"]) == (41, 40, 1)


def test_two_sources_and_merged_sessions_give_the_rows_of_a_hosted_graph(spark: SparkSession, tmp_path: Path) -> None:
    graph = GRAPHS / "union.py"
    feeds = {}
    for name, shift in {"left": 0, "right": 7}.items():
        notes = [("abcd"[(i + shift) % 4], max(0, 4 * i - 24 * (i % 5 == 0)), 0.5 * i) for i in range(200)]
        feeds[name] = str(tmp_path / f"{name}.ndjson")
        lines = (json.dumps(dict(zip(("device", "at", "value"), note, strict=True))) + "\n" for note in notes)
        Path(feeds[name]).write_text("".join(lines))
    limits = Limits(bundle_records_max=10)
    job = make_job(str(graph), feeds, limits=limits, now_us=NOW_US, state=True)
    expected = by_a_host(job)
    assert expected["balanced"]

    with run_hosted(spark, HostedPlan(job)) as result:
        tables = {name: [row.asDict() for row in frame.collect()] for name, frame in result.tables.items()}
        late = result.late_records.count()
        assert result.state is not None
        state = {
            (row.interval, row.kind, row.namespace, row.key, row.subkey): row.value for row in result.state.collect()
        }

    for name, rows in tables.items():
        for row in rows:
            row.update({at: round(row[at].timestamp() * 1e6) for at in ("window_start", "window_end")})
        stored = [{of: value for of, value in row.items() if of != "bundle"} for row in expected["rows"][name]]
        assert sorted(rows, key=repr) == sorted(stored, key=repr)
    assert max(row["pane_index"] for row in tables["fixed"]) > 0, "no window had a later pane"
    assert late == len(expected["late"]) > 0
    wanted = {
        (i, str(k), n, key.decode(), sub): v.decode() for (i, k, n, key, sub), (v, _) in expected["entries"].items()
    }
    assert {name: value for name, value in state.items() if name[1] != "fleet"} == wanted


def test_a_batch_whose_accounting_does_not_balance_fails(types: tuple[Path, Path]) -> None:
    graph, feed = types
    hosted = HostedPlan(make_job(str(graph), [str(feed)], limits=Limits(), now_us=NOW_US, state=False))
    source, *stages = hosted.plan.by_interval
    ids = hosted.plan.deployment.subscription_ids.values()
    read = [("injected", "things", 41), ("accepted", "things", 40), ("dead_lettered", "things", 1)]
    ends = {source: IntervalEnd([*read, *(("produced", str(one), 40) for one in ids)], {}, {})}
    ends |= {stage: IntervalEnd([], {}, {}) for stage in stages}
    for interval_id in {of.intervals[0].interval_id: of for of in hosted.plan if of.stage is not None}:
        (subscription,) = hosted.plan.by_interval[interval_id].incoming
        ends[interval_id] = IntervalEnd([("consumed", str(subscription), 40)], {}, {})

    assert account(hosted, ends, {}).balanced
    ends[stages[0]].counters[0] = ("consumed", ends[stages[0]].counters[0][1], 39)
    with pytest.raises(CorruptionError, match="the accounting does not balance"):
        account(hosted, ends, {})
    del ends[stages[-1]]
    with pytest.raises(CorruptionError, match="has not come to its end"):
        account(hosted, ends, {})


def test_a_batch_that_lacks_rows_of_a_table_fails(types: tuple[Path, Path]) -> None:
    graph, feed = types
    hosted = HostedPlan(make_job(str(graph), [str(feed)], limits=Limits(), now_us=NOW_US, state=False))
    ends = dict.fromkeys(hosted.plan.by_interval, IntervalEnd([], {}, {}))

    with pytest.raises(CorruptionError, match="table all_things has 3 rows, but 0 were written"):
        account(hosted, ends, {hosted.plan.deployment.table_ids["all_things"]: 3})


def test_an_error_in_a_task_is_one_line(spark: SparkSession, tmp_path: Path) -> None:
    graph = GRAPHS / "union.py"
    broken = tmp_path / "broken.parquet"
    broken.write_bytes(b"PAR1 this is none PAR1")

    with pytest.raises(MillError, match=r"broken\.parquet"):
        run(spark, graph, {"left": str(broken), "right": str(broken)})


@pytest.mark.parametrize(
    ("inputs", "error"),
    [
        ([], "source 'things' does not end"),
        (["nothing-*.csv"], "no file matches 'nothing-"),
        (["others=things.ndjson"], "the graph has no source 'others'"),
    ],
)
def test_a_graph_that_cannot_run_is_refused_before_spark_starts(
    types: tuple[Path, Path], inputs: list[str], error: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph, feed = types
    monkeypatch.chdir(feed.parent)

    with pytest.raises(UsageError, match=error):
        HostedPlan(make_job(str(graph), inputs, limits=Limits(), now_us=NOW_US, state=False))


def test_a_directory_with_results_is_not_overwritten(types: tuple[Path, Path]) -> None:
    graph, feed = types

    refused = CliRunner().invoke(app, ["spark", "run", str(graph), "--input", str(feed), "--output", str(feed.parent)])

    assert refused.exit_code == 2
    assert "is not empty" in refused.output
