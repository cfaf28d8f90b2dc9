"""What the Kafka injector hands over, without a broker."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import msgspec

from millpy.injectors.kafka import Kafka, KafkaInjector, KafkaPosition, _Chunk
from millpy.injectors.kafka_client import Cluster
from millpy.injectors.protocol import SourceSetup
from millpy.limits import Limits
from millpy.testing.clock import ManualClock


class ReadBehindMarkers:
    """A client that has read up to offset 12: behind records there are only markers."""

    async def end(self) -> int:
        return 12

    async def position(self) -> int:
        return 12


def a_record(offset: int) -> Any:
    return SimpleNamespace(offset=offset, key=None, value=b"{}", headers=(), timestamp=0)


async def test_position_behind_markers_is_committed_when_records_before_them_were_still_waiting() -> None:
    limits, clock = Limits(bundle_records_max=2), ManualClock()
    setup = SourceSetup(graph="g", stream="s", partition="t/0", limits=limits, clock=clock, ready=asyncio.Event())
    injector = KafkaInjector(setup, Kafka("t", partitions=1), Cluster("nowhere:1"))
    injector._position, injector._offset = KafkaPosition(6), 10
    injector._inbox.extend(_Chunk([a_record(offset), a_record(offset + 1)], 4) for offset in (6, 8))

    clock.advance(60)
    await injector._prove(ReadBehindMarkers())  # type: ignore[arg-type]
    taken = [await injector.take() for _ in range(3)]

    assert [msgspec.json.decode(t.position or b"")["offset"] for t in taken if t is not None] == [8, 12]
