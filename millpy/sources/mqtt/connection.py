"""One connection to an MQTT broker: the only module that knows aiomqtt, of which it uses public names only.

The library authenticates, subscribes, pings, publishes our markers and reports why a connection ended. It connects to
our relay (relay.py), which connects to the broker, speaks TLS, and handles messages and their acknowledgements:
aiomqtt has no manual acknowledgement, and spends an iteration of the event loop on each message.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import re
import ssl
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from typing import Any, cast

import aiomqtt
from aiomqtt.exceptions import MqttConnectError
from paho.mqtt.client import MQTT_CLEAN_START_FIRST_ONLY
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties
from paho.mqtt.reasoncodes import ReasonCode
from paho.mqtt.subscribeoptions import SubscribeOptions

from millpy.errors import ConfigError, SourceUnavailableError
from millpy.sources.mqtt.address import BrokerAddress, tls_context
from millpy.sources.mqtt.packets import Messages
from millpy.sources.mqtt.properties import CONNACK_FIRST, SessionGrant, session_grant
from millpy.sources.mqtt.relay import PacketRelay

log = logging.getLogger(__name__)

_CONNECT_S_MAX = 5.0
_FAREWELL_S_MAX = 3.0
_SILENCE_S_MAX = 60.0  # without a packet beside pings; an expected answer may wait behind a session's whole backlog
_LAST_WORD_S_MAX = 0.5  # for the library to read what the broker sent before it closed the connection
_REFUSED_MIN = _UNSPECIFIED = 128
_SESSION_TAKEN_OVER = 142
_BAD_CREDENTIALS = {4, 5, 134, 135}
_BAD_PROTOCOL = {1, 132}


class MqttConnection:
    """One network connection with a persistent session.

    Args:
        address: the broker.
        deliver: called with messages, in the order received, on the event loop.
        packet_bytes_max: the length above which a message is delivered without the end of its payload.
        kept_bytes: the length of the beginning that is delivered then.
        answer: called with the other packets of a read; returns those that the library is to see.

    Attributes:
        grant: what the broker has said of the session; None before it has answered.
    """

    def __init__(
        self,
        address: BrokerAddress,
        deliver: Callable[[Messages], None],
        *,
        packet_bytes_max: int,
        kept_bytes: int,
        answer: Callable[[list[bytes]], list[bytes]] = list,
    ) -> None:
        self.address = address
        self.grant: SessionGrant | None = None
        self._answer_packets = answer
        self._relay = PacketRelay(
            five=address.protocol == 5,
            packet_bytes_max=packet_bytes_max,
            kept_bytes=kept_bytes,
            deliver=deliver,
            answer=self._see,
        )
        self._tls = tls_context(address)
        self._client: aiomqtt.Client | None = None
        self._lost: asyncio.Task[None] | None = None
        self.why_lost = ""

    def _see(self, packets: list[bytes]) -> list[bytes]:
        """Read what the broker says of the session, which the library keeps to itself."""
        if self.grant is None and packets and packets[0][0] == CONNACK_FIRST:
            self.grant = session_grant(packets[0], five=self.address.protocol == 5)
        return self._answer_packets(packets)

    def _client_of(self, path: str) -> aiomqtt.Client:
        """Return a client that connects to the relay at this path."""
        address = self.address
        five = address.protocol == 5
        properties: Any = cast("Any", Properties)(PacketTypes.CONNECT) if five else None
        if properties is not None:
            properties.SessionExpiryInterval = address.session_expiry_s
            properties.ReceiveMaximum = address.receive_max
        return aiomqtt.Client(
            path,
            transport="unix",
            username=address.username,
            password=address.password,
            identifier=address.client_id,
            protocol=aiomqtt.ProtocolVersion.V5 if five else aiomqtt.ProtocolVersion.V311,
            clean_session=None if five else address.clean,
            clean_start=address.clean if five else MQTT_CLEAN_START_FIRST_ONLY,  # what paho insists on under 3.1.1
            properties=properties,
            keepalive=address.keepalive_s,
        )

    async def open(self) -> None:
        """Connect and resume the session; the broker may deliver queued messages at once.

        Raises:
            ConfigError: the broker rejects the credentials or the protocol version, its certificate is untrusted, or
                the directory for temporary files is unusable.
            SourceUnavailableError: the broker cannot be reached.
        """
        try:
            async with asyncio.timeout(_CONNECT_S_MAX):
                await self._relay.connect(self.address.host, self.address.port, self._tls)
            try:
                async with self._relay.entrance() as path:
                    self._client = self._client_of(path)
                    await self._enter(self._client)
            except OSError as error:
                raise ConfigError(
                    f"cannot create a socket in the directory for temporary files: {error}",
                    hint="set TMPDIR to a directory with a short path, in which this user can write",
                ) from error
        except (aiomqtt.MqttError, OSError) as error:
            await self.close()
            raise self._refusal(error) from error
        except BaseException:
            await self.close()
            raise

    async def _enter(self, client: aiomqtt.Client) -> None:
        """Let the library connect. Raises MqttError when that fails, or the connection ends before."""
        self._lost = asyncio.create_task(_await_loss(client), name="millpy-mqtt-loss")
        entering = asyncio.create_task(client.__aenter__(), name="millpy-mqtt-connect")
        try:
            await asyncio.wait([entering, self._lost, self._relay.ended], return_when=asyncio.FIRST_COMPLETED)
            await asyncio.wait([entering], timeout=_LAST_WORD_S_MAX)
            if entering.done():
                entering.result()
            if not self._is_connected():
                raise aiomqtt.MqttError(str(self._relay.error or "it closed the connection"))
        finally:
            entering.cancel()
            await asyncio.wait([entering])
            if not entering.cancelled():
                entering.exception()  # marks it as retrieved, or asyncio would log it

    def _is_connected(self) -> bool:
        return self._relay.is_open and self._lost is not None and not self._lost.done()

    def _refusal(self, error: aiomqtt.MqttError | OSError) -> ConfigError | SourceUnavailableError:
        code = _code_of(error)
        if isinstance(error, ssl.SSLCertVerificationError):
            return ConfigError(
                f"the certificate of the MQTT broker at {self.address} is not trusted: {error.verify_message or error}",
                hint="set tls=Tls(ca=…) to the certificates to trust; the broker's must contain the name in host=",
            )
        if isinstance(error, MqttConnectError) and code in _BAD_CREDENTIALS:
            user = self.address.username
            who = "a client without a user" if user is None else f"user {user!r}"
            return ConfigError(
                f"the MQTT broker at {self.address} refuses {who}: {error}",
                hint="set login=Login(…), or MILLPY_MQTT_URL=mqtt://user:password@host:port",
            )
        if isinstance(error, MqttConnectError) and code in _BAD_PROTOCOL:
            return ConfigError(
                f"the MQTT broker at {self.address} does not speak protocol {self.address.protocol}",
                hint="set protocol=311 at a source; a sink needs a broker with MQTT 5",
            )
        return SourceUnavailableError(
            f"cannot connect to the MQTT broker at {self.address}: {reason_of(error)}",
            hint="check the address, and that the broker runs",
        )

    async def subscribe(self, topic_filter: str, *, retained: bool) -> None:
        """Subscribe with QoS 1, never 2: paho would acknowledge messages of QoS 2 before we see them.

        Wait for the answer as long as packets other than answers to pings arrive, or reading is paused.

        Raises:
            ConfigError: the filter is invalid, or the broker does not allow the subscription.
            SourceUnavailableError: the connection was lost, or the broker does not answer.
        """
        assert self._client is not None
        how: dict[str, Any] = {"qos": 1}
        if self.address.protocol == 5:
            handling = SubscribeOptions.RETAIN_SEND_IF_NEW_SUB if retained else SubscribeOptions.RETAIN_DO_NOT_SEND
            how = {"options": SubscribeOptions(qos=1, retainHandling=handling)}
        try:
            granted: Sequence[ReasonCode | int] = await self._answer(
                self._client.subscribe(topic_filter, timeout=math.inf, **how)
            )
        except ValueError as error:
            raise ConfigError(f"invalid MQTT topic filter {topic_filter!r}: {error}") from error
        except aiomqtt.MqttError as error:
            raise SourceUnavailableError(f"cannot subscribe to {topic_filter!r}: {error}") from error
        if len(granted) != 1:
            raise SourceUnavailableError(
                f"the MQTT broker at {self.address} answered the subscription to {topic_filter!r} "
                f"with {len(granted)} codes",
                hint="check that the address is an MQTT broker",
            )
        code = _value_of(granted[0])
        if code is not None and code >= _REFUSED_MIN:
            raise ConfigError(
                f"the MQTT broker refuses the subscription to {topic_filter!r}: {granted[0]} (0x{code:02x})",
                hint="allow this client to subscribe to it, or see the broker's log and limits",
            )
        if code != 1:
            raise ConfigError(
                f"the MQTT broker granted {code} instead of QoS 1 for {topic_filter!r}",
                hint="allow this client to subscribe with QoS 1; with QoS 0 a crash would lose messages",
            )

    async def _answer(self, question: Coroutine[Any, Any, Any]) -> Any:
        """Await the broker's answer. Raises MqttError when the connection is lost or silent for too long."""
        assert self._lost is not None
        asked, lost = asyncio.ensure_future(question), self._lost
        try:
            while not asked.done():
                heard = self._relay.reads_beside_pings
                await asyncio.wait([asked, lost], timeout=_SILENCE_S_MAX, return_when=asyncio.FIRST_COMPLETED)
                if asked.done():
                    break
                if lost.done():
                    raise aiomqtt.MqttError("the connection was lost")
                if not self._relay.paused and self._relay.reads_beside_pings == heard:
                    raise aiomqtt.MqttError("the broker does not answer")
            return asked.result()
        finally:
            asked.cancel()

    async def publish(self, topic: str, payload: bytes) -> None:
        """Publish with QoS 1 and wait for the broker's acknowledgement. Raises SourceUnavailableError."""
        assert self._client is not None
        try:
            await self._client.publish(topic, payload, qos=1)
        except aiomqtt.MqttError as error:
            raise SourceUnavailableError(f"cannot publish to {topic!r}: {error}") from error

    def acknowledge(self, packet_ids: Sequence[int]) -> None:
        """Send PUBACKs, in this order; do nothing on a lost connection."""
        self._relay.acknowledge(packet_ids)

    def write(self, data: bytes) -> None:
        """Write whole packets; do nothing on a lost connection."""
        self._relay.write(data)

    def ping(self) -> int:
        """Send a ping behind everything written so far, and return its number; 0 on a lost connection."""
        return self._relay.ping() if self._relay.is_open else 0

    def answered(self, ping: int) -> bool:
        """Tell whether the broker has answered this ping, and so processed everything written before it."""
        return ping > 0 and self._relay.answered(ping)

    @property
    def reads(self) -> int:
        """The number of reads from the broker so far."""
        return self._relay.reads

    @property
    def paused(self) -> bool:
        """Whether reading is paused, so that no answer can be heard."""
        return self._relay.paused

    def pause(self) -> None:
        """Stop reading; incoming bytes wait in the network, and the session stays alive."""
        self._relay.pause()

    def resume(self) -> None:
        """Resume reading."""
        self._relay.resume()

    def mark_lost(self, why: str) -> None:
        """Treat the connection as lost."""
        self._relay.abort(OSError(why))

    async def lost(self) -> bool:
        """Wait until the connection is lost; return True when another client took over the session."""
        assert self._lost is not None
        await asyncio.wait([self._lost])
        error = None if self._lost.cancelled() else self._lost.exception()
        cause = error.__cause__ if error is not None else None
        taken_over = _code_of(cause) == _SESSION_TAKEN_OVER
        why = self._relay.error or cause
        self.why_lost = "another client took over the session" if taken_over else _why(why)
        log.info("mqtt connection lost", extra={"broker": str(self.address), "why": str(why), "taken_over": taken_over})
        return taken_over

    async def close(self) -> None:
        """Disconnect; the session stays at the broker."""
        client, self._client = self._client, None
        try:
            if client is not None and self._is_connected():
                self.resume()
                with suppress(TimeoutError):
                    async with asyncio.timeout(_FAREWELL_S_MAX):
                        await self._relay.processed()
                await client.__aexit__(None, None, None)
        except aiomqtt.MqttError as error:
            log.debug("mqtt disconnect failed", extra={"why": str(error)})
        finally:
            await self._dispose(client)

    async def _dispose(self, client: aiomqtt.Client | None) -> None:
        """Close both connections of the relay, and the library's socket."""
        lost = self._lost
        fault = lost.exception() if lost is not None and lost.done() and not lost.cancelled() else None
        if client is not None and fault is not None and not isinstance(fault.__cause__, aiomqtt.MqttError | None):
            # After an exception in a callback of its own, the library keeps its socket and never reads the end of it.
            # It closes the socket when it connects again, which fails, as the relay listens no longer.
            with suppress(aiomqtt.MqttError):
                await client.__aexit__(None, None, None)
                await client.__aenter__()
        await self._relay.close(timeout_s=_FAREWELL_S_MAX)
        if lost is not None:
            lost.cancel()
            await asyncio.wait([lost])
            if not lost.cancelled():
                lost.exception()  # marks it as retrieved, or asyncio would log it


async def _await_loss(client: aiomqtt.Client) -> None:
    """Wait until the client is disconnected. Raises MqttError, whose cause says why."""
    async for _ in client.messages:  # the relay hands it none
        pass


def reason_of(error: Exception) -> str:
    """Return why a connection failed, in the system's words: asyncio says instead which of its own calls failed."""
    numbers = dict.fromkeys(re.findall(r"\[Errno (\d+)\]", str(error)))
    return "; ".join(os.strerror(int(number)) for number in numbers) or str(error) or "it does not answer"


def _why(error: BaseException | None) -> str:
    """Return why a connection has ended; a broker that stops just closes it."""
    if not isinstance(error, Exception) or _code_of(error) == _UNSPECIFIED:
        return "the broker closed it"
    return reason_of(error)


def _code_of(error: BaseException | None) -> int | None:
    return _value_of(error.rc) if isinstance(error, aiomqtt.MqttCodeError) else None


def _value_of(code: ReasonCode | int | None) -> int | None:
    return code.value if isinstance(code, ReasonCode) else code
