"""A connection for one interval of a Kafka topic: a producer with a transactional id.

A producer that has met an error is never used again: the next connection begins with its epoch and its position, which
settle what has become of the transaction. aiokafka would repeat a request whose connection broke, under the same epoch.
But the first one may still arrive, in the midst of the next transaction: it would end that too early, or set the
position back. The broker refuses it once there is a higher epoch. So such an error ends the producer, too.

The transactional id and the group are `millpy.GRAPH.SINK.NUMBER.…`, with the number of the interval and a part of the
graph's secret: what is dropped and deployed again begins with other ids.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from aiokafka import AIOKafkaProducer, TopicPartition
from aiokafka.client import ConnectionGroup, CoordinationType
from aiokafka.errors import (
    ConcurrentTransactions,
    GroupAuthorizationFailedError,
    InvalidProducerIdMapping,
    InvalidTimestampError,
    KafkaConnectionError,
    KafkaError,
    MessageSizeTooLargeError,
    NodeNotReadyError,
    ProducerClosed,
    ProducerFenced,
    TopicAuthorizationFailedError,
    TransactionalIdAuthorizationFailed,
    UnknownTopicOrPartitionError,
    for_code,
)
from aiokafka.producer.sender import (
    BACKOFF_OVERRIDE,
    AddOffsetsToTxnHandler,
    AddPartitionsToTxnHandler,
)
from aiokafka.protocol.transaction import (
    AddOffsetsToTxnRequest,
    AddPartitionsToTxnRequest,
    EndTxnRequest,
    TxnOffsetCommitRequest,
)

from millpy.errors import MillError, SinkUnavailableError
from millpy.sinks.kafka.partitioning import partition_of
from millpy.sinks.kafka.positions import marked, stored_position
from millpy.sinks.kafka.topic import KafkaTopic
from millpy.sinks.messages import SinkMessages
from millpy.sinks.protocol import SinkSetup
from millpy.sources.kafka.client import ANSWER_S_MAX, Cluster, bootstrap_in_turn, quieten
from millpy.sources.kafka.connect_errors import reason
from millpy.sources.kafka.topic_ids import TopicMetadataRequest, metadata_of

log = logging.getLogger(__name__)
BEGIN_RETRY_S = 0.002
"""Seconds between attempts to begin a transaction while the one before ends; 0.02 in aiokafka, which is most of it."""
SEND_S_MAX = 60.0
LOOK_S = 5.0
"""Seconds of a `send` after which it looks whether the topic is still there, and again."""
CLOSE_S_MAX = 2.0
RETRY_MS = 10
"""Milliseconds until a request is repeated, for example while the coordinator still ends the transaction before."""
KNOWN_KEYS_MAX = 100_000
SECRET_CHARACTERS = 12
HINTS = {
    TopicAuthorizationFailedError: "grant the user Read, Write and Describe on the topic",
    TransactionalIdAuthorizationFailed: "grant the user Write and Describe on the transactional ids of the sink",
    GroupAuthorizationFailedError: "grant the user Read on the groups of the sink",
    InvalidProducerIdMapping: "do nothing: the brokers forget the id of a sink that was idle, and it begins anew",
}
"""What to do. The position is an offset of the topic: only with Read on the topic, too, may a user store it."""
_OF_TRANSACTIONS = (AddOffsetsToTxnRequest, AddPartitionsToTxnRequest, EndTxnRequest, TxnOffsetCommitRequest)


class UnknownOutcomeError(Exception):
    """The connection broke after a request of a transaction, which may still arrive."""


class KafkaConnection:
    """Delivers messages of one interval in transactions."""

    def __init__(self, topic: KafkaTopic, setup: SinkSetup, cluster: Cluster) -> None:
        self._topic = topic
        self._setup = setup
        quieten()
        self._options: Mapping[str, Any] = cluster.options()
        secret = hashlib.sha256(setup.secret.encode()).hexdigest()[:SECRET_CHARACTERS] if setup.secret else ""
        name = f"millpy.{setup.graph}.{setup.sink}.{setup.number}"
        self.id = f"{name}.{secret}" if secret else name
        self._producer: AIOKafkaProducer | None = None
        self._partitions: dict[bytes, int] = {}
        self._count = 0
        self._requests: set[asyncio.Task[Any]] = set()
        self._sent: list[asyncio.Future[Any]] = []

    async def open(self) -> int:
        """Raise the epoch of the transactional id, and return the stored position, 0 without one."""
        topic = self._topic
        self._producer = AIOKafkaProducer(
            **self._options,
            client_id=self.id,
            transactional_id=self.id,
            transaction_timeout_ms=int(topic.transaction_timeout_s * 1_000),
            request_timeout_ms=int(ANSWER_S_MAX * 1_000),
            retry_backoff_ms=RETRY_MS,
            compression_type=topic.compression,
            max_batch_size=topic.message_bytes_max,
        )
        client, accumulator = self._producer.client, self._producer._message_accumulator
        bootstrap_in_turn(client)
        client.send = _sending_once(client.send)
        accumulator.reenqueue = _unless_done(accumulator.reenqueue)
        sender = self._producer._sender
        sender._do_add_partitions_to_txn = self._noting(partial(_begin_transaction, sender, self.id))
        sender._send_produce_req = self._noting(sender._send_produce_req)
        sender._do_txn_offset_commit = self._noting(partial(self._commit_position, sender._do_txn_offset_commit))
        async with self._answers(self._producer, ANSWER_S_MAX):
            await self._producer.start()
            await self._check_topic(client)
            await self._producer.partitions_for(topic.topic)
            found = await stored_position(client, self.id, topic.topic, 0, self._setup.clock)
        return max(0, found)

    def _noting(self, send: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        """Return a function that sends requests, in a task that `close` ends: a sender that has failed leaves it."""

        async def send_noted(*arguments: Any) -> Any:
            task = asyncio.current_task()
            assert task is not None
            self._requests.add(task)
            task.add_done_callback(self._requests.discard)
            return await send(*arguments)

        return send_noted

    async def _commit_position(self, commit: Callable[..., Awaitable[Any]], *arguments: Any) -> None:
        """Send the position behind the answers to the batches.

        A broker verifies batches and the position with the coordinator of the transaction (KIP-890). While it verifies
        the one, it would refuse the other, which costs a pause and another attempt.
        """
        if self._sent:
            await asyncio.wait(self._sent)
        await commit(*arguments)

    async def _check_topic(self, client: Any) -> None:
        """Check that the topic exists: aiokafka would wait for it, and make the broker create it.

        Raises:
            SinkUnavailableError: it does not exist.
        """
        name = self._topic.topic
        metadata = metadata_of(await client.send(client.get_random_node(), TopicMetadataRequest(name)))
        if metadata.error_code == UnknownTopicOrPartitionError.errno:
            raise _missing(name)
        if metadata.error_code and not metadata.partitions:
            raise for_code(metadata.error_code)(name)

    async def send(self, messages: SinkMessages) -> None:
        """Deliver messages in one transaction, with the position behind them.

        Raises:
            SinkUnavailableError: the transaction may be committed or not; the next connection knows.
        """
        producer = self._producer
        assert producer is not None, "open the connection first"
        async with self._answers(producer, SEND_S_MAX):
            self._count_partitions(producer)
            sending = asyncio.create_task(self._send_transaction(producer, messages), name="millpy-kafka-sink-send")
            try:
                while not (await asyncio.wait([sending], timeout=LOOK_S))[0]:
                    await self._check_topic(producer.client)  # aiokafka waits for one that was deleted
                await sending
            finally:
                if sending.cancel():
                    await asyncio.wait([sending])

    async def _send_transaction(self, producer: AIOKafkaProducer, messages: SinkMessages) -> None:
        topic, partitions = self._topic.topic, list(map(self._partition_of, messages.keys))
        await producer.begin_transaction()
        # Its error comes also by the calls below; asyncio would tell of one that nobody has asked for.
        producer._txn_manager.wait_for_transaction_end().add_done_callback(_retrieve)
        self._sent = []
        for partition, batch in self._batches(producer, messages, partitions):
            self._sent.append(await producer.send_batch(batch, topic, partition=partition))
            self._sent[-1].add_done_callback(_retrieve)
        await producer.send_offsets_to_transaction({TopicPartition(topic, 0): marked(messages.end)}, self.id)
        await asyncio.gather(*self._sent)
        await producer.commit_transaction()

    def _count_partitions(self, producer: AIOKafkaProducer) -> None:
        """Choose among as many partitions as the topic has now."""
        count = len(producer.client.cluster.partitions_for_topic(self._topic.topic) or ())
        if not count:
            raise _missing(self._topic.topic)
        if count != self._count:
            self._partitions.clear()
            self._count = count

    def _batches(
        self, producer: AIOKafkaProducer, messages: SinkMessages, partitions: Sequence[int]
    ) -> list[tuple[int, Any]]:
        """Return the messages as batches by partition, in order within each partition."""
        open_batches: dict[int, Any] = {}
        full: list[tuple[int, Any]] = []
        # Brokers refuse timestamps of the future, which the panes of windows that are still open have.
        now_ms = self._setup.clock.now_us() // 1_000
        times = [min(max(0, at // 1_000), now_ms) for at in messages.event_times]
        columns = zip(messages.keys, messages.values, times, partitions, strict=True)
        for place, (key, value, at, partition) in enumerate(columns):
            headers = list(messages.headers_of(place))
            batch = open_batches.get(partition)
            if batch is None or batch.append(timestamp=at, key=key, value=value, headers=headers) is None:
                if batch is not None:
                    full.append((partition, batch))
                batch = open_batches[partition] = producer.create_batch()
                batch.append(timestamp=at, key=key, value=value, headers=headers)  # the first one always fits
        return [*full, *open_batches.items()]

    def _partition_of(self, key: bytes) -> int:
        """Return the partition of a key. Raises SinkUnavailableError."""
        found = self._partitions.get(key)
        if found is None:
            if len(self._partitions) >= KNOWN_KEYS_MAX:
                self._partitions.clear()
            found = self._partitions[key] = partition_of(self._topic.partitioner, key, self._count)
        return found

    async def close(self) -> None:
        """Disconnect. An open transaction ends with the next connection, or by its timeout."""
        producer, self._producer = self._producer, None
        if producer is None:
            return
        for batches in producer._message_accumulator._batches.values():
            for batch in batches:  # of a transaction that has failed
                batch._drain_waiter.add_done_callback(_retrieve)
                batch.future.add_done_callback(_retrieve)
        # What `send` has not waited for is not wanted any more; the producer would wait for it, and the sender go on.
        producer._message_accumulator.fail_all(ProducerClosed())
        for request in (requests := list(self._requests)):
            request.cancel()
        stopping = asyncio.create_task(producer.stop(), name="millpy-kafka-sink-stop")
        done, _ = await asyncio.wait([stopping], timeout=CLOSE_S_MAX)
        if not done:
            stopping.cancel()
            await asyncio.wait([stopping], timeout=CLOSE_S_MAX)
        await producer.client.close()
        if requests:
            await asyncio.wait(requests, timeout=CLOSE_S_MAX)
        if stopping.done() and not stopping.cancelled() and (error := stopping.exception()) is not None:
            log.debug("kafka: %r while closing", error)

    @asynccontextmanager
    async def _answers(self, producer: AIOKafkaProducer, within_s: float) -> AsyncIterator[None]:
        """Translate aiokafka's errors into ours."""
        try:
            async with asyncio.timeout(within_s):
                yield
        except TimeoutError as error:
            raise SinkUnavailableError(
                f"Kafka did not answer within {within_s:g} s", hint="check that the brokers run and can be reached"
            ) from error
        except ProducerFenced as error:
            raise SinkUnavailableError(f"another connection has taken over {self.id}") from error
        except (KafkaConnectionError, NodeNotReadyError) as error:
            why: MillError = await reason(producer.client, self._options, error)
            raise SinkUnavailableError(why.message, hint=why.hint) from error
        except MessageSizeTooLargeError as error:
            raise SinkUnavailableError(
                f"topic {self._topic.topic!r} refuses a batch of up to {self._topic.message_bytes_max:,} bytes",
                hint="set message_bytes_max of the sink to max.message.bytes of the topic, or less",
            ) from error
        except InvalidTimestampError as error:
            raise SinkUnavailableError(
                f"topic {self._topic.topic!r} refuses the time of a message",
                hint="raise message.timestamp.before.max.ms of the topic, or set its clock and this host's",
            ) from error
        except (KafkaError, OSError) as error:
            cause = error.__cause__
            if isinstance(cause, UnknownOutcomeError):
                raise SinkUnavailableError(f"Kafka: {cause}", hint="check that the broker runs") from error
            refusal = cause if isinstance(cause, KafkaError) else error  # aiokafka wraps those that it does not expect
            hint = HINTS.get(type(refusal), "check the topic, the user and the rights")
            raise SinkUnavailableError(f"Kafka: {refusal!r}", hint=hint) from error


