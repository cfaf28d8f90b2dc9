"""W1 with early panes: the file of W1 through windows that also fire every second of processing time.

    python -m benchmarks.w1_early [--records 2000000] [--intervals 4]

Runs W1 (see `w1_windows.py`) with its default trigger and with `AfterWatermark(early=Every(seconds(1)))`, in turns, on
one file. `records_per_s` is the best of the runs with early panes, `w1_ratio` that by the best of the others.
`differences` counts windows, and late records, of all runs that differ from a recomputation by DuckDB. Few panes are
early here (`panes` beyond `rows` are): a bundle spans more event time than a window. What is measured is the cost of
triggers with a state.
"""

from __future__ import annotations

import argparse

import psycopg

from benchmarks.harness import Bench, arguments
from benchmarks.readings import write_readings
from benchmarks.w1_windows import DEVICES, TABLE, differences, one_worker

EARLY = f"SELECT count(*), sum(pane_index + 1) FROM {TABLE}"
TRIGGERS = ("default", "early", "default", "early")


def main(options: argparse.Namespace) -> None:
    with Bench("w1_early", options) as bench:
        path = bench.directory / "readings.ndjson"
        bench.show("bytes_per_record", write_readings(path, options.records, DEVICES, value="temperature"))
        best: dict[str, float] = {}
        wrong = 0
        for trigger in TRIGGERS:
            environment = {"BENCH_FILE": str(path), "BENCH_INTERVALS": str(options.intervals), "BENCH_TRIGGER": trigger}
            url, seconds, _ = one_worker(bench, environment)
            wrong += differences(url, path)
            with psycopg.connect(url) as connection:
                rows, panes = connection.execute(EARLY).fetchone() or (0, 0)
            bench.show(trigger, {"seconds": seconds, "rows": rows, "panes": int(panes)})
            best[trigger] = max(best.get(trigger, 0.0), options.records / seconds)
        bench.finish(records_per_s=best["early"], w1_ratio=best["early"] / best["default"], differences=wrong)


if __name__ == "__main__":
    main(arguments(__doc__, "differences<=0", records=2_000_000, intervals=4).parse_args())
