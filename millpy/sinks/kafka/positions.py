"""The stored position of an interval, as the offset of a consumer group: read so that no pending one is missed.

A transaction's offsets become visible when its end has been written to the group's log, which may be a moment after the
transaction has ended for its producer. Version 7 of the request tells: with `require_stable` the broker answers that
the offset is unstable (KIP-447) instead of the one before.

Each position carries a mark in its metadata. An offset without the mark was set by somebody else, for example by
`kafka-consumer-groups.sh --reset-offsets`: it does not tell which messages the topic has.
"""

from __future__ import annotations

from typing import Any

from aiokafka.client import AIOKafkaClient, ConnectionGroup, CoordinationType
from aiokafka.errors import (
    CoordinatorLoadInProgressError,
    CoordinatorNotAvailableError,
    KafkaError,
    NotCoordinatorError,
    for_code,
)
from aiokafka.protocol.api import Request, RequestStruct, Response
from aiokafka.protocol.types import (
    Boolean,
    CompactArray,
    CompactString,
    Int16,
    Int32,
    Int64,
    Schema,
    TaggedFields,
)
from aiokafka.structs import OffsetAndMetadata

from millpy.clock import Clock
from millpy.errors import SinkUnavailableError

UNSTABLE_OFFSET_COMMIT, GROUP_ID_NOT_FOUND = 88, 69
RETRY_S = 0.02
UNSTABLE_S_MAX = 8.0
"""Seconds for which a transaction may hold the offset although the next epoch has ended it."""
NO_OFFSET = -1
_PASSING = (CoordinatorNotAvailableError, CoordinatorLoadInProgressError, NotCoordinatorError)


class StableOffsetFetchResponse(Response):  # type: ignore[misc]
    """The offsets of a group."""

    API_KEY = 9
    API_VERSION = 7
    SCHEMA = Schema(
        ("throttle_time_ms", Int32),
        (
            "topics",
            CompactArray(
                ("topic", CompactString("utf-8")),
                (
                    "partitions",
                    CompactArray(
                        ("partition", Int32),
                        ("offset", Int64),
                        ("leader_epoch", Int32),
                        ("metadata", CompactString("utf-8")),
                        ("error_code", Int16),
                        ("tags", TaggedFields),
                    ),
                ),
                ("tags", TaggedFields),
            ),
        ),
        ("error_code", Int16),
        ("tags", TaggedFields),
    )


class StableOffsetFetchStruct(RequestStruct):  # type: ignore[misc]
    """The request for offsets that no open transaction changes."""

    FLEXIBLE_VERSION = True
    API_KEY = 9
    API_VERSION = 7
    RESPONSE_TYPE = StableOffsetFetchResponse
    SCHEMA = Schema(
        ("group", CompactString("utf-8")),
        (
            "topics",
            CompactArray(
                ("topic", CompactString("utf-8")),
                ("partitions", CompactArray(Int32)),
                ("tags", TaggedFields),
            ),
        ),
        ("require_stable", Boolean),
        ("tags", TaggedFields),
    )


class StableOffsetFetch(Request[StableOffsetFetchStruct]):  # type: ignore[misc]
    """Asks for the stable offset of one partition."""

    API_KEY = 9

    def __init__(self, group: str, topic: str, partition: int) -> None:
        self._group, self._topic, self._partition = group, topic, partition

    def build(self, request_struct_class: type[StableOffsetFetchStruct]) -> StableOffsetFetchStruct:
        """Return the request in a version of the protocol."""
        return request_struct_class(self._group, [(self._topic, [self._partition], {})], True, {})


def marked(position: int) -> OffsetAndMetadata:
    """Return a position as an offset to store, with its mark."""
    return OffsetAndMetadata(position, f"millpy {position}")


async def stored_position(client: AIOKafkaClient, group: str, topic: str, partition: int, clock: Clock) -> int:
    """Read the offset of a group for a partition; NO_OFFSET without one.

    The caller bounds the time: the coordinator may be loading, or a transaction may be ending.

    Raises:
        KafkaError: the broker refuses.
        SinkUnavailableError: the offset is not one that `marked` has made, or a transaction holds it.
    """
    began = clock.monotonic()
    while True:
        try:
            node = await client.coordinator_lookup(CoordinationType.GROUP, group)
            request = StableOffsetFetch(group, topic, partition)
            answer: Any = await client.send(node, request, group=ConnectionGroup.COORDINATION)
        except _PASSING:
            await clock.sleep(RETRY_S)
            continue
        found = [part for _, partitions, _ in answer.topics for part in partitions]
        code = answer.error_code or next((part[4] for part in found), 0)
        if code in (0, GROUP_ID_NOT_FOUND):
            offset, metadata = (int(found[0][1]), found[0][3]) if found else (NO_OFFSET, "")
            if offset != NO_OFFSET and marked(offset).metadata != metadata:
                raise SinkUnavailableError(
                    f"somebody has set the offset of consumer group {group} for {topic}-{partition} to {offset}",
                    hint="delete the group's offsets of this topic; the sink then begins where the database says, and "
                    "may repeat its last transaction",
                )
            return offset
        error = for_code(code)
        if code != UNSTABLE_OFFSET_COMMIT and error not in _PASSING:
            raise error(group) if issubclass(error, KafkaError) else KafkaError(f"error {code} of group {group}")
        if code == UNSTABLE_OFFSET_COMMIT and clock.monotonic() - began >= UNSTABLE_S_MAX:
            raise SinkUnavailableError(
                f"a transaction of consumer group {group} for {topic}-{partition} has not ended",
                hint="if it lasts for minutes, a broker has lost its end: `kafka-transactions.sh find-hanging` finds it"
                " in the topic and in __consumer_offsets, and `abort` ends it in each of their partitions",
            )
        await clock.sleep(RETRY_S)
