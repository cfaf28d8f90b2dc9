"""The one clock of a worker: the database's time, carried by the host's monotonic clock, witnessed by its wall clock.

Arrival and processing times come from here. Between two readings of the database's clock, time goes on by the
monotonic clock. A reading that is within `clock_step_s` of that is followed. One that is further away is a step:

    refused   time goes on by the monotonic clock, and people are told (event, log, doctor)
    over      the database agrees with our time again
    followed  the host's wall clock has agreed with the database for `clock_agree_s`; or, whatever the host says, the
              database's clock has run evenly for `clock_settle_s`: then it is ours that is wrong

What that means for clocks that go wrong (D the database's, W the host's wall clock, T our time):

    D steps for some seconds            refused; T goes on
    W steps, or is corrected            told; T does not depend on it
    both step (one machine, or NTP)     refused, followed after `clock_agree_s`
    failover to a database with         refused for `clock_settle_s`, then followed: it is the authority
      another clock
    the host was suspended, or paused   T is behind: D and W agree, followed after `clock_agree_s`; when nobody corrects
                                        W, after `clock_settle_s`
    slewing, drift, leap second         below `clock_step_s`, followed
    a worker starts while D and W       T begins as D, in doubt until W agrees or D has run evenly for `clock_settle_s`
      disagree                          (a host that has not been set yet, before `UNSET_US`, is no witness)

While T is in doubt, or a step is refused, there is an earliest and a latest time that it can be. What cannot be undone
goes by the safe one: idle sources advance their watermark, and dedupe ids expire, by the earliest; a record is from the
future by the latest. A step that is followed is no elapsed time: `ClockReading.stepped_us` says how much to take off.
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
"""A reading whose round trip took longer than a step says little; after so many it has to do."""
QUARTZ_MAX = 0.02
"""A monotonic clock is at most by this part slow or fast."""
UNSET_US = 1_767_225_600_000_000
"""2026-01-01: a clock that shows an earlier time has not been set since the machine started."""

Tell = Callable[[str, dict[str, object]], None]


@dataclass(slots=True)
class _Doubt:
    """A disagreement: how far the other clock is ahead of ours, and since when, on the monotonic clock.

    `latest_us`: how far it was ahead in the latest reading.
    """

    ahead_us: int
    since_s: float
    latest_us: int = 0


class ClockGuard:
    """Decides from readings what time it is; pure but for its own memory.

    Args:
        limits: what counts as a step, and how long one is refused.
        tell: told of steps (kind, detail): "clock_refused", "clock_agrees", "clock_followed", "clock_doubted",
            "clock_settled".
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
        """Whether the clocks disagree and it is not decided yet who is right."""
        return self._refused is not None or self._unwitnessed is not None

    def read(self, wall_us: Instant, monotonic_s: float) -> ClockReading:
        """The time now, by what the host's clocks show; only after the first `observe`."""
        now = self._time(monotonic_s)
        earliest = latest = now
        if self._unwitnessed is not None:
            # By the host's clock as it began, and as it is by now: one that steps meanwhile makes nothing sure.
            began = now + self._unwitnessed.ahead_us
            wall = wall_us if wall_us >= UNSET_US else began
            earliest, latest = min(now, wall, began), max(now, wall, began)
        if self._refused is not None:
            latest = max(latest, now + self._refused.ahead_us)
        return ClockReading(Instant(now), Instant(earliest), Instant(latest), self._stepped_us)

    def observe(self, server_us: Instant, round_trip_s: float, wall_us: Instant, monotonic_s: float) -> None:
        """Take a reading of the database's clock in.

        Args:
            server_us: what it showed at some moment of the round trip, which has ended just now.
            round_trip_s: how long that took.
            wall_us: the host's wall clock now.
            monotonic_s: the host's monotonic clock now.
        """
        if self._base_us is None:
            self._base_us, self._base_s = server_us, monotonic_s
            if wall_us >= UNSET_US and abs(wall_us - server_us) > self._step_us + round_trip_s * 1e6:
                self._unwitnessed = _Doubt(wall_us - server_us, monotonic_s)
                self._say("clock_doubted", server_us - wall_us, "the database's clock less the host's, at the start")
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
            self._say("clock_agrees", self._refused.ahead_us, "the step that was refused is over")
            self._refused = None
        if self._unwitnessed is not None and (witnessed or monotonic_s - self._unwitnessed.since_s >= self._settle_s):
            why = "the host's clock agrees" if witnessed else "the database's clock has run evenly"
            self._say("clock_settled", -self._unwitnessed.ahead_us, why)
            self._unwitnessed = None

    def _judge_step(self, ahead_us: int, witnessed: bool, monotonic_s: float) -> None:
        """Refuse a step, or follow one that has lasted."""
        wait_s = self._settle_s
        if witnessed:  # by a host whose clock was never seen to agree with the time that we began with
            wait_s = 0.0 if self._unwitnessed is not None else self._agree_s
        refused = self._refused
        if refused is None or not self._runs_evenly(refused, ahead_us, monotonic_s):
            refused = _Doubt(ahead_us, monotonic_s)
        refused.latest_us = ahead_us
        if monotonic_s - refused.since_s < wait_s:
            if refused is not self._refused:
                self._refused = refused
                self._say("clock_refused", ahead_us, "the database's clock has stepped; time goes on without it")
            return
        self._base_us, self._base_s = self._time(monotonic_s) + ahead_us, monotonic_s
        self._stepped_us += ahead_us
        self._refused = self._unwitnessed = None
        why = "the host's clock agrees" if witnessed else "the database's clock has run evenly since"
        self._say("clock_followed", ahead_us, why)

    def _runs_evenly(self, refused: _Doubt, ahead_us: int, monotonic_s: float) -> bool:
        """Whether a clock is as far ahead as when it was refused, but for what a quartz may lose or gain since."""
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
    """A Clock whose wall time is guarded; give it to whoever asks for the time of arrival.

    Args:
        host: the machine's clocks.
        server_now: reads the database's clock, µs since the epoch.
        limits, tell: see `ClockGuard`.
    """

    def __init__(self, host: Clock, server_now: Callable[[], Awaitable[Instant]], limits: Limits, tell: Tell) -> None:
        self._host = host
        self._server_now = server_now
        self._quick_s = limits.clock_step_s
        self._guard = ClockGuard(limits, tell)
        self._read_at = float("-inf")
        # Several readings within the time that a step is refused for, however short somebody has made that.
        in_doubt_s = min(READ_EVERY_IN_DOUBT_S, max(0.05, limits.clock_agree_s / 12))
        self._every_s = (min(READ_EVERY_S, max(in_doubt_s, limits.clock_settle_s / 60)), in_doubt_s)

    def read(self) -> ClockReading:
        """What time it is, and how sure that is."""
        return self._guard.read(self._host.now_us(), self._host.monotonic())

    def now_us(self) -> Instant:
        """Processing time, µs since the epoch."""
        return self.read().now_us

    def monotonic(self) -> float:
        """The host's monotonic clock."""
        return self._host.monotonic()

    async def sleep(self, seconds: float) -> None:
        """Wait for that many seconds."""
        await self._host.sleep(seconds)

    def is_due(self) -> bool:
        """Whether the database's clock should be read."""
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


def believed_floor(floor: Instant, clock: ClockReading, step_us: int) -> Instant:
    """The processing time that an interval has reached, unless no clock can have been there: then the clock's.

    A floor keeps processing time from running backwards at a takeover. One that was stored while a clock was wrong
    would stop it, for years perhaps.
    """
    return floor if floor <= clock.latest_us + step_us else clock.now_us
