"""The one place that speaks aiokafka: one Kafka partition, assigned by hand and read where we say.

No consumer group: offsets are in our commit, leases are ours. `isolation_level="read_committed"`, so records of open
and aborted transactions are not seen, and `end()` is where the oldest open transaction begins.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.errors import (
    AuthenticationFailedError,
    AuthenticationMethodNotSupported,
    ClusterAuthorizationFailedError,
    KafkaConnectionError,
    KafkaError,
    NodeNotReadyError,
    OffsetOutOfRangeError,
    SaslAuthenticationFailed,
    TopicAuthorizationFailedError,
    UnknownTopicOrPartitionError,
    UnsupportedCodecError,
    UnsupportedSaslMechanismError,
    for_code,
)
from aiokafka.protocol.metadata import MetadataRequest

from millpy.errors import ConfigError, SourceUnavailableError
from millpy.extras import to_install
from millpy.injectors.kafka_batches import read_patiently
from millpy.injectors.kafka_reasons import reason, verifying

log = logging.getLogger(__name__)

FETCH_BYTES = 4_000_000
_ANSWER_S_MAX = 10.0
_REFUSALS = (
    AuthenticationFailedError,
    AuthenticationMethodNotSupported,
    ClusterAuthorizationFailedError,
    SaslAuthenticationFailed,
    TopicAuthorizationFailedError,
    UnsupportedSaslMechanismError,
)


@dataclass(frozen=True, slots=True)
class Cluster:
    """Where the brokers are and who we are there."""

    servers: str
    username: str | None = None
    password: str | None = field(default=None, repr=False)
    sasl: str = "PLAIN"
    tls: bool = False
    ca_file: str | None = None

    def options(self) -> dict[str, Any]:
        """As aiokafka's consumer wants them."""
        protocol = ("SASL_" if self.username else "") + ("SSL" if self.tls else "PLAINTEXT")
        found: dict[str, Any] = {"bootstrap_servers": self.servers.split(","), "security_protocol": protocol}
        if self.username:
            found |= {"sasl_mechanism": self.sasl, "sasl_plain_username": self.username}
            found |= {"sasl_plain_password": self.password or ""}
        if self.tls:
            found["ssl_context"] = verifying(self.ca_file)
        return found


def _quieten() -> None:
    """Of an outage aiokafka logs several errors a second; we say once that it begins. A level set by hand stays."""
    theirs = logging.getLogger("aiokafka")
    if theirs.level == logging.NOTSET:
        theirs.setLevel(logging.CRITICAL)


class OutOfRangeError(SourceUnavailableError):
    """The offset that was to be read next is not there (any more)."""


