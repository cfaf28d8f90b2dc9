"""One case of the crash matrix: its database, its processes, what was done to them, and how long they took to recover.

A case is a function of a `World`. It starts workers, hurts something, waits for the recovery and for the end; then the
results are compared with the oracle. `play` does that for pytest and for the matrix alike.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import psycopg
from aiokafka.errors import KafkaError

from millpy.embedded import EmbeddedPostgres
from millpy.errors import MillError
from tests.crash.checks import Fault, Header, Observer, faults, headers_of, orphans
from tests.crash.harness import Worker, await_true
from tests.crash.workload import Expected
from tests.databases import fresh_database, make_template

END = 4_611_686_018_427_387_904
RECOVERY_S_MAX = 60.0
LOOK_EVERY_S = 0.02


@dataclass(frozen=True)
class Inputs:
    """A file of records and its expected results; the audit of a database whose graph has read it, if there is one."""

    path: Path
    expected: Expected
    audit: Callable[[str], list[Fault]] | None = None


@dataclass(frozen=True)
class Case:
    """One cell of the matrix.

    Attributes:
        fault: the row of the table that it belongs to.
        variant: what distinguishes it there.
        run: does it.
    """

    fault: str
    variant: str
    run: Callable[[World], None]

    @property
    def name(self) -> str:
        return f"{self.fault}, {self.variant}" if self.variant else self.fault


@dataclass
class Verdict:
    """How a case went.

    Attributes:
        kills: those that hit somebody: an interval that had not finished.
        idle_kills: the others, which show nothing.
        recovered: of each recovery that was waited for, how many intervals committed again.
        audited: whether Spark has audited the tables.
    """

    case: Case
    faults: list[Fault]
    kills: int
    idle_kills: int
    recovered: list[int]
    recoveries_s: list[float]
    notes: list[str]
    took_s: float
    audited: bool

    def count(self, kind: str) -> int:
        return sum(fault.count for fault in self.faults if fault.kind == kind)


class Skipped(Exception):  # noqa: N818 - it is no error
    """This machine cannot play a case."""


class World:
    """The world in which a case runs: database, workers, input."""

    def __init__(self, directory: Path, server: EmbeddedPostgres, inputs: Inputs) -> None:
        self.directory = directory
        self.server = server
        self.inputs = inputs
        self.stack = ExitStack()
        self.url = ""
        self.kills = self.idle_kills = 0
        self.audited = False
        self.recovered: list[int] = []
        self.recoveries_s: list[float] = []
        self.notes: list[str] = []
        self.workers: list[Worker] = []
        self.observer: Observer | None = None
        self.seen: list[Fault] = []
        self.oracle: Callable[[], list[Fault]] | None = None
        """Compares the results, if they are not those of the graph that reads the file."""

    def __enter__(self) -> Self:
        self.directory.mkdir(parents=True, exist_ok=True)
        self.url = self.server.url(self.stack.enter_context(fresh_database(self.server)))
        return self

    def __exit__(self, *_: object) -> None:
        self.stack.close()

    def own_server(self, directory: Path | None = None, **settings: str) -> EmbeddedPostgres:
        """A server that may be damaged: the case continues with a database there."""
        self.server = EmbeddedPostgres(directory or self.directory / "postgres", tcp=True, settings=settings)
        self.stack.enter_context(self.server)
        self.stack.callback(self.server.kill)  # its directory may be gone before a supervisor could stop it
        make_template(self.server)
        with psycopg.connect(self.server.url(), autocommit=True) as connection:
            connection.execute("CREATE DATABASE own TEMPLATE millpy_template")
        self.url = self.server.url("own")
        return self.server

    def move(self, url: str) -> None:
        """Replace the database by another one with its own history."""
        self.url = url
        if self.observer is not None:
            self.seen += self.observer.faults
            self.observer = None

    def worker(self, url: str | None = None, **options: Any) -> Worker:
        """Start a worker; it is watched, and killed at the end if it still runs."""
        if self.observer is None:
            self.observer = self.stack.enter_context(Observer(self.url))
        worker = Worker(self.directory, url or self.url, self.inputs.path, **options)
        self.workers.append(worker)
        return self.stack.enter_context(worker)

    def connect(self) -> psycopg.Connection:
        """A connection of the case's own, in autocommit mode."""
        return self.stack.enter_context(psycopg.connect(self.url, autocommit=True))

    def kill(self, worker: Worker) -> Recovery:
        """SIGKILL, now."""
        worker.kill()
        return self._count_kill(self.hurt([worker.process.pid]))

    def await_killed(self, worker: Worker) -> Recovery:
        """Wait until its failpoint kills a worker, which owned an interval there even if it has lost it by now."""
        worker.await_killed()
        return self._count_kill(self._hurt_at_failpoint(worker))

    def await_frozen(self, worker: Worker) -> Recovery:
        """Wait until its failpoint freezes a worker, which owned an interval there as in `await_killed`."""
        worker.await_frozen()
        return self._hurt_at_failpoint(worker)

    def _hurt_at_failpoint(self, worker: Worker) -> Recovery:
        pids = [worker.process.pid]
        recovery = self.hurt(pids)
        if not recovery.hit and self.observer is not None:
            recovery.hit = self.observer.last_owned_by(pids)
        return recovery

    def _count_kill(self, recovery: Recovery) -> Recovery:
        if recovery.unfinished:
            self.kills += 1
        else:
            self.idle_kills += 1
        return recovery

    def hurt(self, pids: Iterable[int] | None = None, *, fenced: bool = True) -> Recovery:
        """Start to measure the recovery from a fault, of the intervals of these processes (None: of all)."""
        recovery = Recovery(self, pids, fenced)
        if self.observer is not None:
            with suppress(psycopg.OperationalError):  # it may still be down
                self.observer.look_now()
        return recovery

    def await_finished(self, *workers: Worker) -> None:
        """The graph has finished and these have left in good order."""
        for worker in workers:
            worker.await_finished()

    def let_another_finish(self, one: Worker, *, frozen: bool, **how: Any) -> None:
        """Let another worker finish the graph when a failpoint has killed or frozen one, which then wakes up."""
        if frozen:
            one.await_frozen()
            self.await_finished(self.worker(**how))
            one.thaw()
            self.await_finished(one)
        else:
            recovery = self.await_killed(one)
            again = self.worker(**how)
            recovery.wait(watched=again)
            self.await_finished(again)

    def wrong_results(self) -> list[Fault]:
        """Compare the results, by an audit too where the graph reads the file and somebody audits."""
        if self.oracle is not None:
            return self.oracle()
        found = faults(self.url, self.inputs.expected)
        if self.inputs.audit is not None:
            found += self.inputs.audit(self.url)
            self.audited = True
        return found

    def found(self) -> list[Fault]:
        """Return the observer's findings, and orphaned processes."""
        seen = self.seen
        if self.observer is not None:
            self.observer.look_now()
            seen += self.observer.faults
            if not self.observer.samples:
                seen.append(Fault("violation", "nobody has watched"))
        with psycopg.connect(self.url, autocommit=True) as connection:
            return [*seen, *orphans(connection)]


