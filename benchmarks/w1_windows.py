"""W1: 2 M JSON readings from a file, through exactly-once windows, into a table.

    python -m benchmarks.w1_windows [--records 2000000] [--intervals 4] [--dedupe]

Timed from the source's first claim by the worker (interpreter, imports and deployment are over; nothing is read yet)
to the last commit. fsync is on. `parse_ratio` = our records/s by those of a plain pyarrow JSON parse of the same file
with the same fields (both cores). `copy_ratio` = our result rows/s by those of a raw binary COPY of the very rows of
the result table into an equal empty one, one commit. `differences` counts windows, and late records, that differ from a
recomputation by DuckDB's own JSON reader. With `two_workers`, the source runs on one worker and the windows on another.
`--dedupe` turns dedupe ids on (device and sequence number, ten minutes; the file has no duplicates).
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import duckdb
import psycopg
import pyarrow as pa
import pyarrow.json

from benchmarks.bundles import committed_bundles
from benchmarks.harness import Bench, Worker, arguments
from benchmarks.readings import write_readings

DEVICES = 1_000
COMMITS_MIN = 20
BUNDLE_RECORDS_MAX = 100_000
RUN_S_MAX = 600
TABLE = "w1.temperature_10s"
FIELDS = pa.schema(
    [
        ("device", pa.string()),
        ("event_ms", pa.int64()),
        ("temperature", pa.float64()),
        ("humidity", pa.float64()),
        ("seq", pa.int64()),
    ]
)

# Late for a window: the watermark before the record (largest event time so far - 2 s) has reached its end.
RECOMPUTED = """
WITH read AS (
    SELECT device, event_ms, temperature, row_number() OVER () AS line
    FROM read_json('{path}', format = 'newline_delimited',
                   columns = {{device: 'VARCHAR', event_ms: 'BIGINT', temperature: 'DOUBLE'}})
), judged AS (
    SELECT device, temperature, event_ms - event_ms % 10000 AS start_ms,
           max(event_ms) OVER (ORDER BY line ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING) - 2000 AS watermark_ms
    FROM read
), marked AS (
    SELECT *, coalesce(watermark_ms >= start_ms + 10000, false) AS late FROM judged
)
SELECT device, start_ms, count(*) FILTER (NOT late) AS n, avg(temperature) FILTER (NOT late) AS mean,
       min(temperature) FILTER (NOT late) AS low, max(temperature) FILTER (NOT late) AS high,
       count(*) FILTER (late) AS n_late
FROM marked GROUP BY device, start_ms
"""
STORED = """
SELECT device, (extract(epoch FROM window_start) * 1000)::bigint, n, mean, low, high FROM {table}
"""
LATE = """
SELECT key::json #>> '{}', window_start / 1000, count(*) FROM mill.late_records GROUP BY key, window_start
"""


def timed(workers: list[Worker], source: Worker) -> float:
    """Seconds from the source's claim to the last commit of any worker."""
    for worker in workers:
        worker.wait(RUN_S_MAX)
    return float(max(worker.report["committed_at"] for worker in workers) - source.report["claimed_at"])


def one_worker(bench: Bench, environment: dict[str, str]) -> tuple[str, float, float]:
    url = bench.database()
    worker = bench.worker("windows.py", url, environment=environment)
    seconds = timed([worker], worker)
    return url, seconds, float(worker.report["peak_rss_mb"])


def two_workers(bench: Bench, environment: dict[str, str]) -> tuple[str, float]:
    url = bench.database()
    windows = bench.worker("windows.py", url, only=["temperature_10s"], environment=environment)
    windows.wait_claimed()
    source = bench.worker("windows.py", url, only=["readings"], environment=environment)
    return url, timed([windows, source], source)


def parse_seconds(path: Path) -> float:
    """The plain parse: the best of two, with the fields that the graph declares."""
    options = pyarrow.json.ParseOptions(explicit_schema=FIELDS, unexpected_field_behavior="ignore")
    found = []
    for _ in range(2):
        started = time.perf_counter()
        pyarrow.json.read_json(path, parse_options=options)
        found.append(time.perf_counter() - started)
    return min(found)


