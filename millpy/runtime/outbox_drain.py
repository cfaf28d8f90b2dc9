"""OutboxDrain: delivers the messages of one owned interval of a sink, in order, after the commits that stored them.

What a commit has just stored is handed over in memory, if there is room; everything else is read from the outbox. There
is one `send` at a time. After an error the drain connects again, and begins at the position that is known: that of the
other side if it stores one, else the one up to which all was delivered.

A `send` that fails may have been too much for a slow link, or for a transaction that must end in time: the next one has
half as many messages, and each that succeeds lets the next one have twice as many again.

A drain that owns its interval no longer may still deliver messages, because they are committed and never change; the
new owner may deliver them, too. A sink that stores positions shuts the earlier connection out.
"""

from __future__ import annotations

import asyncio
import logging
import random
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from millpy.clock import Clock
from millpy.errors import CorruptionError, OwnershipError, SinkUnavailableError, TransientError, UsageError
from millpy.ingest.connection_state import ConnectionState
from millpy.limits import Limits
from millpy.model.checkpoint import Grant, OutboxRows, OutboxState
from millpy.model.record import RecordType
from millpy.sinks.messages import SinkMessages, decode, joined
from millpy.sinks.protocol import SendBound, Sink, SinkConnection, SinkSetup
from millpy.store.protocol import SinkReport, Store

log = logging.getLogger(__name__)
HANDED_OVER_BYTES_MAX = 4_000_000
"""Bytes of committed rows that wait in memory, for each interval; others are read from the store in their turn."""
CLOSE_S_MAX = 5.0
"""Seconds that a connection may take to close; then it is left to itself."""


@dataclass(frozen=True, slots=True)
class DrainContext:
    """What the drains of a worker share.

    Attributes:
        wake: called when an outbox is no longer full.
        report: called when progress is to be recorded at once.
    """

    store: Store
    limits: Limits
    clock: Clock
    rng: random.Random
    wake: Callable[[], None]
    report: Callable[[], None]


