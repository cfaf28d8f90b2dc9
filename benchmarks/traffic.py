"""Publisher and reader around running workers."""

from __future__ import annotations

import json
import subprocess
import time
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import psycopg

from benchmarks.harness import WAIT_S_MAX, Bench
from benchmarks.publisher import Publisher, ping

READER_S_MAX = 120.0


def await_flow(url: str, table: str, port: int, devices: int = 64) -> None:
    """Wait until the source has subscribed: publish pings numbered below zero until every interval shows one."""
    publisher = Publisher("127.0.0.1", port)
    deadline = time.monotonic() + WAIT_S_MAX
    graph, name = table.split(".")
    with psycopg.connect(url, autocommit=True) as connection:
        wanted = connection.execute(
            "SELECT count(*) FROM mill.intervals AS i JOIN mill.result_tables AS t USING (computation_id)"
            " JOIN mill.graphs AS g ON g.graph_id = t.graph_id WHERE (g.name, t.name) = (%s, %s)",
            (graph, name),
        ).fetchone()
        assert wanted is not None
        count, round_number = 0, 0
        while count < wanted[0]:
            if time.monotonic() > deadline:
                raise SystemExit(f"no record arrived in {table}: {count} of {wanted[0]} intervals")
            round_number += 1
            # Multiples of the sample rate of the soak, so that each of them is a row there too.
            publisher.publish([ping(-10 * (round_number * devices + n), devices * 10) for n in range(devices)])
            time.sleep(0.2)
            row = connection.execute(f"SELECT count(DISTINCT interval_id) FROM {table}").fetchone()
            count = row[0] if row else 0


def start_reader(bench: Bench, url: str, table: str, rows: int) -> tuple[subprocess.Popen[str], Path]:
    """Start the polling reader; `rows_of` waits for it."""
    out = bench.directory / f"seen-{time.monotonic_ns()}.npy"
    return bench.child("benchmarks.reader", "--database", url, "--table", table, "--rows", rows, "--out", out), out


def start_publisher(
    bench: Bench, port: int, rate: float, seconds: float, *, devices: int = 1_000
) -> subprocess.Popen[str]:
    """Start the paced publisher, which numbers records from 0."""
    return bench.child(
        "benchmarks.publisher", "--port", port, "--rate", rate, "--seconds", seconds, "--devices", devices
    )


def result_of(process: subprocess.Popen[str], timeout_s: float) -> dict[str, Any]:
    """Wait for a helper process; return the JSON that it prints at its end."""
    try:
        out, _ = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        process.terminate()
        out, _ = process.communicate(timeout=WAIT_S_MAX)
    return dict(json.loads(out.strip().splitlines()[-1]))


def rows_of(reader: tuple[subprocess.Popen[str], Path]) -> npt.NDArray[np.int64]:
    """Wait for the reader; return its rows, int64[n, 3] of seq, sent, seen."""
    result_of(reader[0], READER_S_MAX)
    found: npt.NDArray[np.int64] = np.load(reader[1])
    return found


def latencies_ms(rows: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """Return the time from publishing to visible of each row."""
    return (rows[:, 2] - rows[:, 1]) / 1e6
