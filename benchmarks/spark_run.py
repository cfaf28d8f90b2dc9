"""W1 and W4 as Spark batches, and W1 as a streaming query, against one worker on the same records.

    python -m benchmarks.spark_run [--records 2000000] [--intervals 4]

The worker reads NDJSON; Spark reads the same records as one Parquet file, in row groups of a bundle, with local[2].
Timed from the call of `run` to the end of writing the result tables as Parquet, in the second run of a session: the
first starts Python and compiles. The stream is timed from its start to the end of its last batch, when all rows are
published, and is the second of the session, too. `w1_worker_ratio` and `w4_worker_ratio` are Spark's records/s by the
worker's.
`differences` counts rows that differ between the worker's tables and Spark's (floats by 1e-9), and W4's final states.
`stream_p50_ms` is the median time of a batch of the stream with records.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import psycopg
import pyarrow.json
import pyarrow.parquet
from pyspark.sql import DataFrame, SparkSession

from benchmarks.harness import Bench, arguments
from benchmarks.readings import write_readings
from benchmarks.w4_state import STATE
from millpy.spark import BatchResult, StreamPlaces, read_results, run, session, stream

RUN_S_MAX = 900
GRAPHS = Path(__file__).with_name("graphs")
ROW_GROUP = 65_536
EVERY = timedelta(milliseconds=100)
US = "(extract(epoch FROM window_start) * 1000000)::bigint"
WINDOWS = f"SELECT device, {US}, n, mean, low, high FROM w1.temperature_10s"
OUTLIERS = "SELECT device, seq, value, mean FROM w4.outliers"
Rows = dict[tuple[Any, ...], tuple[Any, ...]]


def as_parquet(path: Path) -> Path:
    """Write the records of an NDJSON file as Parquet."""
    target = path.with_suffix(".parquet")
    pyarrow.parquet.write_table(pyarrow.json.read_json(path), target, row_group_size=ROW_GROUP, compression="zstd")
    return target


def by_worker(bench: Bench, graph: str, environment: Mapping[str, str]) -> tuple[str, float]:
    """Return the worker's database, and the seconds from its first claim to its last commit."""
    url = bench.database()
    worker = bench.worker(graph, url, environment=dict(environment))
    worker.wait(RUN_S_MAX)
    return url, float(worker.report["committed_at"] - worker.report["claimed_at"])


def by_spark(spark: SparkSession, graph: str, path: Path, target: Path, *, state: bool) -> tuple[float, BatchResult]:
    """Run a graph twice; return the seconds of the second run, and its result."""
    seconds = 0.0
    for attempt in range(2):
        began = time.perf_counter()
        result = run(spark, GRAPHS / graph, {"readings": str(path)}, state=state)
        for name, frame in result.tables.items():
            frame.write.parquet(str(target / f"{attempt}-{name}"))
        seconds = time.perf_counter() - began
        if attempt == 0:
            result.close()
    return seconds, result


def by_stream(spark: SparkSession, path: Path, target: Path) -> tuple[dict[str, float], DataFrame]:
    """Stream W1 twice; return the figures of the second time, and its table."""
    figures = {}
    for attempt in range(2):
        places = StreamPlaces(target / f"{attempt}-checkpoint", target / f"{attempt}-output")
        began = time.perf_counter()
        running = stream(spark, GRAPHS / "windows.py", {"readings": str(path)}, places=places, every=EVERY)
        running.wait(RUN_S_MAX)
        seconds = time.perf_counter() - began
        took = [batch.durationMs["triggerExecution"] for batch in running.query.recentProgress]
        figures = {"stream_s": seconds, "batches": len(took), "stream_p50_ms": statistics.median(took)}
    return figures, read_results(spark, places.output)["temperature_10s"]


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


def main(options: argparse.Namespace) -> None:
    ratios, differences = {}, 0
    with Bench("spark_run", options) as bench:
        os.environ["BENCH_INTERVALS"], os.environ["BENCH_FILE"] = str(options.intervals), "replaced"
        spark = session(master="local[2,4]", memory="3g", name="bench-spark-run")
        for name, (graph, value, devices, compare) in WORKLOADS.items():
            path = bench.directory / f"{name}.ndjson"
            write_readings(path, options.records, devices, value=value)
            environment = {"BENCH_FILE": str(path), "BENCH_INTERVALS": str(options.intervals)}
            url, worker_s = by_worker(bench, graph, environment)
            parquet = as_parquet(path)
            spark_s, result = by_spark(spark, graph, parquet, bench.directory / name, state=name == "w4")
            with result:
                differences += compare(url, result)
            bench.show(name, {"worker_s": worker_s, "spark_s": spark_s, "records_per_s": options.records / spark_s})
            ratios[f"{name}_worker_ratio"] = worker_s / spark_s
            if name == "w1":
                streamed, table = by_stream(spark, parquet, bench.directory / "stream")
                differences += _w1_rows(url, table)
                bench.show("stream", streamed)
                ratios["stream_records_per_s"] = options.records / streamed["stream_s"]
        spark.stop()
        bench.finish(**ratios, differences=differences)


if __name__ == "__main__":
    main(arguments(__doc__, "differences<=0", records=2_000_000, intervals=4).parse_args())
