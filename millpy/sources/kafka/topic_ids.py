"""Requests to a Kafka broker that name a topic by its id (KIP-516), which no other topic of the same name has.

aiokafka names topics only, so a fetch at an offset of a deleted topic would be answered from its successor. Brokers
from Kafka 3.1 on take the id instead, and refuse a fetch from another topic than the one that was read so far; those
from 2.8 on tell it at least. The schemas are those of Kafka's protocol guide: Metadata 10, and Fetch 13.
"""

from __future__ import annotations

from io import BytesIO
from typing import Any, NamedTuple
from uuid import UUID

from aiokafka.errors import KafkaError, for_code
from aiokafka.protocol.abstract import AbstractType
from aiokafka.protocol.api import Request, RequestStruct, Response
from aiokafka.protocol.fetch import FetchRequest, FetchResponse_v11
from aiokafka.protocol.metadata import MetadataRequest_v5
from aiokafka.protocol.types import (
    Boolean,
    CompactArray,
    CompactBytes,
    CompactString,
    Int8,
    Int16,
    Int32,
    Int64,
    Schema,
    TaggedFields,
)

NO_ID = UUID(int=0)
UNKNOWN_IDS = (100, 103)
"""The codes of the errors UNKNOWN_TOPIC_ID and INCONSISTENT_TOPIC_ID."""
_TAGS = ("tags", TaggedFields)


class TopicIdType(AbstractType[UUID]):  # type: ignore[misc]
    """The id of a topic on the wire: 16 bytes."""

    @classmethod
    def encode(cls, value: UUID) -> bytes:
        """Return the bytes of an id."""
        return value.bytes

    @classmethod
    def decode(cls, data: BytesIO) -> UUID:
        """Read an id."""
        return UUID(bytes=data.read(16))


class UnknownTopicIdError(KafkaError):  # type: ignore[misc]
    """The broker knows no topic with the id, not yet or not any more."""


class TopicMetadata(NamedTuple):
    """The answer of a broker about a topic.

    Attributes:
        error_code: Kafka's error code; 0 without an error.
        partitions: the number of partitions.
        topic_id: the id; None from a broker that knows no ids.
    """

    error_code: int
    partitions: int
    topic_id: UUID | None


class MetadataResponseV10(Response):  # type: ignore[misc]
    """The metadata of topics, with their ids."""

    API_KEY = 3
    API_VERSION = 10
    SCHEMA = Schema(
        ("throttle_time_ms", Int32),
        (
            "brokers",
            CompactArray(
                ("node_id", Int32), ("host", CompactString()), ("port", Int32), ("rack", CompactString()), _TAGS
            ),
        ),
        ("cluster_id", CompactString()),
        ("controller_id", Int32),
        (
            "topics",
            CompactArray(
                ("error_code", Int16),
                ("topic", CompactString()),
                ("topic_id", TopicIdType),
                ("is_internal", Boolean),
                (
                    "partitions",
                    CompactArray(
                        ("error_code", Int16),
                        ("partition", Int32),
                        ("leader", Int32),
                        ("leader_epoch", Int32),
                        ("replicas", CompactArray(Int32)),
                        ("isr", CompactArray(Int32)),
                        ("offline_replicas", CompactArray(Int32)),
                        _TAGS,
                    ),
                ),
                ("authorized_operations", Int32),
                _TAGS,
            ),
        ),
        ("cluster_authorized_operations", Int32),
        _TAGS,
    )


class MetadataRequestV10(RequestStruct):  # type: ignore[misc]
    """A request for the metadata of topics."""

    FLEXIBLE_VERSION = True
    API_KEY = 3
    API_VERSION = 10
    RESPONSE_TYPE = MetadataResponseV10
    SCHEMA = Schema(
        ("topics", CompactArray(("topic_id", TopicIdType), ("topic", CompactString()), _TAGS)),
        ("allow_auto_topic_creation", Boolean),
        ("include_cluster_authorized_operations", Boolean),
        ("include_topic_authorized_operations", Boolean),
        _TAGS,
    )


class TopicMetadataRequest(Request[MetadataRequest_v5 | MetadataRequestV10]):  # type: ignore[misc]
    """A request for the metadata of one topic, which does not create it."""

    API_KEY = 3

    def __init__(self, topic: str) -> None:
        self._topic = topic

    def build(self, request_struct_class: type[RequestStruct]) -> Any:
        """Return the request in a version that the broker understands."""
        if request_struct_class.API_VERSION < 10:
            return request_struct_class([self._topic], False)
        return request_struct_class([(NO_ID, self._topic, {})], False, False, False, {})


