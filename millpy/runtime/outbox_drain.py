"""OutboxDrain: delivers the messages of one owned interval of a sink, in order, after the commits that stored them.

There is one `send` at a time. After an error the drain connects again, and begins at the position that is known: that
of the other side if it stores one, else the one up to which all was delivered.

Messages that the other side refuses are held back, with all that come behind them of their keys, and sent again when
they are due (`refused_messages.py`); others are delivered meanwhile. What is held back is stored in one statement with
the position behind the `send`, before the next one. A sink that stores positions has taken none of such a `send`: the
messages are held back first, and the others are sent without them.

A `send` that fails may have been too much for a slow link, or for a transaction that must end in time: the next one has
half as many messages, unless a repeat must have the same, and each that succeeds lets the next one have twice as many.

A drain that owns its interval no longer may still deliver messages, because they are committed and never change; the
new owner may deliver them, too. A sink that stores positions shuts the earlier connection out.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from millpy.clock import Clock
from millpy.errors import (
    CorruptionError,
    MessagesRefusedError,
    OwnershipError,
    SinkUnavailableError,
    StoreUnavailableError,
    TransientError,
    UsageError,
)
from millpy.ingest.connection_state import ConnectionState
from millpy.limits import Limits
from millpy.model.checkpoint import DeadLetter, Grant, OutboxRows, OutboxState, RefusedMessage, Settlement
from millpy.model.dead_letter import error_text, printable
from millpy.model.stage import Release
from millpy.runtime.cancellation import is_cancelled
from millpy.runtime.refused_messages import RETRY_AFTER_S_MAX, RefusedMessages
from millpy.runtime.waiting_rows import WaitingRows
from millpy.sinks.messages import SinkMessages
from millpy.sinks.outbox import OutboxStage
from millpy.sinks.protocol import SendBound, Sink, SinkConnection, SinkSetup
from millpy.store.protocol import SinkReport, Store

log = logging.getLogger(__name__)
CLOSE_S_MAX = 5.0
"""Seconds that a connection may take to close; then it is left to itself."""
DEFECTS = (Exception, BaseExceptionGroup, SystemExit, GeneratorExit)
"""What a sink may raise that has a defect."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class DrainContext:
    """What the drains of a worker share.

    Attributes:
        wake: called when an outbox is no longer full, and when messages are given up.
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
        waiting: the rows that are not delivered.
        refused: the messages that the other side refuses, and those behind them.
        is_full: whether the interval takes no input: more waits than the limits allow, until it is half of that, or the
            sink is not prepared, or was not asked yet what it has, or has messages that were never committed.
        connection: whether the sink is connected, and why not.
    """

    def __init__(
        self,
        context: DrainContext,
        grant: Grant,
        sink: Sink,
        setup: SinkSetup,
        state: OutboxState,
        stage: OutboxStage | None = None,
    ) -> None:
        self._context = context
        self._sink = sink
        self._setup = setup
        self._stage = stage
        self.grant = grant
        self.connection: ConnectionState = setup.connection
        self.waiting = WaitingRows(context.store, state)
        self.refused = RefusedMessages(sink.refusals, context.limits, context.rng, state.refused)
        self.is_full = self._closing = False
        self._prepared = type(sink).prepare is Sink.prepare  # which does nothing
        self._stores_positions = self._is_ahead = self._has_asked = False
        self._known_max = state.head
        """The greatest position that the other side may have: of what was committed at the takeover, or sent since."""
        self._bound = sink.bound
        self._news = asyncio.Event()
        self._recorded = state.delivered
        self._recording = asyncio.Event()
        self._reported: SinkReport | None = None
        self._call: tuple[str, float] | None = None
        """The call of the sink that has not returned and is not reported, and when it began."""
        self._open_connection = self._try_to_connect(has_delivered=state.delivered > 0)
        self._judge()
        self._task = asyncio.create_task(self._run(), name=f"millpy-outbox-{setup.sink}-{setup.interval}")

    def _try_to_connect(self, *, has_delivered: bool) -> SinkConnection | None:
        """Return a connection, not yet open; None if it cannot be made now: the task tries again, and says why.

        Raises:
            UsageError: it never can. A sink that has delivered could: a file with a secret may be about to be replaced.
        """
        try:
            return self._sink.connect(self._setup)
        except (asyncio.CancelledError, *DEFECTS) as error:
            if isinstance(error, UsageError) and not has_delivered:
                raise
            log.debug("sink %s: %s", self._setup.sink, error_text(error))
            return None

    # -- called by the worker -------------------------------------------------------------------------------------

    def agrees(self, grant: Grant, state: OutboxState) -> bool:
        """Tell whether the store still has all that it had stored of this outbox, by a state read under a grant."""
        if grant == self.grant:  # reports may have changed the store since it was read
            return True
        has_all = state.head >= self.waiting.head and state.delivered >= self._recorded
        return has_all and self.refused.agree(state.refused)

    def regrant(self, grant: Grant, state: OutboxState) -> None:
        """Continue under another grant of the same worker, after a commit whose outcome was not known."""
        if grant != self.grant:  # under the same one nothing was committed
            self.refused.reconcile(state.refused)
            self._known_max = max(self._known_max, state.head)
        self.grant = grant
        if state.head > self.waiting.head:
            self.waiting.add(state.head, max(0, state.size - self.waiting.size))
        self._judge()
        self._news.set()

    def committed(self, rows: OutboxRows | None, settlement: Settlement | None = None) -> None:
        """Take rows that a commit has stored, and what it has settled."""
        if settlement is not None:
            self.refused.settle(settlement.letters, settlement.released)
        if rows is not None:
            self.waiting.commit(rows)
        self._judge()
        self._news.set()

    def settlement(self, releases: Sequence[Release]) -> tuple[Settlement | None, list[Release]]:
        """Return what the next commit is to settle, and the releases that it executes; others come again."""
        # A sink that stores positions must have passed a message: what is behind its position comes again.
        given_up = self.refused.take_given_up(self._recorded)
        letters = {found.position: self._letter(found.message, found.why) for found in given_up}
        released, executed = [], []
        for release in releases:
            found = self.refused.parked(release.key, release.ticket)
            if found is not None:
                if not self.refused.can_release(found, self._recorded):
                    continue
                found.settling = True
                released.append(release.key)
                if release.discard:
                    letters[found.position] = self._letter(found.message, found.why)
            executed.append(release)
        return (Settlement(letters, released) if letters or released else None), executed

    def _letter(self, message: SinkMessages, why: str) -> DeadLetter:
        assert self._stage is not None, "only a step of a graph gives messages up"
        return self._stage.letter_of(message, why)

    def due_report(self) -> SinkReport | None:
        """Return what is to be recorded; None if nothing has changed, or nothing is known yet."""
        self._report_silence()
        changes = self.refused.changes
        if self.connection.is_connected is None and self.waiting.delivered == self._recorded and not changes:
            return None
        report = self._report(changes)
        return None if report == self._reported and not changes else report

    def _report(self, changes: Mapping[int, RefusedMessage | None]) -> SinkReport:
        now = self.connection
        return SinkReport(
            self.grant,
            self.waiting.delivered,
            now.is_connected is not False,
            now.since_us,
            printable(now.why),
            now.attempts,
            tuple(change for change in changes.values() if change is not None),
            tuple(position for position, change in changes.items() if change is None),
        )

    def _report_silence(self) -> None:
        """Report a call that does not return as an outage; leave it alone, as what it has sent may still arrive."""
        within_s = self._context.limits.edge_call_s_max
        if self._call is not None and self._now() - self._call[1] > within_s:
            (what, _), self._call = self._call, None
            self._lost(f"`{what}` has not returned for {within_s:g} s", "waiting for it")

    def recorded(self, report: SinkReport) -> None:
        """Learn that a report is stored."""
        self._reported, self._recorded = report, max(self._recorded, report.delivered)
        self.refused.on_stored(report.refused, report.accepted)
        self._recording.set()
        if self.refused.has_given_up(self._recorded):
            self._context.wake()

    def raise_failed(self) -> None:
        """Raise the error that has ended the drain, if any has."""
        if self._task.done() and not self._task.cancelled():
            self._task.result()

    async def close(self) -> None:
        """Stop delivering, and disconnect. A sink that does not let itself be stopped is left to itself."""
        self._closing = True  # a sink may swallow the cancellation
        self._task.cancel()
        done, _ = await asyncio.wait([self._task], timeout=2 * CLOSE_S_MAX)
        if not done:
            log.warning("sink %s, interval %d, does not stop", self._setup.sink, self._setup.interval)
        elif not self._task.cancelled():
            self._task.exception()

    # -- the task -------------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        """Connect and deliver, again after each error that may pass."""
        limits, retry_s = self._context.limits, self._context.limits.retry_s_min
        while not self._closing:
            before, after_s = self.waiting.delivered, 0.0
            try:
                await self._prepare()
                await self._connect_and_deliver()
            except (OwnershipError, StoreUnavailableError) as error:
                log.debug("sink %s: %s", self._setup.sink, error)  # the worker will find that out, too
            except CorruptionError:
                raise
            except (TransientError, UsageError) as error:
                asked_s = getattr(error, "retry_after_s", None)
                after_s = asked_s if isinstance(asked_s, float | int) else 0.0  # text of a header says nothing
                self._lost(f"{error.message} ({error.hint})" if error.hint else f"{error.message}")  # of any type
            except asyncio.CancelledError as error:
                if self._closing or is_cancelled():  # the drain itself, not only what its sink waits for
                    raise
                # As clients do whose tasks end.
                self._lost(f"the sink was cancelled by its own code: {error_text(error)}")
            except DEFECTS as error:  # it must not stop what else the worker runs
                log.exception("sink %s, interval %d", self._setup.sink, self._setup.interval)
                self._lost(error_text(error))
            retry_s = limits.retry_s_min if self.waiting.delivered > before else min(limits.retry_s_max, retry_s * 2)
            delay = retry_s * self._context.rng.uniform(0.5, 1.0)
            await self._context.clock.sleep(max(delay, min(after_s, RETRY_AFTER_S_MAX)))

    async def _prepare(self) -> None:
        """Get what messages need, before the interval takes input."""
        if not self._prepared:
            await self._sink.prepare([] if self._stage is None else self._stage.record_types)
            self._prepared = True
            self._judge()
            self._context.wake()

    async def _ask(self, what: str, call: Awaitable[T]) -> T:
        self._call = (what, self._now())
        try:
            return await call
        finally:
            self._call = None

    def _lost(self, why: str, doing: str = "trying again") -> None:
        known = self.connection.why
        self.connection.disconnected(why, attempted=True)
        if not self._has_asked:
            self._has_asked = True  # it may be away for long: messages wait in the outbox
            self._judge()
            self._context.wake()
        if known != self.connection.why:
            log.warning("sink %s, interval %d: %s; %s", self._setup.sink, self._setup.interval, why, doing)

    async def _connect_and_deliver(self) -> None:
        if not self._setup.trusted():  # a connection would shut out that of the new owner
            raise SinkUnavailableError("the lease has ended, and another worker may own the interval")
        connection = self._open_connection or self._sink.connect(self._setup)
        self._open_connection = None
        try:
            known = _position(await self._ask("open", connection.open()))
            if known is not None and known > self._known_max:  # by a new owner, or the database is an old one
                await self._context.store.record_delivered([self._report({})])
            self._begin(known)
            while not self._closing:
                if (again := self._due_again()) is not None:
                    again.end = self.waiting.delivered
                    await self._send(connection, again)
                    await self._await_recorded()
                if not self._is_held:
                    await self._send_next(connection)
                await self._await_news()
        finally:
            await _closed(connection)

    def _due_again(self) -> SinkMessages | None:
        """Return refused messages that are to be sent again now; one at a time if a repeat must have the same."""
        bound = SendBound(records=1) if self._sink.stable_sends else self._bound
        return self.refused.due(self._now(), bound, self.waiting.delivered, firsts=self._stores_positions)

    @property
    def _is_held(self) -> bool:
        """Whether too many messages are refused to send others."""
        stored_ahead = self._stores_positions or self._sink.stable_sends
        return self.refused.is_full(self.waiting.delivered if stored_ahead else None)

    def _now(self) -> float:
        return self._context.clock.monotonic()

    def _begin(self, known: int | None) -> None:
        """Begin behind what the other side has, in the stored rows.

        Raises:
            SinkUnavailableError: the other side has messages that were never committed.
        """
        self._is_ahead = known is not None and known > self._known_max
        self._has_asked = True
        if self._is_ahead:
            self._judge()
            raise SinkUnavailableError(
                f"the other side has messages up to {known}, but only {self._known_max} are committed",
                hint="was the database restored from a backup? Delete the position that the other side stores,"
                " such as the group's offsets of the topic in Kafka; the sink then begins where the database says",
            )
        self._stores_positions = known is not None
        if self._stores_positions:
            self.refused.be_final()
        self._pass(known or 0)
        self.waiting.rewind()
        # One that was lost may take connections and no messages: then only a `send` shows that it is back.
        if self.connection.is_connected is None or (
            self.waiting.is_empty and self.refused.next_due(self.waiting.delivered) is None
        ):
            self.connection.connected()

    async def _send_next(self, connection: SinkConnection) -> None:
        """Send the next messages; hold those back that must wait behind refused ones."""
        stable = self._sink.stable_sends
        bound = self._sink.bound if stable else self._bound
        taken = await self.waiting.take(self.grant, bound, stable=stable)
        if taken is None:
            return
        sent, behind = self.refused.separate(taken)
        chosen = taken if len(sent) == len(taken) else taken.select(sent)
        # The position of the other side will be behind them; or a repeated `send` must not have them, either.
        if (self._stores_positions or stable) and behind:
            self._wait_behind(taken, behind)
            behind = []
            await self._await_recorded()
        if sent and not await self._send(connection, chosen):
            self.waiting.rewind()
            return
        self._wait_behind(taken, behind)
        self._pass(taken.end)
        await self._await_recorded()

    async def _send(self, connection: SinkConnection, messages: SinkMessages) -> bool:
        """Send messages, and hold those back that are refused. Return False if the other side has taken none."""
        bound = self._bound
        self._bound = SendBound(max(1, len(messages) // 2), max(1, messages.size // 2))  # unless it succeeds
        self._known_max = max(self._known_max, messages.end)
        try:
            await self._ask("send", connection.send(messages))
        except MessagesRefusedError as error:
            self._answered(bound)
            self._hold_back(messages, error)
            if self._stores_positions:
                await self._await_recorded()
                return False
        else:
            self._answered(bound)
            self.refused.accept(position for position in messages.positions if position in self.refused)
        if self._closing:
            raise asyncio.CancelledError  # the sink has swallowed it
        return True

    def _answered(self, bound: SendBound) -> None:
        """Note that the other side has answered a `send` within a bound: the next one may have more."""
        self.connection.connected()
        whole = self._sink.bound
        self._bound = SendBound(min(whole.records, 2 * bound.records), min(whole.bytes, 2 * bound.bytes))

    def _hold_back(self, messages: SinkMessages, error: MessagesRefusedError) -> None:
        """Hold the refused messages of a `send` back, with those behind them of their keys.

        Raises:
            SinkUnavailableError: the error names none of the messages.
        """
        named = _refused_places(messages, error)
        if not named:
            raise SinkUnavailableError("the sink refuses messages, but not which", hint="correct the sink's `send`")
        if not self._stores_positions:
            taken = (at for place, at in enumerate(messages.positions) if place not in named and at in self.refused)
            self.refused.accept(list(taken))
        if not len(self.refused):
            log.warning("sink %s, interval %d: %s", self._setup.sink, self._setup.interval, error.message)
        now, now_us = self._now(), self._context.clock.now_us()
        keys: set[bytes] = set()
        for place in named:
            position, key = messages.positions[place], messages.keys[place]
            if key in keys and self._stores_positions:
                continue  # it is sent again without the refused one
            if position not in self.refused:
                self._wait_behind(messages, [place])
            if key not in keys:
                final, is_tried = place in error.final, place not in error.untried
                why, after_s = error.reasons[place], error.retry_after_s
                self.refused.refuse(position, why, now, now_us, final=final, is_tried=is_tried, retry_after_s=after_s)
                keys.add(key)

    def _wait_behind(self, messages: SinkMessages, places: Sequence[int]) -> None:
        """Let messages wait behind those of their keys."""
        for place in places:
            message = messages.part(place, place + 1)
            key = messages.keys[place] if self._stage is None else self._stage.key_text(messages, place)
            self.refused.wait(message, key, self._context.clock.now_us())

    def _pass(self, position: int) -> None:
        """Note that all messages before a position are delivered, or wait because they are refused."""
        self.waiting.deliver(position)
        before = self.is_full
        self._judge()
        if before and not self.is_full:
            self._context.wake()

    def _judge(self) -> None:
        limits, waiting = self._context.limits, self.waiting
        share = 2 if self.is_full else 1
        messages = waiting.head - waiting.delivered
        self.is_full = (
            not self._prepared
            # With more messages, the next owner would take those of the other side for them.
            or not self._has_asked
            or self._is_ahead
            or waiting.size * share > limits.outbox_bytes_max
            or messages * share > limits.outbox_records_max
        )

    async def _await_recorded(self) -> None:
        """Wait until the store has what the other side cannot tell after a crash."""
        while self.refused.changes or (not self._stores_positions and self._recorded < self.waiting.delivered):
            self._recording.clear()
            self._context.report()
            await self._recording.wait()

    async def _await_news(self) -> None:
        """Wait until there is a message to send."""
        if not (self.waiting.is_empty or self._is_held):
            return
        due = self.refused.next_due(self.waiting.delivered)
        if due is not None and due <= self._now():
            return
        self._news.clear()
        wakers: list[asyncio.Task[Any]] = [asyncio.create_task(self._news.wait())]
        if due is not None:
            wakers.append(asyncio.create_task(self._context.clock.sleep(due - self._now())))
        try:
            await asyncio.wait(wakers, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for waker in wakers:
                waker.cancel()


def _position(known: object) -> int | None:
    """Check what `open` has returned.

    Raises:
        SinkUnavailableError: it is not a position.
    """
    if known is None or (isinstance(known, int) and not isinstance(known, bool) and known >= 0):
        return known
    raise SinkUnavailableError(
        f"the sink's `open` returned {known!r}", hint="return the position behind the last message, as an int, or None"
    )


def _refused_places(messages: SinkMessages, error: MessagesRefusedError) -> list[int]:
    """Return the places that an error names, and those behind them of the same keys."""
    keys = {messages.keys[place]: place for place in sorted(error.reasons, reverse=True) if 0 <= place < len(messages)}
    return [place for place, key in enumerate(messages.keys) if place >= keys.get(key, len(messages))]


async def _closed(connection: SinkConnection) -> None:
    """Close a connection; leave one that does not close to itself."""
    try:
        async with asyncio.timeout(CLOSE_S_MAX):
            await connection.close()
    except DEFECTS as error:  # it is no longer used
        log.debug("a sink does not close: %s", error_text(error))
