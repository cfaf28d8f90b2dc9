"""The parts of every workload: a fresh PostgreSQL with fsync on, worker processes, and the last line.

`Bench.show` prints settings and counts from the tables. `Bench.finish` prints one JSON object as the last line, and
fails the run when a figure breaks one of its bounds.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import psutil
import psycopg

from benchmarks.memory import peak_rss_mb
from millpy.embedded import EmbeddedBroker, EmbeddedPostgres
from millpy.store.postgres.deployment.migrate import migrate

HERE = Path(__file__).resolve().parent
WAIT_S_MAX = 60.0


class Bench:
    """One run of a workload, in its own directory, which is removed at the end.

    Args:
        workload: its name in the last line.
        options: parsed by `arguments()`.
        tcp: let the server listen on 127.0.0.1 too, for `server.tcp_url(...)`.
        server: settings of the server.
    """

    def __init__(
        self,
        workload: str,
        options: argparse.Namespace,
        *,
        tcp: bool = False,
        server: Mapping[str, str] | None = None,
    ) -> None:
        self.workload = workload
        self.options = options
        self._tcp = tcp
        self._server_settings = server
        self._stack = ExitStack()
        self._databases = 0
        self.settings: dict[str, Any] = {}

    def __enter__(self) -> Self:
        if self.options.directory is not None:
            self.options.directory.mkdir(parents=True, exist_ok=True)
        self.directory = Path(tempfile.mkdtemp(prefix=f"millpy-{self.workload}-", dir=self.options.directory))
        if not self.options.keep:
            self._stack.callback(shutil.rmtree, self.directory, ignore_errors=True)
        self.server = self._stack.enter_context(
            EmbeddedPostgres(
                self.directory / "postgres",
                version=self.options.postgres,
                tcp=self._tcp,
                settings=self._server_settings,
            )
        )
        self._stack.callback(self._wait_for_server_end)
        self.settings = self._settings()
        self.show("settings", self.settings)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def database(self) -> str:
        """Create and migrate a database; return its URL."""
        self._databases += 1
        name = f"bench_{self._databases}"
        with psycopg.connect(self.server.url(), autocommit=True) as connection:
            connection.execute(f"CREATE DATABASE {name}")
        url = self.server.url(name)
        migrate(url)
        return url

    def broker(self) -> EmbeddedBroker:
        """Start a broker that runs until the end, or until `stop`.

        What is measured one after another takes one each: the session of a worker that has ended stays, its messages
        queue up, and mosquitto answers nobody while it saves them, once a minute.
        """
        broker = self._stack.enter_context(EmbeddedBroker(self.directory / f"broker-{time.monotonic_ns()}"))
        self.settings["broker"] = Path(broker.program).name if broker.program else "amqtt"
        return broker

    def worker(
        self, graph: str, url: str, *, only: Sequence[str] = (), environment: Mapping[str, str] | None = None
    ) -> Worker:
        """Start a worker process on a graph file of `benchmarks/graphs`."""
        worker = Worker(HERE / "graphs" / graph, url, self.directory, only, environment or {})
        self._stack.callback(worker.kill)
        return worker

    def child(self, module: str, *arguments: object) -> subprocess.Popen[str]:
        """Start a helper process (publisher, reader) that prints one JSON object at its end."""
        command = [sys.executable, "-m", module, *map(str, arguments)]
        process = subprocess.Popen(command, cwd=HERE.parent, stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True)
        self._stack.callback(_kill, process)
        return process

    def show(self, what: str, value: object) -> None:
        """Print one readable line."""
        text = json.dumps(value, default=str) if isinstance(value, dict | list) else str(value)
        print(f"{self.workload} {what}: {text}", flush=True)

    def finish(self, **figures: Any) -> None:
        """Print the last line, and end with status 1 when a figure breaks a bound."""
        rounded = {name: rounded_to_four(value) for name, value in figures.items()}
        line = {"workload": self.workload, "commit": commit_hash(), **rounded, "settings": self.settings}
        print(json.dumps(line, default=str), flush=True)
        broken = [bound for bound in self.options.bounds if not bound.holds(figures)]
        for bound in broken:
            print(f"{self.workload}: {bound.figure} is {figures.get(bound.figure)}, not {bound}", file=sys.stderr)
        if broken:
            raise SystemExit(1)

    def _wait_for_server_end(self) -> None:
        # Registered after the server, so it runs first: release it, and wait before the directory is removed.
        pid = self.server.pid()
        self.server.release()
        deadline = time.monotonic() + WAIT_S_MAX
        while psutil.pid_exists(pid) and time.monotonic() < deadline:
            time.sleep(0.05)

    def _settings(self) -> dict[str, Any]:
        names = ["server_version", "fsync", "synchronous_commit", "full_page_writes", "shared_buffers", "max_wal_size"]
        with psycopg.connect(self.server.url(), autocommit=True) as connection:
            found = {name: connection.execute(f"SHOW {name}").fetchone()[0] for name in names}  # type: ignore[index]
        assert found["fsync"] == found["synchronous_commit"] == "on", found
        given = {name: value for name, value in os.environ.items() if name.startswith("MILLPY_")}
        return {
            **found,
            "cores": len(psutil.Process().cpu_affinity())
            if hasattr(psutil.Process, "cpu_affinity")
            else os.cpu_count(),
            "python": platform.python_version(),
            "filesystem": _filesystem(self.directory),
            "load_before": round(os.getloadavg()[0], 2),
            **given,
        }


class Worker:
    """A worker process; `report` has its own measurements."""

    def __init__(
        self, graph: Path, url: str, directory: Path, only: Sequence[str], environment: Mapping[str, str]
    ) -> None:
        self.report_path = directory / f"worker-{time.monotonic_ns()}.json"
        command = [sys.executable, "-m", "benchmarks.worker", str(graph), "--database", url]
        command += ["--report", str(self.report_path), *(["--only", ",".join(only)] if only else [])]
        self.process = subprocess.Popen(
            command,
            cwd=HERE.parent,
            env={"MILLPY_LOG_LEVEL": "warning", **_environment(), **environment},
            stdin=subprocess.DEVNULL,
            stdout=sys.stderr,
        )

    @property
    def pid(self) -> int:
        """The process id."""
        return self.process.pid

    @property
    def report(self) -> dict[str, Any]:
        """The worker's report; empty until it has claimed an interval."""
        return dict(json.loads(self.report_path.read_text())) if self.report_path.exists() else {}

    def wait_claimed(self) -> None:
        """Wait until the worker owns an interval."""
        wait_until(lambda: bool(self.report) or self.process.poll() is not None, "a worker claims")
        self.check()

    def wait(self, timeout_s: float) -> None:
        """Wait until the worker has ended by itself; a failure ends the benchmark."""
        self.process.wait(timeout_s)
        self.check()

    def check(self) -> None:
        """End the benchmark if the worker has failed."""
        if self.process.poll() not in (None, 0):
            raise SystemExit(f"the worker ended with status {self.process.returncode}")

    def running(self) -> bool:
        """Return True; a failure ends the benchmark."""
        self.check()
        return True

    def drain(self, timeout_s: float = WAIT_S_MAX) -> None:
        """Send SIGTERM, and wait until the worker has ended."""
        self.process.terminate()
        self.wait(timeout_s)

    def peak_rss_mb(self) -> float:
        """Return the peak memory of the running worker."""
        return peak_rss_mb(self.pid)

    def kill(self) -> None:
        """Send SIGKILL; do nothing if the worker has ended."""
        _kill(self.process)


