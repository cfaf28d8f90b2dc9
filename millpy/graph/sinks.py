"""Sinks as steps of a graph: `to_sql`, and `to_sink`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from millpy.config.access import NO_LOGIN, Login, Tls
from millpy.errors import GraphError
from millpy.graph.arguments import field_names
from millpy.graph.names import checked_name
from millpy.graph.nodes import StageNode
from millpy.graph.sql_types import sql_type
from millpy.limits import KEY_INTERVALS_DEFAULT
from millpy.model.arguments import check_instance
from millpy.model.record import RecordType
from millpy.sinks.kafka.topic import Compression, KafkaTopic, Partitioner
from millpy.sinks.mqtt.topic import MqttTopic, Qos
from millpy.sinks.outbox import OutboxLogic
from millpy.sinks.protocol import Sink
from millpy.sinks.refusal_policy import RefusalPolicy
from millpy.sinks.statement import StatementLogic, places_of
from millpy.sinks.webhook.endpoint import NO_ACCESS, Batch, Webhook, WebhookAccess
from millpy.sources.kafka.source import DEFAULT_BROKERS, KafkaBrokers

if TYPE_CHECKING:
    from millpy.graph.streams import Stream

VALUE_TYPES = (str, bytes)
"""Types of a field that can be the value of a message."""


class SinkMethods:
    """The methods of a stream that send its records out of the graph."""

    __slots__ = ()

    def to_sql(
        self, statement: str, *, key: str | Sequence[str], name: str, intervals: int = KEY_INTERVALS_DEFAULT
    ) -> None:
        """Run a SQL statement for each record, inside the commit: exactly once in tables of your own.

        The statement runs as the role of the workers, in the transaction of the turn, once for each record, for those
        of a key in their order. If it fails for a value of the record (a constraint, a trigger), the record becomes a
        dead letter, and the others commit. Names need their schema: the search path is pg_catalog alone.

        Args:
            statement: an INSERT, UPDATE, DELETE, MERGE, SELECT, or a CALL of a procedure that does not commit, with
                `%(field)s` for the value of a field and `%%` for a percent sign. May change at any time.
            key: the field or fields by which the work is divided.
            name: the step's name.
            intervals: number of key intervals, the unit of ownership.

        Raises:
            GraphError: the statement is none of these, a name is taken or invalid, or records may be retracted.
            SchemaError: a field does not exist, or cannot be a key.

        Examples:
            >>> alerts.to_sql(
            ...     "INSERT INTO app.alerts (device, value) VALUES (%(device)s, %(value)s)", key="device", name="to_app"
            ... )  # doctest: +SKIP
        """
        fields = places_of(statement)
        record_type = _stream(self).record_type
        types = [sql_type(record_type.annotations_along(field)[-1]) for field in fields]
        _add(_stream(self), StatementLogic(statement, fields, types), key, name, intervals)

    def to_sink(
        self, sink: Sink, *, key: str | Sequence[str], name: str, intervals: int = KEY_INTERVALS_DEFAULT
    ) -> None:
        """Send each record to a sink, as a message. The messages are stored in the commit and delivered after it.

        Those of a key arrive in their order. While the other side is away they wait in the database, up to
        MILLPY_OUTBOX_RECORDS_MAX or MILLPY_OUTBOX_BYTES_MAX for each interval; then the step takes no input, and at
        last the sources wait.

        Args:
            sink: the sink, such as `KafkaTopic`, or one of your own.
            key: the field or fields by which the work is divided, and the key of the message.
            name: the step's name.
            intervals: number of key intervals, the unit of ownership.

        Raises:
            GraphError: it is no sink, the sink cannot carry the records, a name is taken or invalid, or records may be
                retracted.
            SchemaError: a field does not exist, or cannot be a key.
        """
        check_instance("the sink", sink, Sink, "for example to_sink(KafkaTopic(…), key=…); your own derives from Sink")
        record_type = _stream(self).record_type
        _check_fields(sink, record_type)
        sink.validate(record_type)
        _add(_stream(self), OutboxLogic(sink), key, name, intervals)

    def to_kafka(  # noqa: PLR0913 - what a user may say of a topic
        self,
        topic: str,
        *,
        key: str | Sequence[str],
        name: str,
        value: str = "",
        headers: str | Sequence[str] = (),
        compression: Compression | None = None,
        partitioner: Partitioner = "murmur2",
        brokers: KafkaBrokers = DEFAULT_BROKERS,
        intervals: int = KEY_INTERVALS_DEFAULT,
    ) -> None:
        """Send each record to a Kafka topic: once for readers of committed messages, through any crash.

        The same as `to_sink(KafkaTopic(…))`, which has more settings.

        Args:
            topic: the topic's name; it must exist.
            key: the field or fields of the key.
            name: the step's name.
            value: the field whose text or bytes is the value; by default the whole record, as JSON.
            headers: fields that become headers.
            compression: the codec of batches; by default none.
            partitioner: how a key chooses its partition: "murmur2", "crc32", "fnv1a", or a function of yours.
            brokers: the brokers' addresses, our login and TLS; by default those of the environment.
            intervals: number of key intervals; each has a transaction of its own.

        Raises:
            ConfigError: a setting is wrong.
            GraphError, SchemaError: as for `to_sink`.
        """
        fields = field_names("headers", headers) if headers else ()
        sink = KafkaTopic(
            topic, value=value, headers=fields, compression=compression, partitioner=partitioner, brokers=brokers
        )
        self.to_sink(sink, key=key, name=name, intervals=intervals)

    def to_mqtt(  # noqa: PLR0913 - what a user may say of a topic
        self,
        topic: str | Callable[[Any], str],
        *,
        key: str | Sequence[str],
        name: str,
        value: str = "",
        headers: str | Sequence[str] = (),
        qos: Qos = 1,
        retain: bool = False,
        host: str | None = None,
        port: int | None = None,
        login: Login = NO_LOGIN,
        tls: Tls | bool | None = None,
        intervals: int = KEY_INTERVALS_DEFAULT,
    ) -> None:
        """Send each record to a topic of an MQTT 5 broker: at least once, with an id that never changes.

        The same as `to_sink(MqttTopic(…))`, which has more settings.

        Args:
            topic: the topic; `{field}` stands for the value of a field. Or a function from a record to its topic.
            key: the field or fields whose records keep their order.
            name: the step's name.
            value: the field whose text or bytes is the payload; by default the whole record, as JSON.
            headers: fields that become user properties.
            qos: 1, or 2 for subscribers that want it.
            retain: whether the broker keeps the last message of each topic for later subscribers.
            host: the broker; by default that of MILLPY_MQTT_URL.
            port: the broker's port.
            login: our user name and password.
            tls: whether to encrypt, and to verify the broker.
            intervals: number of key intervals; each has a connection of its own.

        Raises:
            ConfigError: a setting is wrong.
            GraphError, SchemaError: as for `to_sink`; or messages cannot be sent to the topic.
        """
        fields = field_names("headers", headers) if headers else ()
        sink = MqttTopic(
            topic, value=value, headers=fields, qos=qos, retain=retain, host=host, port=port, login=login, tls=tls
        )
        self.to_sink(sink, key=key, name=name, intervals=intervals)

    def to_webhook(  # noqa: PLR0913 - what a user may say of an endpoint
        self,
        url: str,
        *,
        key: str | Sequence[str],
        name: str,
        headers: Mapping[str, str] | None = None,
        batch: Batch | None = None,
        access: WebhookAccess = NO_ACCESS,
        refusals: RefusalPolicy = RefusalPolicy(),  # noqa: B008 - immutable
        intervals: int = KEY_INTERVALS_DEFAULT,
    ) -> None:
        """Post each record to an HTTP endpoint, as JSON: at least once, under an id that never changes.

        The same as `to_sink(Webhook(…))`, which has more settings.

        Args:
            url: the URL of the endpoint.
            key: the field or fields by which the work is divided; records of a key arrive in their order.
            name: the step's name.
            headers: the header -> the field with its value.
            batch: "json" or "ndjson" for requests with many records; by default a request has one.
            access: signatures, secret headers and certificates.
            refusals: when to stop trying a record that the endpoint refuses.
            intervals: number of key intervals; each has requests of its own.

        Raises:
            ConfigError: a setting is wrong.
            GraphError, SchemaError: as for `to_sink`.
        """
        sink = Webhook(url, headers=headers, batch=batch, access=access, refusals=refusals)
        self.to_sink(sink, key=key, name=name, intervals=intervals)


def _stream(methods: SinkMethods) -> Stream:
    return cast("Stream", methods)


def _check_fields(sink: Sink, record_type: RecordType) -> None:
    """Check the fields that become the value and the headers of a message."""
    if sink.value and record_type.field_type(sink.value) not in VALUE_TYPES:
        raise GraphError(
            f"field {sink.value!r} of {record_type.struct.__name__} cannot be the value of a message",
            hint="name a field of text or bytes, or leave out value= to send the whole record as JSON",
        )
    for name in sink.headers:
        record_type.field_type(name)


def _add(
    stream: Stream, logic: OutboxLogic | StatementLogic, key: str | Sequence[str], name: str, intervals: int
) -> None:
    inputs = stream.key_by(*field_names("key", key)).inputs()
    if retracting := [taken.stream.name for taken in inputs if taken.retracts]:
        raise GraphError(
            f"records of {retracting[0]!r} may be retracted, and a sink cannot take back what has left",
            hint="let the windows accumulate instead of retract, or aggregate the panes before the sink",
        )
    stream.graph.add(StageNode(checked_name(name, "sink"), inputs, logic, intervals))
