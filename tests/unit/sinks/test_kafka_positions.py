"""The stored position of an interval of a Kafka topic, without a broker."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from millpy.errors import SinkUnavailableError
from millpy.sinks.kafka.positions import UNSTABLE_OFFSET_COMMIT, marked, stored_position
from millpy.testing.clock import ManualClock


class PassingClock(ManualClock):
    async def sleep(self, seconds: float) -> None:
        self.advance(seconds)


class Coordinator:
    """Answers that the offset is unstable, and from a time on with an offset of ours."""

    def __init__(self, clock: ManualClock, stable_at: float) -> None:
        self._clock, self._stable_at = clock, stable_at

    async def coordinator_lookup(self, *_: object) -> int:
        return 1

    async def send(self, *_: object, **__: object) -> Any:
        offset = marked(7)
        code = 0 if self._clock.monotonic() >= self._stable_at else UNSTABLE_OFFSET_COMMIT
        part = (0, offset.offset, -1, offset.metadata, code, {})
        return SimpleNamespace(error_code=0, topics=[("alerts", [part], {})])


async def test_an_offset_that_a_transaction_holds_is_waited_for_and_then_named() -> None:
    async def position(stable_at: float) -> int:
        clock = PassingClock()
        return await stored_position(Coordinator(clock, stable_at), "g", "alerts", 0, clock)

    assert await position(stable_at=1.0) == 7
    with pytest.raises(SinkUnavailableError, match="transaction of consumer group g for alerts-0 has not ended"):
        await position(stable_at=3_600.0)
