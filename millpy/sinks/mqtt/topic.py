"""MqttTopic: messages of a graph under MQTT topics, each at least once, with an id that never changes.

A broker stores no position with a message, and keeps nothing of a publisher whose connection has ended. So what a crash
leaves unknown is sent again, at most the messages of one `send`, and a user property of each message identifies it.
QoS 2 changes nothing about that: it is for subscribers, which get the lower QoS of publisher and subscription.

MQTT 3.1.1 is refused: its brokers cannot refuse a message, so they acknowledge it and drop it, or close the connection;
and its messages have no properties.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal, get_args

from millpy.config.access import NO_LOGIN, Login, Tls
from millpy.config.extras import to_install
from millpy.errors import ConfigError, GraphError, RefusedValueError
from millpy.model.arguments import check_flags, check_instance, is_whole
from millpy.model.finding import Finding
from millpy.model.identity import Identity
from millpy.model.record import RecordType, getter
from millpy.sinks.messages import TOPIC, check_value, field_headers
from millpy.sinks.mqtt.template import Topic, checked_topic, topic_reader, unsendable, validate
from millpy.sinks.protocol import SendBound, Sink, SinkConnection, SinkSetup
from millpy.sinks.refusal_policy import RefusalPolicy
from millpy.sources.mqtt.address import BrokerAccess, BrokerAddress, check_address
from millpy.sources.mqtt.source import session_name

if TYPE_CHECKING:
    from millpy.sinks.mqtt.publisher import MqttPublisher

Qos = Literal[1, 2]
NO_GIVING_UP = RefusalPolicy()
SEND_MAX = SendBound(records=100, bytes=4_000_000)
EXPIRY_MAX = timedelta(seconds=2**32 - 1)
ON_WAY_MAX = 1_000
"""The most messages of an interval whose acknowledgement is awaited, if the broker allows as many."""
PROPERTY_BYTES_MAX = 65_535


@dataclass(frozen=True, slots=True, repr=False)
class MqttTopic(Sink):
    """Topics of an MQTT 5 broker, to which each message goes at least once, with QoS 1 or 2.

    Each message has the user property `millpy-id`: INTERVAL/NUMBER. The messages of a key have ascending numbers. A
    message that comes again has the same id. The repr and the identity leave out everything but the kind, so that all
    settings may change with a deployment.

    Args:
        topic: `{field}` stands for the value of a field (text, a whole number, a UUID, an Enum), which must stay within
            its level: `alerts/{device}`. Or a function from a record to its topic. A record whose
            topic is invalid becomes a dead letter.
        value: the field whose text or bytes is the payload; by default the whole record, as JSON. None becomes an empty
            payload.
        headers: fields that become user properties, as text; those with None are left out.
        qos: 1, or 2 for subscribers that want it.
        retain: whether the broker keeps the last message of each topic for later subscribers. An empty payload deletes
            the one that it keeps.
        expiry: how long the broker keeps a message for subscribers that are away; from when it has it.
        content_type: the content type; by default "application/json" for whole records.
        message_bytes_max: the most bytes of topic, value and headers; a record with a larger message becomes a dead
            letter.
        host: the broker. When it is left out, the broker, the credentials and TLS come from MILLPY_MQTT_URL.
        port: the broker's port; by default 1883, with TLS 8883.
        login: our user name and password.
        tls: whether to encrypt, and to verify the broker's certificate and name; by default True if a password would go
            to another machine.
        keepalive_s: the MQTT keep-alive in seconds.
        bound: the most messages of one `send`, which is what a crash repeats for an interval.
        refusals: when to stop trying a message that the broker refuses.
    """

    topic: Topic
    value: str = ""
    headers: tuple[str, ...] = ()
    qos: Qos = 1
    retain: bool = False
    expiry: timedelta | None = None
    content_type: str | None = None
    message_bytes_max: int = 1_000_000
    host: str | None = None
    port: int | None = None
    login: Login = NO_LOGIN
    tls: Tls | bool | None = None
    keepalive_s: int = 20
    bound: SendBound = SEND_MAX
    refusals: RefusalPolicy = NO_GIVING_UP

    def __post_init__(self) -> None:
        checked_topic(self.topic)
        check_value(self.value, self.headers)
        check_address(self.host, self.port, self.login, self.tls)
        check_instance("refusals", self.refusals, RefusalPolicy, "for example refusals=RefusalPolicy(attempts=3)")
        check_instance("bound", self.bound, SendBound, "for example bound=SendBound(records=10)")
        check_flags(retain=self.retain)
        if self.qos not in get_args(Qos):
            raise ConfigError(
                f"qos={self.qos!r} is neither 1 nor 2", hint="the broker does not acknowledge messages of QoS 0"
            )
        expiry: object = self.expiry
        if expiry is not None and not (isinstance(expiry, timedelta) and timedelta(seconds=1) <= expiry <= EXPIRY_MAX):
            raise ConfigError(f"expiry={expiry!r} is not between 1 s and 136 years", hint="for example hours(1)")
        if not is_whole(self.keepalive_s, 1, 65_535):
            raise ConfigError(f"keepalive_s={self.keepalive_s!r} is not between 1 and 65,535", hint="leave it out")
        if not is_whole(self.message_bytes_max, 1):
            raise ConfigError(
                f"message_bytes_max={self.message_bytes_max!r} lets no message pass", hint="use a positive number"
            )
        kind: object = self.content_type
        if kind is not None and not (isinstance(kind, str) and len(kind) <= 1_000 and not unsendable(kind)):
            raise ConfigError(f"{f'{kind!r}':.200} is no content type", hint='for example "text/plain"')

    @property
    def calls_code(self) -> bool:  # type: ignore[override]
        """Whether a function makes the topics."""
        return callable(self.topic)

    def identity(self) -> Identity:
        """Describe the kind; positions are in the database, so everything else may change."""
        return {"kind": "mqtt_topic"}

    def validate(self, record_type: RecordType) -> None:
        """Check the fields of the topic and of the user properties. Raises GraphError, SchemaError."""
        validate(self.topic, record_type)
        for name in self.headers:
            if record_type.field_type(name) is bytes:
                raise GraphError(
                    f"field {name!r} of {record_type.struct.__name__} has bytes, and a user property is text",
                    hint="map the records to a class in which it is text",
                )

    def header_reader(self, record_type: RecordType) -> Callable[[Any], list[tuple[str, bytes]]]:
        """Return a function from a record to its topic and its user properties."""
        del record_type
        topic_of = topic_reader(self.topic)
        readers = [(name, getter(name)) for name in self.headers]

        def read(record: Any) -> list[tuple[str, bytes]]:
            found = field_headers(record, readers)
            for name, value in found:
                if len(value) > PROPERTY_BYTES_MAX or unsendable(value.decode()):
                    raise RefusedValueError(
                        f"field {name!r} has a control character or more than 65,535 bytes, and is a user property"
                    )
            return [(TOPIC, topic_of(record).encode()), *found]

        return read

    def connect(self, setup: SinkSetup) -> SinkConnection:
        """Return a connection for an interval, not yet open.

        Raises:
            ConfigError: the package aiomqtt is missing, or a file with the password or a certificate is unreadable.
        """
        return self.publisher(setup)

    def publisher(self, setup: SinkSetup) -> MqttPublisher:
        """Return the connection. Raises ConfigError."""
        try:
            from millpy.sinks.mqtt.publisher import MqttPublisher  # needs an optional dependency
        except ImportError as error:
            raise ConfigError("MQTT needs the package aiomqtt", hint=to_install("mqtt")) from error
        name = session_name(setup.graph, setup.sink, f"interval {setup.number}", setup.secret)
        return MqttPublisher(self, setup, self.address(name))

    def address(self, client_id: str) -> BrokerAddress:
        """Return the address and credentials. Raises ConfigError."""
        return BrokerAccess(self.host, self.port, self.login, self.tls).address(
            client_id=client_id,
            protocol=5,
            keepalive_s=self.keepalive_s,
            session_expiry_s=0,
            receive_max=1,
            clean=True,
        )

    def examine(self, graph: str, sink: str) -> AsyncIterator[Finding]:
        """Check the broker, its login and its limits. Raises MillError."""
        from millpy.sinks.mqtt.examination import examine

        return examine(self, graph, sink)
