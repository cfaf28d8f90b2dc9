"""GuardedInjector: an injector whose failures end no worker and delay no other source.

After a SourceUnavailableError its source partition counts as disconnected, for that reason, and nothing is taken. After
a pause, which grows with the failures in a row, `is_due` asks the worker to connect to the source again. Between two
attempts, and while one lasts, the worker takes turns with everything else.

The source may be somebody else's code. What it raises that is no MillError, a call that does not return, and a batch
that a step could not read (`ingest/batch_check.py`) count as such an outage; they are logged, and the pauses get
longer.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from millpy.errors import MillError, SourceUnavailableError, TransientError
from millpy.ingest.batch_check import check_batch, checked_arrivals
from millpy.ingest.protocol import Injector, Source, SourceBatch, SourceSetup
from millpy.model.dead_letter import error_text
from millpy.model.step_progress import is_user_error
from millpy.runtime.cancellation import is_cancelled

log = logging.getLogger(__name__)
PAUSE_S_MAX = 60.0
OPENING_AWAITED_S = 1.0
"""How long `open` waits, in seconds. A longer attempt to connect continues beside the worker's turns."""
OPENING_REPORTED_S = 5.0
"""How long the first attempt to connect may last, in seconds, before the source counts as disconnected."""
FAREWELL_S_MAX = 5.0

T = TypeVar("T")


class GuardedInjector:
    """An injector that connects when it is opened, and raises MillErrors only.

    Args:
        source: the source.
        setup: the parameters of its injector.
        arrives: whether the event time is that of arrival, so that the steps need the arrivals of batches.
        progressed: called when a call of the source has ended: many partitions together may keep the worker for long.

    Attributes:
        injector: the source's own; None before it is open.
    """

    def __init__(
        self,
        source: Source,
        setup: SourceSetup,
        *,
        arrives: bool = False,
        progressed: Callable[[], None] = lambda: None,
    ) -> None:
        self._source = source
        self._setup = setup
        self._arrives = arrives
        self._progressed = progressed
        self.injector: Injector | None = None
        self._opening: asyncio.Task[None] | None = None
        self._opening_at = 0.0
        self._why = ""
        self._again_at = 0.0

    @property
    def is_due(self) -> bool:
        """Whether the source has failed and the pause is over: it is to be closed, and another one opened."""
        return bool(self._why) and self._setup.clock.monotonic() >= self._again_at

    async def open(self, position: bytes | None) -> None:
        """Begin to connect at a position. If that takes long, it ends later, and `take` returns None until then.

        Raises:
            ConfigError: the source cannot be opened so.
            TransientError: not the source but something else that it needs is away.
        """
        self._opening_at = self._setup.clock.monotonic()
        self._opening = asyncio.create_task(self._open(position))
        self._opening.add_done_callback(lambda _: self._setup.ready.set())
        await asyncio.wait([self._opening], timeout=OPENING_AWAITED_S)
        self._end_opening()

    async def _open(self, position: bytes | None) -> None:
        connection = self._setup.connection
        try:
            with self._guarded("open"):
                self.injector = self._source.connect(self._setup)
                await self._in_time(self.injector.open(position), self._setup.limits.call_s_max)
        except TransientError as error:
            connection.disconnected(error.message, attempted=True)
            raise
        if not self._why and not connection.managed:
            connection.connected()

    @property
    def _is_open(self) -> bool:
        return self._opening is None and self.injector is not None and not self._why

    def _end_opening(self) -> None:
        """Note the end of the attempt to connect, or that it lasts long. Raises what it has raised."""
        if self._opening is None:
            return
        if self._opening.done():
            opened, self._opening = self._opening, None
            opened.result()
            return
        connection, lasts_s = self._setup.connection, self._setup.clock.monotonic() - self._opening_at
        if connection.is_connected is None and lasts_s > OPENING_REPORTED_S:
            connection.disconnected("the attempt to connect has not ended")

    async def take(self) -> SourceBatch | None:
        """Return what is waiting; None while there is no connection. Raises what `open` raises, if that lasts."""
        self._end_opening()
        taken = None
        if self._is_open:
            assert self.injector is not None
            with self._guarded("take"):
                given = await self._in_time(self.injector.take())
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
        if self._is_open:
            assert self.injector is not None
            with self._guarded("acknowledge"):
                await self._in_time(self.injector.acknowledge(token))

    def quiet(self) -> bool:
        """Tell whether nothing waits; without a connection that is not known."""
        is_quiet = False
        if self._is_open:
            assert self.injector is not None
            with self._guarded("quiet"):
                answer: object = self.injector.quiet()
                if not isinstance(answer, bool):  # a coroutine, which is true, would let the clock move the watermark
                    raise TypeError(f"it returned {type(answer).__name__}, not a bool")
                is_quiet = answer
        if is_quiet:
            self._recovered()
        return is_quiet

    async def close(self) -> None:
        """Disconnect, or end the attempt to connect."""
        if self._opening is not None:
            opening, self._opening = self._opening, None
            opening.cancel()
            await asyncio.wait([opening], timeout=FAREWELL_S_MAX)
            if opening.done() and not opening.cancelled() and (error := opening.exception()) is not None:
                log.debug("source %s (%s) was not opened", self._setup.stream, self._setup.partition, exc_info=error)
        if self.injector is not None:
            with self._guarded("close"):
                await self._in_time(self.injector.close())

    async def _in_time(self, call: Awaitable[T], within_s: float | None = None) -> T:
        """Await a call of the source. Raises TimeoutError when it does not return."""
        within_s = within_s or self._setup.limits.edge_call_s_max
        try:
            async with asyncio.timeout(within_s) as scope:
                return await call
        except TimeoutError:
            if scope.expired():
                raise TimeoutError(f"it has not returned for {within_s:g} s") from None
            raise
        finally:
            self._progressed()

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
