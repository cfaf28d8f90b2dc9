"""The one clock of a worker: the database's time, carried by the host's monotonic clock, checked by its wall clock.

Arrival and processing times come from this clock. Between two readings of the database's clock, time advances by the
monotonic clock. A reading within `clock_step_s` of that time is followed. A reading further away is a step:

    refused   time advances by the monotonic clock; an event, the log and `millpy doctor` report the step
    over      the database agrees with our time again
    followed  the host's wall clock has agreed with the database for `clock_agree_s`; or, whatever the host says, the
              database's clock has run evenly for `clock_settle_s`: then our time is wrong

The outcomes for clocks that go wrong (D the database's clock, W the host's wall clock, T our time):

    D steps for some seconds            refused; T continues
    W steps, or is corrected            reported; T does not depend on it
    both step (one machine, or NTP)     refused, followed after `clock_agree_s`
    failover to a database with         refused for `clock_settle_s`, then followed: it is the authority
      another clock
    the host was suspended, or paused   T is behind: D and W agree, followed after `clock_agree_s`; when W is not
                                        corrected, after `clock_settle_s`
    slewing, drift, leap second         below `clock_step_s`, followed
    a worker starts while D and W       T begins as D, in doubt until W agrees or D has run evenly for `clock_settle_s`
      disagree                          (a host clock before `UNSET_US` has not been set and does not count)

While T is in doubt, or a step is refused, T has an earliest and a latest possible value. Irreversible decisions use the
safe one: idle sources advance their watermark, and dedupe ids expire, by the earliest; a record is from the future by
the latest. A followed step is not elapsed time: `ClockReading.stepped_us` is the amount to subtract.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from millpy.clock import Clock
from millpy.limits import Limits
from millpy.model.time import INSTANT_MIN, ClockReading, Instant

log = logging.getLogger(__name__)
READ_EVERY_S = 60.0
READ_EVERY_IN_DOUBT_S = 5.0
READINGS_MAX = 5
"""A reading with a round trip longer than a step is imprecise; after this many attempts it is used nevertheless."""
QUARTZ_MAX = 0.02
"""The largest relative error of a monotonic clock."""
UNSET_US = 1_767_225_600_000_000
"""2026-01-01: a clock that shows an earlier time has not been set since the machine started."""

Tell = Callable[[str, dict[str, object]], None]


@dataclass(slots=True)
class _Doubt:
    """A disagreement: how far the other clock is ahead of ours, and since when, on the monotonic clock.

    `latest_us` is how far it was ahead in the latest reading.
    """

    ahead_us: int
    since_s: float
    latest_us: int = 0


class ClockGuard:
    """Computes the time from readings of three clocks; performs no I/O itself.

    Args:
        limits: the size of a step, and how long a step is refused.
        tell: called with (kind, detail) for each step: "clock_refused", "clock_agrees", "clock_followed",
            "clock_doubted", "clock_settled".
    """

    def __init__(self, limits: Limits, tell: Tell) -> None:
        self._step_us = round(limits.clock_step_s * 1e6)
        self._agree_s = limits.clock_agree_s
        self._settle_s = limits.clock_settle_s
        self._tell = tell
        self._base_us: int | None = None
        self._base_s = 0.0
        self._stepped_us = 0
        self._refused: _Doubt | None = None
        self._unwitnessed: _Doubt | None = None

    @property
    def doubtful(self) -> bool:
        """Whether the clocks disagree and it is undecided which is right."""
        return self._refused is not None or self._unwitnessed is not None

    def read(self, wall_us: Instant, monotonic_s: float) -> ClockReading:
        """Return the time for a reading of the host's clocks; requires an earlier `observe`."""
        now = self._time(monotonic_s)
        earliest = latest = now
        if self._unwitnessed is not None:
            # Use the host's clock both as it began and as it is now: it may have stepped meanwhile.
            began = now + self._unwitnessed.ahead_us
            wall = wall_us if wall_us >= UNSET_US else began
            earliest, latest = min(now, wall, began), max(now, wall, began)
        if self._refused is not None:
            latest = max(latest, now + self._refused.ahead_us)
        return ClockReading(Instant(now), Instant(earliest), Instant(latest), self._stepped_us)

    def observe(self, server_us: Instant, round_trip_s: float, wall_us: Instant, monotonic_s: float) -> None:
        """Compare a reading of the database's clock with our time; follow or refuse it.

        Args:
            server_us: the database's time at some moment of the round trip, which has just ended.
            round_trip_s: duration of the round trip.
            wall_us: the host's wall clock now.
            monotonic_s: the host's monotonic clock now.
        """
        if self._base_us is None:
            self._base_us, self._base_s = server_us, monotonic_s
            if wall_us >= UNSET_US and abs(wall_us - server_us) > self._step_us + round_trip_s * 1e6:
                self._unwitnessed = _Doubt(wall_us - server_us, monotonic_s)
                self._say("clock_doubted", server_us - wall_us, "the database's clock minus the host's, at the start")
            return
        now = self._time(monotonic_s)
        server_last = server_us + round(round_trip_s * 1e6)
        ahead = server_us - now if server_us > now else min(0, server_last - now)
        witnessed = server_us - self._step_us <= wall_us <= server_last + self._step_us
        if abs(ahead) > self._step_us:
            self._judge_step(ahead, witnessed, monotonic_s)
            return
        self._base_us, self._base_s = now + ahead, monotonic_s
        if self._refused is not None:
            self._say("clock_agrees", self._refused.ahead_us, "the refused step is over")
            self._refused = None
        if self._unwitnessed is not None and (witnessed or monotonic_s - self._unwitnessed.since_s >= self._settle_s):
            why = "the host's clock agrees" if witnessed else "the database's clock has run evenly"
            self._say("clock_settled", -self._unwitnessed.ahead_us, why)
            self._unwitnessed = None

    def _judge_step(self, ahead_us: int, witnessed: bool, monotonic_s: float) -> None:
        """Refuse a step, or follow one that has lasted."""
        wait_s = self._settle_s
        if witnessed:  # the wait is zero if the host's clock has never agreed with the time that we began with
            wait_s = 0.0 if self._unwitnessed is not None else self._agree_s
        refused = self._refused
        if refused is None or not self._runs_evenly(refused, ahead_us, monotonic_s):
            refused = _Doubt(ahead_us, monotonic_s)
        refused.latest_us = ahead_us
        if monotonic_s - refused.since_s < wait_s:
            if refused is not self._refused:
                self._refused = refused
                self._say("clock_refused", ahead_us, "the database's clock has stepped; time continues without it")
            return
        self._base_us, self._base_s = self._time(monotonic_s) + ahead_us, monotonic_s
        self._stepped_us += ahead_us
        self._refused = self._unwitnessed = None
        why = "the host's clock agrees" if witnessed else "the database's clock has run evenly since"
        self._say("clock_followed", ahead_us, why)

    def _runs_evenly(self, refused: _Doubt, ahead_us: int, monotonic_s: float) -> bool:
        """Tell whether a clock is as far ahead as when it was refused, within the drift of a quartz since then."""
        drift_us = (monotonic_s - refused.since_s) * 1e6 * QUARTZ_MAX
        has_stepped = abs(refused.latest_us - ahead_us) > self._step_us
        return not has_stepped and abs(refused.ahead_us - ahead_us) <= self._step_us + drift_us

    def _time(self, monotonic_s: float) -> int:
        assert self._base_us is not None, "the database's clock has not been read"
        return self._base_us + round((monotonic_s - self._base_s) * 1e6)

    def _say(self, kind: str, ahead_us: int, why: str) -> None:
        log.warning("%s by %+.3f s: %s", kind.replace("_", " "), ahead_us / 1e6, why)
        self._tell(kind, {"ahead_s": ahead_us / 1e6, "why": why})


