"""The injector of one topic filter: its session at the broker, and the messages that are not acknowledged yet.

    received -> inbox -> taken (token) -> committed -> PUBACK, in the order received, on the connection that delivered

The broker reuses packet ids, so a lost connection voids them: the injector drops the inbox and the tokens, and the
broker sends their messages again. A message that was committed but not acknowledged arrives twice; with `Dedupe` the
injector recognizes it by its digest (redelivery.py), acknowledges it and skips it.

    connect      only under a trusted grant, with backoff; the session has one reader at the broker at any time
    taken over   another client has connected with our id: wait for a whole lease, check the grant again, and only
                 then reconnect. MQTT 3.1.1 does not say why a connection ends, and in MQTT 5 the reason may be lost
                 with the connection: so a connection that ends within a lease counts as taken over
    backlog      proven drained when a marker, published after connecting to a private topic of this session, has come
                 back through the same queue; sent again when this process may have slept
    too much     beyond two bundles the injector pauses reading the socket and discards nothing. A backlog arrives
                 before the answer to our subscription, so records are taken while that answer is pending

A bundle is at most a quarter of the messages that the broker sends ahead of acknowledgements, so that it keeps sending
while we step and commit. The broker has limits, too: mosquitto drops messages beyond `max_queued_messages` while no
client is connected.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from millpy.clock import random_id
from millpy.errors import ConfigError, SourceUnavailableError
from millpy.formats import Format
from millpy.ingest.expansion import Expander
from millpy.ingest.protocol import RejectedRow, SourceBatch, SourceSetup
from millpy.model.time import Instant
from millpy.sources.mqtt.address import BrokerAddress
from millpy.sources.mqtt.connection import MqttConnection
from millpy.sources.mqtt.inbox import MARKER_PREFIX, MessageBatch, MessageQueue
from millpy.sources.mqtt.packets import Messages
from millpy.sources.mqtt.redelivery import Redeliveries, SentBundle
from millpy.sources.mqtt.silence import HANG_UP_AFTER_S, SILENT_AFTER_S, WATCH_EVERY_S, BrokerSilence
from millpy.sources.mqtt.source import RECEIVE_MAX
from millpy.sources.mqtt.topics import TopicFields, TopicPattern

log = logging.getLogger(__name__)

_HEAD_BYTES_MAX = 66_000  # topic and properties of a message
_WATCH_GAP_S = 2.0
_CANCEL_AGAIN_S = 1.0
_MARKER_PATIENCE_S = 10.0
_LISTENS_S_MAX = 1.0
MARKER_RIGHTS = f"allow this client to publish and read {MARKER_PREFIX}#"
LOST_SESSION = (
    "let the broker keep sessions on disk (mosquitto: persistence true), and longer than workers are away;"
    " another client id or broker has another session"
)
ANOTHER_CLIENT = "give two deployments on one broker different client ids with MqttSession(client_id=…)"


class _Session:
    """The messages that one connection has delivered and we have not acknowledged; discarded with the connection."""

    def __init__(
        self,
        setup: SourceSetup,
        address: BrokerAddress,
        pattern: TopicPattern,
        *,
        retained: bool,
        format: Format | None,
    ) -> None:
        self._setup = setup
        self._limits = limits = setup.limits
        record_type = setup.record_type
        self.inbox = MessageQueue(
            topics=pattern.matches(),
            retained=retained,
            arrays=record_type is None or not record_type.struct.__struct_config__.array_like,
            readings_max=limits.message_records_max,
            bytes_max=limits.bundle_bytes_max,
            complete=TopicFields(pattern, record_type) if pattern.levels and record_type is not None else None,
            digests=setup.deduplicated,
            expander=Expander(format, record_type, limits, setup) if format and record_type else None,
        )
        self.connection: MqttConnection = MqttConnection(
            address,
            self._deliver,
            packet_bytes_max=max(limits.bundle_bytes_max, limits.record_bytes_max + _HEAD_BYTES_MAX),
            kept_bytes=(limits.record_bytes_max if format is None else limits.message_bytes_max) + 1,
        )
        self.marker_topic = marker_topic(address.client_id).encode()
        self.marker = b""
        self.marker_sent_at = float("inf")
        self._received_before_marker = -1
        self._told_marker = False
        self.connected_at = setup.clock.monotonic()
        self.silence = BrokerSilence(self.connected_at)
        self.outstanding: deque[_Token] = deque()
        self._take_max = max(1, address.receive_max // 4)
        self._paused = False
        self._told_foreign = False
        self.full = asyncio.Event()
        self.subscribing: asyncio.Task[None] | None = None
        self.drained = False
        self.key = object()
        """An opaque token that identifies this connection without keeping it alive."""
        self._behind: list[_Token] | None = None
        self._settled_ping = 0
        self._handed_over = 0

    def _deliver(self, published: Messages) -> None:
        self.inbox.put(published)
        if self.inbox.foreign is not None and not self._told_foreign:
            self._told_foreign = True
            log.warning(
                "ignoring messages under topic %r, which does not match filter %r",
                self.inbox.foreign.decode(errors="replace"),
                self._setup.partition,
                extra={"hint": "an earlier subscription of this session is still active; change client_id="},
            )
        if self.inbox.records >= self._take_max:
            self.full.set()  # enough for a turn, and the broker will soon wait for acknowledgements
        full = (
            self.inbox.records >= 2 * self._limits.bundle_records_max
            or self.inbox.bytes >= 2 * self._limits.bundle_bytes_max
        )
        if full:
            self.pause()
        self._setup.ready.set()

    def pause(self) -> None:
        """Stop reading the socket until `take` has made room."""
        self.full.set()
        if not self._paused:
            self._paused = True
            self.connection.pause()

    @property
    def refusal(self) -> BaseException | None:
        """The error of a failed subscription; None while it is pending or after it succeeded."""
        task = self.subscribing
        return None if task is None or not task.done() or task.cancelled() else task.exception()

    def subscribe(self, subscribing: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Start to subscribe; a failure also ends the connection, because the caller may have stopped waiting."""

        def ended(_: object) -> None:
            if self.refusal is not None:
                self.connection.mark_lost(str(self.refusal))

        self.subscribing = asyncio.create_task(subscribing, name="millpy-mqtt-subscribe")
        self.subscribing.add_done_callback(ended)
        return self.subscribing

    async def close(self) -> None:
        """Disconnect, then cancel a pending subscription, so that an answer on its way still counts."""
        await self.connection.close()
        if self.subscribing is not None:
            self.subscribing.cancel()
            await asyncio.wait([self.subscribing])

    def take(self, redeliveries: Redeliveries) -> MessageBatch:
        """Return the records of one bundle, and the markers and skipped messages before them."""
        bound = self._setup.take_bound
        bundle = self.inbox.take(
            records_max=min(self._take_max, bound.records),
            bytes_max=bound.bytes,
            is_committed=redeliveries.recognize,
            arrived_at=self._setup.clock.now_us(),
        )
        self.drained |= (self.marker_topic, self.marker) in bundle.markers
        left = self.inbox.received - self.inbox.records
        bundle.counted, self._handed_over = left - self._handed_over, left
        low = (
            self.inbox.records <= self._limits.bundle_records_max // 2
            and self.inbox.bytes <= self._limits.bundle_bytes_max // 2
        )
        if self._paused and low:
            self._paused = False
            self.connection.resume()
        return bundle

    def acknowledge(self, packet_ids: list[int]) -> None:
        """Acknowledge messages without records: now, or together with the last bundle received before them."""
        if self.outstanding:
            self.outstanding[-1].packet_ids.extend(packet_ids)
        else:
            self.connection.acknowledge(packet_ids)

    def is_settled(self) -> bool:
        """Tell whether the broker has processed our acknowledgements of all messages from before this connection."""
        if self.drained and self._behind is None:
            self._behind = list(self.outstanding)  # later bundles do not matter
        if self._behind is not None and not self._settled_ping:
            self._behind = [token for token in self._behind if token in self.outstanding]
            self._settled_ping = 0 if self._behind else self.connection.ping()
        return self.connection.answered(self._settled_ping)

    async def publish_marker(self) -> None:
        """Publish a fresh marker; the backlog is drained when it comes back."""
        self.drained = False
        self.marker = random_id().hex.encode()
        self.marker_sent_at = self._setup.clock.monotonic()
        self._received_before_marker = self.inbox.received
        try:
            await self.connection.publish(self.marker_topic.decode(), self.marker)
        except SourceUnavailableError as error:
            # The answer is late behind a large backlog, or lost with the connection: `quiet` sends the marker again.
            log.debug("mqtt marker unconfirmed", extra={"topic": self.marker_topic.decode(), "why": error.message})

    def warn_of_marker(self) -> None:
        """Say once that the marker does not come back, if nothing else has arrived that could be before it.

        Brokers tell little of rights: mosquitto accepts each subscription, and MQTT 3.1.1 each publication.
        """
        if self._told_marker or self.outstanding or self.inbox.received != self._received_before_marker:
            return
        self._told_marker = True
        log.warning(
            "the MQTT broker does not return our marker for filter %r: while the source is idle, its watermark waits",
            self._setup.partition,
            extra={"hint": MARKER_RIGHTS},
        )


