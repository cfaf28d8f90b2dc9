"""Timers and holds of a key: a timer wakes the key, and both can hold the low watermark back.

A timer is set once per (domain, name): setting it again moves it. Due timers of one key and domain fire by
time, then by name.

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


class Timer(msgspec.Struct, frozen=True, repr_omit_defaults=True):
    """A timer that is set, or that fires: the argument of `process_timer`.

    Attributes:
        name: name given to `set_timer`.
        domain: "event" or "processing" ("hold" is a hold, which never fires).
        at_us: when the timer fires, in µs since the epoch.
        event_time_us: event time of the timer's productions.
        holds: whether the timer keeps the low watermark back.
        chain: for a timer that a timer has set at a time that was already due: the number of timers before it in that
            chain, and the time of the first of them since the last one of the other domain.
    """

    name: str
    domain: TimeDomain
    at_us: Instant
    event_time_us: Instant
    holds: bool = True
    chain: tuple[int, Instant] | None = None

    @property
    def at(self) -> datetime:
        """The time at which the timer fires, in UTC."""
        return to_datetime(self.at_us)

    @property
    def processing(self) -> bool:
        """Whether the timer fires by the clock instead of the watermark."""
        return self.domain == "processing"

    @property
    def id(self) -> TimerId:
        """The id of the timer; a timer replaces an earlier one with the same id."""
        return (self.domain, self.name)

    @property
    def hold_us(self) -> Instant:
        """The event time beyond which the timer holds the low watermark back; INSTANT_MAX if it does not."""
        if not self.holds:
            return INSTANT_MAX
        return self.event_time_us


def without_chain(timer: Timer) -> Timer:
    """Return the timer as if no chain had set it."""
    return timer if timer.chain is None else msgspec.structs.replace(timer, chain=None)


class _StoredTimer(msgspec.Struct, omit_defaults=True):
    """The value of a timer's entry. Domain, name and fire time are other columns of the entry."""

    event_time: int | None = None
    holds: bool = True
    chain: tuple[int, int] | None = None


def encode_timer(timer: Timer) -> bytes:
    """Encode the value of a timer's entry as JSON: `{}` for a timer that holds the watermark at its fire time."""
    event_time = timer.event_time_us if timer.event_time_us != timer.at_us else None
    return msgspec.json.encode(_StoredTimer(event_time, timer.holds, timer.chain))


def decode_timer(domain: TimeDomain, name: str, at_us: int, value: bytes) -> Timer:
    """Decode a timer from its entry."""
    stored = msgspec.json.decode(value, type=_StoredTimer)
    event_time = at_us if stored.event_time is None else stored.event_time
    chain = None if stored.chain is None else (stored.chain[0], Instant(stored.chain[1]))
    return Timer(name, domain, Instant(at_us), Instant(event_time), stored.holds, chain)
