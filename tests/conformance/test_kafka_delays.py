"""How long a Kafka source waits until it connects again."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from millpy.clock import SystemClock
from millpy.errors import SourceUnavailableError
from millpy.ingest.protocol import SourceSetup
from millpy.limits import Limits
from millpy.model.record import RecordType
from millpy.sources.kafka.client import Client
from millpy.sources.kafka.source import Kafka, KafkaBrokers
from tests.kafka_server import KafkaServer
from tests.kafka_topics import make_topic


class Reading(msgspec.Struct):
    value: int


class NotingClock(SystemClock):
    """Notes how long a reader would wait."""

    ahead = 0.0

    def __init__(self) -> None:
        self.waits: list[float] = []
        self.enough = asyncio.Event()

    def monotonic(self) -> float:
        return super().monotonic() + self.ahead

    async def sleep(self, seconds: float) -> None:
        self.waits.append(seconds)
        if len(self.waits) == 4:
            self.enough.set()
        await asyncio.sleep(0)


@pytest.mark.parametrize(("lasts_s", "waits"), [(0.0, [0.1, 0.2, 0.4, 0.8]), (6.0, [0.1] * 4)])
async def test_a_reader_that_fails_again_as_soon_as_it_is_connected_waits_longer(
    kafka: KafkaServer, monkeypatch: pytest.MonkeyPatch, lasts_s: float, waits: list[float]
) -> None:
    topic, clock = f"delays-{lasts_s:.0f}", NotingClock()
    await make_topic(kafka.address, topic, 1)

    async def fail(client: Client, records_max: int, wait_s: float) -> Any:
        clock.ahead += lasts_s
        raise SourceUnavailableError("the broker cannot read its log")

    monkeypatch.setattr(Client, "fetch", fail)
    setup = SourceSetup(
        graph="g", stream="s", partition=f"{topic}/0", limits=Limits(), clock=clock, ready=asyncio.Event(),
        record_type=RecordType(Reading),
    )  # fmt: skip
    injector = Kafka(topic, partitions=1, brokers=KafkaBrokers(kafka.address)).connect(setup)
    async with asyncio.timeout(60):
        await injector.open(None)
        try:
            await clock.enough.wait()
        finally:
            await injector.close()

    assert clock.waits[:4] == waits
