"""The global window: one window for each key, of all records; it ends when the input does."""

from __future__ import annotations

from dataclasses import dataclass

from millpy.model.identity import Identity
from millpy.model.identity_text import GraphPart

GLOBAL_START_US = -62_104_060_800_000_000
GLOBAL_END_US = 253_370_764_800_000_000
"""0002-01-01 and 9999-01-01 UTC: within the years that clients of the database can show in any time zone."""


@dataclass(frozen=True, slots=True, repr=False)
class GlobalWindow(GraphPart):
    """One window for each key, with all of its records, from 0002-01-01 to 9999-01-01 UTC: `GlobalWindow()`.

    No record is late for it. With the default trigger it gives its only pane when every source has ended, so behind
    sources that do not end it needs a trigger that fires before, such as `AfterWatermark(early=Every(seconds(10)))`.
    """

    def identity(self) -> Identity:
        """Describe the window."""
        return {"kind": "global"}

    @property
    def offset_us(self) -> int:
        """The time from the epoch to the start in µs."""
        return GLOBAL_START_US

    @property
    def size_us(self) -> int:
        """The length in µs."""
        return GLOBAL_END_US - GLOBAL_START_US

    @property
    def every_us(self) -> int:
        """The length, as the time from one start to the next, in µs."""
        return self.size_us
