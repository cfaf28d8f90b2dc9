"""What a sink says of an error of Kafka: the advice fits the reason, also when aiokafka has wrapped it."""

from __future__ import annotations

from typing import Any

import pytest
from aiokafka.errors import InvalidProducerIdMapping, KafkaError, TopicAuthorizationFailedError

from millpy.clock import SystemClock
from millpy.errors import SinkUnavailableError
from millpy.sinks.kafka.connection import KafkaConnection
from millpy.sinks.kafka.topic import KafkaTopic
from millpy.sinks.protocol import SinkSetup
from millpy.sources.kafka.client import Cluster


@pytest.mark.parametrize(
    ("reason", "hint"),
    [
        (InvalidProducerIdMapping(), "do nothing: the brokers forget the id of a sink that was idle"),
        (TopicAuthorizationFailedError(), "grant the user Read, Write and Describe"),
        (KafkaError("odd"), "check the topic, the user and the rights"),
    ],
    ids=lambda found: type(found).__name__ if isinstance(found, KafkaError) else "",
)
async def test_advice_fits_the_reason(reason: KafkaError, hint: str) -> None:
    setup = SinkSetup("g", "s", 0, 1, 1, SystemClock())
    connection, producer = KafkaConnection(KafkaTopic("t"), setup, Cluster("localhost:1")), None

    async def fails(producer: Any) -> None:
        async with connection._answers(producer, 1.0):
            raise KafkaError("Unexpected error during batch delivery") from reason

    with pytest.raises(SinkUnavailableError) as raised:
        await fails(producer)
    assert raised.value.hint.startswith(hint)
