"""The API: what viewers cost W2, and how fast lists are on large tables.

    python -m benchmarks.api [--viewers 200] [--page-viewers 0] [--seconds 60] [--devices 100000] [--rows 10000000]

*Viewers.* W2 with one stage runs alone, and then beside `--viewers` viewers: each has a stream of live events open and
asks for a list, or `--page-viewers` of them for a view of the page, every five seconds (`viewers.py`). `p99_ratio` is
W2's p99 beside them by that without them, `api_p95_ms` and `page_p95_ms` the time of an answer as a viewer sees it,
`failures` what was not answered with 200, `api_cores` the CPU time of the API by the time. As a control, W2 also runs
beside the same viewers of a bare app that answers the same bytes always (`constant_api.py`): `p99_control_ratio` is
what viewers cost on this machine without a database, and `p99_by_control` what remains for millpy.

*Large tables.* A worker reads readings of `--devices` devices and makes windows of them; rows of further windows are
inserted into the result table, until it has `--rows`. Then each list is asked for ten times: `slowest_p95_ms` is the
p95 of the slowest, which the lines before name, `api_rss_mb` the peak memory of the API.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import psutil
import psycopg

from benchmarks.harness import Bench, arguments, peak_rss_mb, percentile
from benchmarks.late import consume, write
from benchmarks.w2_latency import measure
from millpy.admin.queries import Admin
from millpy.admin.tokens import Role, create

ROOT = Path(__file__).resolve().parents[1]
TIMES = 10
MINUTES_AT_ONCE = 10
INSERT = """
INSERT INTO late.by_minute ({names})
SELECT {values} FROM generate_series(%s::int, %s::int) AS m
 CROSS JOIN (SELECT * FROM late.by_minute WHERE window_start = (SELECT min(window_start) FROM late.by_minute)) AS t
 ORDER BY m, device
