"""Canary: continues at the offset that was read last, like a consumer group, and not at that of the last commit."""

from __future__ import annotations

from pathlib import Path

from millpy.ingest.protocol import SourceBatch
from millpy.sources.kafka.injector import KafkaInjector
from tests.crash.kafka_graph import graph

__all__ = ["graph"]

OFFSET = Path("offset")  # in the worker's own directory, which its successor shares

take_of_ours, open_of_ours = KafkaInjector.take, KafkaInjector.open


async def take(self: KafkaInjector) -> SourceBatch | None:
    taken = await take_of_ours(self)
    if taken is not None and taken.position is not None:
        OFFSET.write_bytes(taken.position)
    return taken


async def open_at_offset(self: KafkaInjector, position: bytes | None) -> None:
    await open_of_ours(self, OFFSET.read_bytes() if OFFSET.exists() else position)


KafkaInjector.take = take  # type: ignore[method-assign]
KafkaInjector.open = open_at_offset  # type: ignore[method-assign]
