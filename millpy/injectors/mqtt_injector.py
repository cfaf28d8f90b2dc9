"""One topic filter, live: its session at the broker, what has been received, taken and not yet acknowledged.

    received -> inbox -> taken (token) -> committed -> PUBACK, in the order received, on the connection that delivered

Packet ids are reused, so a lost connection voids them: its inbox and tokens are forgotten, and the broker sends again
what was in them. A message that was committed but not yet acknowledged comes twice; with `Dedupe` it is known by itself
(mqtt_redelivery.py), and acknowledged and passed over.

    connect      only under a trusted grant, with backoff; the session has one reader at the broker at any time
    taken over   (another client with our id) wait for a whole lease, look at the grant again, only then reconnect.
                 MQTT 3.1.1 does not say why a connection ends, and in MQTT 5 the word may be lost with it: so one
                 that did not last for a lease is taken for this
    backlog      proven drained when a marker, published to a private topic of this very session after connecting,
                 has come back through the same queue; asked again when this process may have slept
    too much     beyond two bundles we stop reading the socket; nothing is discarded on our side. A backlog comes before
                 the answer to our subscription, which then is waited for while records are taken

A bundle is at most a quarter of what the broker sends ahead of acknowledgements, so that it goes on sending while we
step and commit. The broker's own limits are not ours: mosquitto drops beyond `max_queued_messages` while nobody is
connected.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from millpy.clock import fresh_identity
from millpy.errors import ConfigError, SourceUnavailableError
from millpy.injectors.mqtt_address import BrokerAddress
from millpy.injectors.mqtt_connection import Connection
from millpy.injectors.mqtt_inbox import MARKER_PREFIX, Bundle, Inbox
from millpy.injectors.mqtt_packets import Published
from millpy.injectors.mqtt_redelivery import Redeliveries, Sent
from millpy.injectors.mqtt_topics import TopicFields, TopicPattern
from millpy.injectors.protocol import Refused, SourceSetup, Taken

log = logging.getLogger(__name__)

_HEAD_BYTES_MAX = 66_000  # of a message: topic, properties
_WATCH_GAP_S = 2.0
_CANCEL_AGAIN_S = 1.0
_MARKER_PATIENCE_S = 10.0


class _Session:
    """What one connection has delivered and not yet had acknowledged; dies with it."""

    def __init__(self, setup: SourceSetup, address: BrokerAddress, pattern: TopicPattern, *, retained: bool) -> None:
        self._setup = setup
        self._limits = limits = setup.limits
        record_type = setup.record_type
        self.inbox = Inbox(
            topics=pattern.matches(),
            retained=retained,
            arrays=record_type is None or not record_type.struct.__struct_config__.array_like,
            readings_max=limits.message_records_max,
            bytes_max=limits.bundle_bytes_max,
            complete=TopicFields(pattern, record_type) if pattern.levels and record_type is not None else None,
            digests=setup.deduplicated,
        )
        self.connection: Connection = Connection(
            address,
            self._deliver,
            packet_bytes_max=max(limits.bundle_bytes_max, limits.record_bytes_max + _HEAD_BYTES_MAX),
            kept_bytes=limits.record_bytes_max + 1,
        )
        self.marker_topic = marker_topic(address.client_id).encode()
        self.marker = b""
        self.marker_sent_at = float("inf")
        self.connected_at = setup.clock.monotonic()
        self.outstanding: deque[_Token] = deque()
        self._take_max = max(1, address.receive_max // 4)
        self._paused = False
        self._told_foreign = False
        self.full = asyncio.Event()
        self.subscribing: asyncio.Task[None] | None = None
        self.drained = False
        self.key = object()
        """Stands for this connection where it is to be known, but not kept."""
        self._behind: list[_Token] | None = None
        self._settled_ping = 0
        self._handed_over = 0

    def _deliver(self, published: Published) -> None:
        self.inbox.put(published)
        if self.inbox.foreign is not None and not self._told_foreign:
            self._told_foreign = True
            log.warning(
                "messages under %r are not of %r and are passed over",
                self.inbox.foreign.decode(errors="replace"),
                self._setup.partition,
                extra={"hint": "this session was once subscribed to more; another client_id= begins anew"},
            )
        if self.inbox.records >= self._take_max:
            self.full.set()  # there is enough for a turn, and the broker waits for acknowledgements before long
        full = (
            self.inbox.records >= 2 * self._limits.bundle_records_max
            or self.inbox.bytes >= 2 * self._limits.bundle_bytes_max
        )
        if full:
            self.pause()
        self._setup.ready.set()

    def pause(self) -> None:
        """Stop reading when there is too much."""
        self.full.set()
        if not self._paused:
            self._paused = True
            self.connection.pause()

    @property
    def refusal(self) -> BaseException | None:
        """Why we are not subscribed, and will not be on this connection."""
        task = self.subscribing
        return None if task is None or not task.done() or task.cancelled() else task.exception()

    def subscribe(self, subscribing: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Begin to; what fails ends the connection, because nobody may be waiting for it any more."""

        def ended(_: object) -> None:
            if self.refusal is not None:
                self.connection.give_up(str(self.refusal))

        self.subscribing = asyncio.create_task(subscribing, name="millpy-mqtt-subscribe")
        self.subscribing.add_done_callback(ended)
        return self.subscribing

    async def close(self) -> None:
        """Disconnect; before it, an answer that is on its way is still taken."""
        await self.connection.close()
        if self.subscribing is not None:
            self.subscribing.cancel()
            await asyncio.wait([self.subscribing])

    def take(self, redeliveries: Redeliveries) -> Bundle:
        """The records of one bundle, and what was passed on the way to them."""
        bound = self._setup.take_bound
        bundle = self.inbox.take(
            records_max=min(self._take_max, bound.records),
            bytes_max=bound.bytes,
            is_committed=redeliveries.recognize,
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

    def settle(self, packet_ids: list[int]) -> None:
        """Acknowledge what carried no records: now, or behind what was received before it."""
        if self.outstanding:
            self.outstanding[-1].packet_ids.extend(packet_ids)
        else:
            self.connection.acknowledge(packet_ids)

    def is_settled(self) -> bool:
        """Whether the broker has processed what we said to all that came from before this connection."""
        if self.drained and self._behind is None:
            self._behind = list(self.outstanding)  # more may be under way at any later time
        if self._behind is not None and not self._settled_ping:
            self._behind = [token for token in self._behind if token in self.outstanding]
            self._settled_ping = 0 if self._behind else self.connection.ping()
        return self.connection.answered(self._settled_ping)

    async def ask(self) -> None:
        """Publish a fresh marker; the backlog is drained when it comes back."""
        self.drained = False
        self.marker = fresh_identity().hex.encode()
        self.marker_sent_at = self._setup.clock.monotonic()
        try:
            await self.connection.publish(self.marker_topic.decode(), self.marker)
        except SourceUnavailableError as error:
            # Late behind a large backlog, or lost with the connection: `quiet` asks again.
            log.debug("mqtt marker unconfirmed", extra={"topic": self.marker_topic.decode(), "why": error.message})


def marker_topic(client_id: str) -> str:
    """A topic that only this session reads. Others may see it; the client id cannot be found from it."""
    return MARKER_PREFIX + blake2b(client_id.encode(), digest_size=16).hexdigest()


@dataclass(slots=True, eq=False)
class _Token:
    """A bundle that was taken: on which connection, what to acknowledge, and what to know again."""

    session: _Session
    packet_ids: list[int]
    sent: Sent | None


class MqttInjector:
    """One topic filter, live."""

    def __init__(self, setup: SourceSetup, address: BrokerAddress, pattern: TopicPattern, *, retained: bool) -> None:
        self._setup = setup
        self._address = address
        self._pattern = pattern
        self._retained = retained
        self._session: _Session | None = None
        self._keeper: asyncio.Task[None] | None = None
        self._asking: asyncio.Task[None] | None = None
        self._watched_at = 0.0
        self._total = 0
        self._redeliveries = Redeliveries(setup.notes, address.receive_max)

    async def open(self, position: bytes | None) -> None:
        """Connect; when the broker is away, keep trying in the background.

        Raises:
            ConfigError: the broker refuses the credentials, the protocol or the subscription.
        """
        if self._setup.trusted():
            try:
                self._session = await self._connect()
            except SourceUnavailableError as error:
                log.warning("%s; trying again", error.message, extra={"hint": error.hint})
        self._keeper = asyncio.create_task(self._keep_connected(), name=f"millpy-mqtt-{self._setup.partition}")
        self._keeper.add_done_callback(lambda _: self._setup.ready.set())

    async def _connect(self) -> _Session:
        session = _Session(self._setup, self._address, self._pattern, retained=self._retained)
        await session.connection.open()
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
        self._setup.ready.set()
        return session

    async def _subscribe(self, session: _Session) -> None:
        await session.connection.subscribe(self._setup.partition, retained=self._retained)
        await self._prepare_marker(session)

    async def _prepare_marker(self, session: _Session) -> None:
        try:
            await session.connection.subscribe(session.marker_topic.decode(), retained=False)
        except ConfigError as error:
            # Safe, but an idle source can then never advance its watermark.
            log.warning("%s", error.message, extra={"hint": f"allow this client to publish and read {MARKER_PREFIX}#"})
            session.marker_sent_at = float("inf")
            return
        self._ask(session)

    def _ask(self, session: _Session) -> None:
        session.drained = False
        session.marker_sent_at = self._setup.clock.monotonic()
        if self._asking is not None:
            self._asking.cancel()
        self._asking = asyncio.create_task(session.ask(), name="millpy-mqtt-marker")

    async def _keep_connected(self) -> None:
        limits, delay_s = self._setup.limits, self._setup.limits.retry_s_min
        while True:
            if self._session is not None:
                taken_over = await self._session.connection.lost()
                lost, self._session = self._session, None
                self._setup.ready.set()
                await lost.close()
                if lost.refusal is not None and not isinstance(lost.refusal, SourceUnavailableError):
                    raise lost.refusal
                lasted_s = self._setup.clock.monotonic() - lost.connected_at
                delay_s = limits.retry_s_min
                if taken_over or lasted_s < limits.lease_ttl_s:
                    # Whoever it was, and even if it is not us who should yield: not faster than a lease can settle it.
                    self._tell_rivals(taken_over)
                    delay_s = limits.lease_ttl_s
            await self._setup.clock.sleep(delay_s)
            delay_s = min(delay_s * 2, limits.retry_s_max)
            if not self._setup.trusted():
                continue
            try:
                self._session = await self._connect()
            except SourceUnavailableError as error:
                log.debug("mqtt: %s", error.message)

    def _tell_rivals(self, taken_over: bool) -> None:
        why = (
            "another client took our mqtt session over"
            if taken_over
            else "our mqtt connection ended soon after it began"
        )
        log.warning(
            "%s (stream %s, filter %r); waiting for a lease",
            why,
            self._setup.stream,
            self._setup.partition,
            extra={"hint": "two deployments on one broker need different client ids: client_id="},
        )

    async def take(self) -> Taken | None:
        """Everything received and not yet taken, at most a bundle. Raises ConfigError when the broker refused us."""
        if self._keeper is not None and self._keeper.done():
            self._keeper.result()  # nobody connects again: say why rather than go quiet
        session = self._session
        if session is None or not session.inbox:
            return None
        self._redeliveries.prove(session.key, session.connection.answered, drained=session.is_settled())
        bundle = session.take(self._redeliveries)
        self._total += bundle.counted
        if bundle.passed_over:
            log.info("mqtt: %d messages came again that are committed", bundle.passed_over)
        if not bundle.records:
            session.settle(bundle.packet_ids)
            return None
        sent, notes = self._redeliveries.take(bundle.digests, session.key) if self._setup.deduplicated else (None, {})
        token = _Token(session, bundle.packet_ids, sent)
        session.outstanding.append(token)
        return Taken(
            format="json",
            arrived_at=self._setup.clock.now_us(),
            payloads=bundle.payloads(),
            refused=[Refused(row, "oversize", why) for row, why in bundle.refused],
            describe=bundle.describe(),
            notes=notes,
            token=token,
            records=bundle.counted,
            total=self._total,
        )

    async def acknowledge(self, token: Any) -> None:
        """PUBACK a committed bundle, if the connection that delivered it still stands."""
        assert isinstance(token, _Token)
        session, sent = token.session, token.sent
        if sent is not None:
            self._redeliveries.commit(sent)
            self._setup.ready.set()  # what it repeats may have waited for this
        if session is self._session:
            session.connection.acknowledge(token.packet_ids)
            if sent is not None:
                sent.ping = session.connection.ping()
        if session.outstanding and session.outstanding[0] is token:
            session.outstanding.popleft()

    def quiet(self) -> bool:
        """Whether we are connected, nothing waits, and the marker sent after (re)connecting has come back.

        When nobody asked for a while, this process may have been asleep with messages in its socket: then the marker
        is sent again first.
        """
        now, watched_at = self._setup.clock.monotonic(), self._watched_at
        self._watched_at = now
        session = self._session
        if session is None or session.inbox:
            return False
        slept = session.drained and now - watched_at > _WATCH_GAP_S
        unanswered = not session.drained and now - session.marker_sent_at > _MARKER_PATIENCE_S
        if slept or unanswered:
            self._ask(session)
        return session.drained

    async def close(self) -> None:
        """Disconnect; the broker keeps the session, and sends what was not acknowledged to whoever connects next."""
        tasks: Sequence[asyncio.Task[None]] = [task for task in (self._asking, self._keeper) if task is not None]
        self._asking = self._keeper = None
        for task in tasks:
            # A cancellation is lost when what the library waits for (`asyncio.wait_for`) ends in the same moment.
            while not task.done():
                task.cancel()
                await asyncio.wait([task], timeout=_CANCEL_AGAIN_S)
        for task in tasks:
            if not task.cancelled():
                task.exception()  # said in `take`, or of no interest any more
        session, self._session = self._session, None
        if session is not None:
            await session.close()
