"""BrokerLink: one network connection to a broker on which messages are published, and their answers read.

The connection is that of the source (`sources/mqtt/connection.py`): aiomqtt logs in and pings, and what belongs to
messages passes it by.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from millpy.errors import MillError, SinkUnavailableError
from millpy.sinks.mqtt.packets import (
    CONNACK,
    DISCONNECT,
    ID_MAX,
    PUBACK,
    PUBCOMP,
    PUBREC,
    REFUSED_MIN,
    BrokerLimits,
    answer_of,
    farewell_of,
    limits_of,
    packet_type,
    publish,
    publish_size,
    pubrel,
)
from millpy.sinks.mqtt.send_progress import SendProgress
from millpy.sources.mqtt.address import BrokerAddress
from millpy.sources.mqtt.connection import MqttConnection
from millpy.sources.mqtt.packets import Messages, PacketError

ANSWER_S_MAX = 10.0
"""Seconds without any answer to messages after which the connection is given up."""
NEVER_TAKEN = {0x81, 0x90, 0x95, 0x99}
"""Malformed, topic name invalid, packet too large, payload format invalid: the same message fares no better later."""
PacketEnd = tuple[bytes, bytes]


class LinkEndError(SinkUnavailableError):
    """The connection has ended while messages were on their way.

    Attributes:
        code: the reason code with which the broker has ended it; None if it just closed it, or the network failed.
    """

    def __init__(self, message: str, code: int | None) -> None:
        super().__init__(message)
        self.code = code


class BrokerLink:
    """A connection, and the messages that are on their way on it.

    Args:
        address: the broker.
        qos: the QoS of the messages, 1 or 2.
        retain: whether the broker keeps them.

    Attributes:
        limits: what the broker takes.
    """

    def __init__(self, address: BrokerAddress, *, qos: int, retain: bool) -> None:
        self.limits = BrokerLimits()
        self._address = address
        self._qos, self._retain, self._on_way_max = qos, retain, 1
        self._connection = MqttConnection(
            address, _ignore, packet_bytes_max=1_000_000, kept_bytes=1, answer=self._take_answers
        )
        self._lost: asyncio.Task[bool] | None = None
        self._farewell: tuple[int, str] | None = None
        self._progress = SendProgress(())
        self._packet_of: Callable[[int], PacketEnd] = _no_packet
        self._places: dict[int, int] = {}  # packet id -> place
        self._last_id = 0
        self._answers = 0
        self._done = asyncio.get_running_loop().create_future()

    async def open(self) -> None:
        """Connect with a new session, which ends the one of an earlier connection with the client id.

        Raises:
            SinkUnavailableError: the broker cannot be reached, refuses us, or cannot take such messages.
        """
        try:
            await self._connection.open()
        except MillError as error:
            raise SinkUnavailableError(error.message, hint=error.hint) from error
        self._lost = asyncio.create_task(self._connection.lost(), name="millpy-mqtt-sink-loss")
        if self.limits.qos_max < self._qos:
            raise SinkUnavailableError(
                f"the MQTT broker at {self._address} takes no messages of QoS {self._qos}",
                hint="allow it at the broker" if self._qos == 1 else "set qos=1, or allow it at the broker",
            )
        if self._retain and not self.limits.retains:
            raise SinkUnavailableError(
                f"the MQTT broker at {self._address} keeps no messages", hint="leave out retain=, or allow it there"
            )

    async def deliver(self, progress: SendProgress, packet_of: Callable[[int], PacketEnd], on_way_max: int) -> None:
        """Publish messages until the broker has taken or refused each.

        Args:
            progress: the messages.
            packet_of: returns the packet of the message at a place, without its id.
            on_way_max: the most messages whose answer may be awaited, if the broker allows them.

        Raises:
            LinkEndError: the connection has ended before.
            SinkUnavailableError: the broker does not answer.
        """
        assert self._lost is not None, "open the link first"
        if self._lost.done():
            raise self._end()  # while nothing was on its way
        self._progress, self._packet_of = progress, packet_of
        self._on_way_max = min(on_way_max, self.limits.receive_max)
        self._done = asyncio.get_running_loop().create_future()
        self._publish_ready()
        while not self._done.done():
            before = self._answers
            await asyncio.wait([self._done, self._lost], timeout=ANSWER_S_MAX, return_when=asyncio.FIRST_COMPLETED)
            if self._done.done():
                return
            if self._lost.done():
                raise self._end()
            if self._answers == before:
                why = f"the MQTT broker at {self._address} has acknowledged no message for {ANSWER_S_MAX:g} s"
                self._connection.mark_lost(why)
                raise SinkUnavailableError(why, hint="is it frozen, or overloaded?")

    def _end(self) -> LinkEndError:
        if self._farewell is None:
            return LinkEndError(
                f"the connection to the MQTT broker at {self._address} has ended: {self._connection.why_lost}", None
            )
        code, why = self._farewell
        return LinkEndError(f"the MQTT broker at {self._address} has ended the connection: {why}", code)

    async def close(self) -> None:
        """Disconnect; publish nothing more of a `deliver` that was cancelled."""
        self._done.cancel()
        await self._connection.close()
        if self._lost is not None:
            await asyncio.wait([self._lost])

    # -- on each read ---------------------------------------------------------------------------------------------

    def _take_answers(self, packets: list[bytes]) -> list[bytes]:
        """Take the answers to messages, and publish what may leave then; return the packets for the library."""
        others = [packet for packet in packets if not self._take(packet)]
        if len(others) < len(packets):
            self._answers += 1
            self._publish_ready()
        return others

    def _take(self, packet: bytes) -> bool:
        """Take one packet; return whether it was an answer to a message."""
        match packet_type(packet):
            case found if found in (PUBACK, PUBREC, PUBCOMP):
                self._take_answer(found, packet)
                return True
            case found if found == CONNACK:
                self.limits = limits_of(packet)
            case found if found == DISCONNECT:
                self._farewell = farewell_of(packet)
        return False

    def _take_answer(self, kind: int, packet: bytes) -> None:
        answer = answer_of(packet)
        if (kind == PUBACK) != (self._qos == 1) or answer.packet_id not in self._places:
            raise PacketError(f"the broker has answered message {answer.packet_id}, which was not sent")
        if answer.code < REFUSED_MIN:
            if kind == PUBREC:
                self._connection.write(pubrel(answer.packet_id))
            else:
                self._progress.delivered(self._places.pop(answer.packet_id))
        elif kind == PUBCOMP:
            raise PacketError(f"the broker has lost a message that it had accepted: {answer.why}")
        else:
            place = self._places.pop(answer.packet_id)
            self._progress.refused(place, f"the broker says: {answer.why}", final=answer.code in NEVER_TAKEN)

    def _publish_ready(self) -> None:
        """Publish the messages that may leave, and note whether all are done."""
        if self._done.done():
            return
        packets: list[bytes] = []
        progress, size_max = self._progress, self.limits.packet_bytes_max
        while len(self._places) < self._on_way_max and (place := progress.next()) is not None:
            end = self._packet_of(place)
            size = publish_size(end)
            if size > size_max:
                why = f"a packet of {size:,} bytes; the broker takes at most {size_max:,}"
                progress.refused(place, why, final=True)
                continue
            packets.append(publish(end, self._next_id(place), qos=self._qos, retain=self._retain))
        self._connection.write(b"".join(packets))
        if not progress.left:
            self._done.set_result(None)

    def _next_id(self, place: int) -> int:
        """Return a packet id that is free, and note whose it is."""
        while True:
            self._last_id = self._last_id % ID_MAX + 1
            if self._last_id not in self._places:
                self._places[self._last_id] = place
                return self._last_id


def _ignore(messages: Messages) -> None:
    """Ignore messages, as nothing is subscribed to."""
    del messages


def _no_packet(place: int) -> PacketEnd:
    raise AssertionError(f"no message has place {place}")
