"""Timers and holds of one key: what wakes it, and what keeps the low watermark back for it.

A timer is named and set once per (domain, name): setting it again moves it. Due timers fire in `due_order`.

    domain      fires when                         holds the low watermark at
    event       the input watermark reaches it     its event time: its fire time, unless an earlier one was named
    processing  the worker's clock reaches it      its event time: that of the record that set it, if that was not late
    hold        never                              its time
"""

from __future__ import annotations

from datetime import datetime
from typing import Literal

import msgspec

from millpy.model.time import INSTANT_MAX, Instant, to_datetime

TimeDomain = Literal["event", "processing", "hold"]
TimerId = tuple[TimeDomain, str]


class Timer(msgspec.Struct, frozen=True):
    """A timer that is set, or that fires: what `process_timer` is given.

    Attributes:
        name: as given to `set_timer`.
        domain: "event" or "processing" ("hold" is a hold, and never fires).
        at_us: when it fires, µs since the epoch.
        event_time_us: event time of what it produces.
        holds: whether it keeps the low watermark back.
    """

    name: str
    domain: TimeDomain
    at_us: Instant
    event_time_us: Instant
    holds: bool = True

    @property
    def at(self) -> datetime:
        """When it fires, in UTC."""
        return to_datetime(self.at_us)

    @property
    def processing(self) -> bool:
        """Whether it goes by the clock rather than by the watermark."""
        return self.domain == "processing"

    @property
    def id(self) -> TimerId:
        """What a second `set_timer` replaces."""
        return (self.domain, self.name)

    @property
    def hold_us(self) -> Instant:
        """Where it keeps the low watermark back; INSTANT_MAX for nowhere."""
        if not self.holds:
            return INSTANT_MAX
        return self.event_time_us


def due_order(timer: Timer) -> tuple[Instant, str]:
    """Timers of one key and domain fire by time, then by name."""
    return (timer.at_us, timer.name)


class _Stored(msgspec.Struct, omit_defaults=True):
    """What a timer's entry says beside its name and fire time."""

    event_time: int | None = None
    holds: bool = True


def encode_timer(timer: Timer) -> bytes:
    """The JSON value of a timer's entry; `{}` for one whose event time is its fire time."""
    event_time = timer.event_time_us if timer.event_time_us != timer.at_us else None
    return msgspec.json.encode(_Stored(event_time, timer.holds))


def decode_timer(domain: TimeDomain, name: str, at_us: int, value: bytes) -> Timer:
    """The inverse of `encode_timer`, with what the entry's columns say."""
    stored = msgspec.json.decode(value, type=_Stored)
    event_time = at_us if stored.event_time is None else stored.event_time
    return Timer(name, domain, Instant(at_us), Instant(event_time), stored.holds)
