"""GuardedInjector: an injector whose failures end no worker and delay no other source.

After a SourceUnavailableError its source partition counts as disconnected, for that reason, and nothing is taken. After
a pause, which grows with the failures in a row, `take` raises the error: the worker recovers, and connects to the
source again at the stored position. Between two attempts the worker takes turns with everything else.

The source may be somebody else's code. What it raises that is no MillError, and a batch that a step could not read
(`ingest/batch_check.py`), count as such an outage; they are logged, and the pauses get longer.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from millpy.errors import MillError, SourceUnavailableError
from millpy.ingest.batch_check import check_batch, checked_arrivals
from millpy.ingest.protocol import Injector, Source, SourceBatch, SourceSetup
from millpy.model.dead_letter import error_text
from millpy.model.step_progress import is_user_error
from millpy.runtime.cancellation import is_cancelled

log = logging.getLogger(__name__)
PAUSE_S_MAX = 60.0


class GuardedInjector:
    """An injector that connects when it is opened, and raises MillErrors only.

    Args:
        source: the source.
        setup: the parameters of its injector.
        arrives: whether the event time is that of arrival, so that the steps need the arrivals of batches.

    Attributes:
        injector: the source's own; None before it is open.
    """

    def __init__(self, source: Source, setup: SourceSetup, *, arrives: bool = False) -> None:
        self._source = source
        self._setup = setup
        self._arrives = arrives
        self.injector: Injector | None = None
        self._why = ""
        self._again_at = 0.0

    async def open(self, position: bytes | None) -> None:
        """Connect, and open at a position. Raises ConfigError."""
        with self._guarded("open"):
            self.injector = self._source.connect(self._setup)
            await self.injector.open(position)

    async def take(self) -> SourceBatch | None:
        """Return what is waiting; None after a failure.

        Raises:
            SourceUnavailableError: the pause after a failure is over.
        """
        if self._why and self._setup.clock.monotonic() >= self._again_at:
            raise SourceUnavailableError(self._why)
        taken = None
        if self.injector is not None and not self._why:
            with self._guarded("take"):
                given = await self.injector.take()
                if given is not None:
                    self._check(given)
                taken = given
        if taken is not None:
            self._recovered()
        return taken

    def _check(self, taken: object) -> None:
        """Check a batch before the worker sees it, and ask for its arrivals now if a step would ask for them."""
        if not isinstance(taken, SourceBatch):
            raise TypeError(f"it returned {type(taken).__name__}, not a SourceBatch")
        check_batch(taken)
        if self._arrives and taken.arrivals is not None:
            arrivals = checked_arrivals(taken)
            taken.arrivals = lambda: arrivals

    async def acknowledge(self, token: Any) -> None:
        """Acknowledge a batch; after a failure it comes again."""
        if self.injector is not None and not self._why:
            with self._guarded("acknowledge"):
                await self.injector.acknowledge(token)

    def quiet(self) -> bool:
        """Tell whether nothing waits; after a failure that is not known."""
        is_quiet = False
        if self.injector is not None and not self._why:
            with self._guarded("quiet"):
                answer: object = self.injector.quiet()
                if not isinstance(answer, bool):  # a coroutine, which is true, would let the clock move the watermark
                    raise TypeError(f"it returned {type(answer).__name__}, not a bool")
                is_quiet = answer
        if is_quiet:
            self._recovered()
        return is_quiet

    async def close(self) -> None:
        """Disconnect."""
        if self.injector is not None:
            with self._guarded("close"):
                await self.injector.close()

    @contextmanager
    def _guarded(self, call: str) -> Iterator[None]:
        """Run a call of the source inside the block; after a defect, note it and leave the block."""
        try:
            yield
        except BaseException as error:
            setup, connection = self._setup, self._setup.connection
            if isinstance(error, SourceUnavailableError):  # the worker logs it when it connects again
                self._why = error.message if isinstance(error.message, str) else error_text(error)
                pause_s_max = setup.limits.retry_s_max
            elif isinstance(error, MillError) or not is_user_error(error):
                raise
            elif isinstance(error, asyncio.CancelledError) and is_cancelled():  # this task, not what the source awaits
                raise
            else:
                log.exception("source %s (%s) fails in %s", setup.stream, setup.partition, call)
                self._why = f"the source has a defect: {call} raises {error_text(error)}"
                pause_s_max = PAUSE_S_MAX
            connection.hold(self._why)
            connection.disconnected(self._why, attempted=True)
            connection.failing = True
            pause_s = setup.limits.retry_pause_s(connection.attempts, pause_s_max)
            self._again_at = setup.clock.monotonic() + pause_s

    def _recovered(self) -> None:
        """Note that the source works, if it had failed."""
        connection = self._setup.connection
        if connection.failing:
            connection.failing = False
            connection.release()
