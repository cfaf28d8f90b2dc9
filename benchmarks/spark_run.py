"""W1 and W4 as Spark batches from an archive, and W1 as a streaming query, against one worker on the same records.

    python -m benchmarks.spark_run [--records 2000000] [--intervals 4] [--times 3]

The worker reads NDJSON, by itself, writing the archive itself, and with an archiver beside it, in turn; the best of
`--times` runs each counts. `archiving_cost` is the part of W1's rate that is lost when the worker archives,
`archiver_cost` that with the archiver (the source waits, too, when the archiver is behind by the default bound). Spark
reads the worker's archive with local[2]. Timed from the call of `run` to the end of writing
the result tables as Parquet, in the second run of a session: the first starts Python and compiles. `w1_worker_ratio`
and `w4_worker_ratio` are Spark's records/s by those of the worker by itself. The stream reads one Parquet file with row
groups of a bundle. It is timed from its start to the end of its last batch, when all rows are published, and is the
second of the session, too; `stream_p50_ms` is the median time of a batch with records. `native_ratio` is the time of
hand-written SQL for W1's windows over the archive, by that of the native engine of `millpy audit`, both with listing of
the files: the best of five runs each. `differences` counts rows that differ between the worker's tables and Spark's
(floats by 1e-9), and W4's final states.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import psycopg
import pyarrow.json
import pyarrow.parquet
from pyspark.sql import DataFrame, SparkSession

from benchmarks.harness import Bench, arguments, wait_until
from benchmarks.readings import write_readings
from benchmarks.w4_state import STATE
from millpy.graph.loader import load_graph
from millpy.spark import Archive, BatchResult, StreamPlaces, read_results, run, session, stream
from millpy.spark.native import native_plans, native_table

RUN_S_MAX = 900
GRAPHS = Path(__file__).with_name("graphs")
ROW_GROUP = 65_536
EVERY = timedelta(milliseconds=100)
ARCHIVE_EVERY_S = 1
LIVE = "SELECT count(*) FILTER (WHERE live) FROM millpy.archive"
US = "(extract(epoch FROM window_start) * 1000000)::bigint"
WINDOWS = f"SELECT device, {US}, n, mean, low, high FROM w1.temperature_10s"
OUTLIERS = "SELECT device, seq, value, mean FROM w4.outliers"
BY_HAND = """
SELECT device, timestamp_micros(s) AS window_start, timestamp_micros(s + 10000000) AS window_end,
       count(*) AS n, avg(temperature) AS mean, min(temperature) AS low, max(temperature) AS high
  FROM (SELECT *, _event_time_us DIV 10000000 * 10000000 AS s FROM archived)
 WHERE _watermark_us < s + 10000000
 GROUP BY device, s
"""
Rows = dict[tuple[Any, ...], tuple[Any, ...]]


def as_parquet(path: Path) -> Path:
    """Write the records of an NDJSON file as Parquet."""
    target = path.with_suffix(".parquet")
    pyarrow.parquet.write_table(pyarrow.json.read_json(path), target, row_group_size=ROW_GROUP, compression="zstd")
    return target


def by_worker(bench: Bench, graph: str) -> float:
    """Return the seconds from a worker's first claim to its last commit, of a graph without its archive."""
    worker = bench.worker(graph, bench.database(), environment={"BENCH_ARCHIVE": ""})
    worker.wait(RUN_S_MAX)
    return float(worker.report["committed_at"] - worker.report["claimed_at"])


def by_archiving_worker(bench: Bench, graph: str, into: Path) -> tuple[str, float]:
    """Return the database and the seconds of a worker that archives what it reads."""
    url = bench.database()
    worker = bench.worker(graph, url, environment={"MILLPY_ARCHIVE": str(into), "MILLPY_ARCHIVE_IN_WORKERS": "1"})
    worker.wait(RUN_S_MAX)
    return url, float(worker.report["committed_at"] - worker.report["claimed_at"])