def metadata_of(answer: Any) -> TopicMetadata:
    """Return the metadata of the one topic in an answer to a `TopicMetadataRequest`."""
    (found,) = answer.topics
    if answer.API_VERSION < 10:
        code, *_, partitions = found
        return TopicMetadata(code, len(partitions), None)
    code, _, topic_id, _, partitions, *_ = found
    return TopicMetadata(code, len(partitions), None if topic_id == NO_ID else topic_id)


class FetchResponseV13(Response):  # type: ignore[misc]
    """Records of topics named by id."""

    API_KEY = 1
    API_VERSION = 13
    SCHEMA = Schema(
        ("throttle_time_ms", Int32),
        ("error_code", Int16),
        ("session_id", Int32),
        (
            "topics",
            CompactArray(
                ("topic_id", TopicIdType),
                (
                    "partitions",
                    CompactArray(
                        ("partition", Int32),
                        ("error_code", Int16),
                        ("highwater_offset", Int64),
                        ("last_stable_offset", Int64),
                        ("log_start_offset", Int64),
                        (
                            "aborted_transactions",
                            CompactArray(("producer_id", Int64), ("first_offset", Int64), _TAGS),
                        ),
                        ("preferred_read_replica", Int32),
                        ("message_set", CompactBytes),
                        _TAGS,
                    ),
                ),
                _TAGS,
            ),
        ),
        _TAGS,
    )


class FetchRequestV13(RequestStruct):  # type: ignore[misc]
    """A request for records of topics named by id."""

    FLEXIBLE_VERSION = True
    API_KEY = 1
    API_VERSION = 13
    RESPONSE_TYPE = FetchResponseV13
    SCHEMA = Schema(
        ("replica_id", Int32),
        ("max_wait_time", Int32),
        ("min_bytes", Int32),
        ("max_bytes", Int32),
        ("isolation_level", Int8),
        ("session_id", Int32),
        ("session_epoch", Int32),
        (
            "topics",
            CompactArray(
                ("topic_id", TopicIdType),
                (
                    "partitions",
                    CompactArray(
                        ("partition", Int32),
                        ("current_leader_epoch", Int32),
                        ("fetch_offset", Int64),
                        ("last_fetched_epoch", Int32),
                        ("log_start_offset", Int64),
                        ("max_bytes", Int32),
                        _TAGS,
                    ),
                ),
                _TAGS,
            ),
        ),
        (
            "forgotten_topics_data",
            CompactArray(("topic_id", TopicIdType), ("partitions", CompactArray(Int32)), _TAGS),
        ),
        ("rack_id", CompactString()),
        _TAGS,
    )


class TopicIdFetchRequest(FetchRequest):  # type: ignore[misc]
    """A request of aiokafka for records of one topic, which names it by id where the broker understands that."""

    def __init__(self, request: FetchRequest, topic_id: UUID) -> None:
        self.__dict__.update(vars(request))
        self._topic_id = topic_id

    def build(self, request_struct_class: type[RequestStruct]) -> Any:
        """Return the request in a version that the broker understands."""
        if request_struct_class.API_VERSION < FetchRequestV13.API_VERSION:
            return super().build(request_struct_class)
        ((_, partitions),) = self.topics
        return request_struct_class(
            -1,  # a consumer
            self._max_wait_ms,
            self._min_bytes,
            self._max_bytes,
            self._isolation_level,
            0,
            -1,  # without a session
            [(self._topic_id, [(number, -1, offset, -1, -1, size, {}) for number, offset, size in partitions], {})],
            [],
            self._rack_id,
            {},
        )


TopicIdFetchRequest._CLASSES = (*FetchRequest._CLASSES, FetchRequestV13)


def as_named(response: Any, topic: str) -> Any:
    """Return an answer to a `TopicIdFetchRequest` in the form that aiokafka's fetcher reads.

    Raises:
        UnknownTopicIdError: the broker does not know the id.
        KafkaError: the request has failed as a whole.
    """
    if response.API_VERSION < FetchResponseV13.API_VERSION:
        return response
    if response.error_code:
        raise _error(response.error_code, topic)
    named = []
    for _, partitions, _ in response.topics:
        found = []
        for number, code, highwater, stable, oldest, aborted, replica, records, _ in partitions:
            if code in UNKNOWN_IDS:
                raise _error(code, topic)
            transactions = [(producer, first) for producer, first, _ in aborted or ()]
            found.append((number, code, highwater, stable, oldest, transactions, replica, records))
        named.append((topic, found))
    return FetchResponse_v11(response.throttle_time_ms, 0, response.session_id, named)


def _error(code: int, topic: str) -> KafkaError:
    return UnknownTopicIdError(topic) if code in UNKNOWN_IDS else for_code(code)(topic)
