"""Warnings of what comes to source partitions after their end: their windows are closed, so it is not read."""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress

from millpy.ingest.protocol import Source, SourceSetup

log = logging.getLogger(__name__)
CHECK_S = 5.0
"""How long a worker that ends waits for checks that still run."""
SHOWN_MAX = 5
"""How many things a warning names."""


class EndedSources:
    """Checks each ended partition once, beside the turns, which a place that does not answer must not delay."""

    def __init__(self) -> None:
        self._checks: dict[int, asyncio.Task[None]] = {}

    def check(self, interval_id: int, source: Source, setup: SourceSetup) -> None:
        """Begin to check an ended partition, unless this process has done so."""
        if interval_id not in self._checks:
            check = self._checks[interval_id] = asyncio.create_task(_check(source, setup), name=setup.stream)
            check.add_done_callback(_log_failure)

    async def await_checks(self) -> None:
        """Wait for the checks that have begun, for at most CHECK_S."""
        with suppress(TimeoutError):
            async with asyncio.timeout(CHECK_S):
                await asyncio.gather(*self._checks.values(), return_exceptions=True)

    def close(self) -> None:
        """Cancel the checks that still run."""
        for check in self._checks.values():
            check.cancel()


async def _check(source: Source, setup: SourceSetup) -> None:
    unread = await asyncio.to_thread(source.unread, setup)
    if not unread:
        return
    more = f" and {len(unread) - SHOWN_MAX} more" if len(unread) > SHOWN_MAX else ""
    these = "; ".join(unread[:SHOWN_MAX]) + more
    what = f"it has ended and its windows are closed, so this is not read: {these}"
    log.warning(
        "source %s: %s (for files that come or grow later, use Directory in a new generation)", setup.stream, what
    )
    setup.tell("came_after_end", {"stream": setup.stream, "partition": setup.partition, "what": what})


def _log_failure(check: asyncio.Task[None]) -> None:
    """Log what a source has raised, whatever it is: only a warning depends on it."""
    if not check.cancelled() and (error := check.exception()) is not None:
        log.warning("source %s has ended; what has come since is not known: %s", check.get_name(), error)
