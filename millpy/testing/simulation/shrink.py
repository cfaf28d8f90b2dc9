"""Shrinking: the shortest schedule found that still fails in the same way.

First the faults, by halves and then one by one (as delta debugging does), then everything else that has a simpler
value. Each trial is a run; what a smaller schedule decides differently does not matter as long as it fails alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from millpy.testing.simulation.schedule import Schedule

RUNS_MAX = 300
Fails = Callable[[Schedule], bool]


def shrink(schedule: Schedule, fails: Fails, runs_max: int = RUNS_MAX) -> Schedule:
    """Make a failing schedule smaller as long as it fails.

    Args:
        schedule: one that fails.
        fails: runs one, and says whether it fails in the same way.
        runs_max: how many trials to spend.
    """
    left = runs_max
    shrunk = True
    while shrunk and left:
        shrunk = False
        for smaller in _smaller(schedule):
            if not left:
                break
            left -= 1
            if fails(smaller):
                schedule, shrunk = smaller, True
                break
    return schedule


def _smaller(schedule: Schedule) -> Iterator[Schedule]:
    """Schedules with less in them, the boldest cuts first."""
    size = len(schedule.faults)
    part = (size + 1) // 2
    while part:
        for start in range(0, size, part):
            yield replace(schedule, faults=schedule.faults[:start] + schedule.faults[start + part :])
        part //= 2
    plain = [
        replace(schedule, deep=False),
        replace(schedule, placed=False),
        replace(schedule, few_cells=False),
        replace(schedule, idle=False),
        replace(schedule, poison=False),
        replace(schedule, by_arrival=False),
    ]
    yield from (simpler for simpler in plain if simpler != schedule)
    if schedule.workers > 1:
        yield replace(schedule, workers=schedule.workers - 1)
    for records in (schedule.records // 2, schedule.records - 5):
        if 0 < records < schedule.records:
            yield replace(schedule, records=records)
