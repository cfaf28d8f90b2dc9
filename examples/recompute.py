"""Recompute every window from the publisher's own list, in plain Python.

This module shares no code with millpy, and so can contradict it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path

WINDOW = timedelta(seconds=5)
MAX_DISORDER = timedelta(seconds=2)
ALLOWED_LATENESS = timedelta(seconds=20)
EPOCH = datetime.fromisoformat("1970-01-01T00:00:00+00:00")


@dataclass
class Expected:
    """One window of one device."""

    values: list[float] = field(default_factory=list)
    late: int = 0

    def row(self) -> tuple[int, float, float, int]:
        """Return (n, mean, high, late_count) as in the table."""
        return len(self.values), sum(self.values) / len(self.values), max(self.values), self.late


@dataclass
class Recomputed:
    """The contents that the database should have."""

    published: int = 0
    duplicates: int = 0
    too_late: int = 0
    windows: dict[tuple[str, datetime], Expected] = field(default_factory=dict)


def recompute(own_list: Path) -> Recomputed:
    """Read the list in the order of publishing and judge every record by the watermark before it."""
    result = Recomputed()
    seen: set[str] = set()
    watermark: datetime | None = None
    for line in own_list.read_text().splitlines():
        reading = json.loads(line)
        result.published += 1
        if reading["id"] in seen:
            result.duplicates += 1
            continue
        seen.add(reading["id"])
        at = datetime.fromisoformat(reading["at"])
        start = at - (at - EPOCH) % WINDOW
        end = start + WINDOW
        if watermark is not None and watermark >= end + ALLOWED_LATENESS:
            result.too_late += 1
        else:
            window = result.windows.setdefault((reading["device"], start), Expected())
            window.values.append(reading["temperature"])
            window.late += watermark is not None and watermark >= end
        watermark = max(watermark or at - MAX_DISORDER, at - MAX_DISORDER)
    return result