async def _begin_transaction(sender: Any, transactional_id: str, partitions: Any) -> bool:
    """Add partitions and our group to the transaction: at once, because the broker answers them in order."""
    node_id = await sender._find_coordinator(CoordinationType.TRANSACTION, transactional_id)
    handlers: list[Any] = [_EagerPartitionsHandler(sender, partitions)]
    if (group := sender._txn_manager.consumer_group_to_add()) is not None:
        handlers.append(_EagerOffsetsHandler(sender, group))
    found = await asyncio.gather(*(handler.do(node_id) for handler in handlers), return_exceptions=True)
    for error in found:
        if isinstance(error, BaseException):
            raise error
    return all(found)


class _EagerPartitionsHandler(AddPartitionsToTxnHandler):  # type: ignore[misc]
    """Begins a transaction as soon as the one before has ended."""

    def handle_response(self, resp: Any) -> float | None:
        """Return the seconds until the next attempt; None after a success."""
        found: float | None = super().handle_response(resp)
        return BEGIN_RETRY_S if found == BACKOFF_OVERRIDE else found


class _EagerOffsetsHandler(AddOffsetsToTxnHandler):  # type: ignore[misc]
    """Adds a group to a transaction as soon as the one before has ended."""

    group = ConnectionGroup.COORDINATION

    def handle_response(self, resp: Any) -> float | None:
        """Return the seconds until the next attempt; None after a success."""
        found: float | None = super().handle_response(resp)
        return BEGIN_RETRY_S if resp.error_code == ConcurrentTransactions.errno else found


def _sending_once(send: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    """Return a function that sends a request; one of a transaction that may have arrived must not be repeated."""

    async def send_once(node_id: Any, request: Any, **options: Any) -> Any:
        try:
            return await send(node_id, request, **options)
        except NodeNotReadyError:
            raise  # nothing was sent
        except KafkaError as error:
            if isinstance(request, _OF_TRANSACTIONS):
                raise UnknownOutcomeError(f"the connection broke in a transaction: {error!r}") from error
            raise

    return send_once


def _unless_done(reenqueue: Callable[[Any], None]) -> Callable[[Any], None]:
    """Return a function that sends a batch again, unless its transaction has failed meanwhile."""

    def reenqueue_pending(batch: Any) -> None:
        if not batch.future.done():
            reenqueue(batch)

    return reenqueue_pending


def _missing(topic: str) -> SinkUnavailableError:
    return SinkUnavailableError(
        f"topic {topic!r} does not exist", hint="create it, with as many partitions as its readers need"
    )


def _retrieve(future: asyncio.Future[Any]) -> None:
    """Take the exception of a future, so that asyncio does not report it."""
    if not future.cancelled():
        future.exception()
