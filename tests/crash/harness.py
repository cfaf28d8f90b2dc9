"""Real worker processes to kill, freeze and await."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Self

import psycopg

from millpy.hosting.failpoints import Failpoint
from tests.forked import fork_server
from tests.processes import state_of
from tests.waiting import WITHIN_S

ROOT = Path(__file__).resolve().parents[2]
GRAPH = Path(__file__).with_name("graph.py")
LEASE_S = 1.0
SETTINGS = {
    "lease-s": LEASE_S,
    "bundle-records-max": 100,
    "fold-every-s": 0.15,
    "closed-windows-bytes-max": 4_000,
    "unfired-windows-bytes-max": 40_000,
    "epoch-s": 0.4,
    "progress-every-s": 0.02,
    "retry-s-max": 0.3,
}


def await_true(condition: Callable[[], bool], what: str, within_s: float = WITHIN_S) -> float:
    """Poll until the condition is true, for at most a quarter of the time; return how long that took."""
    started = asked = time.monotonic()
    while not condition():
        if time.monotonic() - started > within_s:
            raise AssertionError(f"not within {within_s} s: {what}")
        time.sleep(max(0.01, 3 * (time.monotonic() - asked)))
        asked = time.monotonic()
    return time.monotonic() - started


class Worker:
    """One `crash_worker` process."""

    numbers = itertools.count(1)

    def __init__(
        self,
        directory: Path,
        url: str,
        source: Path,
        *,
        graph: Path = GRAPH,
        failpoint: str = "",
        only: str = "",
        archive: Path | None = None,
        gated: bool = False,
        environment: Mapping[str, str] | None = None,
        **settings: float,
    ) -> None:
        number = next(Worker.numbers)
        self.reached_file = directory / f"reached.{number}"
        self.log_file = directory / f"worker.{number}.log"
        limits = {**SETTINGS, **{name.replace("_", "-"): value for name, value in settings.items()}}
        command = [str(graph), "--database", url]
        command += ["--failpoint", failpoint, "--reached", str(self.reached_file), "--only", only]
        command += [word for name, value in limits.items() for word in (f"--{name}", str(value))]
        command += ["--archive", str(archive)] if archive else []
        command += ["--gated"] if gated else []
        variables = {**os.environ, "CRASH_INPUT": str(source), "PYTHONPATH": str(ROOT), **(environment or {})}
        with self.log_file.open("wb") as log:
            self.process = fork_server().begin("crash_worker", command, (log, log), variables, directory)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self.process.stdin.close()

    @property
    def log(self) -> str:
        return self.log_file.read_text(errors="replace")

    @property
    def points_reached(self) -> Counter[Failpoint]:
        """How often each point was reached."""
        reached = self.reached_file
        whole = reached.read_text().rpartition("\n")[0] if reached.exists() else ""  # the last line may be half written
        return Counter(map(Failpoint, whole.split()))

    def reached(self, point: Failpoint) -> int:
        return self.points_reached[point]

    def await_reached(self, point: Failpoint, times: int = 1, within_s: float = WITHIN_S) -> None:
        self.await_while_running(lambda: self.reached(point) >= times, f"{point} {times} times", within_s)

    def await_while_running(self, condition: Callable[[], bool], what: str, within_s: float = WITHIN_S) -> None:
        """Poll until the condition is true; fail if the worker ends first."""

        def holds() -> bool:
            ended = self.process.poll()
            if condition():
                return True
            assert ended is None, f"ended with {ended} before: {what}; log: {self.log[-3000:]}"
            return False

        try:
            await_true(holds, what, within_s)
        except AssertionError as error:
            raise AssertionError(f"{error}; log: {self.log[-3000:]}") from None

    def await_ready(self) -> None:
        """A gated worker has been imported and waits."""
        self.await_while_running(lambda: "ready" in self.log, "ready")

    def begin(self) -> None:
        """Open the gate."""
        self.process.stdin.write(b"\n")
        self.process.stdin.flush()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def freeze(self) -> None:
        self.process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def drain(self) -> None:
        self.process.send_signal(signal.SIGTERM)

    def await_killed(self, within_s: float = WITHIN_S) -> None:
        """Its failpoint has killed it."""
        self._await_end(within_s)
        assert self.process.returncode == -signal.SIGKILL, (self.process.returncode, self.log[-3000:])

    def await_frozen(self, within_s: float = WITHIN_S) -> None:
        """Its failpoint has stopped it."""
        await_true(lambda: state_of(self.process.pid) == "T", "frozen", within_s)

    def await_finished(self, within_s: float = 2 * WITHIN_S) -> None:
        """The graph has finished and the worker has left in good order."""
        self._await_end(within_s)
        assert self.process.returncode == 0, (self.process.returncode, self.log[-3000:])

    def _await_end(self, within_s: float) -> None:
        try:
            self.process.wait(within_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"did not end within {within_s} s; log: {self.log[-3000:]}") from None


def owners(url: str) -> dict[int, tuple[str | None, int]]:
    """interval -> (owner, sequencer)."""
    with psycopg.connect(url, autocommit=True) as connection:
        rows = connection.execute("SELECT interval_id, worker_id::text, sequencer FROM mill.intervals").fetchall()
    return {row[0]: (row[1], row[2]) for row in rows}


def committed(url: str) -> dict[int, int]:
    """interval -> bundle."""
    with psycopg.connect(url, autocommit=True) as connection:
        return dict(connection.execute("SELECT interval_id, bundle FROM mill.intervals").fetchall())


def owned_by(url: str, worker: Worker) -> list[int]:
    """Return the intervals of a worker, from the table."""
    with psycopg.connect(url, autocommit=True) as connection:
        rows = connection.execute(
            "SELECT interval_id FROM mill.intervals JOIN mill.workers USING (worker_id) WHERE pid = %s",
            [worker.process.pid],
        ).fetchall()
    return [row[0] for row in rows]
