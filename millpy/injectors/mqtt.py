"""MQTT as a source: QoS 1 in a persistent session, PUBACK after the commit.

One topic filter is one source partition with a session (client id) of its own, stable over restarts and owners. The
broker keeps the position: what is not acknowledged comes again with the next connection, and only then. So:

    received -> inbox -> taken (token) -> committed -> PUBACK, in the order received, on the connection that delivered

Packet ids are reused, so a lost connection voids them: its inbox and tokens are forgotten, and the broker sends again
what was in them. A record that was committed but not yet acknowledged comes twice; `Dedupe` drops it.

    connect      only under a trusted grant, with backoff; the session has one reader at the broker at any time
    taken over   (another client with our id) wait for a whole lease, look at the grant again, only then reconnect.
                 MQTT 3.1.1 does not say why a connection ends, and in MQTT 5 the word may be lost with it: so one
                 that did not last for a lease is taken for this
    backlog      proven drained when a marker, published to a private topic of this very session after connecting,
                 has come back through the same queue; asked again when this process may have slept
    too much     beyond two bundles we stop reading the socket; nothing is discarded on our side

A bundle is at most a quarter of what the broker sends ahead of acknowledgements, so that it goes on sending while we
step and commit. The broker's own limits are not ours: mosquitto drops beyond `max_queued_messages` while nobody is
connected.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import TYPE_CHECKING, Any, Literal

import xxhash

from millpy.clock import fresh_identity
from millpy.errors import ConfigError, SourceUnavailableError
from millpy.injectors.mqtt_address import NOTHING, BrokerAddress, tls_context, url_of_environment
from millpy.injectors.mqtt_inbox import MARKER_PREFIX, Bundle, Inbox
from millpy.injectors.mqtt_packets import Published
from millpy.injectors.mqtt_topics import TopicFields, TopicPattern, overlap
from millpy.injectors.protocol import SourceSetup, Taken
from millpy.model.record import RecordType

if TYPE_CHECKING:
    from millpy.injectors.mqtt_connection import Connection

log = logging.getLogger(__name__)

RECEIVE_MAX = 65_535
"""How far the broker may send ahead of acknowledgements; the protocol's largest, as they come a commit later."""
TAKE_MAX = RECEIVE_MAX // 4
_HEAD_BYTES_MAX = 66_000  # of a message: topic, properties
_READINGS_MAX = 65_536  # in one message
_WATCH_GAP_S = 2.0
_MARKER_PATIENCE_S = 10.0


