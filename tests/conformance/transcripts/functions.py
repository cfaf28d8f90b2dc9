"""Window functions of the transcripts in functions.yaml."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

from millpy import WindowFunction, hours, minutes

Window = tuple[datetime, datetime]
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class Doubling(WindowFunction):
    """Unaligned windows of 1, 2, 4, … minutes: the n-th begins 2**n - 1 minutes behind the epoch."""

    length_max = hours(1)

    def assign(self, record: Any, at: datetime, key: Any) -> Iterable[Window]:
        start, size = EPOCH, minutes(1)
        while start + size <= at:
            start, size = start + size, 2 * size
        return [(start, start + size)]


class Around(WindowFunction):
    """The minute of a record and, with an even value, the half hour around it; none with a value of 0."""

    windows_max = 2

    def assign(self, record: Any, at: datetime, key: Any) -> Iterable[Window]:
        if record.value == 0:
            return
        minute = at - (at - EPOCH) % minutes(1)
        yield minute, minute + minutes(1)
        if record.value % 2 == 0:
            yield minute - minutes(14), minute + minutes(16)


class Trips(WindowFunction):
    """Sessions whose gap is ten seconds, for a value beyond 100 a minute."""

    merges = True
    length_max = minutes(5)

    def assign(self, record: Any, at: datetime, key: Any) -> Iterable[Window]:
        return [(at, at + timedelta(seconds=60 if (record.value or 0) > 100 else 10))]


class Touching(Trips):
    """Windows of whole minutes that merge with those beside them; the key "b" has none."""

    def assign(self, record: Any, at: datetime, key: Any) -> Iterable[Window]:
        minute = at - (at - EPOCH) % minutes(1)
        return [] if key == "b" else [(minute, minute + minutes(1))]

    def merge(self, window: Window, others: Sequence[Window]) -> Iterable[Window]:
        return [other for other in others if other[1] >= window[0] and window[1] >= other[0]]


class Nested(WindowFunction):
    """Whole hours, of which that of a late-comer takes the shorter windows inside."""

    merges = True

    def assign(self, record: Any, at: datetime, key: Any) -> Iterable[Window]:
        size = minutes(record.value)
        start = at - (at - EPOCH) % size
        return [(start, start + size)]

    def merge(self, window: Window, others: Sequence[Window]) -> Iterable[Window]:
        return others if window[1] - window[0] == minutes(5) else []


class Wrong(WindowFunction):
    """Breaks a rule, according to the value."""

    length_max = minutes(1)
    windows_max = 2

    def assign(self, record: Any, at: datetime, key: Any) -> Any:
        second = timedelta(seconds=1)
        return {
            1: [(at, at + second)],
            2: [(at + second, at + 2 * second)],
            3: [(at, at)],
            4: [(at, at + 61 * second)],
            5: [(at - n * second, at + second) for n in range(3)],
            6: [(at.replace(tzinfo=None), at + second)],
            7: [at],
            8: None,
        }[record.value]