def marker_topic(client_id: str) -> str:
    """Return a topic that only this session reads. It does not reveal the client id."""
    return MARKER_PREFIX + blake2b(client_id.encode(), digest_size=16).hexdigest()


@dataclass(slots=True, eq=False)
class _Token:
    """A taken bundle: its connection, the packet ids to acknowledge, and its entry among the redeliveries."""

    session: _Session
    packet_ids: list[int]
    sent: SentBundle | None


class MqttInjector:
    """Reads one topic filter, and reconnects in the background.

    Args:
        setup: the setup of the source partition.
        address: reads the address and our login, whose files may be replaced, before each attempt to connect.
        pattern: the filter.
        retained: whether retained messages are records.
        format: the payload format; None for JSON.
    """

    _address: BrokerAddress  # of the last attempt to connect

    def __init__(
        self,
        setup: SourceSetup,
        address: Callable[[], BrokerAddress],
        pattern: TopicPattern,
        *,
        retained: bool,
        format: Format | None = None,
    ) -> None:
        self._setup = setup
        self._format = format
        self._read_address = address
        self._pattern = pattern
        self._retained = retained
        self._session: _Session | None = None
        self._keeper: asyncio.Task[None] | None = None
        self._asking: asyncio.Task[None] | None = None
        self._watcher: asyncio.Task[None] | None = None
        self._watched_at = 0.0
        self._told_expiry = False
        self._total = 0
        self._redeliveries = Redeliveries(setup.notes, RECEIVE_MAX)

    async def open(self, position: bytes | None) -> None:
        """Connect; when the broker is unreachable, or refuses us after it has accepted us, try again in the background.

        Raises:
            ConfigError: the broker, which has not accepted us before, rejects the credentials, the protocol or the
                subscription.
        """
        connection = self._setup.connection
        connection.managed = True
        if self._setup.trusted():
            try:
                self._session = await self._connect()
            except (SourceUnavailableError, ConfigError) as error:
                if not connection.is_outage(error):
                    raise
                connection.disconnected(error.message, attempted=True)
                log.warning("%s; trying again", error.message, extra={"hint": error.hint})
        self._watcher = asyncio.create_task(self._watch_answers(), name="millpy-mqtt-watch")
        self._keeper = asyncio.create_task(self._keep_connected(), name=f"millpy-mqtt-{self._setup.partition}")
        self._keeper.add_done_callback(lambda _: self._setup.ready.set())

    async def _connect(self) -> _Session:
        self._address = self._read_address()
        session = _Session(self._setup, self._address, self._pattern, retained=self._retained, format=self._format)
        await session.connection.open()
        self._report_session(session.connection)
        subscribing = session.subscribe(self._subscribe(session))
        full = asyncio.create_task(session.full.wait(), name="millpy-mqtt-full")
        try:
            await asyncio.wait([subscribing, full], return_when=asyncio.FIRST_COMPLETED)
            if session.refusal is not None:
                raise session.refusal
        except BaseException:
            await session.close()
            raise
        finally:
            full.cancel()
        log.info("mqtt connected", extra={"broker": str(self._address), "filter": self._setup.partition})
        self._setup.connection.connected()
        self._setup.ready.set()
        return session

    def _report_session(self, connection: MqttConnection) -> None:
        """Say that the broker has forgotten our session, or will do so earlier than it was asked to."""
        grant, setup = connection.grant, self._setup
        if grant is None:
            return
        if setup.connection.accepted and not grant.resumed:
            text = (
                f"{setup.partition}: the MQTT broker at {self._address} has no session of ours any more; "
                "messages that it had not delivered, or that came in the meantime, may be lost"
            )
            log.warning("%s", text, extra={"hint": LOST_SESSION})
            setup.tell("source_lost", {"partition": setup.partition, "stream": setup.stream, "what": text})
        asked_s = self._address.session_expiry_s
        if grant.expiry_s is not None and grant.expiry_s < asked_s and not self._told_expiry:
            self._told_expiry = True
            log.warning(
                "%s: the MQTT broker at %s keeps messages for %s s without a worker, instead of %s s",
                setup.partition,
                self._address,
                f"{grant.expiry_s:,}",
                f"{asked_s:,}",
                extra={"hint": "raise the broker's limit for the expiry of sessions, or lower MqttSession(expiry_s=…)"},
            )

    async def _watch_answers(self) -> None:
        """Ping the broker, tell when it does not answer, and hang up when it has not answered for long.

        A broker that is frozen, or that has vanished without closing the connection, sends no error.
        """
        clock, connection = self._setup.clock, self._setup.connection
        while True:
            await clock.sleep(WATCH_EVERY_S)
            session, now = self._session, clock.monotonic()
            if session is None:
                continue
            session.silence.look(session.connection.reads, paused=session.connection.paused, now=now)
            silent_s = session.silence.seconds(now)
            if silent_s >= HANG_UP_AFTER_S:
                session.connection.mark_lost(f"the broker has not answered for {silent_s:.0f} s")
            elif silent_s >= SILENT_AFTER_S:
                since = Instant(clock.now_us() - round(silent_s * 1e6))
                why = f"the MQTT broker at {self._address} accepts the connection but does not answer"
                connection.disconnected(why, since_us=since)
            else:
                connection.connected()
            session.connection.ping()

    async def _subscribe(self, session: _Session) -> None:
        await session.connection.subscribe(self._setup.partition, retained=self._retained)
        self._setup.connection.accepted = True
        await self._prepare_marker(session)

    async def _prepare_marker(self, session: _Session) -> None:
        try:
            await session.connection.subscribe(session.marker_topic.decode(), retained=False)
        except ConfigError as error:
            # This is safe, but an idle source then cannot advance its watermark.
            log.warning("%s", error.message, extra={"hint": MARKER_RIGHTS})
            session.marker_sent_at = float("inf")
            return
        self._send_marker(session)

    def _send_marker(self, session: _Session) -> None:
        session.drained = False
        session.marker_sent_at = self._setup.clock.monotonic()
        if self._asking is not None:
            self._asking.cancel()
        self._asking = asyncio.create_task(session.publish_marker(), name="millpy-mqtt-marker")

    async def _keep_connected(self) -> None:
        limits, delay_s = self._setup.limits, self._setup.limits.retry_s_min
        while True:
            if self._session is not None:
                taken_over = await self._session.connection.lost()
                lost, self._session = self._session, None
                self._setup.connection.disconnected(
                    f"the connection to the MQTT broker at {self._address} was lost: {lost.connection.why_lost}"
                )
                self._setup.ready.set()
                await lost.close()
                if lost.refusal is not None and not isinstance(lost.refusal, SourceUnavailableError):
                    self._setup.connection.disconnected(str(lost.refusal))
                    if not self._setup.connection.is_outage(lost.refusal):
                        raise lost.refusal
                lasted_s = self._setup.clock.monotonic() - lost.connected_at
                delay_s = limits.retry_s_min
                if taken_over or lasted_s < limits.lease_ttl_s:
                    # In either case a reconnect within a lease could disconnect the rightful owner.
                    self._warn_of_takeover(taken_over, listens=taken_over or await self._listens())
                    self._setup.ready.set()
                    delay_s = limits.lease_ttl_s
            await self._setup.clock.sleep(delay_s)
            delay_s = min(delay_s * 2, limits.retry_s_max)
            if not self._setup.trusted():
                continue
            try:
                self._session = await self._connect()
            except (SourceUnavailableError, ConfigError) as error:
                self._setup.connection.disconnected(error.message, attempted=True)
                if not self._setup.connection.is_outage(error):
                    raise  # `take` raises it
                log.debug("mqtt: %s", error.message)

    def _warn_of_takeover(self, taken_over: bool, *, listens: bool) -> None:
        """Say that another client may have our id; but not if the broker has stopped, which also ends connections."""
        why = (
            "another client took over our mqtt session"
            if taken_over
            else "our mqtt connection ended soon after it began"
        )
        log.warning(
            "%s (stream %s, filter %r); waiting for a lease before reconnecting",
            why,
            self._setup.stream,
            self._setup.partition,
            extra={"hint": ANOTHER_CLIENT if listens else "start the broker: nothing listens at its address"},
        )

    async def _listens(self) -> bool:
        """Tell whether something accepts connections at the broker's address; our session stays as it is."""
        try:
            async with asyncio.timeout(_LISTENS_S_MAX):
                _, writer = await asyncio.open_connection(self._address.host, self._address.port)
        except (OSError, TimeoutError):
            return False
        writer.close()
        return True

    async def take(self) -> SourceBatch | None:
        """Return the received records, at most a bundle. Raises ConfigError when the broker has never accepted us."""
        if self._keeper is not None and self._keeper.done():
            self._keeper.result()  # the reconnecting task has failed: raise its error instead of staying silent
        session = self._session
        if session is None or not session.inbox:
            return None
        self._redeliveries.prove(session.key, session.connection.answered, drained=session.is_settled())
        bundle = session.take(self._redeliveries)
        self._total += bundle.counted
        if bundle.skipped:
            log.info("mqtt: skipped %d redelivered messages that are committed", bundle.skipped)
        if not bundle.records:
            session.acknowledge(bundle.packet_ids)
            if bundle.packet_ids and session.inbox:
                self._setup.ready.set()  # the messages without records have taken all the time of this take
            return None
        sent, notes = self._redeliveries.take(bundle.digests, session.key) if self._setup.deduplicated else (None, {})
        token = _Token(session, bundle.packet_ids, sent)
        session.outstanding.append(token)
        return SourceBatch(
            format="json",
            arrived_at=self._setup.clock.now_us(),
            payloads=bundle.payloads(),
            refused=[*(RejectedRow(row, "oversize", why) for row, why in bundle.refused), *bundle.bad],
            describe=bundle.describe(),
            messages=bundle.messages,
            notes=notes,
            token=token,
            records=bundle.counted,
            total=self._total,
        )

    async def acknowledge(self, token: Any) -> None:
        """Acknowledge a committed bundle, if the connection that delivered it still exists."""
        assert isinstance(token, _Token)
        session, sent = token.session, token.sent
        if sent is not None:
            self._redeliveries.commit(sent)
            self._setup.ready.set()  # redelivered messages may have waited for this commit
        if session is self._session:
            session.connection.acknowledge(token.packet_ids)
            if sent is not None:
                sent.ping = session.connection.ping()
        if session.outstanding and session.outstanding[0] is token:
            session.outstanding.popleft()

    def quiet(self) -> bool:
        """Tell whether we are connected, the broker answers, the inbox is empty, and our marker has come back.

        When the last call was long ago, this process may have slept with messages in its socket: then send the marker
        again.
        """
        now, watched_at = self._setup.clock.monotonic(), self._watched_at
        self._watched_at = now
        session = self._session
        if session is None or session.inbox:
            return False
        slept = session.drained and now - watched_at > _WATCH_GAP_S
        unanswered = not session.drained and now - session.marker_sent_at > _MARKER_PATIENCE_S
        if unanswered and session.silence.answers(now):
            session.warn_of_marker()
        if slept or unanswered:
            self._send_marker(session)
        return session.drained and session.silence.answers(now)

    async def close(self) -> None:
        """Disconnect; the broker keeps the session, and sends unacknowledged messages to the next connection."""
        await _stop(self._watcher)
        await _stop(self._keeper)
        session, self._session = self._session, None
        if session is not None:
            await session.close()
        await _stop(self._asking)  # last: a connection that is made, and its subscription, send a marker
        self._keeper = self._asking = self._watcher = None


async def _stop(task: asyncio.Task[None] | None) -> None:
    if task is None:
        return
    # A cancellation is lost when the library's `asyncio.wait_for` completes at the same moment.
    while not task.done():
        task.cancel()
        await asyncio.wait([task], timeout=_CANCEL_AGAIN_S)
    if not task.cancelled():
        task.exception()  # `take` has raised it, or it no longer matters
