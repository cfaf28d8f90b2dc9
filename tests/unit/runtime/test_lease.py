"""The heartbeat continues after any failed beat."""

import asyncio
import threading
from uuid import UUID

import pytest

from millpy.clock import SystemClock
from millpy.errors import ConfigError, CorruptionError, LeaseExpiredError, MillError, StoreUnavailableError
from millpy.limits import Limits
from millpy.model.lease import Renewal, WorkerUsage
from millpy.runtime.database_health import DatabaseHealth
from millpy.runtime.lease import Heartbeat, HeartbeatThread, Lease
from millpy.testing.clock import ManualClock

LIMITS = Limits(lease_ttl_s=0.5)


class FailingOnce:
    def __init__(self, error: MillError) -> None:
        self._errors = [error]
        self.beaten = threading.Event()

    def beat(self, worker_id: UUID, ttl_s: float, usage: WorkerUsage) -> Renewal:
        if self._errors:
            raise self._errors.pop()
        self.beaten.set()
        return Renewal()

    def close(self) -> None:
        pass


@pytest.mark.parametrize(
    "error", [StoreUnavailableError("away"), ConfigError("missing rights"), CorruptionError("unexpected answer")]
)
def test_a_failed_heartbeat_does_not_end_the_heartbeats(error: MillError) -> None:
    sender, lease = FailingOnce(error), Lease(LIMITS, SystemClock())
    thread = HeartbeatThread(sender, UUID(int=1), lease, LIMITS, SystemClock())
    thread.start()
    try:
        assert sender.beaten.wait(60)
    finally:
        thread.stop()

    assert lease.is_trusted()


class Slow:
    """Answers after a while."""

    def __init__(self, clock: ManualClock, takes_s: float) -> None:
        self._clock = clock
        self._takes_s = takes_s

    def beat(self, worker_id: UUID, ttl_s: float, usage: WorkerUsage) -> Renewal:
        self._clock.advance(self._takes_s)
        return Renewal()

    def close(self) -> None:
        pass


@pytest.mark.parametrize("takes_s", [0.0, 1.0, 3.0])
def test_trust_ends_a_margin_before_the_lease_counted_from_the_attempt(takes_s: float) -> None:
    limits, clock = Limits(lease_ttl_s=5.0), ManualClock()
    assert limits.lease_margin_s == 1.0
    lease = Lease(limits, clock)
    heartbeat = Heartbeat(Slow(clock, takes_s), UUID(int=1), lease, limits, clock)
    assert not lease.is_trusted()

    heartbeat.attempt()

    assert lease.is_trusted()
    clock.advance(4.0 - takes_s - 0.001)
    assert lease.is_trusted()
    clock.advance(0.001)
    assert not lease.is_trusted(), "the margin is for what is sent before the lease ends, and lands behind it"


@pytest.mark.parametrize("takes_s", [4.0, 6.0])
def test_an_answer_later_than_the_trust_gives_none(takes_s: float) -> None:
    limits, clock = Limits(lease_ttl_s=5.0), ManualClock()
    lease = Lease(limits, clock)

    Heartbeat(Slow(clock, takes_s), UUID(int=1), lease, limits, clock).attempt()

    assert not lease.is_trusted()


class Reading:
    """Keeps what was reported, and answers that the worker has to drain."""

    def __init__(self) -> None:
        self.reported: list[WorkerUsage] = []

    def beat(self, worker_id: UUID, ttl_s: float, usage: WorkerUsage) -> Renewal:
        self.reported.append(usage)
        return Renewal(drain_requested=True)

    def close(self) -> None:
        pass


def test_a_heartbeat_reports_what_was_used_and_learns_of_a_drain() -> None:
    limits, clock, sender = Limits(), ManualClock(), Reading()
    lease, used = Lease(limits, clock), WorkerUsage(1_000, 0.1, 0.2, 0.01, 0.02)
    heartbeat = Heartbeat(sender, UUID(int=1), lease, limits, clock, usage=lambda: used)
    assert not lease.drain_requested

    heartbeat.attempt()

    assert (sender.reported, lease.drain_requested) == ([used], True)
    assert lease.is_trusted()


def test_a_stuck_worker_is_logged_once_until_it_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    limits, clock, sender = Limits(watchdog_s=60), ManualClock(), Reading()
    lease = Lease(limits, clock)
    heartbeat = Heartbeat(sender, UUID(int=1), lease, limits, clock)

    for _ in range(2):
        clock.advance(61)
        heartbeat.attempt()
        heartbeat.attempt()
        lease.progressed()
        heartbeat.attempt()

    assert [record.message for record in caplog.records if "makes no progress" in record.message] == [
        "the worker makes no progress; stopping its heartbeats, so that its lease expires"
    ] * 2
    assert len(sender.reported) == 2


async def test_a_lease_that_was_lost_and_renewed_is_waited_for_again() -> None:
    limits, clock = Limits(lease_ttl_s=5.0), ManualClock()
    lease = Lease(limits, clock)
    lease.lost()
    with pytest.raises(LeaseExpiredError, match="has expired"):
        await lease.await_trust()

    lease.renewed(clock.monotonic())
    clock.advance(4.5)  # beyond the trust; the next heartbeat is late

    waiting = asyncio.create_task(lease.await_trust())
    await asyncio.sleep(0)
    lease.renewed(clock.monotonic())
    clock.advance(limits.heartbeat_s)
    await waiting


def test_thread_that_is_stopped_has_ended_and_closed_its_connection() -> None:
    sender = Closing()
    thread = HeartbeatThread(sender, UUID(int=1), Lease(LIMITS, SystemClock()), Limits(lease_ttl_s=60), SystemClock())
    thread.start()

    thread.stop()

    assert not thread.is_alive()
    assert sender.closed


class Closing(Reading):
    closed = False

    def close(self) -> None:
        self.closed = True


class Answering(Reading):
    """Answers with what it is given, or fails with it."""

    def __init__(self, *answers: Renewal | MillError | None) -> None:
        super().__init__()
        self._answers = list(answers)

    def beat(self, worker_id: UUID, ttl_s: float, usage: WorkerUsage) -> Renewal | None:  # type: ignore[override]
        answer = self._answers.pop(0)
        if isinstance(answer, MillError):
            raise answer
        return answer


def test_a_lease_that_has_expired_in_the_database_is_lost_at_once() -> None:
    limits, clock = Limits(), ManualClock()
    lease = Lease(limits, clock)
    heartbeat = Heartbeat(Answering(Renewal(), None), UUID(int=1), lease, limits, clock)
    heartbeat.attempt()
    assert (lease.is_trusted(), lease.expired, lease.drain_requested) == (True, False, False)

    heartbeat.attempt()

    assert (lease.is_trusted(), lease.expired) == (False, True)


def test_heartbeats_tell_whether_the_database_answers() -> None:
    limits, clock = Limits(), ManualClock()
    health = DatabaseHealth(clock)
    sender = Answering(StoreUnavailableError("away"), Renewal())
    heartbeat = Heartbeat(sender, UUID(int=1), Lease(limits, clock), limits, clock, health)

    heartbeat.attempt()
    assert (health.answers, health.why) == (False, "away")
    heartbeat.attempt()
    assert health.answers
