"""MQTT as a source: QoS 1 in a persistent session, PUBACK after the commit.

One topic filter is one source partition with a session (client id) of its own, stable over restarts and owners. The
broker keeps the position: what is not acknowledged comes again with the next connection, and only then. So:

    received -> inbox -> taken (token) -> committed -> PUBACK, in the order received, on the connection that delivered

Packet ids are reused, so a lost connection voids them: its inbox and tokens are forgotten, and the broker sends again
what was in them. A record that was committed but not yet acknowledged comes twice; `Dedupe` drops it.

    connect      only under a trusted grant, with backoff; the session has one reader at the broker at any time
    taken over   (another client with our id) wait for a whole lease, look at the grant again, only then reconnect
    backlog      proven drained when a marker, published to a private topic of this very session after connecting,
                 has come back through the same queue; asked again when this process may have slept
    too much     beyond two bundles we stop reading the socket; nothing is discarded on our side

The broker's own limits are not ours: mosquitto drops beyond `max_queued_messages` while nobody is connected.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import unquote, urlsplit

import xxhash

from millpy.clock import fresh_identity
from millpy.errors import ConfigError, SourceUnavailableError
from millpy.injectors.protocol import SourceSetup, Taken

if TYPE_CHECKING:
    from millpy.injectors.mqtt_connection import BrokerAddress, Connection, Delivered

log = logging.getLogger(__name__)

URL_VARIABLE = "MILLPY_MQTT_URL"
MARKER_PREFIX = "millpy/marker/"
_ACKNOWLEDGE_AT_ONCE = 500
_WATCH_GAP_S = 2.0
_MARKER_PATIENCE_S = 10.0


@dataclass(frozen=True, slots=True, init=False, repr=False)
class Mqtt:
    """Messages under one or more topic filters; each payload is one JSON record.

    Where the broker is and who we are there is left out of the repr, and so of the graph's fingerprint.

    Args:
        filters: MQTT topic filters, each a source partition of its own; they should not overlap.
        host, port, username, password, tls: the broker; what is left out comes from the environment variable
            MILLPY_MQTT_URL (`mqtt://user:password@host:1883`, `mqtts://` for TLS), else localhost:1883.
        client_id: the session's name at the broker; by default made of graph, stream and filter. With several
            filters each gets its own ending. Two deployments on one broker need different ones.
        protocol: 5, or 311 for brokers that speak MQTT 3.1.1 only (mosquitto then keeps but 20 messages in flight).
        retained: take retained messages too when a subscription is new; left out by default, as they are old news.
        session_expiry_s: how long the broker keeps messages for us while we are away (MQTT 5).
        keepalive_s: a dead connection is noticed within one and a half of it.
    """

    filters: tuple[str, ...]
    host: str | None
    port: int | None
    username: str | None
    password: str | None
    tls: bool | None
    client_id: str | None
    protocol: Literal[5, 311]
    retained: bool
    session_expiry_s: int
    keepalive_s: int

    def __init__(
        self,
        *filters: str,
        host: str | None = None,
        port: int | None = None,
        username: str | None = None,
        password: str | None = None,
        tls: bool | None = None,
        client_id: str | None = None,
        protocol: Literal[5, 311] = 5,
        retained: bool = False,
        session_expiry_s: int = 7 * 24 * 3600,
        keepalive_s: int = 20,
    ) -> None:
        if not filters or len(set(filters)) != len(filters):
            raise ConfigError("name one or more different topic filters", hint='Mqtt("sensors/+/reading")')
        if protocol not in (5, 311):
            raise ConfigError(f"unknown MQTT protocol {protocol!r}", hint="5 or 311")
        values = {
            "filters": filters, "host": host, "port": port, "username": username, "password": password, "tls": tls,
            "client_id": client_id, "protocol": protocol, "retained": retained, "session_expiry_s": session_expiry_s,
            "keepalive_s": keepalive_s,
        }  # fmt: skip
        for name, value in values.items():
            object.__setattr__(self, name, value)

    def __repr__(self) -> str:
        retained = ", retained=True" if self.retained else ""
        return f"Mqtt({', '.join(map(repr, self.filters))}{retained})"

    def partitions(self) -> tuple[str, ...]:
        """The topic filters."""
        return self.filters

    def connect(self, setup: SourceSetup) -> MqttInjector:
        """A reader of one filter, not yet connected.

        Raises:
            ConfigError: the package aiomqtt is missing, or MILLPY_MQTT_URL cannot be read.
        """
        try:
            from millpy.injectors import mqtt_connection  # an optional dependency
        except ImportError as error:
            raise ConfigError("MQTT needs the package aiomqtt", hint="pip install 'millpy[mqtt]'") from error
        assert mqtt_connection.RECEIVE_MAX
        return MqttInjector(setup, self._address(setup), retained=self.retained)

    def _address(self, setup: SourceSetup) -> BrokerAddress:
        from millpy.injectors.mqtt_connection import BrokerAddress

        url = urlsplit(os.environ.get(URL_VARIABLE) or "mqtt://localhost:1883")
        if url.scheme not in ("mqtt", "mqtts") or not url.hostname:
            raise ConfigError(f"{URL_VARIABLE} is not an MQTT address", hint="mqtt://user:password@host:1883")
        tls = self.tls if self.tls is not None else url.scheme == "mqtts" and self.host is None
        ours = self.host is None  # credentials belong to the address they were given with
        return BrokerAddress(
            host=self.host or url.hostname,
            port=self.port or (url.port if ours else None) or (8883 if tls else 1883),
            username=self.username or (unquote(url.username) if ours and url.username else None),
            password=self.password or (unquote(url.password) if ours and url.password else None),
            tls=tls,
            client_id=self._client_id(setup),
            protocol=self.protocol,
            keepalive_s=self.keepalive_s,
            session_expiry_s=self.session_expiry_s,
        )

    def _client_id(self, setup: SourceSetup) -> str:
        ending = xxhash.xxh3_64_hexdigest(setup.partition.encode())[:8]
        if self.client_id is None:
            return f"millpy-{setup.graph}-{setup.stream}-{ending}"
        return self.client_id if len(self.filters) == 1 else f"{self.client_id}-{ending}"


class _Session:
    """What one connection has delivered and not yet had acknowledged; dies with it."""

    def __init__(self, setup: SourceSetup, address: BrokerAddress, *, retained: bool) -> None:
        from millpy.injectors.mqtt_connection import Connection

        self._setup = setup
        self._retained = retained
        self._limits = setup.limits
        self.connection: Connection = Connection(address, self._deliver)
        self.marker_topic = MARKER_PREFIX + address.client_id
        self.marker = b""
        self.marker_sent_at = 0.0
        self.inbox: deque[Delivered] = deque()
        self.outstanding: deque[_Token] = deque()
        self._bytes = 0
        self._paused = False
        self.subscribed = False
        self.drained = False

    def _deliver(self, message: Delivered) -> None:
        self.inbox.append(message)
        self._bytes += len(message.payload)
        full = (
            len(self.inbox) >= 2 * self._limits.bundle_records_max or self._bytes >= 2 * self._limits.bundle_bytes_max
        )
        if full:
            self.pause()
        self._setup.ready.set()

    def pause(self) -> None:
        """Stop reading when there is too much; not before the subscription stands, whose answer has to be read."""
        if self.subscribed and not self._paused:
            self._paused = True
            self.connection.pause()

    def take(self) -> tuple[list[Delivered], list[int]]:
        """The records of one bundle, and the packet ids of all that was passed on the way to them."""
        records: list[Delivered] = []
        packet_ids: list[int] = []
        size = 0
        while self.inbox and len(records) < self._limits.bundle_records_max:
            if records and size + len(self.inbox[0].payload) > self._limits.bundle_bytes_max:
                break
            message = self.inbox.popleft()
            self._bytes -= len(message.payload)
            if message.packet_id:
                packet_ids.append(message.packet_id)
            if message.topic.startswith(MARKER_PREFIX):
                self.drained |= message.topic == self.marker_topic and message.payload == self.marker
            elif self._retained or not message.retained:
                records.append(message)
                size += len(message.payload)
        if self._paused and len(self.inbox) <= self._limits.bundle_records_max // 2:
            self._paused = False
            self.connection.resume()
        return records, packet_ids

    def settle(self, packet_ids: list[int]) -> None:
        """Acknowledge what carried no records: now, or behind what was received before it."""
        if self.outstanding:
            self.outstanding[-1].packet_ids.extend(packet_ids)
        else:
            self.connection.acknowledge(packet_ids)

    async def ask(self) -> None:
        """Publish a fresh marker; the backlog is drained when it comes back."""
        self.drained = False
        self.marker = fresh_identity().hex.encode()
        self.marker_sent_at = self._setup.clock.monotonic()
        try:
            await self.connection.publish(self.marker_topic, self.marker)
        except SourceUnavailableError as error:
            # Late behind a large backlog, or lost with the connection: `quiet` asks again.
            log.debug("mqtt marker unconfirmed", extra={"topic": self.marker_topic, "why": error.message})


@dataclass(slots=True, eq=False)
class _Token:
    """A bundle that was taken: on which connection, and what to acknowledge."""

    session: _Session
    packet_ids: list[int]


class MqttInjector:
    """One topic filter, live."""

    def __init__(self, setup: SourceSetup, address: BrokerAddress, *, retained: bool) -> None:
        self._setup = setup
        self._address = address
        self._retained = retained
        self._session: _Session | None = None
        self._keeper: asyncio.Task[None] | None = None
        self._asking: asyncio.Task[None] | None = None
        self._watched_at = 0.0

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
        session = _Session(self._setup, self._address, retained=self._retained)
        await session.connection.open()
        try:
            await session.connection.subscribe(self._setup.partition, retained=self._retained)
            await self._prepare_marker(session)
            session.subscribed = True
        except BaseException:
            await session.connection.close()
            raise
        log.info("mqtt connected", extra={"broker": str(self._address), "filter": self._setup.partition})
        self._setup.ready.set()
        return session

    async def _prepare_marker(self, session: _Session) -> None:
        try:
            await session.connection.subscribe(session.marker_topic, retained=False)
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
                await lost.connection.close()
                delay_s = limits.retry_s_min
                if taken_over:
                    log.warning(
                        "another client took our mqtt session over", extra={"client_id": self._address.client_id}
                    )
                    delay_s = limits.lease_ttl_s
            await self._setup.clock.sleep(delay_s)
            delay_s = min(delay_s * 2, limits.retry_s_max)
            if not self._setup.trusted():
                continue
            try:
                self._session = await self._connect()
            except SourceUnavailableError as error:
                log.debug("mqtt: %s", error.message)

    async def take(self) -> Taken | None:
        """Everything received and not yet taken, at most a bundle. Raises ConfigError when the broker refused us."""
        if self._keeper is not None and self._keeper.done():
            self._keeper.result()  # nobody connects again: say why rather than go quiet
        session = self._session
        if session is None or not session.inbox:
            return None
        records, packet_ids = session.take()
        if not records:
            session.settle(packet_ids)
            return None
        token = _Token(session, packet_ids)
        session.outstanding.append(token)
        return Taken(
            format="json",
            arrived_at=self._setup.clock.now_us(),
            payloads=[record.payload for record in records],
            describe=lambda row: f"{records[row].topic} (packet {records[row].packet_id})",
            token=token,
        )

    async def acknowledge(self, token: Any) -> None:
        """PUBACK a committed bundle, if the connection that delivered it still stands."""
        assert isinstance(token, _Token)
        session = token.session
        while token.packet_ids and session is self._session:
            part, token.packet_ids[:] = token.packet_ids[:_ACKNOWLEDGE_AT_ONCE], token.packet_ids[_ACKNOWLEDGE_AT_ONCE:]
            session.connection.acknowledge(part)
            if token.packet_ids:
                await self._setup.clock.sleep(0)  # thousands of small writes: let the others have the loop
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
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        for task in tasks:
            if not task.cancelled():
                task.exception()  # said in `take`, or of no interest any more
        session, self._session = self._session, None
        if session is not None:
            await session.connection.close()
