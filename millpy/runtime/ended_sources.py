"""Source partitions that have ended, and whether something has come to them since: then they are read on.

A worker looks once at each partition that had ended before it claimed it, so that a file which is always written to
does not keep a worker from its end.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from contextlib import suppress

from millpy.errors import BrokenFileError
from millpy.ingest.protocol import Source, SourceSetup
from millpy.model.dead_letter import error_text

log = logging.getLogger(__name__)
CHECK_S = 5.0
"""How long a worker that ends waits for checks that still run."""
SHOWN_MAX = 5
"""How many things a message names."""


class EndedSources:
    """Checks each ended partition once, beside the turns, which a place that does not answer must not delay.

    Attributes:
        unread: interval of an ended partition -> what has come to it since its end.
        defect: why what has come cannot be read, which is to stop the worker.
    """

    def __init__(self) -> None:
        self._checks: dict[int, asyncio.Task[None]] = {}
        self.unread: dict[int, str] = {}
        self.defect: BrokenFileError | None = None

    def check(self, interval_id: int, source: Source, setup: SourceSetup, why_not: str) -> None:
        """Begin to check an ended partition, unless this process has done so.

        Args:
            interval_id: the interval of the partition.
            source: its source.
            setup: as for `Source.connect`.
            why_not: why it cannot be read on, which is then only told; "" if it can.
        """
        if interval_id not in self._checks:
            check = asyncio.create_task(self._check(interval_id, source, setup, why_not), name=setup.stream)
            self._checks[interval_id] = check
            check.add_done_callback(_log_failure)

    @property
    def is_pending(self) -> bool:
        """Whether a partition is to be read on, or a defect is to stop the worker."""
        return bool(self.unread) or self.defect is not None

    async def await_checks(self) -> None:
        """Wait for the checks that have begun, for at most CHECK_S."""
        with suppress(TimeoutError):
            async with asyncio.timeout(CHECK_S):
                await asyncio.gather(*map(asyncio.shield, self._checks.values()), return_exceptions=True)

    def forget(self, interval_id: int) -> None:
        """Forget what has come to a partition, which is checked again if this worker claims it again."""
        self.unread.pop(interval_id, None)
        self._checks.pop(interval_id, None)

    def close(self) -> None:
        """Cancel the checks that still run."""
        for check in self._checks.values():
            check.cancel()

    async def _check(self, interval_id: int, source: Source, setup: SourceSetup, why_not: str) -> None:
        try:
            unread = await asyncio.to_thread(source.unread, setup)
        except BrokenFileError as error:
            self.defect = error
            setup.ready.set()
            return
        except (SystemExit, KeyboardInterrupt) as error:  # of a task, they would end the worker
            raise RuntimeError(error_text(error)) from error
        if not unread:
            return
        if not why_not:
            self.unread[interval_id] = _shown(unread)
            setup.ready.set()
            return
        what = f"it has ended and its windows are closed, so this is not read: {_shown(unread)}; {why_not}"
        log.warning("source %s: %s", setup.stream, what, extra={"hint": RESET_HINT})
        setup.tell("came_after_end", {"stream": setup.stream, "partition": setup.partition, "what": what})


RESET_HINT = "to read everything anew: millpy deploy GRAPH.py --reset NAME, with the source and all its readers"


def _shown(unread: Sequence[str]) -> str:
    more = f" and {len(unread) - SHOWN_MAX} more" if len(unread) > SHOWN_MAX else ""
    return "; ".join(unread[:SHOWN_MAX]) + more


def _log_failure(check: asyncio.Task[None]) -> None:
    """Log what a source has raised, whatever it is: the worker can go on without an answer."""
    if not check.cancelled() and (error := check.exception()) is not None:
        log.warning("source %s has ended; what has come since is not known: %s", check.get_name(), error)
