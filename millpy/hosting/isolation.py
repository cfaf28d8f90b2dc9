"""The choice of a turn's input records that a step leaves out, because the database refuses them.

`runtime/poison_filter.py` says how a worker finds such a record.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from millpy.model.keys import Key
from millpy.model.record import Records

EVERYTHING = 2**62


@dataclass(frozen=True, slots=True)
class PoisonRecord:
    """A record that the database refuses: its row, the database's message, and the table that refused it."""

    row: int
    detail: str
    table: str


@dataclass(slots=True)
class Isolation:
    """The choice of a turn's input records that take part in a run, by their place in the turn.

    Attributes:
        upto: first place that is left out, with all after it (trials only).
        refused: place -> the database's message and the refusing table; these records become dead letters.
        seen: number of records that the run has met so far.
        fired: interval -> key -> number of timers that fired at the end of the turn, where not all due ones did.
        again: whether the turn is stepped again, and so fires the same timers as before.
    """

    upto: int = EVERYTHING
    refused: dict[int, tuple[str, str]] = field(default_factory=dict)
    seen: int = 0
    fired: dict[int, Mapping[Key, int]] = field(default_factory=dict)
    again: bool = False

    def limited_to(self, upto: int) -> Isolation:
        """Return a copy for a trial with only the first `upto` records, which counts `seen` from 0."""
        return replace(self, upto=upto, seen=0)

    def admit(self, records: Records) -> tuple[npt.NDArray[np.int64] | None, list[PoisonRecord]]:
        """Return the rows that take part (None: all), and the records that the database has refused."""
        start = self.seen
        self.seen += len(records)
        if self.seen <= self.upto and not any(start <= place < self.seen for place in self.refused):
            return None, []
        places = np.arange(start, self.seen)
        keep = (places < self.upto) & ~np.isin(places, list(self.refused))
        blamed = [
            PoisonRecord(place - start, *self.refused[place])
            for place in sorted(self.refused)
            if start <= place < self.seen
        ]
        return np.flatnonzero(keep), blamed
