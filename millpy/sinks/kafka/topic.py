"""KafkaTopic: messages of a graph in a topic, exactly once for readers of committed messages.

Each interval has a transactional id. A `send` is one Kafka transaction: the messages, and the position behind them as
the offset of a consumer group of ours. A connection first raises the epoch of the transactional id, which ends an open
transaction of an earlier connection and shuts it out, and then reads the position back. So whatever was killed, each
message is committed once.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

from millpy.errors import ConfigError
from millpy.model.finding import Finding
from millpy.model.identity import Identity
from millpy.sinks.protocol import SendBound, Sink, SinkConnection, SinkSetup
from millpy.sources.kafka.source import DEFAULT_BROKERS, Kafka, KafkaBrokers

if TYPE_CHECKING:
    from millpy.sources.kafka.client import Cluster

Compression = Literal["gzip", "lz4", "snappy", "zstd"]
TRANSACTION_MAX = SendBound(records=10_000, bytes=8_000_000)
COMPRESSIONS = get_args(Compression)


@dataclass(frozen=True, slots=True, repr=False)
class KafkaTopic(Sink):
    """A topic to which each message goes once, by transactions.

    The key of a message is that of the step: text as UTF-8, bytes as they are, a UUID as text, everything else as JSON.
    Its partition is that of Kafka's own clients (murmur2 of the key), its timestamp the event time, at most now. The
    repr and the identity leave out the brokers' addresses, the credentials and the bounds.

    Args:
        topic: the topic's name; it must exist.
        value: the field whose text or bytes is the value; by default the whole record, as JSON. None becomes a
            tombstone.
        headers: fields that become headers; those with None are left out.
        compression: the codec of batches: "gzip", "lz4", "snappy" or "zstd"; by default none.
        message_bytes_max: the most bytes of key, value and headers, at most the topic's `max.message.bytes`; a record
            with a larger message becomes a dead letter.
        brokers: the brokers' addresses, our login and TLS; by default those of the environment.
        bound: the most messages of one transaction.
        transaction_timeout_s: seconds after which the broker ends a transaction whose worker is gone and has no
            successor. So long, readers of committed messages may wait for it.
    """

    topic: str
    value: str = ""
    headers: tuple[str, ...] = ()
    compression: Compression | None = None
    message_bytes_max: int = 1_000_000
    brokers: KafkaBrokers = DEFAULT_BROKERS
    bound: SendBound = TRANSACTION_MAX
    transaction_timeout_s: float = 30.0

    def __post_init__(self) -> None:
        if not isinstance(self.topic, str) or not self.topic:
            raise ConfigError(f"a topic cannot be named {self.topic!r}", hint='for example KafkaTopic("alerts")')
        if self.compression not in (None, *COMPRESSIONS):
            raise ConfigError(
                f"unknown compression={self.compression!r}", hint=f"choose one of {', '.join(COMPRESSIONS)}, or None"
            )
        if self.message_bytes_max < 1:
            raise ConfigError(
                f"message_bytes_max={self.message_bytes_max} lets no message pass", hint="use a positive number"
            )
        if not 1 <= self.transaction_timeout_s <= 900:
            raise ConfigError(
                f"transaction_timeout_s={self.transaction_timeout_s} is not between 1 and 900",
                hint="brokers allow at most 15 minutes by default",
            )

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

        return examine(self.topic, cluster, graph, sink)

    def _cluster(self) -> Cluster:
        """Return the addresses and credentials, which a source of this topic has, too."""
        return Kafka(self.topic, partitions=1, brokers=self.brokers).cluster()
