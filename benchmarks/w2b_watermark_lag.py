"""W2b: how far the low watermark of the last stage is behind the clock, at 1,000 records/s through a real broker.

    python -m benchmarks.w2b_watermark_lag [--rate 1000] [--seconds 60]

The graph of W2 with one stage, and with three in a row, in one worker; its source is in order (`sorted=True`), and each
record's event time is the moment of sending. A reader polls the committed low watermark of the last stage; a sample is
the wall clock minus it. So it contains the way through publisher, broker, worker and commit, and the time since the
newest record (1 ms at this rate). MillWheel reports the same (section 8.2: watermark lag).
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import numpy as np

from benchmarks.harness import Bench, arguments, percentile
from benchmarks.traffic import await_flow, result_of, start_publisher
from benchmarks.w2_latency import FAST, TABLE

BOUNDS = ("one_stage_p99_ms<=100", "three_stages_p99_ms<=100")
STAGES = {"one_stage": 1, "three_stages": 3}


def measure(bench: Bench, name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Run one arrangement; return its percentiles."""
    stages, broker, url = STAGES[name], bench.broker(), bench.database()
    port = broker.port
    environment = {"BENCH_PORT": str(port), "BENCH_STAGES": str(stages), "BENCH_SORTED": "1", **FAST}
    worker = bench.worker("stages.py", url, environment=environment)
    worker.wait_claimed()
    await_flow(url, TABLE, port)
    publisher = start_publisher(bench, port, options.rate, options.warm_up + options.seconds + options.rest)
    time.sleep(options.warm_up)
    out = bench.directory / f"lags-{name}.npy"
    graph, last = TABLE.split(".")[0], f"stage_{stages}"
    reader = bench.child(
        *("benchmarks.lag_reader", "--database", url, "--graph", graph, "--computation", last),
        *("--seconds", options.seconds, "--out", out),
    )
    samples = result_of(reader, options.seconds + 60)
    published = result_of(publisher, options.warm_up + options.seconds + 60)
    worker.drain()
    broker.stop()
    lags = (np.load(out) / 1e3).tolist()
    bench.show(name, {**published, **samples, "max_ms": max(lags), "commits": worker.report["commits"]})
    return {f"{name}_p50_ms": percentile(lags, 0.5), f"{name}_p99_ms": percentile(lags, 0.99)}


def main(options: argparse.Namespace) -> None:
    with Bench("w2b", options) as bench:
        figures: dict[str, Any] = {}
        for name in STAGES:
            figures.update(measure(bench, name, options))
        bench.finish(**figures)


if __name__ == "__main__":
    main(arguments(__doc__, *BOUNDS, rate=1_000, seconds=60.0, warm_up=3.0, rest=3.0).parse_args())