class GuardedClock:
    """A Clock whose wall time is guarded; the clock for arrival times.

    Args:
        host: the machine's clocks.
        server_now: reads the database's clock, in µs since the epoch.
        limits, tell: see `ClockGuard`.
    """

    def __init__(self, host: Clock, server_now: Callable[[], Awaitable[Instant]], limits: Limits, tell: Tell) -> None:
        self._host = host
        self._server_now = server_now
        self._quick_s = limits.clock_step_s
        self._guard = ClockGuard(limits, tell)
        self._read_at = float("-inf")
        # Several readings within the time for which a step is refused, however short the limits make it.
        in_doubt_s = min(READ_EVERY_IN_DOUBT_S, max(0.05, limits.clock_agree_s / 12))
        self._every_s = (min(READ_EVERY_S, max(in_doubt_s, limits.clock_settle_s / 60)), in_doubt_s)

    def read(self) -> ClockReading:
        """Return the time and its bounds."""
        return self._guard.read(self._host.now_us(), self._host.monotonic())

    def now_us(self) -> Instant:
        """Return the processing time in µs since the epoch."""
        return self.read().now_us

    def monotonic(self) -> float:
        """Return the host's monotonic clock in seconds."""
        return self._host.monotonic()

    async def sleep(self, seconds: float) -> None:
        """Sleep for a number of seconds."""
        await self._host.sleep(seconds)

    def is_due(self) -> bool:
        """Tell whether a reading of the database's clock is due."""
        return self._host.monotonic() - self._read_at > self._every_s[self._guard.doubtful]

    async def synchronize(self) -> None:
        """Read the database's clock. Raises TransientError."""
        server_us, round_trip_s, ended = INSTANT_MIN, 0.0, 0.0
        for _ in range(READINGS_MAX):
            began = self._host.monotonic()
            server_us = await self._server_now()
            ended = self._host.monotonic()
            round_trip_s = ended - began
            if round_trip_s <= self._quick_s:
                break
        self._guard.observe(server_us, round_trip_s, self._host.now_us(), ended)
        self._read_at = ended