class OutboxDrain:
    """Delivers the messages of one interval.

    Attributes:
        grant: the worker's present grant on the interval.
        head: the position behind the last committed message.
        delivered: the other side has all messages before it.
        size: bytes of the committed rows that are not delivered.
        is_full: whether the interval takes no input: more waits than the limits allow, until it is half of that, or the
            sink is not prepared.
        connection: whether the sink is connected, and why not.
    """

    def __init__(
        self,
        context: DrainContext,
        grant: Grant,
        sink: Sink,
        setup: SinkSetup,
        state: OutboxState,
        record_types: Sequence[RecordType] = (),
    ) -> None:
        self._context = context
        self._sink = sink
        self._setup = setup
        self._record_types = record_types
        self._bound = sink.bound
        self._prepared = type(sink).prepare is Sink.prepare  # which does nothing
        self.grant = grant
        self.connection: ConnectionState = setup.connection
        self.head, self.delivered = state.head, state.delivered
        self._sizes: deque[tuple[int, int]] = deque([(state.head, state.size)] if state.size else [])
        self.size = state.size
        self.is_full = False
        self._rows: deque[OutboxRows] = deque()
        self._rows_size = 0
        self._taken: SinkMessages | None = None
        self._read_to = state.delivered
        self._news = asyncio.Event()
        self._recorded = state.delivered
        self._recording = asyncio.Event()
        self._reported: SinkReport | None = None
        self._open_connection: SinkConnection | None = sink.connect(setup)
        self._judge()
        self._task = asyncio.create_task(self._run(), name=f"millpy-outbox-{setup.sink}-{setup.interval}")

    # -- called by the worker -------------------------------------------------------------------------------------

    def regrant(self, grant: Grant, state: OutboxState) -> None:
        """Continue under another grant of the same worker, after a commit whose outcome was not known."""
        self.grant = grant
        if state.head > self.head:
            self._add(state.head, max(0, state.size - self.size))

    def committed(self, rows: OutboxRows) -> None:
        """Take rows that a commit has stored."""
        if rows.end <= self.head:
            return  # known by a read after the commit
        if rows.position == self._read_to and self._rows_size + len(rows.payload) <= HANDED_OVER_BYTES_MAX:
            self._rows.append(rows)
            self._rows_size += len(rows.payload)
            self._read_to = rows.end
        self._add(rows.end, len(rows.payload))

    def _add(self, head: int, size: int) -> None:
        self.head = head
        self._sizes.append((head, size))
        self.size += size
        self._judge()
        self._news.set()

    def due_report(self) -> SinkReport | None:
        """Return what is to be recorded; None if nothing has changed, or nothing is known yet."""
        if self.connection.is_connected is None and self.delivered == self._recorded:
            return None
        report = self._report()
        return None if report == self._reported else report

    def _report(self) -> SinkReport:
        now = self.connection
        connected = now.is_connected is not False
        return SinkReport(self.grant, self.delivered, connected, now.since_us, now.why, now.attempts)

    def recorded(self, report: SinkReport) -> None:
        """Learn that a report is stored."""
        self._reported, self._recorded = report, max(self._recorded, report.delivered)
        self._recording.set()

    def raise_failed(self) -> None:
        """Raise the error that has ended the drain, if any has."""
        if self._task.done() and not self._task.cancelled():
            self._task.result()

    async def close(self) -> None:
        """Stop delivering, and disconnect."""
        self._task.cancel()
        await asyncio.wait([self._task])
        if not self._task.cancelled():
            self._task.exception()

    # -- the task -------------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        """Connect and deliver, again after each error that may pass."""
        limits, retry_s = self._context.limits, self._context.limits.retry_s_min
        while True:
            before = self.delivered
            try:
                await self._prepare()
                await self._connect_and_deliver()
            except OwnershipError as error:
                log.debug("sink %s: %s", self._setup.sink, error)  # the worker will find that out, too
            except CorruptionError:
                raise
            except (TransientError, UsageError) as error:
                self._lost(f"{error.message} ({error.hint})" if error.hint else error.message)
            except Exception as error:  # a defect of a sink must not stop what else the worker runs
                log.exception("sink %s, interval %d", self._setup.sink, self._setup.interval)
                self._lost(f"{type(error).__name__}: {error}")
            retry_s = limits.retry_s_min if self.delivered > before else min(limits.retry_s_max, retry_s * 2)
            await self._context.clock.sleep(retry_s * self._context.rng.uniform(0.5, 1.0))

    async def _prepare(self) -> None:
        """Get what messages need, before the interval takes input."""
        if not self._prepared:
            await self._sink.prepare(self._record_types)
            self._prepared = True
            self._judge()
            self._context.wake()

    def _lost(self, why: str) -> None:
        known = self.connection.why
        self.connection.disconnected(why, attempted=True)
        if known != self.connection.why:
            log.warning("sink %s, interval %d: %s; trying again", self._setup.sink, self._setup.interval, why)

    async def _connect_and_deliver(self) -> None:
        if not self._setup.trusted():  # a connection would shut out that of the new owner
            raise SinkUnavailableError("the lease has ended, and another worker may own the interval")
        connection = self._open_connection or self._sink.connect(self._setup)
        self._open_connection = None
        try:
            known = await connection.open()
            if known is not None and known > self.head:  # a new owner has committed them, or the database is an old one
                await self._context.store.record_delivered([self._report()])
            self._begin(known)
            self.connection.connected()
            while True:
                messages = await self._next()
                bound = self._bound
                self._bound = SendBound(max(1, len(messages) // 2), max(1, messages.size // 2))  # unless it succeeds
                await connection.send(messages)
                whole = self._sink.bound
                self._bound = SendBound(min(whole.records, 2 * bound.records), min(whole.bytes, 2 * bound.bytes))
                self._pass(messages.end)
                if known is None:
                    await self._await_recorded(messages.end)
        finally:
            await _closed(connection)

    def _begin(self, known: int | None) -> None:
        """Begin behind what the other side has, in the stored rows.

        Raises:
            SinkUnavailableError: the other side has messages that were never committed.
        """
        if known is not None and known > self.head:
            raise SinkUnavailableError(
                f"the other side has messages up to {known}, but only {self.head} are committed",
                hint="was the database restored from a backup? Deploy the sink under another name",
            )
        self._pass(max(self.delivered, known or 0))
        self._rows.clear()
        self._rows_size, self._taken, self._read_to = 0, None, self.delivered

    def _pass(self, position: int) -> None:
        """Note that the other side has all messages before a position."""
        self.delivered = position
        while self._sizes and self._sizes[0][0] <= position:
            self.size -= self._sizes.popleft()[1]
        before = self.is_full
        self._judge()
        if before and not self.is_full:
            self._context.wake()

    def _judge(self) -> None:
        limits, waiting = self._context.limits, self.head - self.delivered
        share = 2 if self.is_full else 1
        self.is_full = (
            not self._prepared
            or self.size * share > limits.outbox_bytes_max
            or waiting * share > limits.outbox_records_max
        )

    async def _await_recorded(self, position: int) -> None:
        """Wait until the progress is stored, because the other side cannot tell it after a crash."""
        while self._recorded < position:
            self._recording.clear()
            self._context.report()
            await self._recording.wait()

    async def _next(self) -> SinkMessages:
        """Wait for messages, and return as many of the oldest as one `send` may have."""
        bound = self._bound
        parts: list[SinkMessages] = []
        room, room_bytes = bound.records, bound.bytes
        while room > 0 and room_bytes > 0:
            taken = self._taken if self._taken is not None else await self._next_row(wait=not parts)
            if taken is None:
                break
            part = _fitting(taken, room, room_bytes)
            if not len(part):
                part = taken.part(0, 0 if parts else 1)  # a single message may be larger than the bound
            self._taken = taken.part(len(part), len(taken)) if len(part) < len(taken) else None
            if not len(part):
                break
            parts.append(part)
            room, room_bytes = room - len(part), room_bytes - part.size
        return joined(parts)

    async def _next_row(self, *, wait: bool) -> SinkMessages | None:
        """Return the messages of the next row that are not delivered; None if there is none now and `wait` is false."""
        while not self._rows:
            if self._read_to < self.head:
                await self._read()
                continue
            if not wait:
                return None
            self._news.clear()
            await self._news.wait()
        rows = self._rows.popleft()
        self._rows_size -= len(rows.payload)
        messages = decode(rows)
        skipped = max(0, self.delivered - rows.position)
        return messages.part(skipped, len(messages)) if skipped else messages

    async def _read(self) -> None:
        """Read the next rows from the store. Raises SinkUnavailableError if they are gone, to another owner."""
        found = await self._context.store.read_outbox(self.grant, self._read_to, HANDED_OVER_BYTES_MAX)
        if not found or found[0].position > self._read_to:
            raise SinkUnavailableError(f"the messages from position {self._read_to} have left the outbox")
        self._rows.extend(found)
        self._rows_size += sum(len(rows.payload) for rows in found)
        self._read_to = found[-1].end


def _fitting(messages: SinkMessages, records: int, size: int) -> SinkMessages:
    """Return the first messages that fit into a number and bytes."""
    first = messages if len(messages) <= records else messages.part(0, records)
    if first.size <= size:
        return first
    return first.part(0, bisect_right(list(accumulate(first.sizes())), size))


async def _closed(connection: SinkConnection) -> None:
    """Close a connection; leave one that does not close to itself."""
    try:
        async with asyncio.timeout(CLOSE_S_MAX):
            await connection.close()
    except Exception as error:  # it is no longer used
        log.debug("a sink does not close: %r", error)
