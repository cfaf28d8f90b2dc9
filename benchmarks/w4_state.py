"""W4: a Computation in Python over 100,000 keys, 2 M JSON readings from a file.

    python -m benchmarks.w4_state [--records 2000000] [--keys 100000]

Timed from the source's first claim to the moment at which everything is committed *and* folded into rows, whichever
comes last. `differences` compares each key's final state and every outlier with a plain Python loop over the file.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import psycopg

from benchmarks.bundles import committed_bundles
from benchmarks.harness import Bench, arguments
from benchmarks.readings import write_readings

RUN_S_MAX = 900
SIGMAS_SQUARED = 9.0
RECORDS_MIN = 10
UNFOLDED = "SELECT count(*) FROM mill.intervals WHERE folded_bundle < bundle"
STATE = """
SELECT k.key, k.value::json FROM mill.keyed AS k
  JOIN mill.intervals AS i USING (interval_id) JOIN mill.computations AS c USING (computation_id)
 WHERE c.name = 'deviation' AND k.kind = 'state'
"""


def recompute(path: Path) -> tuple[dict[str, tuple[int, float, float]], set[tuple[str, int]]]:
    """Return the expected state and outliers, by a plain loop."""
    state: dict[str, tuple[int, float, float]] = {}
    outliers = set()
    with path.open() as file:
        for line in file:
            reading = json.loads(line)
            device, value = reading["device"], reading["value"]
            count, mean, squares = state.get(device, (0, 0.0, 0.0))
            delta = value - mean
            if count >= RECORDS_MIN and delta * delta > SIGMAS_SQUARED * squares / count:
                outliers.add((device, reading["seq"]))
            mean_after = mean + delta / (count + 1)
            state[device] = (count + 1, mean_after, squares + delta * (value - mean_after))
    return state, outliers


def differences(url: str, path: Path) -> int:
    """Count the keys whose state differs, and missing, superfluous or doubled outliers."""
    state, outliers = recompute(path)
    with psycopg.connect(url) as connection:
        rows = connection.execute("SELECT device, seq FROM w4.outliers").fetchall()
        stored = {}
        for key, value in connection.execute(STATE).fetchall():
            value = value[0] if isinstance(value, list) else value
            stored[json.loads(key)] = (value.get("count", 0), value.get("mean", 0.0), value.get("squares", 0.0))
    wrong = len(state.keys() ^ stored.keys()) + len(rows) - len(set(rows)) + len(outliers ^ set(rows))
    for device in state.keys() & stored.keys():
        one, other = state[device], stored[device]
        close = all(abs(a - b) <= 1e-9 * max(1.0, abs(a)) for a, b in zip(one[1:], other[1:], strict=True))
        wrong += one[0] != other[0] or not close
    return wrong


def main(options: argparse.Namespace) -> None:
    with Bench("w4", options) as bench:
        path = bench.directory / "readings.ndjson"
        bench.show("bytes_per_record", write_readings(path, options.records, options.keys, value="value"))
        url = bench.database()
        environment = {"BENCH_FILE": str(path), "BENCH_INTERVALS": str(options.intervals)}
        worker = bench.worker("deviation.py", url, environment=environment)
        worker.wait(RUN_S_MAX)
        with psycopg.connect(url) as connection:
            unfolded = connection.execute(UNFOLDED).fetchone()
        report = worker.report
        bench.show("worker", report)
        bench.show("bundles", committed_bundles(url))
        if unfolded is None or unfolded[0]:
            raise SystemExit(f"{unfolded} intervals are not folded at the end")
        end = max(report["committed_at"], report["folded_at"])
        bench.finish(
            records_per_s=options.records / (end - report["claimed_at"]),
            committed_records_per_s=options.records / (report["committed_at"] - report["claimed_at"]),
            differences=differences(url, path),
            peak_rss_mb=report["peak_rss_mb"],
        )


if __name__ == "__main__":
    parser = arguments(__doc__, "differences<=0", records=2_000_000, keys=100_000, intervals=4)
    main(parser.parse_args())
