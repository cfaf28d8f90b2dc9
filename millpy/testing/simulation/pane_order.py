"""Checks I7: pane indexes rise by one in each window; one that is over emits nothing, unless it is corrected."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from millpy.testing.simulation.graphs import home_of
from millpy.testing.simulation.history import CommittedBundle
from millpy.testing.simulation.repairs import corrections_of, window_of
from millpy.testing.simulation.windowed import TOTALS

if TYPE_CHECKING:
    from millpy.testing.simulation.checkers import Evidence


def panes_in_order(evidence: Evidence, commit: CommittedBundle) -> Iterator[str]:
    """Yield violations of I7: pane indexes rise by one per (key, window); an expired window emits nothing."""
    corrected = {window_of(window) for _, window in corrections_of(commit)}
    for table, rows in commit.rows.items():
        for row in rows:
            if "pane_index" not in row:
                continue
            name = (table, row.get("device", row.get("group")), row["window_start"], row["window_end"])
            before = evidence.panes.get(name, -1)
            evidence.panes[name] = row["pane_index"]
            if name in evidence.closed and name[1:] not in corrected:
                yield f"{commit.name}: pane {row['pane_index']} of {name} follows its last pane"
            if row.get("pane_last"):
                evidence.closed.add(name)
            if row["pane_index"] != before + 1:
                yield f"{commit.name}: pane {row['pane_index']} of {name} follows pane {before}"
            over = row["window_end"] + evidence.longest_lateness(table)
            over += TOTALS[table].later_us if table in TOTALS else 0
            before_us, _ = evidence.reached(commit, name[1])
            if table != "per_group" and before_us >= over and name[1:] not in corrected:
                yield f"{commit.name}: {name} was over at {over}, the watermark at {before_us}"
    yield from _unclosed(evidence, commit)


def _unclosed(evidence: Evidence, commit: CommittedBundle) -> Iterator[str]:
    """Yield violations of I7: a window of `per_early` that expires has given its last pane, also an empty one."""
    if commit.observed.computation != "per_early":
        return
    for (kind, _, key, subkey), change in commit.changes.items():
        if kind != "window" or change is not None:
            continue
        start, _, end = subkey.partition("/")
        name = ("per_early", home_of(key), int(start), int(end))
        if name not in evidence.closed:
            yield f"{commit.name}: {name} has expired without its last pane"
