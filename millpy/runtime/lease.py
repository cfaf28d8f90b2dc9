"""Leases: how long this process may trust its own lease.

The server's clock decides expiry. Local trust ends at *attempt start + ttl - margin* on the monotonic clock, so a slow
answer cannot stretch it. Trust only saves useless work; the fence in every commit protects the data (I1, I2).

A thread sends heartbeats on a separate connection, so neither a long step nor a slow commit loses the lease. A
watchdog stops the heartbeats when neither the worker's loop nor the step that it awaits makes progress, so a stuck
worker loses the lease. A step reports each call of user code (`StepProgress`), so a long step is not stuck; a call that
does not return within `Limits.call_s_max` is.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Protocol
from uuid import UUID

from millpy.clock import Clock
from millpy.errors import LeaseExpiredError, MillError
from millpy.limits import Limits
from millpy.model.lease import Renewal, WorkerUsage
from millpy.model.step_progress import StepProgress
from millpy.runtime.database_health import DatabaseHealth

log = logging.getLogger(__name__)


class HeartbeatSender(Protocol):
    """Sends heartbeats on a separate connection; blocks."""

    def beat(self, worker_id: UUID, ttl_s: float, usage: WorkerUsage, /) -> Renewal | None:
        """Extend the lease by `ttl_s` from now; return None if it had already expired. Raises TransientError."""
        ...

    def close(self) -> None:
        """Close the connection."""
        ...


class Lease:
    """The worker's trust in its own lease. The heartbeat thread writes it; all other parts of the worker read it.

    Attributes:
        expired: whether the server has reported that the lease had expired.
        drain_requested: whether an operator has requested that the worker drains, as by SIGTERM.
    """

    def __init__(self, limits: Limits, clock: Clock) -> None:
        self._limits = limits
        self._clock = clock
        self._trusted_until = float("-inf")
        self._progress_at = clock.monotonic()
        self._progress = StepProgress()
        self._units = 0
        self.expired = False
        self.drain_requested = False

    def watch(self, progress: StepProgress) -> None:
        """Let `is_stuck` watch the progress of the graph's steps; a step whose units rise is not stuck."""
        self._progress = progress

    def renewed(self, attempt_started: float) -> None:
        """Extend trust after the server has renewed the lease in an attempt that began at `attempt_started`."""
        self._trusted_until = attempt_started + self._limits.lease_ttl_s - self._limits.lease_margin_s
        self.expired = False

    def lost(self) -> None:
        """End trust after the server has reported that the lease had expired."""
        self._trusted_until = float("-inf")
        self.expired = True

    def is_trusted(self) -> bool:
        """Tell whether work may be started and committed under the lease."""
        return self._clock.monotonic() < self._trusted_until

    async def await_trust(self) -> None:
        """Return once work may be started and committed under the lease, usually at once.

        A heartbeat may be late because the machine or the database is busy. Waiting for it loses nothing, as the fence
        protects the data; starting anew would read all state again, which keeps a busy machine busy.

        Raises:
            LeaseExpiredError: the lease had expired, or the database has not renewed it for the length of a lease.
        """
        ends_at = self._clock.monotonic() + self._limits.lease_ttl_s
        while not self.is_trusted():
            if self.expired:
                raise LeaseExpiredError("the lease has expired")
            if self._clock.monotonic() >= ends_at:
                raise LeaseExpiredError(f"the lease was not renewed for {self._limits.lease_ttl_s:.1f} s")
            await self._clock.sleep(self._limits.heartbeat_s / 4)

    def progressed(self) -> None:
        """Note that the worker's loop is alive."""
        self._progress_at = self._clock.monotonic()

    def is_stuck(self) -> bool:
        """Tell whether neither the worker's loop nor the units of its step have moved for longer than allowed."""
        now, progress = self._clock.monotonic(), self._progress
        if progress.units != self._units:
            self._units, self._progress_at = progress.units, now
        allowed_s = self._limits.call_s_max if progress.stepping else self._limits.watchdog_s
        return now - self._progress_at > allowed_s


class Heartbeat:
    """A sender of heartbeats that updates a `Lease` by the answers, and says whether the database answers.

    `usage` returns what the worker reports with each of them.
    """

    def __init__(
        self,
        sender: HeartbeatSender,
        worker_id: UUID,
        lease: Lease,
        limits: Limits,
        clock: Clock,
        database: DatabaseHealth | None = None,
        usage: Callable[[], WorkerUsage] = WorkerUsage,
    ) -> None:
        self._sender = sender
        self._worker_id = worker_id
        self._lease = lease
        self._limits = limits
        self._clock = clock
        self._database = database
        self._usage = usage
        self._is_told = False  # that the worker is stuck

    def attempt(self) -> None:
        """Try once to renew the lease, unless the worker is stuck. Log errors."""
        if self._lease.is_stuck():
            if not self._is_told:
                log.error("the worker makes no progress; stopping its heartbeats, so that its lease expires")
            self._is_told = True
            return
        self._is_told = False
        attempt_started = self._clock.monotonic()
        try:
            renewal = self._sender.beat(self._worker_id, self._limits.lease_ttl_s, self._usage())
        except MillError as error:
            # Catch every error: the next attempt may succeed, and the end of this thread would go unnoticed.
            log.warning("heartbeat failed: %s", error)
            if self._database is not None:
                self._database.failed(error.message)
            return
        if self._database is not None:
            self._database.answered()
        if renewal is None:
            self._lease.lost()
            return
        self._lease.renewed(attempt_started)
        if renewal.drain_requested and not self._lease.drain_requested:
            log.info("an operator has requested that this worker drains")
            self._lease.drain_requested = True


class HeartbeatThread(threading.Thread):
    """A thread that renews a lease until stopped, except while the worker is stuck."""

    def __init__(
        self,
        sender: HeartbeatSender,
        worker_id: UUID,
        lease: Lease,
        limits: Limits,
        clock: Clock,
        database: DatabaseHealth | None = None,
        usage: Callable[[], WorkerUsage] = WorkerUsage,
    ) -> None:
        super().__init__(name="heartbeat", daemon=True)
        self._sender = sender
        self._heartbeat = Heartbeat(sender, worker_id, lease, limits, clock, database, usage)
        self._limits = limits
        self._ended = threading.Event()

    def run(self) -> None:
        """Send a heartbeat every `heartbeat_s` until stopped."""
        while not self._ended.wait(self._limits.heartbeat_s):
            self._heartbeat.attempt()
        self._sender.close()

    def stop(self) -> None:
        """Stop the heartbeats and join the thread."""
        self._ended.set()
        self.join(timeout=self._limits.lease_ttl_s)
