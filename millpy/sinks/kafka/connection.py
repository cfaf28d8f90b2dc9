"""A connection for one interval of a Kafka topic: a producer with a transactional id.

A producer that has met an error is never used again: the next connection begins with its epoch and its position, which
settle what has become of the transaction. The transactional id and the group are `millpy.GRAPH.SINK.NUMBER.…`, with the
number of the interval and a part of the graph's secret: what is dropped and deployed again begins with other ids.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

from aiokafka import AIOKafkaProducer, TopicPartition
from aiokafka.errors import (
    KafkaConnectionError,
    KafkaError,
    MessageSizeTooLargeError,
    NodeNotReadyError,
    ProducerFenced,
)
from aiokafka.partitioner import murmur2
from aiokafka.producer import sender

from millpy.errors import MessagesRefusedError, MillError, SinkUnavailableError
from millpy.sinks.kafka.positions import stored_position
from millpy.sinks.kafka.topic import KafkaTopic
from millpy.sinks.messages import SinkMessages
from millpy.sinks.protocol import SinkSetup
from millpy.sources.kafka.client import Cluster, quieten
from millpy.sources.kafka.connect_errors import reason

log = logging.getLogger(__name__)
sender.BACKOFF_OVERRIDE = 0.002
"""Seconds between attempts to begin a transaction while the one before ends; 0.02 in aiokafka, which is most of it."""
ANSWER_S_MAX = 10.0
"""Seconds that a request may take; also the most for a connection, and for a transaction without progress."""
SEND_S_MAX = 60.0
CLOSE_S_MAX = 2.0
RETRY_MS = 10
"""Milliseconds until a request is repeated, for example while the coordinator still ends the transaction before."""
BATCH_OVERHEAD = 1_000
KNOWN_KEYS_MAX = 100_000
SECRET_CHARACTERS = 12


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
            max_batch_size=topic.message_bytes_max + BATCH_OVERHEAD,
            max_request_size=topic.message_bytes_max + BATCH_OVERHEAD,
        )
        async with self._answers(self._producer, ANSWER_S_MAX):
            await self._producer.start()
            partitions = await self._producer.partitions_for(topic.topic)
            self._count = len(partitions or ())
            found = await stored_position(self._producer.client, self.id, topic.topic, 0, self._setup.clock)
        if not self._count:
            raise SinkUnavailableError(f"topic {topic.topic!r} does not exist", hint="create it")
        self._partitions.clear()
        return max(0, found)

    async def send(self, messages: SinkMessages) -> None:
        """Deliver messages in one transaction, with the position behind them.

        Raises:
            SinkUnavailableError: the transaction may be committed or not; the next connection knows.
            MessagesRefusedError: messages are too large for any batch; no transaction was begun.
        """
        producer, topic = self._producer, self._topic.topic
        assert producer is not None, "open the connection first"
        batches = self._batches(producer, messages)
        async with self._answers(producer, SEND_S_MAX):
            await producer.begin_transaction()
            # Its error comes also by the calls below; asyncio would tell of one that nobody has asked for.
            producer._txn_manager.wait_for_transaction_end().add_done_callback(_retrieve)
            sent = []
            for partition, batch in batches:
                sent.append(await producer.send_batch(batch, topic, partition=partition))
                sent[-1].add_done_callback(_retrieve)
            await producer.send_offsets_to_transaction({TopicPartition(topic, 0): messages.end}, self.id)
            await asyncio.gather(*sent)
            await producer.commit_transaction()

    def _batches(self, producer: AIOKafkaProducer, messages: SinkMessages) -> list[tuple[int, Any]]:
        """Return the messages as batches by partition, in order within each partition. Raises MessagesRefusedError."""
        open_batches: dict[int, Any] = {}
        full: list[tuple[int, Any]] = []
        refused: dict[int, str] = {}
        # Brokers refuse timestamps of the future, which the panes of windows that are still open have.
        now_ms = self._setup.clock.now_us() // 1_000
        times = [min(max(0, at // 1_000), now_ms) for at in messages.event_times]
        for place, (key, value, at) in enumerate(zip(messages.keys, messages.values, times, strict=True)):
            partition = self._partition_of(key)
            headers = list(messages.headers_of(place))
            batch = open_batches.get(partition)
            if batch is None or batch.append(timestamp=at, key=key, value=value, headers=headers) is None:
                if batch is not None:
                    full.append((partition, batch))
                batch = open_batches[partition] = producer.create_batch()
                if batch.append(timestamp=at, key=key, value=value, headers=headers) is None:
                    refused[place] = "it does not fit into a batch: raise message_bytes_max of the sink"
        if refused:
            raise MessagesRefusedError(refused, final=refused)
        return [*full, *open_batches.items()]

    def _partition_of(self, key: bytes) -> int:
        """Return the partition that Kafka's own clients choose for a key."""
        found = self._partitions.get(key)
        if found is None:
            if len(self._partitions) >= KNOWN_KEYS_MAX:
                self._partitions.clear()
            found = self._partitions[key] = (murmur2(key) & 0x7FFFFFFF) % self._count
        return found

    async def close(self) -> None:
        """Disconnect. An open transaction ends with the next connection, or by its timeout."""
        producer, self._producer = self._producer, None
        if producer is None:
            return
        for batches in producer._message_accumulator._batches.values():
            for batch in batches:  # of a transaction that has failed
                batch._drain_waiter.add_done_callback(_retrieve)
        stopping = asyncio.create_task(producer.stop(), name="millpy-kafka-sink-stop")
        done, _ = await asyncio.wait([stopping], timeout=CLOSE_S_MAX)
        if not done:
            stopping.cancel()
            await asyncio.wait([stopping], timeout=CLOSE_S_MAX)
        await producer.client.close()
        if stopping.done() and not stopping.cancelled() and (error := stopping.exception()) is not None:
            log.debug("kafka: %r while closing", error)

    @asynccontextmanager
    async def _answers(self, producer: AIOKafkaProducer, within_s: float) -> AsyncIterator[None]:
        """Translate aiokafka's errors into ours."""
        try:
            async with asyncio.timeout(within_s):
                yield
        except TimeoutError as error:
            raise SinkUnavailableError(f"Kafka did not answer within {within_s:g} s") from error
        except ProducerFenced as error:
            raise SinkUnavailableError(f"another connection has taken over {self.id}") from error
        except (KafkaConnectionError, NodeNotReadyError) as error:
            named = [(broker.host, broker.port) for broker in producer.client.cluster.brokers()]
            places = dict.fromkeys([*((host, port) for host, port, _ in producer.client.hosts), *named])
            why: MillError = await reason(self._options, places, error)
            raise SinkUnavailableError(why.message, hint=why.hint) from error
        except MessageSizeTooLargeError as error:
            raise SinkUnavailableError(
                f"topic {self._topic.topic!r} refuses a batch of up to {self._topic.message_bytes_max:,} bytes",
                hint="set message_bytes_max of the sink to max.message.bytes of the topic, or less",
            ) from error
        except (KafkaError, OSError) as error:
            raise SinkUnavailableError(f"Kafka: {error!r}", hint="check the topic, the user and the rights") from error


def _retrieve(future: asyncio.Future[Any]) -> None:
    """Take the exception of a future, so that asyncio does not report it."""
    if not future.cancelled():
        future.exception()
