"""One worker of a benchmark in its own process: like `millpy.process.worker_process`, but with a stopwatch.

    python -m benchmarks.worker GRAPH.py --database URL --report FILE [--only a,b]

Limits come from MILLPY_* as for `millpy run`. At its end, and once it has claimed something, it writes FILE (JSON):
when it first claimed, how often and when it last committed and folded (seconds of the machine's monotonic clock, so
they compare across processes), and the high-water mark of its memory.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import time
from pathlib import Path

from benchmarks.memory import peak_rss_mb
from millpy.config.settings import Settings, configure_logging
from millpy.graph.loader import load_graph
from millpy.hosting.failpoints import Failpoint
from millpy.process.assembly import run_worker
from millpy.process.worker_process import archive_of
from millpy.runtime import maintenance

maintenance.FINISHED_BYTES = 1 << 60
"""Bundles are counted in the rings afterwards (`bundles.py`), so a finished worker does not empty them."""


class Stopwatch:
    """Failpoints that only read the clock."""

    watches_fence = False

    def __init__(self, report: Path) -> None:
        self.report = report
        self.claimed_at: float | None = None
        self.committed_at = self.folded_at = 0.0
        self.commits = self.folds = 0

    async def reach(self, point: Failpoint) -> None:
        self.reach_now(point)

    def reach_now(self, point: Failpoint) -> None:
        if point is Failpoint.AFTER_COMMIT:
            self.commits += 1
            self.committed_at = time.monotonic()
        elif point is Failpoint.AFTER_FOLD:
            self.folds += 1
            self.folded_at = time.monotonic()
        elif point is Failpoint.AFTER_CLAIM and self.claimed_at is None:
            self.claimed_at = time.monotonic()
            self.write()

    def write(self) -> None:
        """Replace the report in one step, so that a reader never sees half of it."""
        fields = {name: value for name, value in vars(self).items() if name != "report"}
        unfinished = self.report.with_suffix(".new")
        unfinished.write_text(json.dumps({**fields, "peak_rss_mb": peak_rss_mb()}))
        unfinished.rename(self.report)


async def run(arguments: argparse.Namespace, stopwatch: Stopwatch) -> None:
    settings = Settings.load(database_url=arguments.database)
    configure_logging(settings)
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    await run_worker(
        load_graph(arguments.graph),
        arguments.database,
        limits=settings.limits,
        only=tuple(name for name in arguments.only.split(",") if name),
        stop=stop,
        failpoints=stopwatch,
        archive=archive_of(settings),
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.worker")
    parser.add_argument("graph")
    parser.add_argument("--database", required=True)
    parser.add_argument("--report", type=Path, required=True)
    parser.add_argument("--only", default="")
    arguments = parser.parse_args()
    stopwatch = Stopwatch(arguments.report)
    asyncio.run(run(arguments, stopwatch))
    stopwatch.write()


if __name__ == "__main__":
    main()
