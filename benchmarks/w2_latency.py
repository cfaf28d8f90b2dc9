"""W2: from publish to committed and visible in SQL, at 1,000 records/s through a real broker.

    python -m benchmarks.w2_latency [--rate 1000] [--seconds 60]

A Computation updates one state cell and produces one row per record (`to_table`). Publisher, broker, workers, server
and reader are processes of their own on one machine. Latency runs from the moment of sending, which the payload
carries, to the moment at which a polling reader has the row in its hands; the reader pauses 1 ms between its polls. The
first seconds (--warm-up) are published and not counted. Three arrangements: one stage, three stages in a row in one
worker, and those with the source and the first stage on one worker and the others on a second. In these the
Computation says `immediate = True` and the source has no `Dedupe`, so a reading that the broker delivers twice would
count twice. `one_stage_usual` and `three_stages_usual` have neither: callbacks run in the thread, and
dedupe ids are on.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.harness import Bench, arguments, percentile
from benchmarks.traffic import await_flow, latencies_ms, result_of, rows_of, start_publisher, start_reader

TABLE = "stages.pongs"
FAST = {"BENCH_IMMEDIATE": "1"}
USUAL = {"BENCH_DEDUPE": "1"}
ARRANGEMENTS: dict[str, tuple[int, list[list[str]], dict[str, str]]] = {
    "one_stage": (1, [[]], FAST),
    "three_stages": (3, [[]], FAST),
    "three_stages_two_workers": (3, [["pings", "stage_1"], ["stage_2", "stage_3"]], FAST),
    "one_stage_usual": (1, [[]], USUAL),
    "three_stages_usual": (3, [[]], USUAL),
}
"""Name -> (stages, computations of each worker or all, settings of the graph)."""


def measure(
    bench: Bench, name: str, options: argparse.Namespace, *, beside: Callable[[str], None] = lambda url: None
) -> dict[str, Any]:
    """Run one arrangement; return its percentiles. `beside` starts what runs meanwhile, on the database."""
    stages, placement, setting = ARRANGEMENTS[name]
    broker, url = bench.broker(), bench.database()
    port = broker.port
    environment = {"BENCH_PORT": str(port), "BENCH_STAGES": str(stages), **setting}
    workers = [bench.worker("stages.py", url, only=only, environment=environment) for only in placement]
    for worker in workers:
        worker.wait_claimed()
    await_flow(url, TABLE, port)
    total = int(options.rate * (options.warm_up + options.seconds))
    beside(url)
    reader = start_reader(bench, url, TABLE, total)
    publisher = start_publisher(bench, port, options.rate, options.warm_up + options.seconds)
    published = result_of(publisher, options.warm_up + options.seconds + 60)
    rows = rows_of(reader)
    peak = [round(worker.peak_rss_mb()) for worker in workers]
    for worker in workers:
        worker.drain()
    broker.stop()
    measured = latencies_ms(rows[rows[:, 0] >= options.rate * options.warm_up])
    commits = sum(worker.report["commits"] for worker in workers)
    missing = total - len(np.unique(rows[:, 0]))
    bench.show(
        name,
        {
            **published,
            "rows": len(rows),
            "missing": missing,
            "doubled": len(rows) + missing - total,
            "commits": commits,
            "max_ms": float(measured.max()) if len(measured) else None,
            "peak_rss_mb": peak,
        },
    )
    if missing or len(rows) != total:
        raise SystemExit(f"{name}: {len(rows)} rows for {total} records, {missing} missing")
    ordered = measured.tolist()
    return {f"{name}_p50_ms": percentile(ordered, 0.5), f"{name}_p99_ms": percentile(ordered, 0.99)}


def main(options: argparse.Namespace) -> None:
    with Bench("w2", options) as bench:
        figures: dict[str, Any] = {}
        for name in options.only.split(",") if options.only else ARRANGEMENTS:
            figures.update(measure(bench, name, options))
        bench.finish(**figures)


if __name__ == "__main__":
    parser = arguments(__doc__, rate=1_000, seconds=60.0, warm_up=3.0)
    parser.add_argument("--only", default="", help=f"of {', '.join(ARRANGEMENTS)}")
    main(parser.parse_args())
