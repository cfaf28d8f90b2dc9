"""W1 and W4 as Spark batches, and W1 as a streaming query, against one worker on the same records.

    python -m benchmarks.spark_run [--records 2000000] [--intervals 4]

The worker reads NDJSON; Spark reads the same records as one Parquet file, in row groups of a bundle, with local[2].
Timed from the call of `run` to the end of writing the result tables as Parquet, in the second run of a session: the
first starts Python and compiles. The stream is timed from its start to the end of its last batch, when all rows are
published, and is the second of the session, too. `w1_worker_ratio` and `w4_worker_ratio` are Spark's records/s by the
worker's.
`differences` counts rows that differ between the worker's tables and Spark's (floats by 1e-9), and W4's final states.
`stream_p50_ms` is the median time of a batch of the stream with records. `native_ratio` is the time of hand-written SQL
for W1's windows over an archive, by that of the native engine of `millpy audit`: the better of three runs each.
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

import numpy as np
import psycopg
import pyarrow as pa
import pyarrow.json
import pyarrow.parquet
from pyspark.sql import DataFrame, SparkSession

from benchmarks.harness import Bench, arguments
from benchmarks.readings import write_readings
from benchmarks.w4_state import STATE
from millpy.graph.loader import load_graph
from millpy.model.time import INSTANT_MIN
from millpy.spark import BatchResult, StreamPlaces, read_results, run, session, stream
from millpy.spark.native import native_plans, native_table

RUN_S_MAX = 900
GRAPHS = Path(__file__).with_name("graphs")
ROW_GROUP = 65_536
EVERY = timedelta(milliseconds=100)
US = "(extract(epoch FROM window_start) * 1000000)::bigint"
WINDOWS = f"SELECT device, {US}, n, mean, low, high FROM w1.temperature_10s"
OUTLIERS = "SELECT device, seq, value, mean FROM w4.outliers"
DISORDER_US = 2_000_000  # of W1's source
BY_HAND = """
SELECT device, timestamp_micros(s) AS window_start, timestamp_micros(s + 10000000) AS window_end,
       count(*) AS n, avg(temperature) AS mean, min(temperature) AS low, max(temperature) AS high
  FROM (SELECT *, _event_time_us DIV 10000000 * 10000000 AS s FROM {archive})
 WHERE _watermark_us < s + 10000000
 GROUP BY device, s
"""
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


def as_archive(path: Path) -> Path:
    """Write W1's records as an archive has them: with event times, and the watermark before each record."""
    records = pyarrow.parquet.read_table(path)
    times = records["event_ms"].to_numpy() * 1_000
    watermarks = np.concatenate(([INSTANT_MIN], np.maximum.accumulate(times)[:-1] - DISORDER_US))
    target = path.with_suffix(".archive.parquet")
    columns = {
        "_partition": pa.array(["readings/files"] * len(times)),
        "_seq": pa.array(np.arange(len(times)) // ROW_GROUP),
    }
    for name, values in (columns | {"_event_time_us": pa.array(times), "_watermark_us": pa.array(watermarks)}).items():
        records = records.append_column(name, values)
    pyarrow.parquet.write_table(records, target, row_group_size=ROW_GROUP, compression="zstd")
    return target


def natively(spark: SparkSession, path: Path, target: Path) -> tuple[dict[str, float], DataFrame]:
    """Compute W1's windows over an archive, by the native engine and by SQL; return seconds, and the engine's table."""
    os.environ["BENCH_ARCHIVE"] = "1"
    (plan,), _ = native_plans(load_graph(str(GRAPHS / "windows.py")).spec())
    del os.environ["BENCH_ARCHIVE"]
    seconds: dict[str, list[float]] = {"native_s": [], "by_hand_s": []}
    for attempt in range(4):  # the first one compiles
        for name in seconds:
            began = time.perf_counter()
            if name == "native_s":
                frame = native_table(spark, plan, [str(path)], partitions=1).frame
            else:
                frame = spark.sql(BY_HAND.format(archive=f"parquet.`{path}`"))
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
                native, table = natively(spark, as_archive(parquet), bench.directory / "native")
                differences += _w1_rows(url, table)
                bench.show("native", native)
                ratios["native_ratio"] = native["by_hand_s"] / native["native_s"]
        spark.stop()
        bench.finish(**ratios, differences=differences)


if __name__ == "__main__":
    main(arguments(__doc__, "differences<=0", records=2_000_000, intervals=4).parse_args())
