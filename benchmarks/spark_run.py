"""W1 and W4 as Spark batches, against one worker on the same records.

    python -m benchmarks.spark_run [--records 2000000] [--intervals 4]

The worker reads NDJSON; Spark reads the same records as one Parquet file, in row groups of a bundle, with local[2].
Timed from the call of `run` to the end of writing the result tables as Parquet, in the second run of a session: the
first starts Python and compiles. `w1_worker_ratio` and `w4_worker_ratio` are Spark's records/s by the worker's.
`differences` counts rows that differ between the worker's tables and Spark's (floats by 1e-9), and W4's final states.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import psycopg
import pyarrow.json
import pyarrow.parquet
from pyspark.sql import DataFrame, SparkSession

from benchmarks.harness import Bench, arguments
from benchmarks.readings import write_readings
from benchmarks.w4_state import STATE
from millpy.spark import BatchResult, run, session

RUN_S_MAX = 900
GRAPHS = Path(__file__).with_name("graphs")
ROW_GROUP = 65_536
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
    columns = ("device", "unix_micros(window_start)", "n", "mean", "low", "high")
    return differing(_stored(url, WINDOWS), _made(result.tables["temperature_10s"], *columns))


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
            spark_s, result = by_spark(spark, graph, as_parquet(path), bench.directory / name, state=name == "w4")
            with result:
                differences += compare(url, result)
            bench.show(name, {"worker_s": worker_s, "spark_s": spark_s, "records_per_s": options.records / spark_s})
            ratios[f"{name}_worker_ratio"] = worker_s / spark_s
        spark.stop()
        bench.finish(**ratios, differences=differences)


if __name__ == "__main__":
    main(arguments(__doc__, "differences<=0", records=2_000_000, intervals=4).parse_args())
