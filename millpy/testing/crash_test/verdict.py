"""Judges the differences between a crash run and its references, without I/O.

The reference runs twice, the second time with other numbers of workers and bundles. No crash caused the differences of
the two, so they are reported apart from lost, doubled or changed rows. A column in
which they differ is left out of the comparison; the other columns of the table are compared.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from enum import StrEnum

from millpy.testing.crash_test.compare import Difference, Results, RowChange, UnsteadyParts, differences, unsteady


class Judgment(StrEnum):
    """The overall result."""

    EXACT = "exactly once"
    DIFFERENT = "results differ"
    UNSTEADY = "not deterministic"
    STUCK = "did not finish"


@dataclass(frozen=True, slots=True)
class CrashVerdict:
    """The findings.

    Attributes:
        compared: the number of rows of the reference, by table.
        found: the differences that faults have made.
        unsteady: by table, the differences of fault-free runs.
        undecided: differences in tables of which even fault-free runs have different rows.
        faults: other complaints: accounting, input that was not consumed.
    """

    judgment: Judgment
    compared: dict[str, int]
    found: list[Difference] = field(default_factory=list)
    unsteady: dict[str, UnsteadyParts] = field(default_factory=dict)
    undecided: list[Difference] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)

    def count(self, change: RowChange) -> int:
        """Return the number of rows that were lost, doubled or changed."""
        return sum(difference.change is change for difference in self.found)

    @property
    def passed(self) -> bool:
        """Whether no row was lost, doubled or changed."""
        return self.judgment is Judgment.EXACT


def judge(
    first: Results, second: Results, run: Results, *, fed: int, stuck: str = "", redelivers: bool = False
) -> CrashVerdict:
    """Compare a crash run with two references.

    Args:
        first: the results of a run without faults.
        second: the results of another.
        run: the results of the run with faults.
        fed: the number of records that were fed.
        stuck: why the run did not finish.
        redelivers: whether the input came through a broker, which may redeliver; then duplicates do not count.
    """
    found: list[Difference] = []
    undecided: list[Difference] = []
    unsteady_tables: dict[str, UnsteadyParts] = {}
    if redelivers:
        first, second, run = (_once_each(results) for results in (first, second, run))
    for name, reference in first.tables.items():
        parts = unsteady(reference, second.tables[name])
        if parts:
            unsteady_tables[name] = parts
        differing = differences(reference.drop_columns(parts.columns), run.tables[name].drop_columns(parts.columns))
        (undecided if parts.rows else found).extend(differing)
    faults = list(_complaints(first, run, fed, redelivers))
    if stuck:
        judgment = Judgment.STUCK
    elif found or faults:
        judgment = Judgment.DIFFERENT
    else:
        judgment = Judgment.UNSTEADY if unsteady_tables else Judgment.EXACT
    compared = {name: len(table.rows) for name, table in first.tables.items()}
    return CrashVerdict(judgment, compared, found, unsteady_tables, undecided, [*([stuck] if stuck else []), *faults])


def _once_each(results: Results) -> Results:
    """Drop repeated dead letters: without a dedupe id, a record that is redelivered is dead-lettered again."""
    dead = results.tables.get("dead letters")
    if dead is None:
        return results
    once = replace(dead, rows=list(dict.fromkeys(dead.rows)))
    return replace(results, tables={**results.tables, dead.name: once})


def _complaints(first: Results, run: Results, fed: int, redelivers: bool) -> Iterable[str]:
    for place in run.unbalanced:
        yield f"the accounting of {place} does not add up"
    if redelivers:
        accepted, wanted = (r.injected - r.duplicates - r.dead_lettered for r in (run, first))
        if accepted != wanted:
            yield f"{accepted:,} records were accepted instead of {wanted:,}"
        return
    if run.injected != fed:
        yield f"{run.injected:,} records were read of {fed:,} that were fed"
    if (run.duplicates, run.dead_lettered) != (first.duplicates, first.dead_lettered):
        yield (
            f"duplicates and dead letters: {run.duplicates:,} and {run.dead_lettered:,} instead of"
            f" {first.duplicates:,} and {first.dead_lettered:,}"
        )


def by_table(found: Iterable[Difference]) -> dict[str, Counter[RowChange]]:
    """Count each kind of change, by table."""
    counts: dict[str, Counter[RowChange]] = {}
    for difference in found:
        counts.setdefault(difference.table, Counter())[difference.change] += 1
    return counts
