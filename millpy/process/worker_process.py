"""A worker as a process: `python -m millpy.process.worker_process GRAPH.py --database URL [--only a,b]
[--archive DIR]`.

SIGTERM and SIGINT drain the worker: it finishes its turn, releases its intervals and exits with status 0. A second
SIGINT ends it at once with status 130: when its lease ends, other workers take over its intervals and repeat its
uncommitted work. With `--leash`, the end of standard input also drains it, so that workers do not outlive the `millpy
run` that started them. It waits for a database that is not available yet.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path

from millpy.config.settings import Settings, configure_logging
from millpy.errors import MillError, UsageError
from millpy.graph import Graph
from millpy.graph.loader import load_graph
from millpy.model.time import Instant, instant
from millpy.process.answering import answering_beside
from millpy.process.assembly import run_worker
from millpy.process.exit import EXIT_INTERRUPTED, Interrupts, report_error
from millpy.runtime.observer import Observer, Observers
from millpy.store.archive.storage import storage_at
from millpy.store.postgres.archiving import ArchiveInto


def run_until_stopped(  # noqa: PLR0913 - keywords of `run_worker`
    graph: Graph,
    database_url: str,
    settings: Settings,
    *,
    only: Sequence[str] = (),
    leash: bool = False,
    start: Instant | None = None,
    patient: bool = False,
    observer: Observer | None = None,
) -> None:
    """Run one worker until its graph has finished, a signal drains it, or its leash ends.

    A second SIGINT ends the process at once.
    """

    async def run() -> None:
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, stop.set)
        interrupts = Interrupts(lambda: loop.call_soon_threadsafe(stop.set), lambda: os._exit(EXIT_INTERRUPTED))
        signal.signal(signal.SIGINT, interrupts)
        if leash:
            loop.add_reader(sys.stdin.fileno(), _on_end_of_input(loop, stop))
        limits = settings.limits
        await run_worker(
            graph,
            database_url,
            limits=limits,
            only=only,
            stop=stop,
            start=start,
            patient=patient,
            observer=observer,
            archive=archive,
        )

    archive = archive_of(settings)
    before = signal.getsignal(signal.SIGINT)
    try:
        asyncio.run(run())
    finally:
        signal.signal(signal.SIGINT, before)


def archive_of(settings: Settings) -> ArchiveInto | None:
    """Return where archives are written, if it is set.

    Raises:
        UsageError: the directory cannot be made, or the URL is none of an object store, or workers would write there.
    """
    if not settings.archive:
        return None
    if "://" in settings.archive:
        if settings.archive_in_workers:
            raise UsageError(
                f"workers cannot archive into {settings.archive}: their commits would wait for the object store",
                hint="run `millpy archive` beside them; or give a directory",
            )
        storage_at(settings.archive)
        directory: str | Path = settings.archive
    else:
        directory = Path(settings.archive).resolve()
        try:
            directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(
                f"cannot make the directory {directory}: {error.strerror}",
                hint="set MILLPY_ARCHIVE to one that can be written",
            ) from error
    return ArchiveInto(
        directory,
        settings.archive_every_s,
        settings.archive_kept_s,
        settings.archive_compact_after_s,
        settings.archive_in_workers,
    )


def archive_settings(directory: str) -> dict[str, object]:
    """Return the settings of a worker that writes archives into a directory; none for an empty name."""
    return {"archive": directory, "archive_in_workers": True} if directory else {}


def start_of(text: str, graph: Graph) -> Instant | None:
    """Parse the time at which unread sources begin; return None for an empty text.

    Raises:
        UsageError: the text is not a time with a zone, or no source of the graph can begin at a time.
    """
    if not text:
        return None
    try:
        moment: datetime | None = datetime.fromisoformat(text)
    except ValueError:
        moment = None
    if moment is None or moment.tzinfo is None:
        raise UsageError(f"--from {text!r} is not a time with a zone", hint="write it like 2026-11-20T08:00:00Z")
    if not any(node.source.begins_at() for node in graph.injectors()):
        raise UsageError(
            f"no source of graph {graph.name!r} can begin at a time", hint="use --from with a Kafka source"
        )
    return instant(moment)


def _on_end_of_input(loop: asyncio.AbstractEventLoop, stop: asyncio.Event) -> Callable[[], None]:
    def read() -> None:
        if not os.read(sys.stdin.fileno(), 1):
            loop.remove_reader(sys.stdin.fileno())
            stop.set()

    return read


def main() -> int:
    """Run the process and return its exit status."""
    parser = argparse.ArgumentParser(prog="millpy.process.worker_process")
    parser.add_argument("graph")
    parser.add_argument("--database", default=None)
    parser.add_argument("--only", default="")
    parser.add_argument("--from", dest="start", default="")
    parser.add_argument("--archive", default="")
    parser.add_argument("--leash", action="store_true")
    parser.add_argument("--http-port-file", default="")
    arguments = parser.parse_args()
    try:
        settings = Settings.load(database_url=arguments.database, **archive_settings(arguments.archive))
        configure_logging(settings)
        if settings.database_url is None:
            raise UsageError("no database is configured", hint="set MILLPY_DATABASE_URL or give --database URL")
        only = tuple(name for name in arguments.only.split(",") if name)
        graph = load_graph(arguments.graph)
        start = start_of(arguments.start, graph)
        observers = Observers()
        with answering_beside(arguments.http_port_file, graph, observers):
            run_until_stopped(
                graph,
                settings.database_url,
                settings,
                only=only,
                leash=arguments.leash,
                start=start,
                patient=True,
                observer=observers,
            )
    except MillError as error:
        return report_error(error)
    return 0


if __name__ == "__main__":
    sys.exit(main())