class Recovery:
    """From a fault to the next commit of every interval that it has hit.

    Args:
        fenced: the intervals have to be taken over first, if only by their owner; a commit that was in flight and lands
            late is none of a recovery then.
    """

    def __init__(self, world: World, pids: Iterable[int] | None, fenced: bool) -> None:
        self.world = world
        self.started = time.monotonic()
        self.fenced = fenced
        self.hit: dict[int, Header] = {}
        await_true(lambda: self._read(pids), "the database answers", RECOVERY_S_MAX)

    @property
    def unfinished(self) -> dict[int, Header]:
        """Those of the intervals that have something left to do, and so can recover."""
        return {i: header for i, header in self.hit.items() if header[2] < END}

    def wait(self, *, watched: Worker | None = None) -> float:
        """Wait, record the seconds and return them.

        Args:
            watched: the process that causes it; when it ends with an error, waiting ends.
        """
        left = self.unfinished
        intervals = len(left)
        if not left:
            return 0.0
        base: dict[int, int] = {} if self.fenced else {i: bundle for i, (_, bundle, _) in left.items()}
        while left:
            took_s = time.monotonic() - self.started
            assert took_s < RECOVERY_S_MAX, f"no recovery within {RECOVERY_S_MAX} s: {left}; {self._logs()}"
            if watched is not None and watched.process.poll():
                raise AssertionError(f"ended with {watched.process.returncode}: {watched.log[-3000:]}")
            try:
                with psycopg.connect(self.world.url, autocommit=True) as connection:
                    self._look(connection, left, base)
            except psycopg.OperationalError:
                time.sleep(LOOK_EVERY_S)  # the database is down
        took_s = time.monotonic() - self.started
        self.world.recovered.append(intervals)
        self.world.recoveries_s.append(took_s)
        return took_s

    def wait_aside(self, *, watched: Worker | None = None) -> Future[float]:
        """The same in the background; the case must ask for its result before the end."""
        pool = ThreadPoolExecutor(1)
        waiting = pool.submit(self.wait, watched=watched)
        pool.shutdown(wait=False)
        return waiting

    def _read(self, pids: Iterable[int] | None) -> bool:
        try:
            with psycopg.connect(self.world.url, autocommit=True) as connection:
                self.hit = _headers(connection, pids)
        except psycopg.OperationalError:
            return False
        return True

    def _look(self, connection: psycopg.Connection, left: dict[int, Header], base: dict[int, int]) -> None:
        until = time.monotonic() + 0.2
        while left and time.monotonic() < until:
            for interval, (sequencer, bundle, watermark) in _headers(connection, None).items():
                if interval not in left:
                    continue
                if sequencer > left[interval][0]:
                    base.setdefault(interval, bundle)
                if interval in base and (bundle > base[interval] or watermark >= END):
                    del left[interval]
            time.sleep(LOOK_EVERY_S)

    def _logs(self) -> str:
        return " | ".join(worker.log[-1500:] for worker in self.world.workers)


def _headers(connection: psycopg.Connection, pids: Iterable[int] | None) -> dict[int, Header]:
    """The headers of all intervals, or of those that some processes own, by interval."""
    owners = None if pids is None else set(pids)
    found = headers_of(connection)
    return {interval_id: header for interval_id, pid, header in found if owners is None or pid in owners}


def play(case: Case, directory: Path, server: EmbeddedPostgres, inputs: Inputs) -> Verdict:
    """Run one case; every error in it counts as a fault. Raises Skipped."""
    started = time.monotonic()
    with World(directory, server, inputs) as world:
        found: list[Fault] = []
        try:
            case.run(world)
            found = [*world.wrong_results(), *world.found()]
        except (AssertionError, OSError, psycopg.Error, KafkaError, MillError) as error:
            found = [Fault("violation", f"{type(error).__name__}: {error}")]
            if world.observer is not None:
                found += world.observer.faults
        took_s = time.monotonic() - started
        return Verdict(
            case,
            found,
            world.kills,
            world.idle_kills,
            world.recovered,
            world.recoveries_s,
            world.notes,
            took_s,
            world.audited,
        )
