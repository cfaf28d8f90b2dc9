"""Late: a week of one-minute windows waits for late records, and late records come at random.

    python -m benchmarks.late [--windows 10000000] [--records 1000000] [--devices 1000] [--shared-buffers-mb 4096]

First each device sends one record a minute, until `--windows` windows have fired and wait for their allowed lateness of
eight days. Then `--records` late ones come, each for a random window of these: `touched_share` is the share of the
windows that a second's records touch. `records_per_s` is timed from the moment at which the file is there to the begin
of the last commit, by the rows' `emitted_at`, `fill_records_per_s` the same for the windows. (`millpy.accounting` would
read all that is not folded, so it is asked only every few seconds.) The worker then drains, and another takes over:
`takeover_s` is the time until it has added one more record. `differences` counts windows that are missing, superfluous
or different. `peak_rss_mb` is the larger of both workers, `worker_cpu_us_per_record` the worker's CPU time for a late
record.

At the end `bare_late.py` reads and writes as many random windows by psycopg alone: `bare_records_per_s` is the bound
that PostgreSQL sets, `bare_ratio` the worker's rate by that. The server has the settings that millions of rows ask for:
memory for most of them (`--shared-buffers-mb`), and checkpoints that are minutes apart (`--max-wal-mb`).
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import numpy as np
import psutil
import psycopg

from benchmarks import bare_late
from benchmarks.harness import Bench, Worker, arguments, wait_until

START_MS = 1_767_225_600_000
MINUTE_MS = 60_000
LINES_AT_ONCE = 100_000
RUN_S_MAX = 7_200.0
CONSUMED = "SELECT coalesce(sum(consumed), 0)::bigint FROM millpy.accounting WHERE consumer = 'by_minute'"
LAST_MS = "SELECT (extract(epoch FROM max(emitted_at)) * 1000)::bigint FROM late.by_minute"
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


def consume(connection: psycopg.Connection[tuple[int]], worker: Worker, wanted: int, *, every_s: float = 2.0) -> None:
    """Wait until all records are consumed."""
    wait_until(
        lambda: worker.running() and _number(connection, CONSUMED) >= wanted,
        f"{wanted} records are consumed",
        timeout_s=RUN_S_MAX,
        every_s=every_s,
    )


def seconds_until_last(connection: psycopg.Connection[tuple[int]], began: float) -> float:
    """Return the seconds from a time of the clock to the begin of the last commit with rows."""
    return _number(connection, LAST_MS) / 1_000 - began


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
    server = {
        "shared_buffers": f"{options.shared_buffers_mb}MB",
        "max_wal_size": f"{options.max_wal_mb}MB",
        "checkpoint_timeout": "15min",
    }
    with Bench("late", options, server=server) as bench:
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
        worker.wait_claimed()
        began = time.time()
        with psycopg.connect(url, autocommit=True) as connection:
            consume(connection, worker, count)
            fill_s = seconds_until_last(connection, began)
            wait_until(
                lambda: _number(connection, WAITING) >= count, "windows are folded", timeout_s=RUN_S_MAX, every_s=2.0
            )
            bench.show("filled", {"records_per_s": count / fill_s, "peak_rss_mb": worker.peak_rss_mb()})
            hit = random.integers(0, fired, options.records)
            late = random.integers(0, 1_000, options.records)
            np.add.at(counts, hit, 1)
            np.add.at(totals, hit, late)
            write(inbox / "2.ndjson", hit % options.devices, hit // options.devices, late)
            began, cpu_before = time.time(), cpu_seconds(worker)
            consume(connection, worker, count + options.records)
            late_s = seconds_until_last(connection, began)
            cpu_us = (cpu_seconds(worker) - cpu_before) / options.records * 1e6
            rss = worker.peak_rss_mb()
            worker.drain()
            write(inbox / "3.ndjson", np.array([0]), np.array([0]), np.array([1]))
            counts[0] += 1
            totals[0] += 1
            started = time.monotonic()
            other = bench.worker("late.py", url, environment=environment)
            consume(connection, other, count + options.records + 1, every_s=0.1)
            takeover_s = time.monotonic() - started
            rss = max(rss, other.peak_rss_mb())
            other.drain()
        wrong = differences(url, counts[:fired], totals[:fired], options.devices)
        again = random.integers(0, fired, options.records)
        starts_us = (START_MS + again // options.devices * MINUTE_MS) * 1_000
        bare_per_s = bare_late.records_per_s(url, again % options.devices, starts_us, MINUTE_MS * 1_000)
        bench.finish(
            open_windows=count,
            records_per_s=options.records / late_s,
            peak_rss_mb=rss,
            differences=wrong,
            bare_records_per_s=bare_per_s,
            bare_ratio=options.records / late_s / bare_per_s,
            fill_records_per_s=count / fill_s,
            worker_cpu_us_per_record=cpu_us,
            touched_share=len(np.unique(hit)) / late_s / count,
            takeover_s=takeover_s,
        )


if __name__ == "__main__":
    sizes = {"windows": 10_000_000, "records": 1_000_000, "devices": 1_000}
    main(arguments(__doc__, "differences<=0", **sizes, shared_buffers_mb=4_096, max_wal_mb=8_192).parse_args())
