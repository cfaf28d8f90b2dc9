"""The heartbeat goes on, whatever a beat meets."""

import threading
from uuid import UUID

import pytest

from millpy.clock import SystemClock
from millpy.errors import ConfigError, CorruptionError, MillError, StoreUnavailableError
from millpy.limits import Limits
from millpy.runtime.ownership import HeartThread, Lease

LIMITS = Limits(lease_ttl_s=0.5)


class FailingOnce:
    def __init__(self, error: MillError) -> None:
        self._errors = [error]
        self.beaten = threading.Event()

    def beat(self, worker_id: UUID, ttl_s: float) -> bool:
        if self._errors:
            raise self._errors.pop()
        self.beaten.set()
        return True

    def close(self) -> None:
        pass


@pytest.mark.parametrize(
    "error", [StoreUnavailableError("away"), ConfigError("missing rights"), CorruptionError("unexpected answer")]
)
def test_a_beat_that_fails_does_not_end_the_heart(error: MillError) -> None:
    heart, lease = FailingOnce(error), Lease(LIMITS, SystemClock())
    thread = HeartThread(heart, UUID(int=1), lease, LIMITS, SystemClock())
    thread.start()
    try:
        assert heart.beaten.wait(5)
    finally:
        thread.stop()

    assert lease.is_trusted()
