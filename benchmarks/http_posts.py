"""HTTP: 200,000 records in batches of 100 over 50 connections, through exactly-once windows, into a table.

    python -m benchmarks.http_posts [--records 200000]

Each connection sends its next batch after the answer to the one before, which comes after the commit. Timed from the
first byte that a client sends to the last answer (benchmarks/http_client.py, a process of its own). Dedupe ids are on.
Afterwards one more record closes the windows, and all are compared with a recomputation by DuckDB as in W1.
"""

from __future__ import annotations

import argparse
import json
import socket
from pathlib import Path

import psutil

from benchmarks.bundles import committed_bundles
from benchmarks.harness import Bench, arguments, wait_until
from benchmarks.readings import START_MS, write_readings
from benchmarks.traffic import result_of
from benchmarks.w1_windows import differences
from benchmarks.w3_mqtt import CLOSING, DEVICES, HOUR_MS, RUN_S_MAX
from millpy.embedded import free_port


def main(options: argparse.Namespace) -> None:
    with Bench("http", options) as bench:
        path: Path = bench.directory / "readings.ndjson"
        bench.show("bytes_per_record", write_readings(path, options.records, DEVICES, value="temperature"))
        url, port = bench.database(), free_port()
        worker = bench.worker("http_windows.py", url, environment={"BENCH_URL": f"http://127.0.0.1:{port}"})
        worker.wait_claimed()
        wait_until(lambda: listens(port), "the worker listens")
        before_s = sum(psutil.Process(worker.pid).cpu_times()[:2])
        child = ("benchmarks.http_client", "--port", port, "--batch", options.batch)
        client = result_of(bench.child(*child, "--file", path, "--connections", options.connections), RUN_S_MAX)
        bench.show("client", client)
        cpu_s = sum(psutil.Process(worker.pid).cpu_times()[:2]) - before_s
        bench.show("ours", {**committed_bundles(url), "peak_rss_mb": worker.peak_rss_mb(), "cpu_s": cpu_s})
        last = bench.directory / "last.ndjson"
        last.write_text(json.dumps(CLOSING | {"event_ms": START_MS + options.records + HOUR_MS}) + "\n")
        result_of(bench.child(*child, "--file", last, "--connections", 1), RUN_S_MAX)
        worker.drain()
        bench.finish(
            records_per_s=options.records / client["seconds"],
            p50_ms=client["p50_ms"],
            p99_ms=client["p99_ms"],
            differences=differences(url, in_order(path), table="http.temperature_10s"),
        )


def in_order(path: Path) -> Path:
    """Write the readings in the order of their event times: none is late then, as none is for our bound."""
    lines = sorted(path.read_bytes().splitlines(keepends=True), key=lambda line: int(json.loads(line)["seq"]))
    ordered = path.with_suffix(".ordered")
    ordered.write_bytes(b"".join(lines))
    return ordered


def listens(port: int) -> bool:
    """Tell whether something accepts connections."""
    with socket.socket() as taken:
        return taken.connect_ex(("127.0.0.1", port)) == 0


if __name__ == "__main__":
    main(arguments(__doc__, "differences<=0", records=200_000, batch=100, connections=50).parse_args())
