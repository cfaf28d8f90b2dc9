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
    shape = schedule.shape
    plain = [
        replace(schedule, beside=None),
        replace(schedule, placed=False),
        replace(schedule, few_cells=False),
        replace(schedule, shape=replace(shape, deep=False)),
        replace(schedule, shape=replace(shape, idle=False)),
        replace(schedule, shape=replace(shape, poison=False)),
        replace(schedule, shape=replace(shape, skew=False)),
        replace(schedule, shape=replace(shape, by_arrival=False)),
        replace(schedule, shape=replace(shape, columns=False)),
        replace(schedule, shape=replace(shape, partitions=max(1, shape.partitions - 1))),
    ]
    if len(shape.branches) > 1:
        for left_out in shape.branches:
            kept = tuple(branch for branch in shape.branches if branch != left_out)
            plain.append(replace(schedule, shape=replace(shape, branches=kept)))
    yield from (simpler for simpler in plain if simpler != schedule)
    if schedule.workers > 1:
        yield replace(schedule, workers=schedule.workers - 1)
    for records in (schedule.records // 2, schedule.records - 5):
        if 0 < records < schedule.records:
            yield replace(schedule, records=records)
