"""Instants: int64 µs since the epoch, UTC. Sentinels replace `None`."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import NewType

Instant = NewType("Instant", int)

# Far inside int64, so that adding any duration to a sentinel cannot overflow.
INSTANT_MIN = Instant(-(2**62))
INSTANT_MAX = Instant(2**62)

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_US = timedelta(microseconds=1)


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
