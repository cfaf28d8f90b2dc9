"""`millpy run`: find or start the database, then run one worker here or several as child processes.

Several workers run under a supervisor (`supervisor.py`), which starts those again that are killed.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import structlog

from millpy.clock import SystemClock
from millpy.config.secrets import FILE
from millpy.config.settings import DATABASE_URL, Settings
from millpy.embedded import EmbeddedPostgres, embedded_directory
from millpy.errors import MillError, UsageError
from millpy.observability.status_line import Say, line, working
from millpy.process.answering import answering, answering_for, port_file_arguments
from millpy.process.page_process import page_beside
from millpy.process.supervisor import STOP_MARGIN_S, Supervisor

if TYPE_CHECKING:
    from millpy.graph import Graph
    from millpy.runtime.observer import Observers

log = structlog.get_logger("millpy.process.launcher")
WORKERS_MAX = 64
LOOK_S_MAX = 5.0


@contextmanager
def database(settings: Settings, graph_location: str | None, *, create: bool) -> Iterator[str]:
    """Yield the URL of the configured database; without one, start and migrate the embedded one for the block.

    Args:
        settings: the settings; `database_url` takes precedence.
        graph_location: the graph file that the embedded database belongs to.
        create: whether to create the embedded database if it does not exist.

    Raises:
        UsageError: no database is configured, the embedded one does not exist, and `create` is false.
    """
    if settings.database_url is not None:
        yield settings.database_url
        return
    directory = embedded_directory(graph_location)
    if not create and not (directory / "data").exists():
        hint = "set MILLPY_DATABASE_URL, run a graph here first, or name the graph's file"
        if graph_location is not None and ".py" in graph_location:
            hint = f"run the graph first (millpy run {graph_location}), or set MILLPY_DATABASE_URL"
        raise UsageError(f"no database is configured and there is none in {directory.parent}", hint=hint)
    from millpy.store.postgres.deployment.migrate import migrate  # only the embedded database is migrated here

    with ExitStack() as stack:
        with working(f"starting the database in {directory}"):
            server = stack.enter_context(EmbeddedPostgres(directory))
            url = server.url()
            migrate(url)
        if create:
            log.info("embedded database", url=url, version=server.version)
        yield url


def run(  # noqa: PLR0913 - the options of `millpy run`
    location: str,
    settings: Settings,
    *,
    only: Sequence[str],
    workers: int,
    start: str = "",
    archive: bool = False,
    http: str = "",
    page: bool = False,
    ended: Callable[[str, Graph], None] | None = None,
) -> int:
    """Run a graph until it has finished or a signal ends it; return the exit status.

    Args:
        location: the graph's file.
        settings: the database and the limits.
        only: names of the computations to run; empty for all.
        workers: the number of processes.
        start: the time at which unread source partitions begin, as text; empty for the sources' default.
        archive: whether to run the graph's archives instead.
        http: the address at which to serve health and metrics of all workers, "host:port"; empty to serve nothing.
        page: whether to serve the page beside.
        ended: called with the database and the graph after all workers have ended, while the database still runs.

    Raises:
        UsageError: the graph, a name in `only`, the number of workers or `start` is wrong.
    """
    from millpy.graph.loader import load_graph  # late: `millpy status` does not load the engine
    from millpy.process.assembly import archives_of
    from millpy.process.worker_process import run_until_stopped, start_of

    if not 1 <= workers <= WORKERS_MAX:
        raise UsageError(f"invalid number of workers: {workers}", hint=f"give a number from 1 to {WORKERS_MAX}")
    graph = load_graph(location)
    in_workers = settings.archive if settings.archive_in_workers and not archive else ""
    if archive:
        only, settings = archives_of(graph), settings.only_archiving()
    elif in_workers:
        archives_of(graph)  # raises if there is none
    _check_names(graph, only)
    begin = start_of(start, graph)
    _ = settings.limits  # raises on an invalid limit before anything starts
    with database(settings, location, create=True) as url:
        with working("checking the database and the sources"):
            _check_sources(graph, url)
        with line() as say, page_beside(url) if page else nullcontext():
            if workers == 1:
                observers = _observers(say)
                with answering(http, graph, observers):
                    run_until_stopped(graph, url, settings, only=only, start=begin, observer=observers)
                status = 0
            else:
                look = None if say is None else _progress_query(url, graph, say)
                command = worker_command(location, only, start, in_workers)
                grace_s = settings.limits.drain_grace_s
                status = _run_children(command, url, workers, look, grace_s, http, graph.permanent_name)
        if ended is not None:
            ended(url, graph)
        return status


def _observers(say: Say | None) -> Observers:
    """Return the observers of a worker in this process, which show its progress on the status line if there is one."""
    from millpy.observability.progress import ProgressReporter
    from millpy.runtime.observer import Observers

    observers = Observers()
    if say is not None:
        observers.add(ProgressReporter(SystemClock(), say))
    return observers


def _check_names(graph: Graph, only: Sequence[str]) -> None:
    """Check that a graph has the named computations."""
    names = [computation.name for computation in graph.spec().computations]
    for name in only:
        if name not in names:
            raise UsageError(
                f"graph {graph.name!r} has no computation {name!r}", hint=f"choose from {', '.join(names)}"
            )


def _check_sources(graph: Graph, url: str) -> None:
    """Check that a graph's sources exist, before its first deployment."""
    from millpy.admin.queries import Admin

    if Admin(url).name_of(graph.name, graph.generation) is None:
        for node in graph.injectors():
            node.source.check()


