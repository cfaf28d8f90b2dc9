"""A reader of one Kafka partition by aiokafka, with manual assignment and offsets.

There is no consumer group: our commits store the offsets, and our leases decide the owner. `isolation_level` is
"read_committed", so records of open and aborted transactions are invisible, and `end()` is the beginning of the oldest
open transaction.
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

from millpy.config.extras import to_install
from millpy.errors import ConfigError, SourceUnavailableError
from millpy.sources.kafka.batches import tolerate_unreadable_records
from millpy.sources.kafka.connect_errors import reason, verifying

log = logging.getLogger(__name__)

FETCH_BYTES = 4_000_000
_ANSWER_S_MAX = 10.0
_END_S_MAX = 6.0  # for the end of the partition, which an idle reader asks for: a frozen broker is noticed by it
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
    """The addresses of the brokers and our credentials there."""

    servers: str
    username: str | None = None
    password: str | None = field(default=None, repr=False)
    sasl: str = "PLAIN"
    tls: bool = False
    ca_file: str | None = None

    def options(self) -> dict[str, Any]:
        """Return the options for aiokafka's consumer."""
        protocol = ("SASL_" if self.username else "") + ("SSL" if self.tls else "PLAINTEXT")
        found: dict[str, Any] = {"bootstrap_servers": self.servers.split(","), "security_protocol": protocol}
        if self.username:
            found |= {"sasl_mechanism": self.sasl, "sasl_plain_username": self.username}
            found |= {"sasl_plain_password": self.password or ""}
        if self.tls:
            found["ssl_context"] = verifying(self.ca_file)
        return found


def quieten() -> None:
    """Silence aiokafka, which logs several errors a second in an outage; keep a level that the user has set."""
    theirs = logging.getLogger("aiokafka")
    if theirs.level == logging.NOTSET:
        theirs.setLevel(logging.CRITICAL)


class OutOfRangeError(SourceUnavailableError):
    """The next offset to read is not in the log, or not any more."""


class Client:
    """A reader of one partition."""

    def __init__(self, cluster: Cluster, topic: str, partition: int, client_id: str) -> None:
        quieten()
        tolerate_unreadable_records()
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
            await asyncio.wait([closing])  # otherwise the task would be abandoned
            raise
        if closing.cancelled():
            # aiokafka 0.14 cancels a fetch that is backing off, mistakes that for a cancellation of `stop`, and leaves
            # the rest open.
            await self._consumer._client.close()
        elif (error := closing.exception()) is not None:
            log.debug("kafka: %r while closing", error)

    async def partitions(self) -> int:
        """Return the number of the topic's partitions; 0 when a broker says that the topic does not exist.

        The request names the topic, so that a topic that we may not see does not count as missing, and does not create
        the topic on a broker that creates topics automatically.

        Raises:
            SourceUnavailableError: no broker can answer now.
            ConfigError: we may not see the topic.
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
        """Replace a connection error by one that names the reason."""
        async with _answers():
            try:
                yield
            except (KafkaConnectionError, NodeNotReadyError) as error:
                client = self._consumer._client
                named = [(broker.host, broker.port) for broker in client.cluster.brokers()]
                places = dict.fromkeys([*((host, port) for host, port, _ in client.hosts), *named])
                raise await reason(self._options, places, error) from error

    def assign(self, offset: int) -> None:
        """Start reading at an offset."""
        if not self._consumer.assignment():
            self._consumer.assign([self._place])
        self._consumer.seek(self._place, offset)

    async def bounds(self) -> tuple[int, int]:
        """Return the oldest offset of the log, and the one after the newest committed offset."""
        async with _answers():
            begins = await self._consumer.beginning_offsets([self._place])
            ends = await self._consumer.end_offsets([self._place])
        return begins[self._place], ends[self._place]

    async def end(self) -> int:
        """Ask the broker for the offset after the newest committed offset."""
        async with _answers(_END_S_MAX):
            return int((await self._consumer.end_offsets([self._place]))[self._place])

    async def at_time(self, ms: int) -> int | None:
        """Return the first offset with a timestamp of at least `ms`; None when there is none yet."""
        async with _answers():
            found = (await self._consumer.offsets_for_times({self._place: ms}))[self._place]
        return None if found is None else int(found.offset)

    async def position(self) -> int:
        """Return the offset to read next, which is behind transaction markers and compacted records."""
        async with _answers():
            return int(await self._consumer.position(self._place))

    async def fetch(self, records_max: int, wait_s: float) -> Sequence[Any]:
        """Return the records that have arrived or arrive within `wait_s`; unreadable ones as `UnreadableRecord`.

        Raises:
            OutOfRangeError: the offset is not in the log.
            SourceUnavailableError: the broker does not answer, or fails.
            ConfigError: the broker rejects us, or a codec is missing.
        """
        async with _answers(None):
            found = await self._consumer.getmany(self._place, timeout_ms=int(wait_s * 1_000), max_records=records_max)
        return found.get(self._place, ())  # type: ignore[no-any-return]


@asynccontextmanager
async def _answers(within_s: float | None = _ANSWER_S_MAX) -> AsyncIterator[None]:
    """Translate aiokafka's errors into ours."""
    try:
        async with asyncio.timeout(within_s):
            yield
    except TimeoutError as error:
        raise SourceUnavailableError(f"Kafka did not answer within {within_s} s") from error
    except OffsetOutOfRangeError as error:
        raise OutOfRangeError(f"Kafka: {error!r}") from error
    except _REFUSALS as error:
        raise ConfigError(f"Kafka refuses us: {error!r}", hint="check user, password and rights") from error
    except UnsupportedCodecError as error:
        raise ConfigError(f"Kafka: {error!r}", hint=to_install("kafka")) from error
    except (KafkaError, OSError) as error:
        raise SourceUnavailableError(f"Kafka: {error!r}", hint="check that the broker runs") from error
