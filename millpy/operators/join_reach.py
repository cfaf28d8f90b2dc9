"""The reach of a join: which event times of the other side match a record, and how long a record may be matched."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from millpy.model.identity import Identity
from millpy.model.record import Instants

LEFT, RIGHT = 0, 1


class Reach(Protocol):
    """The reach of a join. Times are µs, as numbers or columns of them; all functions rise with the time."""

    def matching(self, side: int, times: Instants) -> tuple[Instants, Instants]:
        """Return the first and the last event time on the other side that match records of a side."""
        ...

    def joined_until(self, side: int, times: Any) -> Any:
        """Return the greatest watermark at which a record in time can still match records of a side with these times.

        Records of the other side are in time while the watermark is at most `in_time_until`; the allowed lateness comes
        on top of both.
        """
        ...

    def left_before(self, side: int, watermark: int) -> int:
        """Return the event time before which `joined_until` is below a watermark."""
        ...

    def in_time_until(self, times: Any) -> Any:
        """Return the greatest watermark at which records with these event times are not late."""
        ...

    def stamps(self, times: Any) -> Any:
        """Return the event times of what is made of single records; that of a pair is the greater of both."""
        ...

    def identity(self) -> Identity:
        """Describe the reach."""
        ...


@dataclass(frozen=True, slots=True)
class IntervalReach:
    """Right records from `before_us` before a left one to `after_us` after it."""

    before_us: int
    after_us: int

    def matching(self, side: int, times: Instants) -> tuple[Instants, Instants]:
        """Return the ends of the interval around each record."""
        if side == LEFT:
            return times - self.before_us, times + self.after_us
        return times - self.after_us, times + self.before_us

    def joined_until(self, side: int, times: Any) -> Any:
        """Return the end of the interval after each record."""
        return times + (self.after_us if side == LEFT else self.before_us)

    def left_before(self, side: int, watermark: int) -> int:
        """Return the event time whose interval ends at the watermark."""
        return watermark - (self.after_us if side == LEFT else self.before_us)

    def in_time_until(self, times: Any) -> Any:
        """Return the event times: what an earlier record could match may have left."""
        return times

    def stamps(self, times: Any) -> Any:
        """Return the event times."""
        return times

    def identity(self) -> Identity:
        """Describe the interval."""
        return {"before_us": self.before_us, "after_us": self.after_us}


@dataclass(frozen=True, slots=True)
class WindowReach:
    """Records of one fixed window."""

    size_us: int
    offset_us: int

    def _starts(self, times: Any) -> Any:
        return (times - self.offset_us) // self.size_us * self.size_us + self.offset_us

    def _last(self, times: Any) -> Any:
        return self._starts(times) + (self.size_us - 1)

    def matching(self, side: int, times: Instants) -> tuple[Instants, Instants]:
        """Return the first and the last µs of each record's window."""
        return self._starts(times), self._last(times)

    def joined_until(self, side: int, times: Any) -> Any:
        """Return the last µs of each record's window."""
        return self._last(times)

    def left_before(self, side: int, watermark: int) -> int:
        """Return the start of the window that the watermark is in: windows before it are over."""
        return int(self._starts(watermark))

    def in_time_until(self, times: Any) -> Any:
        """Return the last µs of each record's window."""
        return self._last(times)

    def stamps(self, times: Any) -> Any:
        """Return the last µs of each record's window."""
        return self._last(times)

    def identity(self) -> Identity:
        """Describe the windows."""
        return {"window_us": self.size_us, "offset_us": self.offset_us}