"""
LISTS = (
    "", "workers", "watermarks", "accounting", "backlog", "sources", "fleet", "fleet?sort=silence", "fleet?sort=lag",
    "fleet?device=dev-000100", "disorder", "causes", "dead-letters", "late-records", "events", "tables",
    "tables/by_minute/rows", "tables/by_minute/rows?where=device=dev-000100", "tables/by_minute/rows?final=false",
    "tables/by_minute/rows?from={from}&to={to}", "computations/by_minute/open-windows",
    "computations/by_minute/open-windows?key=dev-000100", "computations/by_minute/state",
    "computations/by_minute/timers", "computations/by_minute/timers?key=dev-000100", "series",
)  # fmt: skip


class Api:
    """An API for a database, in a process of its own, and its client."""

    def __init__(self, url: str) -> None:
        environment = {
            **os.environ,
            "MILLPY_DATABASE_URL": url,
            "MILLPY_API": "127.0.0.1:0",
            "MILLPY_LOG_FORMAT": "json",
        }
        self.process = subprocess.Popen(
            [sys.executable, "-m", "services.api"], cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True
        )
        assert self.process.stderr is not None
        line = next(line for line in self.process.stderr if "the API is served" in line)
        found = re.search(r"https?://[^/]+", line)
        assert found is not None
        self.url = found[0]
        self.token = create(Admin(url), "bench", Role.VIEWER)[1]

    def ask(self, path: str) -> tuple[float, Any]:
        """Return the milliseconds that an answer took, and the answer."""
        asked_at = time.monotonic()
        headers = {"Authorization": f"Bearer {self.token}"}
        with urllib.request.urlopen(urllib.request.Request(self.url + path, headers=headers), timeout=60) as answer:
            text = answer.read()
        return (time.monotonic() - asked_at) * 1000, json.loads(text)

    def end(self) -> float:
        """End the API; return its peak memory in MB."""
        peak = peak_rss_mb(self.process.pid)
        self.process.terminate()
        self.process.wait()
        assert self.process.stderr is not None
        self.process.stderr.close()
        return peak


def watched(bench: Bench, options: argparse.Namespace) -> dict[str, Any]:
    """Run W2 alone and beside viewers."""
    seconds = options.warm_up + options.seconds
    found: dict[str, Any] = {}

    def start(url: str, token: str) -> subprocess.Popen[str]:
        return bench.child("benchmarks.viewers", url, token, options.viewers, seconds, "stages", options.page_viewers)

    def control(_: str) -> None:
        found["app"] = bench.child("benchmarks.constant_api")
        found["child"] = start(found["app"].stdout.readline().strip(), "none")

    def watch(url: str) -> None:
        found["api"] = api = Api(url)
        found["child"] = start(api.url, api.token)

    def seen(what: str) -> dict[str, Any]:
        text, _ = found["child"].communicate(timeout=options.seconds + 120)
        read: dict[str, Any] = json.loads(text.splitlines()[-1])
        bench.show(what, read)
        return read

    alone = measure(bench, "one_stage", options)
    beside_control = measure(bench, "one_stage", options, beside=control)
    seen("viewers of the control")
    found["app"].kill()
    beside = measure(bench, "one_stage", options, beside=watch)
    viewers = seen("viewers")
    spent = psutil.Process(found["api"].process.pid).cpu_times()
    peak = found["api"].end()
    return {
        "p99_alone_ms": alone["one_stage_p99_ms"],
        "p99_control_ratio": beside_control["one_stage_p99_ms"] / alone["one_stage_p99_ms"],
        "p99_ratio": beside["one_stage_p99_ms"] / alone["one_stage_p99_ms"],
        "p99_by_control": beside["one_stage_p99_ms"] / beside_control["one_stage_p99_ms"],
        "api_p50_ms": viewers["p50_ms"],
        "api_p95_ms": viewers["p95_ms"],
        **{name: viewers[name] for name in ("page_p50_ms", "page_p95_ms") if options.page_viewers},
        "failures": viewers["failures"],
        "api_cores": (spent.user + spent.system) / seconds,
        "api_rss_mb": peak,
    }


def large(bench: Bench, options: argparse.Namespace) -> tuple[str, int, str]:
    """Make a database with large tables; return its URL, the rows of the result table, and a time in their middle."""
    url = bench.database()
    directory = bench.directory / "readings"
    directory.mkdir()
    worker = bench.worker("late.py", url, environment={"BENCH_DIRECTORY": str(directory)})
    worker.wait_claimed()
    devices = np.tile(np.arange(options.devices), 3)
    minutes = np.repeat(np.arange(3), options.devices)
    write(directory / "readings.ndjson", devices, minutes, np.ones(len(devices), dtype=np.int64))
    with psycopg.connect(url, autocommit=True) as connection:
        consume(connection, worker, len(devices))
        worker.drain()
        _insert(connection, options.devices, options.rows)
        connection.execute("VACUUM ANALYZE late.by_minute")
        rows, middle = connection.execute(
            "SELECT count(*), to_char(min(window_start) + (max(window_start) - min(window_start)) / 2,"
            ' \'YYYY-MM-DD"T"HH24:MI:SS"Z"\') FROM late.by_minute'
        ).fetchone() or (0, "")
    return url, rows, middle


def lists(bench: Bench, options: argparse.Namespace) -> dict[str, Any]:
    """Ask for each list on large tables."""
    url, rows, middle = large(bench, options)
    api = Api(url)
    slowest, slowest_ms, took = "", 0.0, {}
    for path in LISTS:
        path = path.format(**{"from": quote(middle), "to": "2027-01-01T00:00:00Z"})
        p95_ms, problem = _asked(api, f"/v1/graphs/late/{path}".rstrip("/"))
        took[path] = problem or round(p95_ms)
        if p95_ms > slowest_ms:
            slowest, slowest_ms = path, p95_ms
    bench.show("lists", took)
    return {
        "rows": rows,
        "devices": options.devices,
        "slowest": slowest,
        "slowest_p95_ms": slowest_ms,
        "lists_failed": sum(isinstance(value, str) for value in took.values()),
        "large_api_rss_mb": api.end(),
    }


def _asked(api: Api, path: str) -> tuple[float, str]:
    took = []
    for _ in range(TIMES):
        try:
            took.append(api.ask(path)[0])
        except urllib.error.HTTPError as error:
            with error:
                return 0.0, error.read().decode()
    return percentile(took, 0.95), ""


def _insert(connection: psycopg.Connection[Any], devices: int, rows: int) -> None:
    """Insert rows of the next minutes, until there are `rows`."""
    names = [column.name for column in connection.execute("SELECT * FROM late.by_minute LIMIT 0").description or ()]
    values = [f"{name} + make_interval(mins => m)" if name.startswith("window_") else name for name in names]
    statement = INSERT.format(names=", ".join(names), values=", ".join(values))
    found = connection.execute("SELECT count(*) FROM late.by_minute").fetchone()
    missing, minute = rows - (found or (0,))[0], 3
    while missing > 0:
        last = minute + min(MINUTES_AT_ONCE, -(-missing // devices)) - 1
        missing -= connection.execute(statement.encode(), [minute, last]).rowcount
        minute = last + 1


def main(options: argparse.Namespace) -> None:
    with Bench("api", options, server={"max_wal_size": "8GB"}) as bench:
        figures: dict[str, Any] = {}
        if options.viewers:
            figures |= watched(bench, options)
        if options.rows:
            figures |= lists(bench, options)
        bench.finish(**figures)


if __name__ == "__main__":
    main(
        arguments(
            __doc__,
            viewers=200,
            page_viewers=0,
            rate=1_000,
            seconds=60.0,
            warm_up=3.0,
            devices=100_000,
            rows=10_000_000,
        ).parse_args()
    )