class Client:
    """A connected reader of one partition."""

    def __init__(self, cluster: Cluster, topic: str, partition: int, client_id: str) -> None:
        _quieten()
        read_patiently()
        self._place = TopicPartition(topic, partition)
        self._options = cluster.options()
        self._consumer = AIOKafkaConsumer(
            **self._options,
            client_id=client_id,
            enable_auto_commit=False,
            auto_offset_reset="none",
            isolation_level="read_committed",
            max_partition_fetch_bytes=FETCH_BYTES,
        )

    async def start(self) -> None:
        """Connect. Raises SourceUnavailableError, ConfigError."""
        async with self._answers_with_reason():
            await self._consumer.start()

    async def stop(self) -> None:
        """Disconnect."""
        closing = asyncio.create_task(self._consumer.stop(), name="millpy-kafka-stop")
        try:
            await asyncio.wait([closing])
        except asyncio.CancelledError:
            await asyncio.wait([closing])  # nobody else would wait for it
            raise
        if closing.cancelled():
            # aiokafka 0.14 cancels a fetch that is backing off, takes that for its own cancellation, and leaves the
            # rest open.
            await self._consumer._client.close()
        elif (error := closing.exception()) is not None:
            log.debug("kafka: %r while closing", error)

    async def partitions(self) -> int:
        """How many partitions the topic has; 0 when a broker says that there is none.

        Asked by name, so that a topic that we may not see is not taken for one that is not there; and without making
        it on a broker that makes topics by itself.

        Raises:
            SourceUnavailableError: no broker knows just now.
            ConfigError: we may not see it.
        """
        async with self._answers_with_reason():
            client = self._consumer._client
            error: KafkaError = NodeNotReadyError("no broker is known")
            for broker in client.cluster.brokers():
                try:
                    answer = await client.send(broker.nodeId, MetadataRequest([self._place.topic], False))
                except (KafkaConnectionError, NodeNotReadyError) as unreached:
                    error = unreached
                    continue
                ((code, *_, partitions),) = answer.topics
                if code == UnknownTopicOrPartitionError.errno:
                    return 0
                if code:
                    raise for_code(code)(self._place.topic)
                return len(partitions)
            raise error

    @asynccontextmanager
    async def _answers_with_reason(self) -> AsyncIterator[None]:
        """When there is no connection, why."""
        async with _answers():
            try:
                yield
            except (KafkaConnectionError, NodeNotReadyError) as error:
                client = self._consumer._client
                named = [(broker.host, broker.port) for broker in client.cluster.brokers()]
                places = dict.fromkeys([*((host, port) for host, port, _ in client.hosts), *named])
                raise await reason(self._options, places, error) from error

    def assign(self, offset: int) -> None:
        """Read from an offset on."""
        if not self._consumer.assignment():
            self._consumer.assign([self._place])
        self._consumer.seek(self._place, offset)

    async def bounds(self) -> tuple[int, int]:
        """The oldest offset there is, and the one after the newest that is committed."""
        async with _answers():
            begins = await self._consumer.beginning_offsets([self._place])
            ends = await self._consumer.end_offsets([self._place])
        return begins[self._place], ends[self._place]

    async def end(self) -> int:
        """The offset after the newest that is committed, asked now."""
        async with _answers():
            return int((await self._consumer.end_offsets([self._place]))[self._place])

    async def at_time(self, ms: int) -> int | None:
        """The first offset with a timestamp of at least this; None when there is none yet."""
        async with _answers():
            found = (await self._consumer.offsets_for_times({self._place: ms}))[self._place]
        return None if found is None else int(found.offset)

    async def position(self) -> int:
        """The offset that is read next; behind transaction markers and what compaction has removed."""
        async with _answers():
            return int(await self._consumer.position(self._place))

    async def fetch(self, records_max: int, wait_s: float) -> Sequence[Any]:
        """What has come, or comes within so long; may be empty. What cannot be read is `Unreadable` in its place.

        Raises:
            OutOfRangeError: the log does not hold the offset.
            SourceUnavailableError, ConfigError: anything else.
        """
        async with _answers(None):
            found = await self._consumer.getmany(self._place, timeout_ms=int(wait_s * 1_000), max_records=records_max)
        return found.get(self._place, ())  # type: ignore[no-any-return]


@asynccontextmanager
async def _answers(within_s: float | None = _ANSWER_S_MAX) -> AsyncIterator[None]:
    """Aiokafka's errors in our words."""
    try:
        async with asyncio.timeout(within_s):
            yield
    except TimeoutError as error:
        raise SourceUnavailableError(f"no answer from Kafka within {within_s} s") from error
    except OffsetOutOfRangeError as error:
        raise OutOfRangeError(f"Kafka: {error!r}") from error
    except _REFUSALS as error:
        raise ConfigError(f"Kafka refuses us: {error!r}", hint="check user, password and rights") from error
    except UnsupportedCodecError as error:
        raise ConfigError(f"Kafka: {error!r}", hint=to_install("kafka")) from error
    except (KafkaError, OSError) as error:
        raise SourceUnavailableError(f"Kafka: {error!r}", hint="is the broker running?") from error
