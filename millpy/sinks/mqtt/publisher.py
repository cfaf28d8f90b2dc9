"""MqttPublisher: delivers the messages of one interval to an MQTT broker.

Each interval has a client id of its own. A new connection with it makes the broker end the one before, so an earlier
owner of the interval, frozen or not, publishes nothing from then on.

When a broker ends the connection, one of the messages on their way may be the reason. They are then sent one by one on
new connections, until the one is found: a message that is refused, and not an outage.
"""

from __future__ import annotations

import hashlib

from millpy.errors import SinkUnavailableError
from millpy.sinks.messages import TOPIC, SinkMessages
from millpy.sinks.mqtt.link import NEVER_TAKEN, BrokerLink, LinkEndError, PacketEnd
from millpy.sinks.mqtt.packets import message_properties, publish_end, user_properties
from millpy.sinks.mqtt.send_progress import SendProgress
from millpy.sinks.mqtt.topic import ON_WAY_MAX, MqttTopic
from millpy.sinks.protocol import SinkSetup
from millpy.sources.mqtt.address import BrokerAddress, tls_context

ID_PROPERTY = b"millpy-id"
SECRET_CHARACTERS = 12
BLAMES_A_MESSAGE = NEVER_TAKEN | {0x82, 0x87}
"""With protocol error and not authorized: reasons of a broker that ends a connection because of a message."""
SAYS_NOTHING = {None, 0x80}
ENDS_MAX = 3
"""After as many connections that have ended without a reason, each with one message on its way, it is refused."""


class MqttPublisher:
    """The connection of an interval, which may be several network connections after each other."""

    def __init__(self, sink: MqttTopic, setup: SinkSetup, address: BrokerAddress) -> None:
        self._sink = sink
        self._setup = setup
        self._address = address
        tls_context(address)  # fails early
        deployment = hashlib.sha256(setup.secret.encode()).hexdigest()[:SECRET_CHARACTERS] if setup.secret else "0"
        self.interval = f"{setup.graph}.{setup.sink}.{deployment}.{setup.number}"
        content_type = sink.content_type
        if content_type is None:
            content_type = "" if sink.value else "application/json"
        expiry_s = None if sink.expiry is None else int(sink.expiry.total_seconds())
        self._properties = message_properties(content_type, expiry_s, is_text=not sink.value)
        self._link: BrokerLink | None = None

    async def open(self) -> None:
        """Connect, and end an earlier connection of the interval. Raises SinkUnavailableError."""
        if not self._setup.trusted():
            raise SinkUnavailableError("the lease of this worker is over, and another one may own the interval")
        self._link = BrokerLink(self._address, qos=self._sink.qos, retain=self._sink.retain)
        await self._link.open()

    async def send(self, messages: SinkMessages) -> None:
        """Publish messages, and return when the broker has acknowledged all of them.

        Raises:
            SinkUnavailableError: it may lack some.
            MessagesRefusedError: it refuses some, and has the others.
        """
        assert self._link is not None, "open the connection first"
        progress, search = SendProgress(messages.keys), CulpritSearch()
        while True:
            try:
                await self._link.deliver(
                    progress, lambda place: self._packet(messages, place), 1 if search.is_on else ON_WAY_MAX
                )
                break
            except LinkEndError as error:
                search.judge(progress, error)
                await self.close()
                await self.open()
        progress.raise_refused()

    def _packet(self, messages: SinkMessages, place: int) -> PacketEnd:
        topic = messages.topic_of(place)
        assert topic is not None, "a message has no topic"
        identity = f"{self.interval}/{messages.positions[place]}".encode()
        pairs = [(name.encode(), value) for name, value in messages.headers_of(place) if name != TOPIC]
        properties = self._properties + user_properties([(ID_PROPERTY, identity), *pairs])
        return publish_end(topic, properties, messages.values[place] or b"")

    async def close(self) -> None:
        """Disconnect."""
        link, self._link = self._link, None
        if link is not None:
            await link.close()


class CulpritSearch:
    """Finds the message because of which a broker ends connections.

    Attributes:
        is_on: whether messages are to be sent one by one.
    """

    def __init__(self) -> None:
        self.is_on = False
        self._suspect = -1
        self._ends = 0
        self._left = -1

    def judge(self, progress: SendProgress, error: LinkEndError) -> None:
        """Note which messages were on their way when a connection ended, and refuse one that is found.

        Raises:
            LinkEndError: the end has another reason, or all messages fare alike.
        """
        on_way = list(progress.on_way)
        blames = error.code in BLAMES_A_MESSAGE
        if not on_way or not (blames or error.code in SAYS_NOTHING):
            raise error
        if len(on_way) == 1:
            (place,) = on_way
            self._ends = self._ends + 1 if place == self._suspect else 1
            self._suspect = place
            if blames or self._ends >= ENDS_MAX:
                if not blames and self._left == progress.left:
                    raise error  # the message before has fared the same, and none has been delivered since
                progress.refused(place, error.message, final=error.code in NEVER_TAKEN)
                self._left = progress.left
        progress.restart()
        self.is_on = True
