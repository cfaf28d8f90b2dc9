"""Late: a week of one-minute windows waits for late records, and late records come at random.

    python -m benchmarks.late [--windows 10000000] [--records 1000000] [--devices 1000]

First each device sends one record a minute, until `--windows` windows have fired and wait for their allowed lateness of
eight days. Then `--records` late ones come, each for a random window of these: `touched_share` is the share of the
windows that a second's records touch. `records_per_s` is timed from the first of their commits that shows to the last,
`fill_records_per_s` the same for the windows. The worker then drains, and another takes over: `takeover_s` is the time
until it has added one more record. `differences` counts windows that are missing, superfluous or different.
`peak_rss_mb` is the larger of both workers, `worker_cpu_us_per_record` the worker's CPU time for a late record.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import numpy as np
import psutil
import psycopg

from benchmarks.harness import Bench, Worker, arguments, wait_until

START_MS = 1_767_225_600_000
MINUTE_MS = 60_000
LINES_AT_ONCE = 100_000
RUN_S_MAX = 7_200.0
CONSUMED = "SELECT coalesce(sum(consumed), 0)::bigint FROM millpy.accounting WHERE consumer = 'by_minute'"
WAITING = "SELECT count(*) FROM mill.keyed WHERE kind = 'window'"


def write(path: Path, devices: np.ndarray, numbers: np.ndarray, values: np.ndarray) -> None:
    """Write records of (device, number of the minute, value) as a file that appears at once."""
    hidden = path.with_name("." + path.name)
    with hidden.open("w") as file:
        for lo in range(0, len(devices), LINES_AT_ONCE):
            part = slice(lo, lo + LINES_AT_ONCE)
            columns = (devices[part].tolist(), (START_MS + numbers[part] * MINUTE_MS).tolist(), values[part].tolist())
            file.write(
                "".join(
                    [
                        f'{{"device":"dev-{d:06d}","event_ms":{at},"value":{v}}}\n'
                        for d, at, v in zip(*columns, strict=True)
                    ]
                )
            )
    hidden.rename(path)


def consume(connection: psycopg.Connection[tuple[int]], worker: Worker, wanted: int) -> float:
    """Wait until all records are consumed; return the seconds since the first of them was."""
    before = _number(connection, CONSUMED)
    wait_until(lambda: worker.running() and _number(connection, CONSUMED) > before, "records come", timeout_s=RUN_S_MAX)
    started = time.monotonic()
    wait_until(
        lambda: worker.running() and _number(connection, CONSUMED) >= wanted,
        f"{wanted} records are consumed",
        timeout_s=RUN_S_MAX,
        every_s=0.2,
    )
    return time.monotonic() - started


def _number(connection: psycopg.Connection[tuple[int]], query: str) -> int:
    row = connection.execute(query.encode()).fetchone()
    assert row is not None
    return int(row[0])


def cpu_seconds(worker: Worker) -> float:
    """Return the CPU time that the worker has used."""
    times = psutil.Process(worker.pid).cpu_times()
    return float(times.user + times.system)


def differences(url: str, counts: np.ndarray, totals: np.ndarray, devices: int) -> int:
    """Count the windows whose row is not that of these arrays, which are by minute, then device."""
    found = np.zeros(len(counts), np.bool_)
    wrong = 0
    query = (
        "SELECT substr(device, 5)::int, (extract(epoch FROM window_start) * 1000)::bigint, n, total FROM late.by_minute"
    )
    with psycopg.connect(url) as connection, connection.cursor("rows") as cursor:
        cursor.itersize = LINES_AT_ONCE
        cursor.execute(query.encode())
        while rows := cursor.fetchmany(LINES_AT_ONCE):
            device, start, n, total = np.array(rows, np.int64).T
            at = (start - START_MS) // MINUTE_MS * devices + device
            wrong += int(np.count_nonzero((counts[at] != n) | (totals[at] != total) | found[at]))
            found[at] = True
    return wrong + int(np.count_nonzero(found != (counts > 0)))


def main(options: argparse.Namespace) -> None:
    with Bench("late", options) as bench:
        inbox = bench.directory / "inbox"
        inbox.mkdir()
        url = bench.database()
        environment = {"BENCH_DIRECTORY": str(inbox)}
        random = np.random.default_rng(1)
        count = options.windows // options.devices * options.devices
        fired = count - 2 * options.devices  # those of the last two minutes are open
        places = np.arange(count)
        values = random.integers(0, 1_000, count)
        counts, totals = np.ones(count, np.int64), values.copy()
        write(inbox / "1.ndjson", places % options.devices, places // options.devices, values)
        worker = bench.worker("late.py", url, environment=environment)
        with psycopg.connect(url, autocommit=True) as connection:
            fill_s = consume(connection, worker, count)
            wait_until(lambda: _number(connection, WAITING) >= count, "windows are folded", timeout_s=RUN_S_MAX)
            bench.show("filled", {"records_per_s": count / fill_s, "peak_rss_mb": worker.peak_rss_mb()})
            hit = random.integers(0, fired, options.records)
            late = random.integers(0, 1_000, options.records)
            np.add.at(counts, hit, 1)
            np.add.at(totals, hit, late)
            write(inbox / "2.ndjson", hit % options.devices, hit // options.devices, late)
            cpu_before = cpu_seconds(worker)
            late_s = consume(connection, worker, count + options.records)
            cpu_us = (cpu_seconds(worker) - cpu_before) / options.records * 1e6
            rss = worker.peak_rss_mb()
            worker.drain()
            write(inbox / "3.ndjson", np.array([0]), np.array([0]), np.array([1]))
            counts[0] += 1
            totals[0] += 1
            started = time.monotonic()
            other = bench.worker("late.py", url, environment=environment)
            consume(connection, other, count + options.records + 1)
            takeover_s = time.monotonic() - started
            rss = max(rss, other.peak_rss_mb())
            other.drain()
        bench.finish(
            open_windows=count,
            records_per_s=options.records / late_s,
            peak_rss_mb=rss,
            differences=differences(url, counts[:fired], totals[:fired], options.devices),
            fill_records_per_s=count / fill_s,
            worker_cpu_us_per_record=cpu_us,
            touched_share=len(np.unique(hit)) / late_s / count,
            takeover_s=takeover_s,
        )


if __name__ == "__main__":
    main(arguments(__doc__, "differences<=0", windows=10_000_000, records=1_000_000, devices=1_000).parse_args())
