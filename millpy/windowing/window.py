"""Windows: where in event time records are grouped. Half-open `[start, end)`.

Fixed windows touch and do not overlap; of sliding ones a record is in several; both are aligned to the epoch. A session
lasts as long as records keep coming: each opens [t, t + gap), and those that intersect merge.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from millpy.errors import GraphError
from millpy.model.keys import Key
from millpy.model.record import Instants
from millpy.model.time import YEARS_HI, YEARS_LO, check_length, microseconds

WINDOWS_PER_RECORD_MAX = 1_000
"""A record in more windows than this is a mistake in the settings."""


def _positive(duration: object, what: str, hint: str) -> None:
    if not isinstance(duration, timedelta):
        raise GraphError(f"{what} of {duration!r}: that is no duration", hint=hint)
    if microseconds(duration) <= 0:
        raise GraphError(f"{what} of {duration!r} holds nothing", hint=hint)
    check_length(what, duration)


@dataclass(frozen=True, slots=True)
class FixedWindows:
    """Windows of one size that touch and do not overlap: `FixedWindows(minutes(1))`.

    Raises:
        GraphError: the size is not positive.
    """

    size: timedelta

    def __post_init__(self) -> None:
        _positive(self.size, "a window", "FixedWindows(minutes(1))")

    @property
    def size_us(self) -> int:
        """The size in µs."""
        return microseconds(self.size)

    @property
    def every_us(self) -> int:
        """From one start to the next: the size."""
        return microseconds(self.size)


@dataclass(frozen=True, slots=True)
class SlidingWindows:
    """Windows of one size, one beginning every so often: `SlidingWindows(seconds(10), every=seconds(2))`.

    A record is in `size / every` of them, and is judged for each apart: late for one, it may be on time for the next.

    Raises:
        GraphError: size or period is not positive, or records would fall between windows or into too many.
    """

    size: timedelta
    every: timedelta

    def __post_init__(self) -> None:
        hint = "SlidingWindows(seconds(10), every=seconds(2))"
        _positive(self.size, "a window", hint)
        _positive(self.every, "a period", hint)
        if self.every > self.size:
            raise GraphError("records would fall between these windows", hint="`every` is at most the size")
        if self.size > self.every * WINDOWS_PER_RECORD_MAX:
            raise GraphError(
                f"a record would be in more than {WINDOWS_PER_RECORD_MAX} windows", hint="make `every` longer"
            )

    @property
    def size_us(self) -> int:
        """The size in µs."""
        return microseconds(self.size)

    @property
    def every_us(self) -> int:
        """From one start to the next, in µs."""
        return microseconds(self.every)


@dataclass(frozen=True, slots=True, init=False)
class SessionWindows:
    """A window lasts as long as each record of its key is less than a gap after another: `SessionWindows(minutes(30))`.

    It begins at its first record and ends a gap after its last. A record that comes out of order may join two.

    Args:
        gap: silence that ends a session.
        by_key: other gaps for some keys (key -> gap); the key as `key_by` makes it, a tuple for several fields.

    Raises:
        GraphError: a gap is not positive.
    """

    gap: timedelta
    by_key: tuple[tuple[Key, timedelta], ...]

    def __init__(self, gap: timedelta, *, by_key: Mapping[Key, timedelta] | None = None) -> None:
        gaps = tuple(sorted((by_key or {}).items(), key=repr))
        for one in (gap, *(other for _, other in gaps)):
            _positive(one, "a session with a gap", 'SessionWindows(minutes(30), by_key={"slow": hours(2)})')
        object.__setattr__(self, "gap", gap)
        object.__setattr__(self, "by_key", gaps)

    def __repr__(self) -> str:
        others = f", by_key={dict(self.by_key)!r}" if self.by_key else ""
        return f"SessionWindows({self.gap!r}{others})"


AlignedWindows: TypeAlias = FixedWindows | SlidingWindows
Windows: TypeAlias = FixedWindows | SlidingWindows | SessionWindows


class Assigner:
    """Aligned windows of event times."""

    def __init__(self, windows: AlignedWindows) -> None:
        self.size_us = windows.size_us
        self.every_us = windows.every_us
        self.most = -(-self.size_us // self.every_us)
        """In so many windows a record is at most."""

    def starts_of(self, event_time: int) -> Iterable[int]:
        """Starts of the windows that have this event time."""
        last = event_time // self.every_us * self.every_us
        if self.most == 1:
            return (last,)
        return range(last, event_time - self.size_us, -self.every_us)

    def assign(self, event_times: Instants) -> tuple[Instants, npt.NDArray[np.int64] | None]:
        """(window starts, the row of each; None when row n has start n)."""
        last = event_times // self.every_us * self.every_us
        if self.most == 1:
            return last, None
        starts = (last[:, None] - np.arange(self.most) * self.every_us).ravel()
        rows = np.repeat(np.arange(len(event_times)), self.most)
        if self.size_us % self.every_us:
            inside = starts > event_times[rows] - self.size_us
            return starts[inside], rows[inside]
        return starts, rows

    def lasting(self) -> tuple[int, int]:
        """Windows of event times from the one to the other begin and end in the years 1 to 9999."""
        first = -(-YEARS_LO // self.every_us) * self.every_us
        last = (YEARS_HI - self.size_us) // self.every_us * self.every_us
        return first + self.size_us - self.every_us, last + self.every_us - 1


class Gaps:
    """Session gaps of keys, in µs."""

    def __init__(self, windows: SessionWindows) -> None:
        self._gap_us = microseconds(windows.gap)
        self._by_key = {key: microseconds(gap) for key, gap in windows.by_key}

    def of(self, key: Key) -> int:
        """The gap of a key."""
        return self._by_key.get(key, self._gap_us)

    def of_all(self, keys: list[Key]) -> npt.NDArray[np.int64]:
        """The gaps of some keys."""
        if not self._by_key:
            return np.full(len(keys), self._gap_us, np.int64)
        return np.array([self.of(key) for key in keys], np.int64)

    def lasting(self) -> tuple[int, int]:
        """The same: sessions begin and end in the years 1 to 9999."""
        return YEARS_LO, YEARS_HI - max([self._gap_us, *self._by_key.values()])
