"""One connection to an MQTT broker: the only module that knows aiomqtt and the paho client inside it.

They connect, speak TLS, authenticate, subscribe, ping, publish our markers and say why a connection ended. Messages and
their acknowledgements go past them (mqtt_socket.py): aiomqtt 2.5 has no public manual acknowledgement, and spends a
turn of the event loop on each message. So this adapter reaches through for a few things, as nothing else in millpy:

    _create_socket                  replaced, so that the library works on our socket
    on_socket_register_write,
    on_socket_unregister_write      ours: the socket takes whole packets and sees to the rest itself
    socket, loop_read, loop_write   stop and resume reading, the only bound that drops nothing
    _sock_close                     leave no socket behind after a connect that failed half way
    _disconnected, _connected       (aiomqtt) the futures that tell when and why a connection was lost
"""

from __future__ import annotations

import asyncio
import logging
import math
import socket
import ssl
import struct
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from typing import Any, cast

import aiomqtt
from aiomqtt.exceptions import MqttConnectError
from paho.mqtt import MQTTException
from paho.mqtt.client import MQTT_CLEAN_START_FIRST_ONLY
from paho.mqtt.client import Client as PahoClient
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties
from paho.mqtt.reasoncodes import ReasonCode
from paho.mqtt.subscribeoptions import SubscribeOptions

from millpy.errors import ConfigError, SourceUnavailableError
from millpy.injectors.mqtt_address import BrokerAddress, tls_context
from millpy.injectors.mqtt_packets import PacketCutter, PacketError, Published
from millpy.injectors.mqtt_socket import PacketSocket

log = logging.getLogger(__name__)

_CONNECT_S_MAX = 5.0
_FAREWELL_S_MAX = 3.0
_SILENCE_S_MAX = 60.0  # of a broker that owes us an answer, which may stand behind a session's whole backlog
# What the library raises when a packet of the broker's is none.
_NO_PACKET = (MQTTException, struct.error, ArithmeticError, AttributeError, LookupError, TypeError, ValueError)
_SESSION_TAKEN_OVER = 142
_BAD_CREDENTIALS = {4, 5, 134, 135}
_BAD_PROTOCOL = {1, 132}


