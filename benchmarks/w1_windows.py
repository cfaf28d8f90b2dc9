"""W1: 2 M JSON readings from a file, through exactly-once windows, into a table.

    python -m benchmarks.w1_windows [--records 2000000] [--intervals 4] [--dedupe]
                                    [--windows fixed|sliding|session]

Timed from the source's first claim by the worker (interpreter, imports and deployment are over; nothing is read yet)
to the last commit. fsync is on. `parse_ratio` = our records/s by those of a plain pyarrow JSON parse of the same file
with the same fields (both cores). `copy_ratio` = our result rows/s by those of a raw binary COPY of the very rows of
the result table into an equal empty one, one commit. `differences` counts windows, and late records, that differ from a
recomputation by DuckDB's own JSON reader. With `two_workers`, the source runs on one worker and the windows on another.
`--dedupe` turns dedupe ids on (device and sequence number, ten minutes; the file has no duplicates). Windows are of
10 s (fixed), of 10 s every 2.5 s, so that a record is in four (sliding), or sessions with a gap of 3 s (session).
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import psycopg
import pyarrow as pa
import pyarrow.json

from benchmarks.bundles import committed_bundles
from benchmarks.harness import Bench, Worker, arguments
from benchmarks.readings import write_readings
from benchmarks.recompute import recomputed

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

MS = "(extract(epoch FROM {}) * 1000)::bigint"
STORED = f"SELECT device, {MS.format('window_start')}, {MS.format('window_end')}, n, mean, low, high FROM {{table}}"
LATE = """
SELECT key::json #>> '{}', window_start / 1000, window_end / 1000, count(*) FROM mill.late_records GROUP BY 1, 2, 3
"""


def timed(workers: list[Worker], source: Worker) -> float:
    """Wait for the workers; return the seconds from the source's claim to the last commit."""
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
    """Return the seconds of a plain parse of the graph's fields, the best of two."""
    options = pyarrow.json.ParseOptions(explicit_schema=FIELDS, unexpected_field_behavior="ignore")
    found = []
    for _ in range(2):
        started = time.perf_counter()
        pyarrow.json.read_json(path, parse_options=options)
        found.append(time.perf_counter() - started)
    return min(found)


def copy_seconds(url: str) -> tuple[int, float]:
    """COPY the result rows into an empty table with the same columns and key; return (rows, seconds)."""
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


def differences(url: str, path: Path, table: str = TABLE, windows: str = "fixed") -> int:
    """Count the windows that are missing, superfluous or different, and wrong counts of late records."""
    expected, late = recomputed(path, windows)
    with psycopg.connect(url) as connection:
        stored = {row[:3]: row[3:] for row in connection.execute(STORED.format(table=table)).fetchall()}
        stored_late = {row[:3]: row[3] for row in connection.execute(LATE).fetchall()}
    wrong: int = len(expected.keys() ^ stored.keys())
    for name in expected.keys() & stored.keys():
        n, mean, low, high = expected[name]
        stored_n, stored_mean, *extremes = stored[name]
        wrong += [n, low, high] != [stored_n, *extremes] or abs(mean - stored_mean) > 1e-9
    return wrong + sum(late.get(name, 0) != stored_late.get(name, 0) for name in late.keys() | stored_late.keys())


def check_rules(bench: Bench, url: str, records: int, enforced: bool) -> None:
    """Check in the tables: at least 20 commits, and no bundle above 100,000 records."""
    found = committed_bundles(url)
    bench.show("bundles", found)
    assert found["largest_source_bundle"] <= BUNDLE_RECORDS_MAX, found
    assert found["largest_stage_bundle"] <= BUNDLE_RECORDS_MAX, found
    assert not enforced or found["commits_with_records"] >= COMMITS_MIN, found


def main(options: argparse.Namespace) -> None:
    with Bench("w1", options) as bench:
        path = bench.directory / "readings.ndjson"
        bench.show("bytes_per_record", write_readings(path, options.records, DEVICES, value="temperature"))
        environment = {
            "BENCH_FILE": str(path),
            "BENCH_INTERVALS": str(options.intervals),
            "BENCH_WINDOWS": options.windows,
        }
        if options.dedupe:
            environment["BENCH_DEDUPE"] = "1"
        url, seconds, peak_rss_mb = one_worker(bench, environment)
        check_rules(bench, url, options.records, enforced=options.records >= 2_000_000)
        wrong = differences(url, path, windows=options.windows)
        parse_s = parse_seconds(path)
        rows, copy_s = copy_seconds(url)
        bench.show("seconds", {"run": seconds, "plain_parse": parse_s, "rows": rows, "raw_copy_of_rows": copy_s})
        url, two_seconds = two_workers(bench, environment)
        check_rules(bench, url, options.records, enforced=False)
        wrong += differences(url, path, windows=options.windows)
        bench.finish(
            records_per_s=options.records / seconds,
            parse_ratio=parse_s / seconds,
            copy_ratio=copy_s / seconds,
            peak_rss_mb=peak_rss_mb,
            differences=wrong,
            two_workers_records_per_s=options.records / two_seconds,
        )


if __name__ == "__main__":
    parser = arguments(__doc__, "differences<=0", records=2_000_000, intervals=4)
    parser.add_argument("--dedupe", action="store_true")
    parser.add_argument("--windows", choices=["fixed", "sliding", "session"], default="fixed")
    main(parser.parse_args())