def _environment() -> dict[str, str]:
    """Return our environment with the allocator of a service.

    It has bytecode caching, so that no worker compiles modules during the measurement.
    """
    found = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return {"ARROW_DEFAULT_MEMORY_POOL": "system", **found}


def _kill(process: subprocess.Popen[Any]) -> None:
    if process.poll() is None:
        process.kill()
        process.wait()


@dataclass(frozen=True, slots=True)
class Bound:
    """A bound on a figure of the last line: `differences<=0`, `client_ratio>=8`."""

    figure: str
    at_least: bool
    limit: float

    @classmethod
    def parse(cls, text: str) -> Bound:
        """Read FIGURE<=NUMBER or FIGURE>=NUMBER; raises ValueError."""
        figure, relation, limit = text.partition(">=" if ">=" in text else "<=")
        if not (figure and relation):
            raise ValueError(f"invalid bound {text!r}: write FIGURE<=NUMBER or FIGURE>=NUMBER")
        return cls(figure, relation == ">=", float(limit))

    def holds(self, figures: Mapping[str, Any]) -> bool:
        """Tell whether the figure exists and is within the bound; a NaN is not."""
        value = figures.get(self.figure)
        if value is None:
            return False
        return bool(value >= self.limit if self.at_least else value <= self.limit)

    def __str__(self) -> str:
        return f"{self.figure}{'>=' if self.at_least else '<='}{self.limit:g}"


def arguments(description: str | None, *bounds: str, **numbers: float) -> argparse.ArgumentParser:
    """Return a parser with the options of all workloads, and an option for each number with its default.

    `bounds` always apply; `--bound` adds others.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", type=Path, default=None, help="where the data goes (default: temporary)")
    parser.add_argument("--postgres", default=None, help="18 (default), 16 or system15")
    parser.add_argument("--keep", action="store_true", help="leave the data directory behind")
    parser.add_argument(
        "--bound",
        dest="bounds",
        action="append",
        type=Bound.parse,
        default=[Bound.parse(text) for text in bounds],
        metavar="FIGURE<=NUMBER",
        help=f"fail when a figure breaks it (or FIGURE>=NUMBER); always: {', '.join(bounds) or 'none'}".replace(
            "%", "%%"
        ),
    )
    for name, default in numbers.items():
        parser.add_argument(
            "--" + name.replace("_", "-"), type=type(default), default=default, help=f"default {default}"
        )
    return parser


def wait_until(
    condition: Callable[[], bool], what: str, *, timeout_s: float = WAIT_S_MAX, every_s: float = 0.02
) -> None:
    """Poll until the condition is true; raise SystemExit after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise SystemExit(f"waited {timeout_s:.0f} s in vain: {what}")
        time.sleep(every_s)


def commit_hash() -> str:
    """Return the commit of the working tree, with a plus if it is not clean."""

    def git(*words: str) -> str:
        done = subprocess.run(["git", *words], cwd=HERE, capture_output=True, text=True, check=False)
        return done.stdout.strip()

    found = git("rev-parse", "--short=12", "HEAD") or "unknown"
    return found + ("+" if git("status", "--porcelain", "--untracked-files=no") else "")


def percentile(values: Sequence[float], share: float) -> float:
    """Return the smallest value that at least this share of all values does not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else math.nan


def rounded_to_four(value: Any) -> Any:
    """Round floats to four significant digits; return other values unchanged."""
    if isinstance(value, float) and math.isfinite(value) and value:
        digits = max(0, 3 - math.floor(math.log10(abs(value))))
        return round(value, digits) if digits else round(value)
    return value


def _filesystem(path: Path) -> str:
    mounts = [p for p in psutil.disk_partitions(all=True) if path.resolve().is_relative_to(p.mountpoint)]
    return max(mounts, key=lambda p: len(p.mountpoint)).fstype if mounts else "unknown"
