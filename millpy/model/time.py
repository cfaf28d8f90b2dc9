"""Instants: int64 µs since the epoch, UTC. Sentinels replace `None`."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import NewType

from millpy.errors import GraphError

Instant = NewType("Instant", int)

# Far inside int64, so that adding any duration to a sentinel cannot overflow.
INSTANT_MIN = Instant(-(2**62))
INSTANT_MAX = Instant(2**62)

# 0001-01-01 and 9999-12-31T23:59:59.999999: every time of a record, timer, hold or window can be a datetime.
YEARS_LO = Instant(-62_135_596_800_000_000)
YEARS_HI = Instant(253_402_300_799_999_999)
DURATION_MAX = timedelta(days=366 * 1_000)
"""The longest window, gap, lateness or horizon; an instant plus such a duration does not overflow."""

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_US = timedelta(microseconds=1)
_UNITS = (("hours", 3_600_000_000), ("minutes", 60_000_000), ("seconds", 1_000_000), ("milliseconds", 1_000))


@dataclass(frozen=True, slots=True)
class ClockReading:
    """The processing time, and bounds on the true time (see `runtime/guarded_clock.py`).

    Attributes:
        now_us: processing time: the best estimate.
        earliest_us: lower bound of the time, for decisions that require that time has passed.
        latest_us: upper bound of the time, for decisions that require that a time has not yet come.
        stepped_us: sum of all steps of `now_us` so far; without them `now_us` counts elapsed time.
    """

    now_us: Instant
    earliest_us: Instant
    latest_us: Instant
    stepped_us: int = 0

    @classmethod
    def certain(cls, now_us: Instant) -> ClockReading:
        """Return a reading whose bounds are the time itself."""
        return cls(now_us, now_us, now_us)

    @property
    def elapsed_us(self) -> int:
        """A time from an arbitrary origin, of which only differences have a meaning: they are elapsed time."""
        return self.now_us - self.stepped_us


def plausible_floor(floor: Instant, clock: ClockReading, step_us: int) -> Instant:
    """Return an interval's floor of processing time, or the clock's time if the floor is too late to be true.

    A floor keeps processing time from running backwards at a takeover. A floor from a worker whose clock was wrong
    could stop processing time for years.
    """
    return floor if floor <= clock.latest_us + step_us else clock.now_us


def check_length(what: str, duration: object) -> None:
    """Raise GraphError for what is no duration, or exceeds DURATION_MAX; `what` names it in the message."""
    if not isinstance(duration, timedelta):
        raise GraphError(f"{what} must be a duration, not {duration!r}", hint=f"for example {what}=seconds(10)")
    if duration > DURATION_MAX:
        raise GraphError(f"{what} of {duration!r} is longer than a thousand years", hint="use a shorter duration")


def check_positive(what: str, duration: object, hint: str) -> None:
    """Raise GraphError for what is no duration, or one that is not positive or too long; `what` names it."""
    if not isinstance(duration, timedelta):
        raise GraphError(f"{what} must be a duration, not {duration!r}", hint=hint)
    if microseconds(duration) <= 0:
        raise GraphError(f"{what} must be positive, not {duration!r}", hint=hint)
    check_length(what, duration)


def microseconds(duration: timedelta) -> int:
    """Return a duration in µs, rounded down."""
    return duration // _US


def duration_text(us: int) -> str:
    """Return the call in `millpy` that makes a duration: `minutes(10)` for 600,000,000 µs."""
    for name, size in _UNITS:
        if us and us % size == 0:
            return f"{name}({us // size})"
    return f"timedelta(microseconds={us})" if us else "seconds(0)"


def instant(moment: datetime) -> Instant:
    """Return the instant of an aware datetime; raise `ValueError` for a naive one."""
    if moment.tzinfo is None:
        raise ValueError(f"datetime {moment!r} has no time zone")
    return Instant((moment - EPOCH) // _US)


def to_datetime(at: Instant) -> datetime:
    """Return the aware UTC datetime of an instant between the years 1 and 9999."""
    return EPOCH + timedelta(microseconds=at)


def nearest_datetime(at: int) -> datetime:
    """Return an instant as a datetime; one outside the years 1 to 9999 becomes the first or the last of them."""
    return to_datetime(Instant(min(max(at, YEARS_LO), YEARS_HI)))


def milliseconds(count: float) -> timedelta:
    """Return a duration of `count` milliseconds."""
    return timedelta(milliseconds=count)


def seconds(count: float) -> timedelta:
    """Return a duration of `count` seconds."""
    return timedelta(seconds=count)


def minutes(count: float) -> timedelta:
    """Return a duration of `count` minutes."""
    return timedelta(minutes=count)


def hours(count: float) -> timedelta:
    """Return a duration of `count` hours."""
    return timedelta(hours=count)


def days(count: float) -> timedelta:
    """Return a duration of `count` days of 24 hours."""
    return timedelta(days=count)


def describe(at: Instant) -> str:
    """Format an instant for messages: ISO 8601, or "the beginning" and "the end" for the sentinels."""
    if at <= INSTANT_MIN:
        return "the beginning"
    if at >= INSTANT_MAX:
        return "the end"
    try:
        return to_datetime(at).isoformat()
    except OverflowError:
        return f"{at} µs"