def by_archived_worker(bench: Bench, graph: str, into: Path) -> float:
    """Return the seconds of a worker with an archiver beside it, which has archived everything."""
    url = bench.database()
    command = [sys.executable, "-m", "millpy", "archive", str(GRAPHS / graph), "--to", str(into)]
    command += ["--every", str(ARCHIVE_EVERY_S), "--database", url, "--json"]
    archiver = subprocess.Popen(command, env={**os.environ, "MILLPY_LOG_LEVEL": "warning"}, stdout=subprocess.DEVNULL)
    try:
        with psycopg.connect(url, autocommit=True) as connection:
            wait_until(lambda: connection.execute(LIVE).fetchone() == (1,), "the archiver is live")
        worker = bench.worker(graph, url)
        worker.wait(RUN_S_MAX)
        if archiver.wait(RUN_S_MAX):
            raise SystemExit(f"the archiver ended with status {archiver.returncode}")
    finally:
        archiver.kill()
        archiver.wait()
    return float(worker.report["committed_at"] - worker.report["claimed_at"])


def by_spark(
    spark: SparkSession, graph: str, archive: Archive, target: Path, *, state: bool
) -> tuple[float, BatchResult]:
    """Run a graph over its archive twice; return the seconds of the second run, and its result."""
    seconds = 0.0
    for attempt in range(2):
        began = time.perf_counter()
        result = run(spark, GRAPHS / graph, archive, state=state)
        for name, frame in result.tables.items():
            frame.write.parquet(str(target / f"{attempt}-{name}"))
        seconds = time.perf_counter() - began
        if attempt == 0:
            result.close()
    return seconds, result


def by_stream(spark: SparkSession, path: Path, target: Path) -> tuple[dict[str, float], DataFrame]:
    """Stream W1 twice; return the figures of the second time, and its table."""
    figures: dict[str, float] = {}
    for attempt in range(2):
        places = StreamPlaces(target / f"{attempt}-checkpoint", target / f"{attempt}-output")
        began = time.perf_counter()
        running = stream(spark, GRAPHS / "windows.py", {"readings": str(path)}, places=places, every=EVERY)
        running.wait(RUN_S_MAX)
        seconds = time.perf_counter() - began
        took = [batch.durationMs["triggerExecution"] for batch in running.query.recentProgress]
        figures = {"stream_s": seconds}
        if took:  # Spark may have been stopped before it noted the last batch
            figures |= {"batches": len(took), "stream_p50_ms": statistics.median(took)}
    return figures, read_results(spark, places.output)["temperature_10s"]


def natively(spark: SparkSession, archive: Path, target: Path) -> tuple[dict[str, float], DataFrame]:
    """Compute W1's windows over an archive, by the native engine and by SQL; return seconds, and the engine's table."""
    (plan,), _ = native_plans(load_graph(str(GRAPHS / "windows.py")).spec())
    files = sorted(map(str, archive.glob("w1/*/hour=*/*.parquet")))
    seconds: dict[str, list[float]] = {"native_s": [], "by_hand_s": []}
    for attempt in range(6):  # the first one compiles
        for name in seconds:
            began = time.perf_counter()
            if name == "native_s":
                frame = native_table(spark, plan, files, partitions=1).frame
            else:
                spark.read.parquet(*files).createOrReplaceTempView("archived")
                frame = spark.sql(BY_HAND)
            frame.write.parquet(str(target / f"{name}-{attempt}"))
            seconds[name].append(time.perf_counter() - began)
    table = spark.read.parquet(str(target / "native_s-0"))
    return {name: min(taken[1:]) for name, taken in seconds.items()}, table


def differing(one: Rows, other: Rows) -> int:
    """Count rows that are missing, superfluous or different."""
    wrong = len(one.keys() ^ other.keys())
    return wrong + sum(
        not all(math.isclose(a, b, rel_tol=1e-9, abs_tol=1e-9) for a, b in zip(one[key], other[key], strict=True))
        for key in one.keys() & other.keys()
    )


def _stored(url: str, query: str) -> Rows:
    with psycopg.connect(url) as connection:
        return {row[:2]: row[2:] for row in connection.execute(query).fetchall()}


def _made(frame: DataFrame, *columns: str) -> Rows:
    rows = frame.selectExpr(*columns).toArrow().to_pylist()
    return {tuple(row.values())[:2]: tuple(row.values())[2:] for row in rows}