def copy_seconds(url: str) -> tuple[int, float]:
    """Raw COPY of the result rows into an empty table with the same columns and key."""
    with psycopg.connect(url) as connection:
        with connection.cursor().copy(f"COPY {TABLE} TO STDOUT (FORMAT binary)") as copy:
            data = b"".join(bytes(block) for block in copy)
        connection.execute(f"CREATE TABLE copied (LIKE {TABLE} INCLUDING ALL)")
        connection.commit()
        started = time.perf_counter()
        cursor = connection.cursor()
        with cursor.copy("COPY copied FROM STDIN (FORMAT binary)") as copy:
            for start in range(0, len(data), 1_000_000):
                copy.write(data[start : start + 1_000_000])
        connection.commit()
        return cursor.rowcount, time.perf_counter() - started


def differences(url: str, path: Path, table: str = TABLE) -> int:
    """Windows that are missing, too many or different, and late records counted otherwise."""
    expected: dict[tuple[str, int], Any] = {}
    late: dict[tuple[str, int], int] = {}
    with duckdb.connect() as duck:
        duck.execute("SET preserve_insertion_order = true")
        for device, start_ms, n, mean, low, high, n_late in duck.execute(RECOMPUTED.format(path=path)).fetchall():
            if n:
                expected[device, start_ms] = (n, mean, low, high)
            if n_late:
                late[device, start_ms] = n_late
    with psycopg.connect(url) as connection:
        stored = {
            (device, start): rest for device, start, *rest in connection.execute(STORED.format(table=table)).fetchall()
        }
        stored_late = {(device, start): n for device, start, n in connection.execute(LATE).fetchall()}
    wrong: int = len(expected.keys() ^ stored.keys())
    for name in expected.keys() & stored.keys():
        n, mean, low, high = expected[name]
        stored_n, stored_mean, *extremes = stored[name]
        wrong += [n, low, high] != [stored_n, *extremes] or abs(mean - stored_mean) > 1e-9
    return wrong + sum(late.get(name, 0) != stored_late.get(name, 0) for name in late.keys() | stored_late.keys())


def check_rules(bench: Bench, url: str, records: int, enforced: bool) -> None:
    """At least 20 commits and no bundle above 100,000 records, from the tables."""
    found = committed_bundles(url)
    bench.show("bundles", found)
    assert found["largest_source_bundle"] <= BUNDLE_RECORDS_MAX, found
    assert found["largest_stage_bundle"] <= BUNDLE_RECORDS_MAX, found
    assert not enforced or found["commits_with_records"] >= COMMITS_MIN, found


def main(options: argparse.Namespace) -> None:
    with Bench("w1", options) as bench:
        path = bench.directory / "readings.ndjson"
        bench.show("bytes_per_record", write_readings(path, options.records, DEVICES, value="temperature"))
        environment = {"BENCH_FILE": str(path), "BENCH_INTERVALS": str(options.intervals)}
        if options.dedupe:
            environment["BENCH_DEDUPE"] = "1"
        url, seconds, peak_rss_mb = one_worker(bench, environment)
        check_rules(bench, url, options.records, enforced=options.records >= 2_000_000)
        wrong = differences(url, path)
        parse_s = parse_seconds(path)
        rows, copy_s = copy_seconds(url)
        bench.show("seconds", {"run": seconds, "plain_parse": parse_s, "rows": rows, "raw_copy_of_rows": copy_s})
        url, two_seconds = two_workers(bench, environment)
        check_rules(bench, url, options.records, enforced=False)
        wrong += differences(url, path)
        bench.finish(
            records_per_s=options.records / seconds,
            parse_ratio=parse_s / seconds,
            copy_ratio=copy_s / seconds,
            peak_rss_mb=peak_rss_mb,
            differences=wrong,
            two_workers_records_per_s=options.records / two_seconds,
        )


if __name__ == "__main__":
    parser = arguments(__doc__, records=2_000_000, intervals=4)
    parser.add_argument("--dedupe", action="store_true")
    main(parser.parse_args())
