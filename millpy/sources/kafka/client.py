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
from uuid import UUID

from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.client import AIOKafkaClient
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
from aiokafka.protocol.admin import DescribeConfigsRequest
from aiokafka.protocol.fetch import FetchRequest

from millpy.config.extras import to_install
from millpy.errors import ConfigError, SourceUnavailableError
from millpy.sources.kafka.batches import RUN_RECORDS, read_by_columns
from millpy.sources.kafka.connect_errors import RefusalError, reason, verifying
from millpy.sources.kafka.record_columns import RecordColumns
from millpy.sources.kafka.topic_ids import (
    TopicIdFetchRequest,
    TopicMetadata,
    TopicMetadataRequest,
    UnknownTopicIdError,
    as_named,
    metadata_of,
)

log = logging.getLogger(__name__)

FETCH_BYTES = 4_000_000
_TOPIC_RESOURCE = 2
ANSWER_S_MAX = 10.0
"""Seconds that a request may take; also the most for a connection."""
SERVER_S_MIN = 3.0
"""Seconds that each of many named servers has at least: a login over a slow link takes some round trips."""
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


def bootstrap_in_turn(client: AIOKafkaClient) -> None:
    """Give each of the servers that we name a part of the time to answer: one that hangs must not take all of it."""
    bootstrap = client.bootstrap

    async def bootstrap_within_parts() -> None:
        whole_ms = client._request_timeout_ms
        if (servers := len(client.hosts)) > 1:
            part_s = max(SERVER_S_MIN, ANSWER_S_MAX / (servers + 1))
            client._request_timeout_ms = min(whole_ms, int(part_s * 1_000))
        try:
            await bootstrap()
        finally:
            client._request_timeout_ms = whole_ms

    client.bootstrap = bootstrap_within_parts


class OutOfRangeError(SourceUnavailableError):
    """The next offset to read is not in the log, or not any more."""


