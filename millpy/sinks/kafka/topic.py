"""KafkaTopic: messages of a graph in a topic, exactly once for readers of committed messages.

Each interval has a transactional id. A `send` is one Kafka transaction: the messages, and the position behind them as
the offset of a consumer group of ours. A connection first raises the epoch of the transactional id, which ends an open
transaction of an earlier connection and shuts it out, and then reads the position back. So whatever was killed, each
message is committed once.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

from millpy.errors import ConfigError, GraphError
from millpy.formats import Avro
from millpy.formats.binary import PLAIN
from millpy.model.arguments import check_function, check_instance, is_number, is_whole
from millpy.model.finding import Finding
from millpy.model.identity import Identity
from millpy.model.record import RecordType
from millpy.sinks.messages import check_value
from millpy.sinks.protocol import SendBound, Sink, SinkConnection, SinkSetup
from millpy.sources.kafka.source import DEFAULT_BROKERS, Kafka, KafkaBrokers, check_brokers

if TYPE_CHECKING:
    from millpy.sinks.kafka.avro_messages import AvroMessages
    from millpy.sources.kafka.client import Cluster

Compression = Literal["gzip", "lz4", "snappy", "zstd"]
KeyHash = Literal["murmur2", "crc32", "fnv1a"]
Partitioner = KeyHash | Callable[[bytes, int], int]
TRANSACTION_MAX = SendBound(records=10_000, bytes=8_000_000)
COMPRESSIONS, KEY_HASHES = get_args(Compression), get_args(KeyHash)


@dataclass(frozen=True, slots=True, repr=False)
class KafkaTopic(Sink):
    """A topic to which each message goes once, by transactions.

    The key of a message is that of the step: text as UTF-8, bytes as they are, a UUID as text, everything else as JSON.
    Its timestamp is the event time, at most now. The repr and the identity leave out the brokers' addresses, the
    credentials and the bounds.

    Args:
        topic: the topic's name; it must exist.
        value: the field whose text or bytes is the value; by default the whole record, as JSON. None becomes a
            tombstone.
        format: instead of `value`, `Avro()` for messages of the whole record; with a registry they begin with the id of
            their schema, under the subject `TOPIC-value`. The schema is that of the record class, or the one given.
        headers: fields that become headers; those with None are left out.
        compression: the codec of batches: "gzip", "lz4", "snappy" or "zstd"; by default none.
        partitioner: how a key chooses its partition: "murmur2" as Kafka's own clients, "crc32" as librdkafka's, "fnv1a"
            as Sarama; or a function from the key's bytes and the number of partitions to the number of one. A function
            that fails holds up the messages of its interval, as a broker does that is away.
        message_bytes_max: the most bytes of key, value and headers, at most the topic's `max.message.bytes`; a record
            with a larger message becomes a dead letter.
        brokers: the brokers' addresses, our login and TLS; by default those of the environment.
        bound: the most messages of one transaction.
        transaction_timeout_s: seconds after which the broker ends a transaction whose worker is gone and has no
            successor. So long, readers of committed messages may wait for it.
    """

    topic: str
    value: str = ""
    format: Avro | None = None
    headers: tuple[str, ...] = ()
    compression: Compression | None = None
    partitioner: Partitioner = "murmur2"
    message_bytes_max: int = 1_000_000
    brokers: KafkaBrokers = DEFAULT_BROKERS
    bound: SendBound = TRANSACTION_MAX
    transaction_timeout_s: float = 30.0

    def __post_init__(self) -> None:
        if not isinstance(self.topic, str) or not self.topic:
            raise ConfigError(f"a topic cannot be named {self.topic!r}", hint='for example KafkaTopic("alerts")')
        check_brokers(self.brokers)
        check_value(self.value, self.headers)
        check_instance("bound", self.bound, SendBound, "for example bound=SendBound(records=100)")
        if self.compression not in (None, *COMPRESSIONS):
            raise ConfigError(
                f"unknown compression={self.compression!r}", hint=f"choose one of {', '.join(COMPRESSIONS)}, or None"
            )
        if self.partitioner not in KEY_HASHES and not callable(self.partitioner):
            raise ConfigError(
                f"unknown partitioner={self.partitioner!r}",
                hint=f"choose one of {', '.join(KEY_HASHES)}, or give a function of a key and a number of partitions",
            )
        if callable(self.partitioner):
            check_function("partitioner", self.partitioner, "lambda key, partitions: key[0] % partitions", takes=2)
        if not is_whole(self.message_bytes_max, 1):
            raise ConfigError(
                f"message_bytes_max={self.message_bytes_max!r} lets no message pass", hint="use a positive number"
            )
        if not is_number(self.transaction_timeout_s, 1, 900):
            raise ConfigError(
                f"transaction_timeout_s={self.transaction_timeout_s!r} is not between 1 and 900",
                hint="brokers allow at most 15 minutes by default",
            )

    def validate(self, record_type: RecordType) -> None:
        """Check that the records can be written in the format. Raises GraphError, ConfigError."""
        if self.format is None:
            return
        if not isinstance(self.format, Avro):
            raise GraphError(f"messages cannot be written as {self.format!r}", hint="format=Avro(registry=…), or a map")
        if self.value or self.format.inside != PLAIN:
            raise GraphError(
                "format= writes the whole record, so it takes neither value= nor inside=", hint="leave them out"
            )
        self._avro(record_type)

    def encoder(self, record_type: RecordType) -> Callable[[Any], bytes | None] | None:
        """Return what writes a record in the format; None without one."""
        return None if self.format is None else self._avro(record_type).encode

    async def prepare(self, record_types: Sequence[RecordType]) -> None:
        """Register the schemas, or look them up. Raises ConfigError, SinkUnavailableError."""
        if self.format is not None:
            for record_type in record_types:
                await self._avro(record_type).prepare()

    def assume_prepared(self, record_types: Sequence[RecordType]) -> None:
        """Give the schemas the id 0 in this process."""
        if self.format is not None:
            for record_type in record_types:
                self._avro(record_type).assume_prepared()

    def _avro(self, record_type: RecordType) -> AvroMessages:
        from millpy.sinks.kafka.avro_messages import AvroMessages  # an optional dependency

        assert self.format is not None
        return AvroMessages(self.topic, self.format, record_type)

    def identity(self) -> Identity:
        """Describe the topic, to whose group the positions belong."""
        return {"kind": "kafka_topic", "topic": self.topic}

    def connect(self, setup: SinkSetup) -> SinkConnection:
        """Return a connection for an interval, not yet open.

        Raises:
            ConfigError: the package aiokafka is missing, or a file with the password cannot be read.
        """
        cluster = self._cluster()
        from millpy.sinks.kafka.connection import KafkaConnection  # _cluster() has found the package

        return KafkaConnection(self, setup, cluster)

    def examine(self, graph: str, sink: str) -> AsyncIterator[Finding]:
        """Check the cluster and the topic. Raises MillError."""
        cluster = self._cluster()
        from millpy.sinks.kafka.examination import examine

        return examine(self, cluster, graph, sink)

    def _cluster(self) -> Cluster:
        """Return the addresses and credentials, which a source of this topic has, too."""
        return Kafka(self.topic, partitions=1, brokers=self.brokers).cluster()
