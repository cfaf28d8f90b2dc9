"""Random faults of everything around a Spark stream: do the archive, Spark's tables and the workers' tables agree?

    python -m tests.crash.spark_run [--minutes 10] [--seed 1]        (make crash-spark)

Files of records arrive in a directory. A worker and an archiver read it into one database, and a streaming query into
another, on one server. Each is killed or frozen at random: the worker, the archiver, the driver with its JVM, one
Python worker of Spark, PostgreSQL; a driver is also frozen while another one takes its place, and must commit nothing
when it wakes. What has ended is started again. In the end, all windows are compared with plain Python's, and the
archive's records with those that arrived. Then `millpy audit` compares the workers' tables, by each engine, and those
of the stream. The last line is JSON: minutes, kills, lost, doubled, audited (rows), differences. Exit status 0 only
when nothing is lost, doubled or different, and every driver that was replaced has ended.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psycopg
import pyarrow.parquet as pq

from millpy.embedded import EmbeddedPostgres
from tests.crash.harness import ROOT, await_true
from tests.crash.spark_graph import WINDOW_US
from tests.databases import fresh_database, passing_server

GRAPH = Path(__file__).with_name("spark_graph.py")
START_US = 1_790_000_000_000_000
DEVICES = 20
FILE_EVERY_S = 0.5
RECORDS = 200
PAUSE_S = (2.0, 6.0)
FROZEN_S = 4.0
END_S_MAX = 180.0
AUDIT_S_MAX = 300.0
Windows = dict[tuple[str, int], tuple[int, int]]
"""(device, start) -> (count, total)."""


@dataclass
class Service:
    """A process that is started again when it has ended; its children are in its process group."""

    name: str
    command: list[str]
    environment: dict[str, str]
    log: Path
    process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                self.command, stdout=log, stderr=log, env=self.environment, cwd=self.log.parent, start_new_session=True
            )

    def keep_running(self) -> None:
        if self.process is None or self.process.poll() is not None:
            self.signal(signal.SIGKILL)  # what a driver has left
            self.start()

    def signal(self, number: int) -> None:
        if self.process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, number)

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        if self.process is not None:
            self.process.wait()


@dataclass
class Feeder:
    """Writes files of records in order of time, and remembers what windows they make."""

    directory: Path
    windows: Windows = field(default_factory=dict)
    records: int = 0
    files: int = 0

    def write(self, rng: random.Random) -> None:
        lines = []
        for _ in range(RECORDS):
            device, at = f"d{rng.randrange(DEVICES)}", START_US + self.records * 10_000
            lines.append(json.dumps({"device": device, "at": at, "n": self.records}))
            window = device, at // WINDOW_US * WINDOW_US
            count, total = self.windows.get(window, (0, 0))
            self.windows[window] = count + 1, total + self.records
            self.records += 1
        self._put(lines)

    def end(self) -> None:
        """Write a record whose time closes all windows before it."""
        at = START_US + self.records * 10_000 + 100 * WINDOW_US
        self._put([json.dumps({"device": "end", "at": at, "n": self.records})])
        self.records += 1

    def _put(self, lines: list[str]) -> None:
        ready = self.directory / "ready.tmp"
        ready.write_text("\n".join(lines) + "\n")
        ready.rename(self.directory / f"{self.files:06}.ndjson")
        self.files += 1


class World:
    """The processes, and the faults that hit them."""

    def __init__(self, directory: Path, server: EmbeddedPostgres, databases: tuple[str, str], seed: int) -> None:
        self._rng = random.Random(seed)
        self._server = server
        self.workers_url, self.spark_url = (server.url(name) for name in databases)
        self.archive = directory / "archive"
        inputs = directory / "input"
        inputs.mkdir()
        self.feeder = Feeder(inputs)
        environment = {**os.environ, "SPARK_INPUT": str(inputs), "PYTHONPATH": str(ROOT), "MILLPY_LEASE_S": "1"}
        millpy = [sys.executable, "-m", "millpy"]
        stream = ["--stream", "--checkpoint", str(directory / "checkpoint"), "--output", str(directory / "output")]
        stream += ["--every", "0.5", "--master", "local[2,4]", "--memory", "1g", "--database", self.spark_url]
        here = ["--database", self.workers_url]
        commands = {
            "worker": [*millpy, "run", str(GRAPH), *here],
            "archiver": [*millpy, "archive", str(GRAPH), "--to", str(self.archive), "--every", "1", *here],
            "driver": [*millpy, "spark", "run", str(GRAPH), *stream],
        }
        self._services = {
            name: Service(name, command, environment, directory / f"{name}.log") for name, command in commands.items()
        }
        self._frozen: list[Service] = []
        self.kills: Counter[str] = Counter()

    def run(self, minutes: float) -> None:
        """Write files and strike until the time is over."""
        faults: list[Callable[[], str]] = [self._kill_one, self._kill_one, self._kill_python, self._freeze_worker]
        faults += [self._restart_server, self._replace_frozen_driver]
        ends = time.monotonic() + minutes * 60
        strikes = time.monotonic() + 30.0  # Spark starts meanwhile
        while time.monotonic() < ends:
            self.keep_running()
            self.feeder.write(self._rng)
            time.sleep(FILE_EVERY_S)
            if time.monotonic() > strikes:
                what = self._rng.choice(faults)()
                self.kills[what] += bool(what)
                print(f"{minutes * 60 - (ends - time.monotonic()):.0f} s: {what or 'nothing to strike'}", flush=True)
                strikes = time.monotonic() + self._rng.uniform(*PAUSE_S) * (3 if "driver" in what else 1)
        self.feeder.end()

    def keep_running(self) -> None:
        """Start again what has ended."""
        for service in self._services.values():
            service.keep_running()

    def close(self) -> None:
        """End all processes."""
        for service in (*self._services.values(), *self._frozen):
            service.kill()

    def woken_have_ended(self) -> bool:
        """Tell whether every driver that was frozen has ended, which only a refusal makes it do."""
        return all(service.process is not None and service.process.poll() is not None for service in self._frozen)

    def _kill_one(self) -> str:
        service = self._rng.choice([*self._services.values()])
        service.kill()
        return service.name

    def _kill_python(self) -> str:
        return kill_python(self._services["driver"], self._rng)

    def _freeze_worker(self) -> str:
        service = self._services[self._rng.choice(["worker", "archiver"])]
        service.signal(signal.SIGSTOP)
        time.sleep(FROZEN_S)
        service.signal(signal.SIGCONT)
        return f"frozen {service.name}"

    def _restart_server(self) -> str:
        self._server.restart()
        return "postgres"

    def _replace_frozen_driver(self) -> str:
        """Freeze the driver with its JVM, start another one, and let the first wake when that has committed."""
        driver = self._services["driver"]
        driver.signal(signal.SIGSTOP)
        frozen = Service("frozen driver", driver.command, driver.environment, driver.log, driver.process)
        self._frozen.append(frozen)
        driver.process = None
        driver.start()
        before = _bundles(self.spark_url)
        with suppress(AssertionError):  # it may lose its own race with a slow machine: the results tell
            await_true(lambda: _bundles(self.spark_url) > before, "the next driver commits", 60)
        frozen.signal(signal.SIGCONT)
        return "frozen driver"


def kill_python(service: Service, rng: random.Random) -> str:
    """Kill a Python process that the JVM of a driver has started; return what it was."""
    driver = service.process
    assert driver is not None
    listed = subprocess.run(
        ["ps", "-o", "pid=,args=", "-g", str(driver.pid)], capture_output=True, text=True, check=False
    ).stdout
    found = [int(line.split()[0]) for line in listed.splitlines() if "pyspark" in line and "java" not in line]
    if not found:
        return ""
    with suppress(ProcessLookupError):
        os.kill(rng.choice(found), signal.SIGKILL)
    return "python worker"


def _bundles(url: str) -> int:
    with suppress(psycopg.Error), psycopg.connect(url, connect_timeout=5) as connection:
        found = connection.execute("SELECT coalesce(sum(bundle), 0)::bigint FROM mill.intervals").fetchone()
        return int(found[0]) if found else 0
    return 0


def tables_of(url: str) -> Windows:
    """Return the windows of a database, without the one of the last record."""
    with suppress(psycopg.Error), psycopg.connect(url, connect_timeout=5) as connection:
        rows = connection.execute(
            "SELECT device, (extract(epoch FROM window_start) * 1000000)::bigint, n, total FROM crashed.sums"
            " WHERE device <> 'end'"
        )
        return {(device, start): (n, int(total)) for device, start, n, total in rows}
    return {}


def archived(url: str, directory: Path) -> Counter[int]:
    """Return how often the archive has each record."""
    found: Counter[int] = Counter()
    with suppress(psycopg.Error, OSError), psycopg.connect(url, connect_timeout=5) as connection:
        for (path,) in connection.execute("SELECT path FROM millpy.archive_files").fetchall():
            found.update(pq.ParquetFile(directory / path).read(["n"])["n"].to_pylist())
    return found


def compared(found: Windows, expected: Windows) -> tuple[int, int]:
    """Return (lost, doubled) records of windows."""
    lost = doubled = 0
    for window in {*found, *expected}:
        here, there = found.get(window, (0, 0)), expected.get(window, (0, 0))
        lost += max(0, there[0] - here[0]) + (here[0] == there[0] and here[1] != there[1])
        doubled += max(0, here[0] - there[0])
    return lost, doubled


def audited(world: World) -> tuple[int, int]:
    """Audit the tables of workers and stream, over the files and over the archive; return (rows, differences)."""
    files = ["--input", f"readings={world.feeder.directory}/*.ndjson"]
    native = ["--engine", "native", "--archive", str(world.archive)]
    rows = differences = 0
    for url, options in ((world.workers_url, files), (world.workers_url, native), (world.spark_url, files)):
        command = [sys.executable, "-m", "millpy", "audit", str(GRAPH), *options, "--database", url, "--json"]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=AUDIT_S_MAX)
        found = json.loads(done.stdout) if done.stdout else {"tables": [], "differences": 1}
        rows += sum(table["rows"] for table in found["tables"])
        differences += found["differences"]
        if found["differences"]:
            print(" ".join(options), done.stdout[:2_000], done.stderr[-2_000:])
    return rows, differences


def main(arguments: Sequence[str] | None = None) -> int:
    """Run it; the exit status."""
    options = argparse.ArgumentParser(prog="python -m tests.crash.spark_run")
    options.add_argument("--minutes", type=float, default=10)
    options.add_argument("--seed", type=int, default=1)
    options.add_argument("--keep", action="store_true", help="leave logs and databases behind")
    given = options.parse_args(arguments)
    directory = Path(tempfile.mkdtemp(prefix="millpy-crash-spark-"))
    lost = doubled = rows = differences = 0
    refused = False
    try:
        with (
            passing_server(directory / "postgres") as server,
            fresh_database(server) as one,
            fresh_database(server) as two,
        ):
            world = World(directory, server, (one, two), given.seed)
            try:
                world.run(given.minutes)
                results = settled(world)
                refused = world.woken_have_ended()
            finally:
                world.close()
            rows, differences = audited(world)
        for what, (missing, more) in results.items():
            print(f"{what}: {missing} lost, {more} doubled")
            lost, doubled = lost + missing, doubled + more
        if not refused:
            print("a driver that was frozen and replaced has not ended")
        print(dict(world.kills))
    finally:
        if not given.keep:
            shutil.rmtree(directory, ignore_errors=True)
    kills = sum(world.kills.values())
    totals = {"minutes": given.minutes, "kills": kills, "lost": lost, "doubled": doubled}
    print(json.dumps(totals | {"audited": rows, "differences": differences}), flush=True)
    return int(bool(lost or doubled or differences) or not refused or not rows)


def settled(world: World) -> dict[str, tuple[int, int]]:
    """Wait until all have read everything, or for too long; return (lost, doubled) of each."""
    expected = world.feeder.windows

    def results() -> dict[str, tuple[int, int]]:
        world.keep_running()
        records = archived(world.workers_url, world.archive)
        doubled = sum(count - 1 for count in records.values())
        return {
            "workers' tables": compared(tables_of(world.workers_url), expected),
            "Spark's tables": compared(tables_of(world.spark_url), expected),
            "archive": (world.feeder.records - len(records), doubled),
        }

    with suppress(AssertionError):
        await_true(
            lambda: not any(any(pair) for pair in results().values()) and world.woken_have_ended(),
            "all has been read, and every replaced driver is refused",
            END_S_MAX,
        )
    return results()


if __name__ == "__main__":
    sys.exit(main())
