"""Judge whether numbers are read as times in the unit that they have."""

from __future__ import annotations

from collections.abc import Iterator

from millpy.admin.diagnosis import Facts
from millpy.limits import Limits
from millpy.model.finding import Finding, Severity
from millpy.model.time import Instant, describe

YEAR_US = 366 * 86_400_000_000
COARSER = (1_000, 1_000_000, 1_000_000_000)
"""How many times as large each unit of time is as a finer one."""


def judge_units(facts: Facts, _: Limits) -> Iterator[Finding]:
    """Yield a finding for each source partition whose newest time is of 1970, and of now in a coarser unit."""
    for row in facts.units:
        newest = row["newest_event_time"]
        if any(abs(newest * factor - row["arrived_at"]) < YEAR_US for factor in COARSER):
            yield Finding(
                Severity.WARNING,
                "unit",
                f"{row['graph']}.{row['stream']} ({row['source_partition']}): its newest record is of "
                f"{describe(Instant(newest))}",
                "in a coarser unit this number is a time of now, so EventTime(unit=…) seems to be wrong",
                "compare a record with the unit; the unit of a source needs a new generation",
            )
