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
"""No window, gap, lateness or horizon is longer, so that instants added to them do not overflow."""

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_US = timedelta(microseconds=1)


@dataclass(frozen=True, slots=True)
class ClockReading:
    """What time it is, and how sure that is (see `runtime/guarded_clock.py`).

    Attributes:
        now_us: processing time: the best that is known.
        earliest_us: it is no earlier than this; what claims that time has passed goes by it.
        latest_us: it is no later than this; what claims that time has not come yet goes by it.
        stepped_us: the sum of all steps of `now_us` so far: without them it counts elapsed time.
    """

    now_us: Instant
    earliest_us: Instant
    latest_us: Instant
    stepped_us: int = 0

    @classmethod
    def certain(cls, now_us: Instant) -> ClockReading:
        """A reading without a doubt."""
        return cls(now_us, now_us, now_us)

    @property
    def elapsed_us(self) -> int:
        """Runs evenly, from an arbitrary origin: differences of it are elapsed time."""
        return self.now_us - self.stepped_us


def check_length(what: str, duration: timedelta) -> None:
    """Refuse a duration that instants cannot be added to. Raises GraphError."""
    if duration > DURATION_MAX:
        raise GraphError(f"{what} of {duration!r} is longer than a thousand years", hint="say a shorter one")


def microseconds(duration: timedelta) -> int:
    """A duration in whole µs."""
    return duration // _US


def instant(moment: datetime) -> Instant:
    """The instant of an aware datetime; a naive one raises `ValueError`, because it names no instant."""
    if moment.tzinfo is None:
        raise ValueError(f"naive datetime {moment!r} names no instant")
    return Instant((moment - EPOCH) // _US)


def to_datetime(at: Instant) -> datetime:
    """The aware UTC datetime of an instant between the years 1 and 9999."""
    return EPOCH + timedelta(microseconds=at)


def milliseconds(count: float) -> timedelta:
    """A duration for settings: `milliseconds(250)`."""
    return timedelta(milliseconds=count)


def seconds(count: float) -> timedelta:
    """A duration for settings: `seconds(10)`."""
    return timedelta(seconds=count)


def minutes(count: float) -> timedelta:
    """A duration for settings: `minutes(1)`."""
    return timedelta(minutes=count)


def hours(count: float) -> timedelta:
    """A duration for settings: `hours(1)`."""
    return timedelta(hours=count)


def days(count: float) -> timedelta:
    """A duration for settings: `days(1)`."""
    return timedelta(days=count)


def describe(at: Instant) -> str:
    """An instant for people: ISO 8601, or the word for a sentinel."""
    if at <= INSTANT_MIN:
        return "the beginning"
    if at >= INSTANT_MAX:
        return "the end"
    try:
        return to_datetime(at).isoformat()
    except OverflowError:
        return f"{at} µs"
