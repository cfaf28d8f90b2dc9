"""One worker in its own process, for tests that kill it.

    python -m millpy.testing.crash_worker GRAPH.py --database URL [--failpoint SPEC] [--reached FILE] [--only A,B]
        [--archive DIRECTORY] [--lease-s 1] [--bundle-records-max 50] …

Every field of `Limits` is an option. With `--archive`, `--only` may name archives. `--gated` lets several processes,
all imported, begin at the same moment. SIGTERM and SIGINT drain. The exit status is 0 when the graph has finished or
the worker has drained.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import logging
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from millpy.errors import MillError
from millpy.graph import Graph
from millpy.graph.loader import load_graph
from millpy.hosting.failpoints import Failpoints
from millpy.limits import Limits
from millpy.process.assembly import run_worker
from millpy.runtime import turn
from millpy.store.postgres.archiving import ArchiveInto
from millpy.testing.crash import CrashFailpoints, Moment, parse_spec


def parser() -> argparse.ArgumentParser:
    """Return the argument parser, with an option for each field of `Limits`."""
    options = argparse.ArgumentParser(prog="crash_worker")
    options.add_argument("graph")
    options.add_argument("--database", required=True)
    options.add_argument("--failpoint", default="")
    options.add_argument("--reached", type=Path)
    options.add_argument("--only", default="")
    options.add_argument("--archive", type=Path)
    options.add_argument("--log-level", default="WARNING")
    options.add_argument("--gated", action="store_true", help="print `ready`, then wait for a line on standard input")
    for limit in dataclasses.fields(Limits):
        names = ["--" + limit.name.replace("_", "-"), *(["--lease-s"] if limit.name == "lease_ttl_s" else [])]
        options.add_argument(*names, dest=limit.name, type=type(limit.default), default=None)
    return options


async def run(
    graph: Graph,
    database: str,
    limits: Limits,
    only: Sequence[str],
    failpoints: Failpoints,
    archive: ArchiveInto | None = None,
) -> None:
    """Run one worker until the graph has finished or a signal asks it to drain."""
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    await run_worker(
        graph, database, limits=limits, only=only, stop=stop, failpoints=failpoints, patient=True, archive=archive
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the worker; return the exit status."""
    options = parser().parse_args(arguments)
    logging.basicConfig(
        level=options.log_level, stream=sys.stderr, format="%(asctime)s.%(msecs)03d %(levelname)s %(name)s %(message)s"
    )
    names = [limit.name for limit in dataclasses.fields(Limits)]
    limits = Limits(**{name: value for name in names if (value := getattr(options, name)) is not None})
    traps = parse_spec(options.failpoint)
    failpoints = CrashFailpoints(traps, options.reached)
    if any(trap.moment is Moment.OVERLAPPED for trap in traps):
        turn.STEP_HERE_S_MAX = 0.0  # a quick step would wait for the commit, however often the point is reached
    only = tuple(filter(None, options.only.split(",")))
    archive = None if options.archive is None else ArchiveInto(options.archive, every_s=0.0)
    try:
        graph = load_graph(options.graph)
        if options.gated:
            print("ready", flush=True)
            sys.stdin.readline()
        asyncio.run(run(graph, options.database, limits, only, failpoints, archive))
    except MillError as error:
        logging.getLogger(__name__).exception("worker stopped")
        print(f"error: {error.message}" + (f" ({error.hint})" if error.hint else ""), file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
