"""One connection to an MQTT broker: the only module that knows aiomqtt and the paho client inside it.

aiomqtt 2.5 has no public manual acknowledgement and one task per received message; so this adapter reaches through to
paho for four things, and nothing else in millpy does:

    manual_ack_set, ack     PUBACK when we say so, not on receipt
    socket, loop_read       stop and resume reading, the only bound that drops nothing
    _sock_close             leave no socket behind after a connect that failed half way
    _disconnected           (aiomqtt) the future that tells when and why a connection was lost
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, cast

import aiomqtt
from aiomqtt.exceptions import MqttConnectError
from paho.mqtt.client import MQTT_CLEAN_START_FIRST_ONLY
from paho.mqtt.client import Client as PahoClient
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties
from paho.mqtt.reasoncodes import ReasonCode
from paho.mqtt.subscribeoptions import SubscribeOptions

from millpy.errors import ConfigError, SourceUnavailableError

log = logging.getLogger(__name__)

RECEIVE_MAX = 65_535  # the protocol's largest: PUBACKs come a commit later, and flow must not wait for them
_SUBSCRIBE_S_MAX = 60.0  # the answer may stand behind a session's whole backlog
_SESSION_TAKEN_OVER = 142
_BAD_CREDENTIALS = {4, 5, 134, 135}
_BAD_PROTOCOL = {1, 132}


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokerAddress:
    """Where and as whom to connect."""

    host: str
    port: int
    username: str | None
    password: str | None
    tls: bool
    client_id: str
    protocol: int
    keepalive_s: int
    session_expiry_s: int

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class Delivered:
    """One message as received; `packet_id` is 0 for QoS 0, which has no acknowledgement."""

    topic: str
    payload: bytes
    packet_id: int
    retained: bool


class _Receiver:
    """What aiomqtt takes for its queue: hands every message on at once."""

    def __init__(self, deliver: Callable[[Delivered], None]) -> None:
        self._deliver = deliver

    def put_nowait(self, message: aiomqtt.Message) -> None:
        """Called by aiomqtt for each message, in the order received."""
        packet_id = message.mid if message.qos else 0
        self._deliver(Delivered(message.topic.value, bytes(message.payload), packet_id, bool(message.retain)))

    def qsize(self) -> int:
        """Nothing stays here."""
        return 0


class Connection:
    """One network connection with a persistent session.

    Args:
        address: the broker.
        deliver: called with every message, in the order received, on the event loop.
    """

    def __init__(self, address: BrokerAddress, deliver: Callable[[Delivered], None]) -> None:
        self.address = address
        five = address.protocol == 5
        properties: Any = cast("Any", Properties)(PacketTypes.CONNECT) if five else None
        if properties is not None:
            properties.SessionExpiryInterval = address.session_expiry_s
            properties.ReceiveMaximum = RECEIVE_MAX
        self._client = aiomqtt.Client(
            address.host,
            address.port,
            username=address.username,
            password=address.password,
            identifier=address.client_id,
            protocol=aiomqtt.ProtocolVersion.V5 if five else aiomqtt.ProtocolVersion.V311,
            clean_session=None if five else False,
            clean_start=False if five else MQTT_CLEAN_START_FIRST_ONLY,  # under 3.1.1 paho insists on its default
            properties=properties,
            keepalive=address.keepalive_s,
            tls_context=ssl.create_default_context() if address.tls else None,
            queue_type=cast("Any", lambda maxsize: _Receiver(deliver)),
        )
        self._paho: PahoClient = self._client._client
        self._paho.manual_ack_set(True)
        self._reading = True

    async def open(self) -> None:
        """Connect and resume the session; queued messages may be delivered at once.

        Raises:
            ConfigError: the broker refuses these credentials or this protocol version.
            SourceUnavailableError: it cannot be reached.
        """
        entering = asyncio.ensure_future(self._client.__aenter__())
        try:
            await asyncio.shield(entering)
        except asyncio.CancelledError:
            # The connect runs in a thread that cannot be stopped: wait it out, then take the socket down.
            await asyncio.wait([entering])
            if not entering.cancelled():
                entering.exception()
            await self.close()
            raise
        except aiomqtt.MqttError as error:
            await self.close()
            raise self._refusal(error) from error

    def _refusal(self, error: aiomqtt.MqttError) -> ConfigError | SourceUnavailableError:
        code = _code_of(error)
        if isinstance(error, MqttConnectError) and code in _BAD_CREDENTIALS:
            return ConfigError(
                f"the MQTT broker at {self.address} refuses user {self.address.username!r}: {error}",
                hint="set username= and password=, or MILLPY_MQTT_URL=mqtt://user:password@host:port",
            )
        if isinstance(error, MqttConnectError) and code in _BAD_PROTOCOL:
            return ConfigError(
                f"the MQTT broker at {self.address} does not speak protocol {self.address.protocol}",
                hint="protocol=311",
            )
        return SourceUnavailableError(
            f"no connection to the MQTT broker at {self.address}: {error}", hint="is it running, and the address right?"
        )

    async def subscribe(self, topic_filter: str, *, retained: bool) -> None:
        """Subscribe with QoS 1, never 2: paho would acknowledge those before anybody sees them.

        Raises:
            ConfigError: the broker does not allow it.
            SourceUnavailableError: the connection was lost meanwhile.
        """
        how: dict[str, Any] = {"qos": 1}
        if self.address.protocol == 5:
            handling = SubscribeOptions.RETAIN_SEND_IF_NEW_SUB if retained else SubscribeOptions.RETAIN_DO_NOT_SEND
            how = {"options": SubscribeOptions(qos=1, retainHandling=handling)}
        try:
            granted = await self._client.subscribe(topic_filter, timeout=_SUBSCRIBE_S_MAX, **how)
        except ValueError as error:
            raise ConfigError(f"{topic_filter!r} is no MQTT topic filter: {error}") from error
        except aiomqtt.MqttError as error:
            raise SourceUnavailableError(f"cannot subscribe to {topic_filter!r}: {error}") from error
        code = _value_of(granted[0])
        if code != 1:
            raise ConfigError(
                f"the MQTT broker granted {code} instead of QoS 1 for {topic_filter!r}",
                hint="allow this client to subscribe with QoS 1; with QoS 0 a crash would lose messages",
            )

    async def publish(self, topic: str, payload: bytes) -> None:
        """Publish with QoS 1 and wait for the broker's acknowledgement. Raises SourceUnavailableError."""
        try:
            await self._client.publish(topic, payload, qos=1)
        except aiomqtt.MqttError as error:
            raise SourceUnavailableError(f"cannot publish to {topic!r}: {error}") from error

    def acknowledge(self, packet_ids: Iterable[int]) -> None:
        """Send PUBACKs, in this order; on a lost connection they go nowhere."""
        for packet_id in packet_ids:
            self._paho.ack(packet_id, 1)

    def pause(self) -> None:
        """Read no more from the socket; what is there waits in the network."""
        sock = self._paho.socket()
        if self._reading and sock is not None:
            self._reading = False
            asyncio.get_running_loop().remove_reader(sock.fileno())

    def resume(self) -> None:
        """Read again."""
        sock = self._paho.socket()
        if not self._reading and sock is not None:
            self._reading = True
            asyncio.get_running_loop().add_reader(sock.fileno(), self._read)

    def _read(self) -> None:
        try:
            self._paho.loop_read()
        except OSError as error:
            if not self._client._disconnected.done():
                self._client._disconnected.set_exception(error)

    async def lost(self) -> bool:
        """Wait until the connection is lost; True when another client took the session over."""
        gone = self._client._disconnected
        await asyncio.wait([gone])
        error = None if gone.cancelled() else gone.exception()
        taken_over = _code_of(error) == _SESSION_TAKEN_OVER
        log.info(
            "mqtt connection lost", extra={"broker": str(self.address), "why": str(error), "taken_over": taken_over}
        )
        return taken_over

    async def close(self) -> None:
        """Disconnect; the session stays at the broker."""
        try:
            if self._paho.socket() is not None and self._client._connected.done():
                await self._client.__aexit__(None, None, None)
        except aiomqtt.MqttError as error:
            log.debug("mqtt disconnect failed", extra={"why": str(error)})
        finally:
            self._paho._sock_close()
            for future in (self._client._connected, self._client._disconnected):
                if future.done() and not future.cancelled():
                    future.exception()  # nobody else asks for it


def _code_of(error: BaseException | None) -> int | None:
    return _value_of(error.rc) if isinstance(error, aiomqtt.MqttCodeError) else None


def _value_of(code: ReasonCode | int | None) -> int | None:
    return code.value if isinstance(code, ReasonCode) else code
