"""JOIN: two files of 1 M JSON readings each, interval join by device within half a second, into a table.

    python -m benchmarks.join [--records 1000000] [--intervals 4] [--how inner|left|full]

Timed as W1 is: from the first claim by the worker to the last commit, fsync on. `records_per_s` counts the records of
both files. A record has one match on average, so that there are about as many rows as records of one file.
`differences` counts joined records that differ from a join of the same files by DuckDB.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import duckdb
import psycopg

from benchmarks.bundles import committed_bundles
from benchmarks.harness import Bench, arguments
from benchmarks.readings import write_readings
from benchmarks.w1_windows import timed

DEVICES = 1_000
WITHIN_MS = 500
RUN = "SELECT device, event_ms, seq, {value} FROM read_json('{path}', format = 'newline_delimited')"
KINDS = {"inner": "", "left": "LEFT", "full": "FULL"}
JOINED = f"""
SELECT coalesce(a.device, b.device), a.seq, a.temperature, b.seq, b.pressure
  FROM ({{left}}) AS a {{kind}} JOIN ({{right}}) AS b
    ON a.device = b.device AND b.event_ms BETWEEN a.event_ms - {WITHIN_MS} AND a.event_ms + {WITHIN_MS}
"""
STORED = "SELECT device, seq, temperature, seq_right, pressure FROM joined.pairs"


def differences(url: str, left: Path, right: Path, how: str) -> tuple[int, int]:
    """Return (number of rows, number of joined records that are missing, superfluous or different)."""
    with psycopg.connect(url) as connection:
        found = connection.execute(STORED).fetchall()
    with duckdb.connect() as duck:
        parts = {
            "left": RUN.format(value="temperature", path=left),
            "right": RUN.format(value="pressure", path=right),
            "kind": KINDS[how],
        }
        expected = set(duck.execute(JOINED.format(**parts)).fetchall())
    stored = set(found)
    return len(found), len(expected ^ stored) + len(found) - len(stored)


def main(options: argparse.Namespace) -> None:
    with Bench("join", options) as bench:
        left, right = bench.directory / "readings.ndjson", bench.directory / "pressures.ndjson"
        write_readings(left, options.records, DEVICES, value="temperature", seed=1)
        write_readings(right, options.records, DEVICES, value="pressure", seed=2)
        url = bench.database()
        environment = {
            "BENCH_LEFT": str(left),
            "BENCH_RIGHT": str(right),
            "BENCH_INTERVALS": str(options.intervals),
            "BENCH_HOW": options.how,
        }
        worker = bench.worker("joined.py", url, environment=environment)
        seconds = timed([worker], worker)
        bench.show("bundles", committed_bundles(url))
        rows, wrong = differences(url, left, right, options.how)
        bench.show("rows", rows)
        bench.finish(
            records_per_s=2 * options.records / seconds,
            peak_rss_mb=float(worker.report["peak_rss_mb"]),
            differences=wrong,
        )


if __name__ == "__main__":
    parser = arguments(__doc__, "differences<=0", records=1_000_000, intervals=4)
    parser.add_argument("--how", choices=sorted(KINDS), default="inner")
    main(parser.parse_args())
