"""Triggers: when windows fire, and whether a pane is on time or late.

    WindowedInterval.step        asks once a turn up to which end windows fire
    WindowedInterval.next_due    asks when the oldest window that has not fired will fire without another record
    SlidingInterval              asks for the end at each row, and for the time at which an end is due
    Emission                     asks for the timing of the panes

Every window that ends by `latest_end` fires in the turn: if it has not fired, or if the turn has changed it. The end of
the allowed lateness is not the trigger's: a window that is over has fired, and does not fire again (I7).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, TypeVar

from millpy.model.identity import Identity
from millpy.model.identity_text import GraphPart
from millpy.model.record import Instants
from millpy.model.time import Instant

Timing = Literal["early", "on_time", "late"]
Ends = TypeVar("Ends", Instant, Instants)


class Trigger(Protocol):
    """The rule by which the windows of a step fire: a value without state.

    `latest_end` never falls when the watermark rises, and `due_at` is its inverse: due_at(e) is the smallest watermark
    whose `latest_end` is e or later.
    """

    def identity(self) -> Identity:
        """Describe the trigger: a change of it is a change of the window."""
        ...

    def latest_end(self, watermark: Ends) -> Ends:
        """Return the latest end of the windows that fire at a watermark, or at each of several."""
        ...

    def due_at(self, end: Instant) -> Instant:
        """Return the watermark at which a window that ends at `end` fires without another record."""
        ...

    def timings(self, late_counts: Sequence[int]) -> list[Timing]:
        """Return the timing of each pane that fires, given its number of late records."""
        ...


@dataclass(frozen=True, slots=True, repr=False)
class AfterWatermark(GraphPart):
    """One pane when the watermark reaches the end of the window, then one for each bundle with late records.

    Panes accumulate, so a pane is late as soon as its window contains a late record.
    """

    def identity(self) -> Identity:
        """Describe the trigger."""
        return {"kind": "after_watermark"}

    def latest_end(self, watermark: Ends) -> Ends:
        """Return the watermark."""
        return watermark

    def due_at(self, end: Instant) -> Instant:
        """Return the end."""
        return end

    def timings(self, late_counts: Sequence[int]) -> list[Timing]:
        """Return "late" for panes with a late record, else "on_time"."""
        if not any(late_counts):
            return ["on_time"] * len(late_counts)
        return ["late" if count else "on_time" for count in late_counts]


AFTER_WATERMARK = AfterWatermark()
"""The default trigger."""