class Client:
    """A reader of one partition."""

    def __init__(self, cluster: Cluster, topic: str, partition: int, client_id: str) -> None:
        quieten()
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
        self._topic_id: UUID | None = None
        self._is_unknown = False
        bootstrap_in_turn(self._consumer._client)
        self._send = self._consumer._client.send
        self._consumer._client.send = self._send_with_id

    async def start(self) -> None:
        """Connect. Raises SourceUnavailableError, ConfigError."""
        async with self._answers_with_reason():
            await self._consumer.start()
        read_by_columns(self._consumer)

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

    async def topic(self) -> TopicMetadata:
        """Return the topic's id and number of partitions; no partitions when a broker says that it does not exist.

        The request names the topic, so that a topic that we may not see does not count as missing, and does not create
        the topic on a broker that creates topics automatically.

        Raises:
            SourceUnavailableError: no broker can answer now.
            ConfigError: we may not see the topic.
        """
        async with self._answers_with_reason():
            async for found in self._topic_by_each_broker():
                return found
            raise NodeNotReadyError("no broker answers")

    async def setting(self, name: str) -> str | None:
        """Return a setting of the topic; None if we may not read it.

        Raises:
            SourceUnavailableError: no broker can answer now.
        """
        client = self._consumer._client
        async with self._answers_with_reason():
            request = DescribeConfigsRequest([(_TOPIC_RESOURCE, self._place.topic, [name])])
            answer = await client.send(client.get_random_node(), request)
        return next((str(entry[1]) for resource in answer.resources for entry in resource[4]), None)

    async def has_lost(self, topic_id: UUID) -> bool:
        """Tell whether no broker that answers knows the topic by this id; one that is behind may know an older one.

        Raises:
            SourceUnavailableError: no broker can answer now.
        """
        async with self._answers_with_reason():
            return topic_id not in [found.topic_id async for found in self._topic_by_each_broker()]

    async def _topic_by_each_broker(self) -> AsyncIterator[TopicMetadata]:
        """Yield the topic's metadata by each broker that can be reached. Raises the last error if none can."""
        client = self._consumer._client
        answered, error = False, NodeNotReadyError("no broker is known")
        for broker in client.cluster.brokers():
            try:
                answer = await client.send(broker.nodeId, TopicMetadataRequest(self._place.topic))
            except (KafkaConnectionError, NodeNotReadyError) as unreached:
                error = unreached
                continue
            answered, found = True, metadata_of(answer)
            if found.error_code == UnknownTopicOrPartitionError.errno:
                found = TopicMetadata(0, 0, None)
            if found.error_code:
                raise for_code(found.error_code)(self._place.topic)
            yield found
        if not answered:
            raise error

    async def _send_with_id(self, node_id: Any, request: Any, **options: Any) -> Any:
        """Send a request of aiokafka, a fetch with the id of the topic that is read."""
        if self._topic_id is None or not isinstance(request, FetchRequest):
            return await self._send(node_id, request, **options)
        answer = await self._send(node_id, TopicIdFetchRequest(request, self._topic_id), **options)
        try:
            return as_named(answer, self._place.topic)
        except UnknownTopicIdError:
            self._is_unknown = True  # aiokafka would go on asking
            raise

    @asynccontextmanager
    async def _answers_with_reason(self) -> AsyncIterator[None]:
        """Replace a connection error by one that names the reason."""
        async with _answers():
            try:
                yield
            except (KafkaConnectionError, NodeNotReadyError) as error:
                raise await reason(self._consumer._client, self._options, error) from error

    def assign(self, offset: int, topic_id: UUID | None) -> None:
        """Start reading at an offset, from the topic with this id only if it is not None and the broker knows ids."""
        self._topic_id = topic_id
        if not self._consumer.assignment():
            self._consumer.assign([self._place])
        self._consumer.seek(self._place, offset)

    async def bounds(self) -> tuple[int, int]:
        """Return the oldest offset of the log, and the one after the newest committed offset."""
        async with _answers():
            self._consumer._client.add_topic(self._place.topic)  # or it fails, and waits before it asks again
            begins = await self._consumer.beginning_offsets([self._place])
            ends = await self._consumer.end_offsets([self._place])
        return begins[self._place], ends[self._place]

    async def end(self) -> int:
        """Ask the broker for the offset after the newest committed offset."""
        async with _answers(_END_S_MAX):
            return int((await self._consumer.end_offsets([self._place]))[self._place])

    def newest(self) -> int | None:
        """Return the offset after the newest record, of open transactions, too, as the last fetch told; None before it.

        Beyond `end()` everything waits for the oldest open transaction.
        """
        found = self._consumer.highwater(self._place)
        return None if found is None else int(found)

    async def at_time(self, ms: int) -> int | None:
        """Return the first offset with a timestamp of at least `ms`; None when there is none yet."""
        async with _answers():
            found = (await self._consumer.offsets_for_times({self._place: ms}))[self._place]
        return None if found is None else int(found.offset)

    async def position(self) -> int:
        """Return the offset to read next, which is behind transaction markers and compacted records."""
        async with _answers():
            return int(await self._consumer.position(self._place))

    async def fetch(self, records_max: int, wait_s: float) -> Sequence[RecordColumns]:
        """Return the records that have arrived or arrive within `wait_s`; unreadable ones as `UnreadableRecord`.

        They are about `records_max` records, at least one run.

        Raises:
            OutOfRangeError: the offset is not in the log.
            SourceUnavailableError: the broker does not answer, fails, or does not know the topic's id.
            ConfigError: the broker rejects us, or a codec is missing.
        """
        runs_max = max(1, records_max // RUN_RECORDS)
        async with _answers(None):
            found = await self._consumer.getmany(self._place, timeout_ms=int(wait_s * 1_000), max_records=runs_max)
        if not found and self._is_unknown:
            raise SourceUnavailableError(
                f"Kafka knows no topic {self._place.topic!r} with the id {self._topic_id}: it was deleted, or the "
                "broker is just starting"
            )
        return found.get(self._place, ())  # type: ignore[no-any-return]


@asynccontextmanager
async def _answers(within_s: float | None = ANSWER_S_MAX) -> AsyncIterator[None]:
    """Translate aiokafka's errors into ours."""
    try:
        async with asyncio.timeout(within_s):
            yield
    except TimeoutError as error:
        raise SourceUnavailableError(
            f"Kafka did not answer within {within_s:g} s", hint="check that the brokers run and can be reached"
        ) from error
    except OffsetOutOfRangeError as error:
        raise OutOfRangeError(f"Kafka: {error!r}") from error
    except _REFUSALS as error:
        raise RefusalError(f"Kafka refuses us: {error!r}", hint="check user, password and rights") from error
    except UnsupportedCodecError as error:
        raise ConfigError(f"Kafka: {error!r}", hint=to_install("kafka")) from error
    except (KafkaError, OSError) as error:
        raise SourceUnavailableError(f"Kafka: {error!r}", hint="check that the broker runs") from error
