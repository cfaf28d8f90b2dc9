"""`millpy run`: find or start the database, then one worker here or several as child processes.

The first SIGINT lets them drain, the second one kills them. Children are on a leash: they drain when this process
ends, however it ends. One that is killed is reported and not
replaced, because the others take its intervals over; one that stops with an error ends the run with its status.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import structlog

from millpy.clock import SystemClock
from millpy.complaint import EXIT_INTERRUPTED, Interrupts
from millpy.config import DATABASE_URL, Settings
from millpy.embedded import EmbeddedPostgres
from millpy.errors import MillError, UsageError
from millpy.progress import Say, line, working
from millpy.secret import FILE

if TYPE_CHECKING:
    from millpy.graph import Graph

log = structlog.get_logger("millpy.launch")
EMBEDDED_DIRECTORY = ".millpy"
WORKERS_MAX = 64
LOOK_EVERY_S = 1.0
LOOK_S_MAX = 5.0


def embedded_directory(graph_location: str | None) -> Path:
    """Where the embedded server of a graph lives: `.millpy/` beside its file, or in the current directory."""
    beside = Path(graph_location.partition(":")[0]).parent if graph_location else Path()
    return beside / EMBEDDED_DIRECTORY / "postgres"


@contextmanager
def database(settings: Settings, graph_location: str | None, *, create: bool) -> Iterator[str]:
    """The configured database, else the embedded one, started and migrated.

    Args:
        settings: `database_url` decides.
        graph_location: the graph file that the embedded one belongs to.
        create: make the embedded one when it does not exist.

    Raises:
        UsageError: none is configured, none is embedded yet, and `create` is false.
    """
    if settings.database_url is not None:
        yield settings.database_url
        return
    directory = embedded_directory(graph_location)
    if not create and not (directory / "data").exists():
        raise UsageError(
            f"no database is configured and there is none in {directory.parent}",
            hint="set MILLPY_DATABASE_URL, or run a graph here first, or name the graph's file",
        )
    from millpy.store.migrate import migrate  # only the embedded one is migrated here

    with ExitStack() as stack:
        with working(f"starting the database in {directory}"):
            server = stack.enter_context(EmbeddedPostgres(directory))
            url = server.url()
            migrate(url)
        if create:
            log.info("embedded database", url=url, version=server.version)
        yield url


def run(
    location: str,
    settings: Settings,
    *,
    only: Sequence[str],
    workers: int,
    start: str = "",
    ended: Callable[[str, Graph], None] | None = None,
) -> int:
    """Run a graph until it has finished or a signal ends it; returns the exit status.

    Args:
        location: the graph's file.
        settings: the database, and limits.
        only: computations; empty for all.
        workers: how many processes.
        start: where source partitions begin that were never read, as text; empty: where the sources say.
        ended: told the database and the graph when all workers have ended, while the database is still there.

    Raises:
        UsageError: the graph, a name in `only`, the number of workers or `start` is wrong.
    """
    from millpy.graph_file import load_graph  # the engine is not loaded for `millpy status`
    from millpy.observe.progress import Progress
    from millpy.worker_process import run_until_told, start_of

    if not 1 <= workers <= WORKERS_MAX:
        raise UsageError(f"{workers} workers cannot be", hint=f"give a number from 1 to {WORKERS_MAX}")
    graph = load_graph(location)
    names = [computation.name for computation in graph.spec().computations]
    for name in only:
        if name not in names:
            raise UsageError(f"graph {graph.name!r} has no computation {name!r}", hint=f"it has: {', '.join(names)}")
    begin = start_of(start, graph)
    _ = settings.limits  # a wrong limit is a usage error here, before anything starts
    with database(settings, location, create=True) as url:
        with working("looking at the database and the sources"):
            _check_sources(graph, url)
        with line() as say:
            if workers == 1:
                observer = None if say is None else Progress(SystemClock(), say)
                run_until_told(graph, url, settings, only=only, start=begin, observer=observer)
                status = 0
            else:
                look = None if say is None else _onlooker(url, graph, say)
                status = _run_children(worker_command(location, only, start), url, workers, look)
        if ended is not None:
            ended(url, graph)
        return status


def _check_sources(graph: Graph, url: str) -> None:
    """Before a graph is deployed for the first time: what it reads must be there."""
    from millpy.graph import InjectorNode
    from millpy.injectors.protocol import Checked
    from millpy.store.admin import Admin

    sources = [node.source for node in graph.nodes if isinstance(node, InjectorNode)]
    checked = [source for source in sources if isinstance(source, Checked)]
    if checked and Admin(url).name_of(graph.name, graph.generation) is None:
        for source in checked:
            source.check()


def worker_command(location: str, only: Sequence[str] = (), start: str = "") -> list[str]:
    """The command line of one worker process; its database comes by the environment, out of sight of `ps`."""
    command = [sys.executable, "-m", "millpy.worker_process", location, "--leash"]
    command += ["--only", ",".join(only)] if only else []
    return [*command, "--from", start] if start else command


def _onlooker(url: str, graph: Graph, say: Say) -> Callable[[], None]:
    """Asks the database how far the workers are, and says so."""
    from millpy.observe.progress import Rate
    from millpy.store.admin import Admin

    admin, clock, rate = Admin(url, statement_s_max=LOOK_S_MAX), SystemClock(), Rate()

    def look() -> None:
        try:
            name = admin.name_of(graph.name, graph.generation)
            sources = [] if name is None else admin.sources(name)
        except MillError as error:
            say(error.message)
            return
        records = sum(int(source["injected"]) for source in sources)
        standing = Counter(source["state"] for source in sources)
        states = ", ".join(f"{count} {state}" for state, count in sorted(standing.items()))
        say(f"{records:,} records, {rate.of(records, clock.monotonic()):,.0f}/s, sources: {states or 'none yet'}")

    return look


def _run_children(command: Sequence[str], url: str, workers: int, look: Callable[[], None] | None = None) -> int:
    """Run workers to their end.

    Args:
        command: of each of them.
        url: the database.
        workers: how many.
        look: where somebody watches: called every second. What the workers print then comes by way of us.
    """
    environment = {name: value for name, value in os.environ.items() if name != DATABASE_URL + FILE}
    environment[DATABASE_URL] = url
    out: int | None = None
    error: int | None = None
    if look is not None:  # it is us who are on the terminal
        environment = {"FORCE_COLOR": "1", "PYTHONUNBUFFERED": "1", **environment}
        out, error = (subprocess.PIPE, subprocess.STDOUT) if sys.stdout.isatty() else (None, subprocess.PIPE)
    children = [
        subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=out, stderr=error, env=environment, start_new_session=True
        )
        for _ in range(workers)
    ]

    def send(number: signal.Signals) -> None:
        # Never SIGINT: a child that still imports has no handler, and Python would print a traceback for it.
        for child in children:
            if child.poll() is None:
                child.send_signal(number)

    interrupts = Interrupts(lambda: send(signal.SIGTERM), lambda: send(signal.SIGKILL))
    before = {
        signal.SIGTERM: signal.signal(signal.SIGTERM, lambda *_: send(signal.SIGTERM)),
        signal.SIGINT: signal.signal(signal.SIGINT, interrupts),
    }
    watchers = [threading.Thread(target=_watch, args=(child, children), daemon=True) for child in children]
    for watcher in watchers:
        watcher.start()
    try:
        for watcher in watchers:
            while look is not None and watcher.is_alive():
                look()
                watcher.join(LOOK_EVERY_S)
            watcher.join()  # a watcher waits for its child, and has then said how it ended
    finally:
        for child in children:
            assert child.stdin is not None
            child.stdin.close()
        for number, handler in before.items():
            signal.signal(number, handler)
    stopped = interrupts.count > 1
    return EXIT_INTERRUPTED if stopped else exit_status([child.returncode for child in children])


def _watch(child: subprocess.Popen[bytes], children: Sequence[subprocess.Popen[bytes]]) -> None:
    for said in child.stdout or child.stderr or ():
        sys.stderr.write(said.decode(errors="replace"))
    code = child.wait()
    if code == -signal.SIGTERM:
        log.info("worker ended before it had begun", pid=child.pid)
    elif code < 0:
        left = "the others take over" if any(other.poll() is None for other in children) else "no other is left"
        log.warning("worker killed", pid=child.pid, signal=signal.Signals(-code).name, left=left)
    elif code > 0:
        log.error("worker failed", pid=child.pid, status=code)
        for other in children:
            if other.poll() is None:
                other.terminate()


def exit_status(codes: Sequence[int]) -> int:
    """The run's status from its workers' (negative: killed by a signal).

    A worker that stopped with an error decides; one that was killed matters only when no other finished.
    """
    failed = [code for code in codes if code > 0]
    if failed:
        return max(failed)
    return 0 if 0 in codes else 1