def worker_command(location: str, only: Sequence[str] = (), start: str = "", archive: str = "") -> list[str]:
    """Return the command line of a worker process; the environment names its database, which `ps` must not show."""
    command = [sys.executable, "-m", "millpy.process.worker_process", location, "--leash"]
    command += ["--only", ",".join(only)] if only else []
    command += ["--archive", archive] if archive else []
    return [*command, "--from", start] if start else command


def _progress_query(url: str, graph: Graph, say: Say) -> Callable[[], None]:
    """Return a function that queries the progress of all workers and shows it."""
    from millpy.admin.queries import Admin
    from millpy.observability.progress import RecordRate

    admin, clock, rate = Admin(url, statement_s_max=LOOK_S_MAX), SystemClock(), RecordRate()

    def look() -> None:
        try:
            name = admin.name_of(graph.name, graph.generation)
            sources = [] if name is None else admin.sources(name)
        except MillError as error:
            say(error.message)
            return
        records = sum(int(source["injected"]) for source in sources)
        counted = Counter(source["state"] for source in sources)
        states = ", ".join(f"{count} {state}" for state, count in sorted(counted.items()))
        say(f"{records:,} records, {rate.update(records, clock.monotonic()):,.0f}/s, sources: {states or 'none yet'}")

    return look


def _run_children(
    command: Sequence[str],
    url: str,
    workers: int,
    look: Callable[[], None] | None,
    grace_s: float,
    http: str = "",
    graph: str = "",
) -> int:
    """Run workers under a supervisor to their end, and return the exit status.

    Args:
        command: the command line of each worker.
        url: the database.
        workers: the number of workers.
        look: called every second to show progress, above which the workers' output is forwarded; None for no progress.
        grace_s: seconds that the workers give themselves to drain; STOP_MARGIN_S later they are killed.
        http: the address at which to serve health and metrics of all workers; empty to serve nothing.
        graph: the graph's name, for the log.
    """
    environment = {name: value for name, value in os.environ.items() if name != DATABASE_URL + FILE}
    environment[DATABASE_URL] = url
    environment.setdefault("ARROW_DEFAULT_MEMORY_POOL", "system")  # Arrow's own allocator holds 40 to 70 MB more
    out: int | None = None
    error: int | None = None
    if look is not None:  # we own the terminal
        environment = {"FORCE_COLOR": "1", "PYTHONUNBUFFERED": "1", **environment}
        out, error = (subprocess.PIPE, subprocess.STDOUT) if sys.stdout.isatty() else (None, subprocess.PIPE)
    grace_s += STOP_MARGIN_S
    with TemporaryDirectory(prefix="millpy-") as directory:

        def command_of(worker: int) -> list[str]:
            return [*command, *(port_file_arguments(Path(directory), worker) if http else ())]

        supervisor = Supervisor(command_of, environment, workers, out=out, error=error, grace_s=grace_s)
        with answering_for(http, graph, Path(directory), supervisor):
            return supervisor.run(look)