@dataclass(frozen=True, slots=True, init=False, repr=False)
class Mqtt:
    """Messages under one or more topic filters; each payload is one JSON record, or an array of them.

    Where the broker is and who we are there is left out of the repr, and so of the graph's fingerprint.

    Args:
        filters: MQTT topic filters, each a source partition of its own; no topic may match two of them. A level
            written `{name}` is a wildcard and fills the record's field of that name: `sensors/{site}/{device}`.
        host, port, username, password, tls: the broker; what is left out comes from the environment variable
            MILLPY_MQTT_URL (`mqtt://user:password@host:1883`, `mqtts://` for TLS), else localhost:1883. With TLS the
            broker's certificate and name are verified.
        tls_ca: a file with the certificates to trust instead of the system's.
        tls_certificate, tls_key: files with our own certificate and key, for brokers that ask for them.
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
    tls_ca: str | None
    tls_certificate: str | None
    tls_key: str | None
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
        tls_ca: str | None = None,
        tls_certificate: str | None = None,
        tls_key: str | None = None,
        client_id: str | None = None,
        protocol: Literal[5, 311] = 5,
        retained: bool = False,
        session_expiry_s: int = 7 * 24 * 3600,
        keepalive_s: int = 20,
    ) -> None:
        if not filters:
            raise ConfigError("name one or more topic filters", hint='Mqtt("sensors/+/reading")')
        _check_apart([TopicPattern.of(text).filter for text in filters])
        if protocol not in (5, 311):
            raise ConfigError(f"unknown MQTT protocol {protocol!r}", hint="5 or 311")
        if tls is False and (tls_ca or tls_certificate or tls_key):
            raise ConfigError("files for TLS are named, and tls=False", hint="leave tls= out")
        values = {
            "filters": filters, "host": host, "port": port, "username": username, "password": password, "tls": tls,
            "tls_ca": tls_ca, "tls_certificate": tls_certificate, "tls_key": tls_key, "client_id": client_id,
            "protocol": protocol, "retained": retained, "session_expiry_s": session_expiry_s,
            "keepalive_s": keepalive_s,
        }  # fmt: skip
        for name, value in values.items():
            object.__setattr__(self, name, value)

    def __repr__(self) -> str:
        retained = ", retained=True" if self.retained else ""
        return f"Mqtt({', '.join(map(repr, self.filters))}{retained})"

    def partitions(self) -> tuple[str, ...]:
        """The topic filters, as the broker is asked for them."""
        return tuple(TopicPattern.of(text).filter for text in self.filters)

    def validate(self, record_type: RecordType) -> None:
        """Refuse named topic levels that are no fields. Raises GraphError."""
        for text in self.filters:
            TopicPattern.of(text).validate(record_type)

    def connect(self, setup: SourceSetup) -> MqttInjector:
        """A reader of one filter, not yet connected.

        Raises:
            ConfigError: the package aiomqtt is missing, or MILLPY_MQTT_URL or a file with certificates cannot be read.
        """
        try:
            import millpy.injectors.mqtt_connection  # noqa: F401 - an optional dependency
        except ImportError as error:
            raise ConfigError("MQTT needs the package aiomqtt", hint="pip install 'millpy[mqtt]'") from error
        address = self._address(setup)
        tls_context(address)
        pattern = next(p for p in map(TopicPattern.of, self.filters) if p.filter == setup.partition)
        return MqttInjector(setup, address, pattern, retained=self.retained)

    def _address(self, setup: SourceSetup) -> BrokerAddress:
        # Credentials belong to the address they were given with.
        url = url_of_environment() if self.host is None else NOTHING
        tls = self.tls if self.tls is not None else url.tls or bool(self.tls_ca or self.tls_certificate)
        return BrokerAddress(
            host=self.host or url.host,
            port=self.port or url.port or (8883 if tls else 1883),
            username=self.username or url.username,
            password=self.password or url.password,
            tls=tls,
            tls_ca=self.tls_ca or url.tls_ca,
            tls_certificate=self.tls_certificate or url.tls_certificate,
            tls_key=self.tls_key or url.tls_key,
            client_id=self._client_id(setup),
            protocol=self.protocol,
            keepalive_s=self.keepalive_s,
            session_expiry_s=self.session_expiry_s,
            receive_max=RECEIVE_MAX,
        )

    def _client_id(self, setup: SourceSetup) -> str:
        ending = xxhash.xxh3_64_hexdigest(setup.partition.encode())[:8]
        if self.client_id is None:
            return f"millpy-{setup.graph}-{setup.stream}-{ending}"
        return self.client_id if len(self.filters) == 1 else f"{self.client_id}-{ending}"


def _check_apart(filters: Sequence[str]) -> None:
    for one, other in combinations(filters, 2):
        if overlap(one, other):
            raise ConfigError(
                f"topics can match both {one!r} and {other!r}, and their messages would be read twice",
                hint="name filters of which each topic matches one",
            )


class _Session:
    """What one connection has delivered and not yet had acknowledged; dies with it."""

    def __init__(self, setup: SourceSetup, address: BrokerAddress, pattern: TopicPattern, *, retained: bool) -> None:
        from millpy.injectors.mqtt_connection import Connection

        self._setup = setup
        self._limits = limits = setup.limits
        record_type = setup.record_type
        self.inbox = Inbox(
            topics=pattern.matches(),
            retained=retained,
            arrays=record_type is None or not record_type.struct.__struct_config__.array_like,
            readings_max=_READINGS_MAX,
            complete=TopicFields(pattern, record_type) if pattern.levels and record_type is not None else None,
        )
        self.connection: Connection = Connection(
            address,
            self._deliver,
            packet_bytes_max=max(limits.bundle_bytes_max, limits.record_bytes_max + _HEAD_BYTES_MAX),
            kept_bytes=limits.record_bytes_max + 1,
        )
        self.marker_topic = (MARKER_PREFIX + address.client_id).encode()
        self.marker = b""
        self.marker_sent_at = 0.0
        self.connected_at = setup.clock.monotonic()
        self.outstanding: deque[_Token] = deque()
        self._paused = False
        self._told_foreign = False
        self.subscribed = False
        self.drained = False

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
        full = (
            self.inbox.records >= 2 * self._limits.bundle_records_max
            or self.inbox.bytes >= 2 * self._limits.bundle_bytes_max
        )
        if full:
            self.pause()
        self._setup.ready.set()

    def pause(self) -> None:
        """Stop reading when there is too much; not before the subscription stands, whose answer has to be read."""
        if self.subscribed and not self._paused:
            self._paused = True
            self.connection.pause()

    def take(self) -> Bundle:
        """The records of one bundle, and what was passed on the way to them."""
        bundle = self.inbox.take(
            records_max=min(TAKE_MAX, self._limits.bundle_records_max), bytes_max=self._limits.bundle_bytes_max
        )
        self.drained |= (self.marker_topic, self.marker) in bundle.markers
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


@dataclass(slots=True, eq=False)
class _Token:
    """A bundle that was taken: on which connection, and what to acknowledge."""

    session: _Session
    packet_ids: list[int]


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
                await lost.connection.close()
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
            "%s (client id %s); waiting for a lease",
            why,
            self._address.client_id,
            extra={"hint": "two deployments on one broker need different client ids: client_id="},
        )

    async def take(self) -> Taken | None:
        """Everything received and not yet taken, at most a bundle. Raises ConfigError when the broker refused us."""
        if self._keeper is not None and self._keeper.done():
            self._keeper.result()  # nobody connects again: say why rather than go quiet
        session = self._session
        if session is None or not session.inbox:
            return None
        bundle = session.take()
        if not bundle.records:
            session.settle(bundle.packet_ids)
            return None
        token = _Token(session, bundle.packet_ids)
        session.outstanding.append(token)
        return Taken(
            format="json",
            arrived_at=self._setup.clock.now_us(),
            payloads=bundle.payloads(),
            describe=bundle.describe(),
            token=token,
        )

    async def acknowledge(self, token: Any) -> None:
        """PUBACK a committed bundle, if the connection that delivered it still stands."""
        assert isinstance(token, _Token)
        session = token.session
        if session is self._session:
            session.connection.acknowledge(token.packet_ids)
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
