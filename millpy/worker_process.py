"""One worker as a process: `python -m millpy.worker_process GRAPH.py --database URL [--only a,b]`.

SIGTERM and SIGINT drain it: the turn is finished, everything released, exit status 0. A second SIGINT ends it at once,
with 130: what was not committed never happened, and its intervals are taken over when its lease ends. With `--leash`
the end of standard input drains it too, so that workers do not outlive the `millpy run` that started them; without, it
is a service, which waits for a database that is not there yet.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
from collections.abc import Callable, Sequence
from datetime import datetime

from millpy.assembly import run_worker
from millpy.complaint import EXIT_INTERRUPTED, Interrupts, complain
from millpy.config import Settings, configure_logging
from millpy.errors import MillError, UsageError
from millpy.graph import Graph, InjectorNode
from millpy.graph_file import load_graph
from millpy.injectors.protocol import BeginsAtMoment
from millpy.model.time import Instant, instant
from millpy.runtime.observer import Observer


def run_until_told(
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
    """Run one worker until its graph has finished, a signal asks it to drain, or its leash ends.

    A second SIGINT ends the process, whatever it is doing.
    """

    async def run() -> None:
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, stop.set)
        interrupts = Interrupts(lambda: loop.call_soon_threadsafe(stop.set), lambda: os._exit(EXIT_INTERRUPTED))
        signal.signal(signal.SIGINT, interrupts)
        if leash:
            loop.add_reader(sys.stdin.fileno(), _on_end(loop, stop))
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
        )

    before = signal.getsignal(signal.SIGINT)
    try:
        asyncio.run(run())
    finally:
        signal.signal(signal.SIGINT, before)


def start_of(text: str, graph: Graph) -> Instant | None:
    """Where sources begin that were never read, from text; None for none.

    Raises:
        UsageError: the text is no moment, or no source of the graph can begin at one.
    """
    if not text:
        return None
    try:
        moment: datetime | None = datetime.fromisoformat(text)
    except ValueError:
        moment = None
    if moment is None or moment.tzinfo is None:
        raise UsageError(f"--from {text!r} is no moment", hint="for example 2026-11-20T08:00:00Z")
    sources = [node.source for node in graph.nodes if isinstance(node, InjectorNode)]
    if not any(isinstance(source, BeginsAtMoment) for source in sources):
        raise UsageError(f"no source of graph {graph.name!r} can begin at a moment", hint="Kafka(…) can")
    return instant(moment)


def _on_end(loop: asyncio.AbstractEventLoop, stop: asyncio.Event) -> Callable[[], None]:
    def read() -> None:
        if not os.read(sys.stdin.fileno(), 1):
            loop.remove_reader(sys.stdin.fileno())
            stop.set()

    return read


def main() -> int:
    """Entry of the process; the exit status says how it went."""
    parser = argparse.ArgumentParser(prog="millpy.worker_process")
    parser.add_argument("graph")
    parser.add_argument("--database", default=None)
    parser.add_argument("--only", default="")
    parser.add_argument("--from", dest="start", default="")
    parser.add_argument("--leash", action="store_true")
    arguments = parser.parse_args()
    try:
        settings = Settings.load(database_url=arguments.database)
        configure_logging(settings)
        if settings.database_url is None:
            raise UsageError("no database is configured", hint="set MILLPY_DATABASE_URL or give --database URL")
        only = tuple(name for name in arguments.only.split(",") if name)
        graph = load_graph(arguments.graph)
        start, leash = start_of(arguments.start, graph), arguments.leash
        run_until_told(graph, settings.database_url, settings, only=only, leash=leash, start=start, patient=not leash)
    except MillError as error:
        return complain(error)
    return 0


if __name__ == "__main__":
    sys.exit(main())
