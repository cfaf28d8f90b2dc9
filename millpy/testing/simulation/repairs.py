"""What operators do to finished windows, and retention to old rows: faults of a schedule, and their check.

added_late     late records are to be added to their windows; sometimes the row is changed meanwhile
corrected      a value of the row of a finished window is changed by hand
rows_dropped   the partitions of result tables that are old enough are dropped
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from millpy.model.checkpoint import PastWindow, Request
from millpy.model.time import Instant
from millpy.store.memory.tables import StoredTable
from millpy.testing.simulation.deployments import BRANCH_OF
from millpy.testing.simulation.graphs import CHANGEABLE, home_of
from millpy.testing.simulation.oracle import END

if TYPE_CHECKING:
    from millpy.testing.simulation.checkers import Evidence
    from millpy.testing.simulation.history import CommittedBundle
    from millpy.testing.simulation.machine import Machine
    from millpy.testing.simulation.schedule import ScheduledFault
    from millpy.testing.simulation.world import World

REPAIRABLE = tuple(table for table, branch in BRANCH_OF.items() if branch in (*CHANGEABLE, "operators"))
"""Result tables from whose rows nothing is computed."""
PER_TRIGGER = ("per_count", "per_enough")
"""Those of windows that may give their only pane when they are over, and so into a partition that was dropped."""
RETENTION_US, PARTITION_US = 600_000, 200_000
PAYLOADS_MAX = 4


def add_late(world: World, victim: Machine, fault: ScheduledFault) -> bool:
    """Request that late records are added to their windows."""
    found = list(_late_records(world))
    asked = 0
    for place in range(1 + int(fault.size * PAYLOADS_MAX) if found else 0):
        number, table, window = found[(int(fault.pick * 997) + place) % len(found)]
        if world.database.requests.replay_into_window(number):
            asked += 1
            if fault.size * 97 % 1 < 0.5:
                world.rewritten.append((table, window))
    return asked > 0


def _late_records(world: World) -> Iterator[tuple[int, str, tuple[Any, ...]]]:
    """Yield the number of each late record that may be added to its window, and that window."""
    number = 0
    for _, _, late in world.database.late_records:
        for key, start, end in zip(late.keys, late.window_starts, late.window_ends, strict=True):
            number += 1
            if late.computation in REPAIRABLE and start is not None:
                yield number, late.computation, (home_of(json.loads(key)), start, end)


def repair_at_the_end(world: World) -> None:
    """Drop old rows once the faults are over, and request each late record once more.

    Nothing is requested of a computation whose worker has finished and ended: it would wait for one that is started.
    """
    if not {"corrections", "retention"}.isdisjoint(world.schedule.features):
        if world.step % 4 == 0 and drop_rows(world):
            world.count_fault("rows_dropped")
        if not world.generations[1].is_covered(world.machines):
            return
        for number, *_ in list(_late_records(world))[len(world.requested) :][:PAYLOADS_MAX]:
            world.requested.add(number)
            if world.database.requests.replay_into_window(number):
                world.count_fault("added_late")


def correct_meanwhile(world: World, machine: Machine) -> None:
    """Correct rows by hand while a turn of a machine adds late records to their windows."""
    intervals = machine.worker.owned.intervals if machine.worker is not None else {}
    replaying = {interval_id for interval_id, interval in intervals.items() if interval.replaying}
    for name, window in world.rewritten.copy() if replaying else ():
        row = world.database.table(name).rows.get(window)
        if row is not None and row["interval_id"] in replaying:
            world.rewritten.remove((name, window))
            _correct(world, name, window)


def correct_row(world: World, victim: Machine, fault: ScheduledFault) -> bool:
    """Change a value of the row of a finished window by hand."""
    names = [(table.spec.name, name) for table in _tables(world) for name in table.rows]
    return bool(names) and _correct(world, *names[int(fault.pick * len(names))])


def _correct(world: World, name: str, window: tuple[Any, ...]) -> bool:
    world.check()  # up to the present commits
    table, evidence = world.database.table(name), world.generations[1].evidence
    if not world.database.requests.correct(table, window, {"total": -world.step}):
        return False
    world.say(f"the row of {window} in {name} is corrected")
    evidence.correct(name, window, table.rows[window])
    return True


def drop_old_rows(world: World, victim: Machine, fault: ScheduledFault) -> bool:
    """Drop the partitions of result tables whose rows are old enough, as a worker does."""
    return drop_rows(world)


def drop_rows(world: World) -> bool:
    """Drop the partitions of result tables whose rows are old enough."""
    history, shape = world.generations[1].history, world.generations[1].shape
    if shape.sites:
        return False  # a site that begins behind the retention writes into partitions that were dropped
    dropped = 0
    for table in _tables(world):
        name = table.spec.name
        if name in PER_TRIGGER or not table.rows:
            continue
        reached = min(observed.header.input_watermark for observed in history.intervals_of(name))
        if reached >= END:  # age counts from the newest partition
            reached = max(row["window_end"] for row in table.rows.values()) // PARTITION_US * PARTITION_US
        lateness_us = 0 if name == "per_op" else shape.lateness_of(BRANCH_OF[name])
        end = (reached - max(RETENTION_US, lateness_us)) // PARTITION_US * PARTITION_US
        if end > history.dropped_to.get(name, 0):
            history.dropped_to[name] = end
            gone = table.drop_before(Instant(end))
            history.dropped.update((name, *window) for window in gone)
            dropped += len(gone)
    world.say(f"{dropped} rows are dropped, up to {history.dropped_to}")
    return dropped > 0


def _tables(world: World) -> list[StoredTable]:
    return [table for table in world.database.tables.values() if table.spec.name in REPAIRABLE]


def corrections_of(commit: CommittedBundle) -> Iterator[tuple[Request, PastWindow]]:
    """Yield the late records that a bundle has added to finished windows, and these windows."""
    for outcome in () if commit.checkpoint is None else commit.checkpoint.outcomes:
        if outcome.corrects and outcome.request.window is not None:
            yield outcome.request, outcome.request.window


def window_of(window: PastWindow) -> tuple[Any, int, int]:
    """Return the name of a window in the result tables."""
    return home_of(json.loads(window.key)), window.start, window.end


def dropped_rows_stay_away(evidence: Evidence, commit: CommittedBundle) -> Iterator[str]:
    """Yield rows that come back after their partition was dropped: what they had before is not known any more."""
    for table, rows in commit.rows.items():
        for row in rows:
            window = (row.get("device", row.get("group")), row.get("window_start"), row.get("window_end"))
            if (table, *window) in evidence.history.dropped:
                yield f"bundle {commit.bundle} of {table} {commit.observed.interval_id} brings back {row}"


def late_records_added_once(evidence: Evidence) -> Iterator[str]:
    """Yield late records that were settled and not added to their windows, or added and not settled."""
    requests = evidence.history.database.requests
    added = evidence.branches.late_records_added()
    number = 0
    for interval_id, _, rows in evidence.history.database.late_records:
        for _ in range(len(rows)):
            number += 1
            state = requests.state_of("late_records", number)
            settled = state.state == "replayed" and state.into_window
            if settled != (number in added) and interval_id in evidence.history.by_interval:
                what = "not added to its window" if settled else f"added to its window and {state.state}"
                yield f"late record {number} of {interval_id} was {what}"