class Connection:
    """One network connection with a persistent session.

    Args:
        address: the broker.
        deliver: called with messages, in the order received, on the event loop.
        packet_bytes_max, kept_bytes: of a longer message only the beginning is delivered.
    """

    def __init__(
        self,
        address: BrokerAddress,
        deliver: Callable[[Published], None],
        *,
        packet_bytes_max: int,
        kept_bytes: int,
    ) -> None:
        self.address = address
        self._deliver = deliver
        self._packet_bytes_max = packet_bytes_max
        self._kept_bytes = kept_bytes
        self._loop = asyncio.get_running_loop()
        five = address.protocol == 5
        properties: Any = cast("Any", Properties)(PacketTypes.CONNECT) if five else None
        if properties is not None:
            properties.SessionExpiryInterval = address.session_expiry_s
            properties.ReceiveMaximum = address.receive_max
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
        )
        self._paho: PahoClient = self._client._client
        self._socket: PacketSocket | None = None
        self._tls = tls_context(address)
        self._untrusted: ssl.SSLCertVerificationError | None = None
        self._go_under()

    def _go_under(self) -> None:
        """Let the library connect as it does, and then work on a socket of ours."""
        cutter = PacketCutter(
            five=self.address.protocol == 5, packet_bytes_max=self._packet_bytes_max, kept_bytes=self._kept_bytes
        )

        def created() -> PacketSocket:
            self._socket = PacketSocket(
                self._connected_socket(),
                loop=self._loop,
                cutter=cutter,
                deliver=self._deliver,
                failed=self._failed,
                readable=self._read,
            )
            return self._socket

        paho: Any = self._paho
        paho._create_socket = created
        # The first of these comes from the thread that connects.
        paho.on_socket_register_write = lambda *_: self._loop.call_soon_threadsafe(self._write)
        paho.on_socket_unregister_write = None

    def _connected_socket(self) -> socket.socket:
        raw = socket.create_connection((self.address.host, self.address.port), timeout=_CONNECT_S_MAX)
        raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if self._tls is None:
            return raw
        try:
            return self._tls.wrap_socket(raw, server_hostname=self.address.host)
        except ssl.SSLCertVerificationError as error:
            self._untrusted = error
            raise
        finally:
            raw.close()  # which TLS has left behind, or taken over

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
        if self._paho.socket() is None:
            await self.close()
            raise SourceUnavailableError(
                f"the MQTT broker at {self.address} ended the connection as soon as it stood",
                hint="is it just starting?",
            )
        assert self._paho.socket() is self._socket, "the client library connects in a way of its own"

    def _refusal(self, error: aiomqtt.MqttError) -> ConfigError | SourceUnavailableError:
        code = _code_of(error)
        if self._untrusted is not None:
            return ConfigError(
                f"the certificate of the MQTT broker at {self.address} is not to be trusted: "
                f"{self._untrusted.verify_message or self._untrusted}",
                hint="tls_ca= names the certificates to trust; the name in host= has to be in the broker's own",
            )
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

        The answer is waited for as long as something comes, or nothing is read.

        Raises:
            ConfigError: the broker does not allow it.
            SourceUnavailableError: the connection was lost meanwhile.
        """
        how: dict[str, Any] = {"qos": 1}
        if self.address.protocol == 5:
            handling = SubscribeOptions.RETAIN_SEND_IF_NEW_SUB if retained else SubscribeOptions.RETAIN_DO_NOT_SEND
            how = {"options": SubscribeOptions(qos=1, retainHandling=handling)}
        try:
            granted: Sequence[ReasonCode | int] = await self._answer(
                self._client.subscribe(topic_filter, timeout=math.inf, **how)
            )
        except ValueError as error:
            raise ConfigError(f"{topic_filter!r} is no MQTT topic filter: {error}") from error
        except aiomqtt.MqttError as error:
            raise SourceUnavailableError(f"cannot subscribe to {topic_filter!r}: {error}") from error
        if len(granted) != 1:
            raise SourceUnavailableError(
                f"the MQTT broker at {self.address} answers the subscription to {topic_filter!r} "
                f"with {len(granted)} codes",
                hint="is it an MQTT broker?",
            )
        code = _value_of(granted[0])
        if code != 1:
            raise ConfigError(
                f"the MQTT broker granted {code} instead of QoS 1 for {topic_filter!r}",
                hint="allow this client to subscribe with QoS 1; with QoS 0 a crash would lose messages",
            )

    async def _answer(self, question: Coroutine[Any, Any, Any]) -> Any:
        """What the broker says to it. Raises MqttError when the connection is lost, or silent for too long."""
        asked, gone = asyncio.ensure_future(question), self._client._disconnected
        try:
            while not asked.done():
                heard = self._socket.reads if self._socket is not None else 0
                await asyncio.wait([asked, gone], timeout=_SILENCE_S_MAX, return_when=asyncio.FIRST_COMPLETED)
                if asked.done():
                    break
                if gone.done():
                    raise aiomqtt.MqttError("the connection was lost")
                if self._socket is None or (not self._socket.paused and self._socket.reads == heard):
                    raise aiomqtt.MqttError("the broker does not answer")
            return asked.result()
        finally:
            asked.cancel()

    async def publish(self, topic: str, payload: bytes) -> None:
        """Publish with QoS 1 and wait for the broker's acknowledgement. Raises SourceUnavailableError."""
        try:
            await self._client.publish(topic, payload, qos=1)
        except aiomqtt.MqttError as error:
            raise SourceUnavailableError(f"cannot publish to {topic!r}: {error}") from error

    def acknowledge(self, packet_ids: Sequence[int]) -> None:
        """Send PUBACKs, in this order; on a lost connection they go nowhere."""
        if self._socket is None or self._client._disconnected.done():
            return
        try:
            self._socket.acknowledge(packet_ids)
        except OSError as error:
            self._failed(error)

    def ping(self) -> int:
        """Ask for an answer behind all that was written so far; 0 on a lost connection."""
        if self._socket is None or self._client._disconnected.done():
            return 0
        try:
            return self._socket.ping()
        except OSError as error:
            self._failed(error)
            return 0

    def answered(self, ping: int) -> bool:
        """Whether the broker has answered this ping, and so has processed what was written before it."""
        return ping > 0 and self._socket is not None and self._socket.answered(ping)

    def pause(self) -> None:
        """Read no more from the socket; what is there waits in the network, and the session is kept alive."""
        if self._socket is not None and not self._socket.paused and self._socket.fileno() >= 0:
            self._loop.remove_reader(self._socket.fileno())
            self._socket.pause()

    def resume(self) -> None:
        """Read again."""
        if self._socket is not None and self._socket.paused and self._socket.fileno() >= 0:
            self._loop.add_reader(self._socket.fileno(), self._read)
            self._socket.resume()

    def _read(self) -> None:
        try:
            while self._paho.loop_read() == 0 and self._socket is not None and self._socket.pending():
                pass
        except OSError as error:
            self._failed(error)
        except _NO_PACKET as error:
            self._failed(PacketError(f"a packet of the broker cannot be read: {error!r}"))

    def _write(self) -> None:
        try:
            self._paho.loop_write()
        except OSError as error:
            self._failed(error)

    def _failed(self, error: OSError) -> None:
        if not self._client._disconnected.done():
            self._client._disconnected.set_exception(error)

    def give_up(self, why: str) -> None:
        """Let the connection count as lost."""
        self._failed(OSError(why))

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
                assert self._socket is not None
                self.resume()
                with suppress(TimeoutError):
                    async with asyncio.timeout(_FAREWELL_S_MAX):
                        await self._socket.processed()
                await self._client.__aexit__(None, None, None)
        except (aiomqtt.MqttError, OSError) as error:
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
