"""Warnings of what comes to source partitions after their end: their windows are closed, so it is not read."""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress

from millpy.ingest.protocol import Source, SourceSetup

log = logging.getLogger(__name__)
LOOK_S = 5.0
"""How long a worker whose sources have ended waits for the looks at them."""
SHOWN_MAX = 5
"""How many things a warning names."""


class EndedSources:
    """Looks at each ended partition once, beside the turns: a place that does not answer delays none of them."""

    def __init__(self) -> None:
        self._looks: dict[int, asyncio.Task[None]] = {}

    def look(self, interval_id: int, source: Source, setup: SourceSetup) -> None:
        """Begin to look at an ended partition, unless this process has."""
        if interval_id not in self._looks:
            look = self._looks[interval_id] = asyncio.create_task(_look(source, setup), name=setup.stream)
            look.add_done_callback(_log_failure)

    async def await_looks(self) -> None:
        """Wait for the looks that have begun, for at most LOOK_S."""
        with suppress(TimeoutError):
            async with asyncio.timeout(LOOK_S):
                await asyncio.gather(*self._looks.values(), return_exceptions=True)

    def close(self) -> None:
        """Cancel the looks that have not ended."""
        for look in self._looks.values():
            look.cancel()


async def _look(source: Source, setup: SourceSetup) -> None:
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


def _log_failure(look: asyncio.Task[None]) -> None:
    """Log what a source has raised, whatever it is: only a warning depends on it."""
    if not look.cancelled() and (error := look.exception()) is not None:
        log.warning("source %s has ended; what has come since is not known: %s", look.get_name(), error)
