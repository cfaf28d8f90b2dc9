"""Leases: how long this process may believe that it is alive.

The server's clock decides expiry. Local trust ends at *attempt start + ttl - margin* on the monotonic clock, so a slow
answer cannot stretch it. Trust is a courtesy that saves useless work: what protects the data is the fence in every
commit (I1, I2). A thread sends heartbeats on a connection of its own, so neither a long step nor a slow commit loses
the lease; a watchdog stops it when neither the worker's loop nor the step that it waits for makes progress, so a stuck
worker does. A step reports each call of user code (`StepProgress`), so a long one is not stuck; a call that does not
return within `Limits.call_s_max` is.
"""

from __future__ import annotations

import logging
import threading
from typing import Protocol
from uuid import UUID

from millpy.clock import Clock
from millpy.errors import LeaseExpiredError, MillError
from millpy.limits import Limits
from millpy.model.step_progress import StepProgress

log = logging.getLogger(__name__)


class Heart(Protocol):
    """Sends one heartbeat, blocking, on a connection of its own."""

    def beat(self, worker_id: UUID, ttl_s: float) -> bool:
        """Renew the lease; False when it had expired. Raises TransientError."""
        ...

    def close(self) -> None:
        """Give the connection back."""
        ...


class Lease:
    """Trust in the worker's own lease; written by the heartbeat thread, read by everybody."""

    def __init__(self, limits: Limits, clock: Clock) -> None:
        self._limits = limits
        self._clock = clock
        self._trusted_until = float("-inf")
        self._progress_at = clock.monotonic()
        self._progress = StepProgress()
        self._units = 0
        self.expired = False

    def watch(self, progress: StepProgress) -> None:
        """Take a step whose units rise for alive."""
        self._progress = progress

    def renewed(self, attempt_started: float) -> None:
        """The server has answered an attempt that began then."""
        self._trusted_until = attempt_started + self._limits.lease_ttl_s - self._limits.lease_margin_s
        self.expired = False

    def lost(self) -> None:
        """The server says that the lease had expired."""
        self._trusted_until = float("-inf")
        self.expired = True

    def is_trusted(self) -> bool:
        """Whether work may be started and committed on it."""
        return self._clock.monotonic() < self._trusted_until

    async def await_trust(self) -> None:
        """Return once work may be started and committed on it, in most cases at once.

        A heartbeat may be late because the machine or the database is busy. Waiting for it loses nothing, as the fence
        protects what is stored; starting anew means to read all state again, which keeps a busy machine busy.

        Raises:
            LeaseExpiredError: it had expired, or the database has renewed nothing for as long as it lasts.
        """
        ends_at = self._clock.monotonic() + self._limits.lease_ttl_s
        while not self.is_trusted():
            if self.expired:
                raise LeaseExpiredError("the lease has expired")
            if self._clock.monotonic() >= ends_at:
                raise LeaseExpiredError(f"the lease was not renewed for {self._limits.lease_ttl_s:.1f} s")
            await self._clock.sleep(self._limits.heartbeat_s / 4)

    def progressed(self) -> None:
        """The worker's loop is alive."""
        self._progress_at = self._clock.monotonic()

    def is_stuck(self) -> bool:
        """Whether nothing has moved for too long: neither the loop nor, by its units, the step that it waits for."""
        now, progress = self._clock.monotonic(), self._progress
        if progress.units != self._units:
            self._units, self._progress_at = progress.units, now
        allowed_s = self._limits.call_s_max if progress.stepping else self._limits.watchdog_s
        return now - self._progress_at > allowed_s


class Heartbeat:
    """One attempt to renew a lease, and what its answer means."""

    def __init__(self, heart: Heart, worker_id: UUID, lease: Lease, limits: Limits, clock: Clock) -> None:
        self._heart = heart
        self._worker_id = worker_id
        self._lease = lease
        self._limits = limits
        self._clock = clock

    def attempt(self) -> None:
        """Renew the lease, unless the worker is stuck."""
        if self._lease.is_stuck():
            log.error("worker makes no progress, lease is left to expire")
            return
        attempt_started = self._clock.monotonic()
        try:
            alive = self._heart.beat(self._worker_id, self._limits.lease_ttl_s)
        except MillError as error:
            # Whatever it is, the next one may succeed; and a thread that ends says nothing to anybody.
            log.warning("heartbeat failed: %s", error)
            return
        if alive:
            self._lease.renewed(attempt_started)
        else:
            self._lease.lost()


class HeartThread(threading.Thread):
    """Renews a lease until stopped, or until the worker is stuck."""

    def __init__(self, heart: Heart, worker_id: UUID, lease: Lease, limits: Limits, clock: Clock) -> None:
        super().__init__(name="heartbeat", daemon=True)
        self._heart = heart
        self._heartbeat = Heartbeat(heart, worker_id, lease, limits, clock)
        self._limits = limits
        self._ended = threading.Event()

    def run(self) -> None:
        """Beat, wait, beat."""
        while not self._ended.wait(self._limits.heartbeat_s):
            self._heartbeat.attempt()
        self._heart.close()

    def stop(self) -> None:
        """Send no more; joins the thread."""
        self._ended.set()
        self.join(timeout=self._limits.lease_ttl_s)
