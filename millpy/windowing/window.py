"""Windows: where in event time records are grouped. Half-open `[start, end)`, aligned to the epoch."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

from millpy.errors import GraphError
from millpy.model.record import Instants
from millpy.model.time import microseconds


@dataclass(frozen=True, slots=True)
class FixedWindows:
    """Windows of one size that touch and do not overlap: `FixedWindows(minutes(1))`.

    Raises:
        GraphError: the size is not positive.
    """

    size: timedelta

    def __post_init__(self) -> None:
        if not isinstance(self.size, timedelta) or microseconds(self.size) <= 0:
            raise GraphError(f"a window of size {self.size!r} holds nothing", hint="FixedWindows(minutes(1))")

    @property
    def size_us(self) -> int:
        """The size in µs."""
        return microseconds(self.size)

    def start_of(self, event_time: int) -> int:
        """Start of the window that has this event time."""
        size = self.size_us
        return event_time // size * size

    def starts_of(self, event_times: Instants) -> Instants:
        """Start of each one's window."""
        size = self.size_us
        return event_times // size * size
