"""Soak: does the database stop growing, and does latency stay the same?

    python -m benchmarks.soak [--minutes 20] [--rate 5000] [--retention_s 60] [--workers 2]

Readings through a real broker, deduplicated over the retention, into 10 s windows, and through a Computation that makes
a row of every tenth record; a polling reader measures its latency from publish to visible. With two workers the source
is on one and the computations are on the other, so that segments are written and freed too. The rings' epochs are
shortened to a quarter of the retention. Sizes are sampled every 2 s; they go up and down with the rings, so "at minute
3" and "at the end" are each the largest sample of the minute before it. RSS is the sum over the workers. A run fails
when a sampled record is missing, the accounting does not balance, or sizes have grown by more than a quarter.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import numpy as np
import psycopg

from benchmarks.harness import Bench, Bound, Worker, arguments, percentile
from benchmarks.memory import rss_mb
from benchmarks.traffic import await_flow, latencies_ms, result_of, rows_of, start_publisher, start_reader

TABLE = "soak.pongs"
SAMPLE_EVERY = 10
LOOK_EVERY_S = 2.0
GROWTH_MAX = 1.25
MILL_BYTES = """
SELECT coalesce(sum(pg_total_relation_size(c.oid)), 0)::float8 / 1e6 FROM pg_class AS c
 WHERE c.relnamespace = 'mill'::regnamespace AND c.relkind = 'r'
"""
LARGEST = """
SELECT coalesce(p.parent, c.relname) AS name, round(sum(pg_total_relation_size(c.oid)) / 1e6)::int AS mb
  FROM pg_class AS c LEFT JOIN LATERAL (
    SELECT inhparent::regclass::text AS parent FROM pg_inherits WHERE inhrelid = c.oid) AS p ON true
 WHERE c.relnamespace = 'mill'::regnamespace AND c.relkind = 'r' GROUP BY 1 ORDER BY 2 DESC LIMIT 5
"""


def watch(url: str, workers: list[Worker], seconds: float) -> list[tuple[float, float, float]]:
    """Sample (seconds since the start, MB of schema mill, MB of the workers' memory)."""
    samples = []
    started = time.monotonic()
    with psycopg.connect(url, autocommit=True) as connection:
        while (elapsed := time.monotonic() - started) < seconds:
            for worker in workers:
                worker.check()
            row = connection.execute(MILL_BYTES).fetchone()
            assert row is not None
            samples.append((elapsed, row[0], sum(rss_mb(worker.pid) for worker in workers)))
            if len(samples) % 15 == 1:
                print(f"soak {elapsed:6.0f} s: mill {row[0]:7.1f} MB, workers {samples[-1][2]:7.1f} MB", flush=True)
            time.sleep(LOOK_EVERY_S)
        print("soak largest:", dict(connection.execute(LARGEST).fetchall()), flush=True)
    return samples


def largest(samples: list[tuple[float, float, float]], column: int, start_s: float, end_s: float) -> float:
    """Return the largest sample of a span of time."""
    return max(sample[column] for sample in samples if start_s <= sample[0] < end_s)


def main(options: argparse.Namespace) -> None:
    seconds = options.minutes * 60
    third = min(180.0, seconds / 2)
    minute = min(60.0, third)
    with Bench("soak", options) as bench:
        broker, url = bench.broker(), bench.database()
        environment = {
            "BENCH_PORT": str(broker.port),
            "BENCH_RETENTION_S": str(options.retention_s),
            "MILLPY_EPOCH_S": str(options.retention_s / 4),
        }
        placement: list[list[str]] = [["pings"], ["per_device_10s", "counting"]] if options.workers == 2 else [[]]
        workers = [bench.worker("soak.py", url, only=only, environment=environment) for only in placement]
        for worker in workers:
            worker.wait_claimed()
        await_flow(url, TABLE, broker.port)
        reader = start_reader(bench, url, TABLE, int(options.rate * seconds) // SAMPLE_EVERY)
        began_ns = time.monotonic_ns()
        publisher = start_publisher(bench, broker.port, options.rate, seconds)
        samples = watch(url, workers, seconds)
        bench.show("publisher", result_of(publisher, 120))
        rows = rows_of(reader)
        accounting = account(url)
        for worker in workers:
            worker.drain()
        bench.show("workers", [worker.report for worker in workers])
        bench.show("accounting", accounting)
        sent_s = (rows[:, 1] - began_ns) / 1e9
        latency = latencies_ms(rows)

        def p99(start_s: float, end_s: float) -> float:
            return percentile(latency[(sent_s >= start_s) & (sent_s < end_s)].tolist(), 0.99)

        expected = int(options.rate * seconds) // SAMPLE_EVERY
        mill_mb, rss_mb_then = (largest(samples, column, third - minute, third) for column in (1, 2))
        options.bounds += [
            Bound("mill_mb_end", at_least=False, limit=GROWTH_MAX * mill_mb),
            Bound("rss_mb_end", at_least=False, limit=GROWTH_MAX * rss_mb_then),
        ]
        bench.finish(
            minutes=options.minutes,
            mill_mb_minute_3=mill_mb,
            mill_mb_end=largest(samples, 1, seconds - minute, seconds),
            rss_mb_minute_3=rss_mb_then,
            rss_mb_end=largest(samples, 2, seconds - minute, seconds),
            unbalanced=sum(not row["balanced"] for row in accounting),
            p99_ms_minute_3=p99(third - minute, third),
            p99_ms_end=p99(seconds - minute, seconds),
            p50_ms_end=percentile(latency[sent_s >= seconds - minute].tolist(), 0.5),
            samples_missing=expected - len(np.unique(rows[:, 0])),
            records_per_s=options.rate,
        )


def account(url: str) -> list[dict[str, Any]]:
    """Return the rows of `millpy.accounting` (I8)."""
    with psycopg.connect(url, autocommit=True) as connection:
        cursor = connection.execute("SELECT * FROM millpy.accounting")
        names = [column.name for column in cursor.description or ()]
        return [dict(zip(names, row, strict=True)) for row in cursor.fetchall()]


if __name__ == "__main__":
    bounds = ("samples_missing<=0", "unbalanced<=0")
    parser = arguments(__doc__, *bounds, minutes=20.0, rate=5_000, retention_s=60.0, workers=2)
    main(parser.parse_args())
