"""Finds a short schedule that fails in the same way as a given one.

First it removes faults, by halves and then one by one (delta debugging), then it simplifies everything else. Each trial
is a run. A smaller schedule may play differently, as long as it fails in the same way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from millpy.testing.simulation.schedule import Schedule

RUNS_MAX = 300
Fails = Callable[[Schedule], bool]


def shrink(schedule: Schedule, fails: Fails, runs_max: int = RUNS_MAX) -> Schedule:
    """Return the smallest schedule found that still fails.

    Args:
        schedule: a failing schedule.
        fails: runs a schedule; returns whether it fails in the same way.
        runs_max: the most trials.
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
    """Yield smaller schedules, the boldest cuts first."""
    size = len(schedule.faults)
    part = (size + 1) // 2
    while part:
        for start in range(0, size, part):
            yield replace(schedule, faults=schedule.faults[:start] + schedule.faults[start + part :])
        part //= 2
    shape = schedule.shape
    plain = [
        replace(schedule, second=None),
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