def _w1(url: str, result: BatchResult) -> int:
    return _w1_rows(url, result.tables["temperature_10s"])


def _w1_rows(url: str, frame: DataFrame) -> int:
    columns = ("device", "unix_micros(window_start)", "n", "mean", "low", "high")
    return differing(_stored(url, WINDOWS), _made(frame, *columns))


def _w4(url: str, result: BatchResult) -> int:
    wrong = differing(_stored(url, OUTLIERS), _made(result.tables["outliers"], "device", "seq", "value", "mean"))
    assert result.state is not None
    state = result.state.where("kind = 'state'").selectExpr("key", "value").toArrow().to_pylist()
    made = {row["key"]: json.loads(row["value"]) for row in state}
    with psycopg.connect(url) as connection:
        stored = dict(connection.execute(STATE).fetchall())
    return (
        wrong + len(stored.keys() ^ made.keys()) + sum(made[key] != stored[key] for key in stored.keys() & made.keys())
    )


WORKLOADS: dict[str, tuple[str, str, int, Callable[[str, BatchResult], int]]] = {
    "w1": ("windows.py", "temperature", 1_000, _w1),
    "w4": ("deviation.py", "value", 100_000, _w4),
}


def against_workers(bench: Bench, graph: str, into: Path) -> tuple[str, dict[str, float], Path]:
    """Run a worker in three ways in turn; return the archiving worker's database, the best seconds, its archive."""
    seconds: dict[str, list[float]] = {"alone_s": [], "archiving_s": [], "beside_archiver_s": []}
    url, archive = "", into
    for attempt in range(bench.options.times):
        seconds["alone_s"].append(by_worker(bench, graph))
        archive = into / str(attempt)
        url, archiving_s = by_archiving_worker(bench, graph, archive)
        seconds["archiving_s"].append(archiving_s)
        seconds["beside_archiver_s"].append(by_archived_worker(bench, graph, into / f"{attempt}-beside"))
    bench.show(f"{graph} worker", seconds)
    return url, {name: min(taken) for name, taken in seconds.items()}, archive


def main(options: argparse.Namespace) -> None:
    ratios, differences = {}, 0
    with Bench("spark_run", options) as bench:
        path = bench.directory / "readings.ndjson"
        # Spark's Python workers load the graphs, too, and keep the environment that the session has at its start.
        os.environ |= {"BENCH_FILE": str(path), "BENCH_INTERVALS": str(options.intervals), "BENCH_ARCHIVE": "1"}
        spark = session(master="local[2,4]", memory="3g", name="bench-spark-run")
        for name, (graph, value, devices, compare) in WORKLOADS.items():
            write_readings(path, options.records, devices, value=value)
            url, by_workers, archive = against_workers(bench, graph, bench.directory / name)
            worker_s = by_workers["alone_s"]
            spark_s, result = by_spark(
                spark, graph, Archive(archive), bench.directory / f"{name}-spark", state=name == "w4"
            )
            with result:
                differences += compare(url, result)
            bench.show(name, {"worker_s": worker_s, "spark_s": spark_s, "records_per_s": options.records / spark_s})
            ratios[f"{name}_worker_ratio"] = worker_s / spark_s
            if name == "w1":
                ratios["archiving_cost"] = 1 - worker_s / by_workers["archiving_s"]
                ratios["archiver_cost"] = 1 - worker_s / by_workers["beside_archiver_s"]
                native, table = natively(spark, archive, bench.directory / "native")
                differences += _w1_rows(url, table)
                bench.show("native", native)
                ratios["native_ratio"] = native["by_hand_s"] / native["native_s"]
                streamed, table = by_stream(spark, as_parquet(path), bench.directory / "stream")
                differences += _w1_rows(url, table)
                bench.show("stream", streamed)
                ratios["stream_records_per_s"] = options.records / streamed["stream_s"]
        spark.stop()
        bench.finish(**ratios, differences=differences)


if __name__ == "__main__":
    main(arguments(__doc__, "differences<=0", records=2_000_000, intervals=4, times=3).parse_args())
