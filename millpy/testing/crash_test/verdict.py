"""Verdict: what the differences between a crash run and its references mean. Pure.

The reference runs twice, the second time with other numbers of workers and bundles. What the two do not agree about
is the graph's own doing: no crash had a part in it, so it can prove nothing, and it is told apart from what was lost,
doubled or changed. A column that they do not agree about is left out; the others of the table are still held to.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from enum import StrEnum

from millpy.testing.crash_test.compare import Change, Difference, Results, Unsteady, differences, unsteady


class Judgement(StrEnum):
    """The last word."""

    EXACT = "exactly once"
    DIFFERENT = "results differ"
    UNSTEADY = "not deterministic"
    STUCK = "did not finish"


@dataclass(frozen=True, slots=True)
class Verdict:
    """What was found.

    Attributes:
        compared: rows of the reference by table.
        found: differences that faults have made.
        unsteady: by table, where fault-free runs do not agree.
        undecided: differences in tables whose rows come and go by themselves.
        faults: other complaints in words: accounting, inputs not consumed.
    """

    judgement: Judgement
    compared: dict[str, int]
    found: list[Difference] = field(default_factory=list)
    unsteady: dict[str, Unsteady] = field(default_factory=dict)
    undecided: list[Difference] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)

    def count(self, change: Change) -> int:
        """How many rows were lost, doubled or changed."""
        return sum(difference.change is change for difference in self.found)

    @property
    def passed(self) -> bool:
        """Whether nothing was lost, doubled or changed."""
        return self.judgement is Judgement.EXACT


def judge(
    first: Results, second: Results, run: Results, *, fed: int, stuck: str = "", redelivers: bool = False
) -> Verdict:
    """Compare a crash run with two references.

    Args:
        first: of a run without faults.
        second: of another.
        run: of the run with faults.
        fed: records that went in.
        stuck: why the run did not come to its end.
        redelivers: the input came over a broker, which may deliver a record again: duplicates are not counted then.
    """
    found: list[Difference] = []
    undecided: list[Difference] = []
    wavering: dict[str, Unsteady] = {}
    if redelivers:
        first, second, run = (_once_each(results) for results in (first, second, run))
    for name, reference in first.tables.items():
        wavers = unsteady(reference, second.tables[name])
        if wavers:
            wavering[name] = wavers
        differing = differences(reference.without(wavers.columns), run.tables[name].without(wavers.columns))
        (undecided if wavers.rows else found).extend(differing)
    faults = list(_complaints(first, run, fed, redelivers))
    if stuck:
        judgement = Judgement.STUCK
    elif found or faults:
        judgement = Judgement.DIFFERENT
    else:
        judgement = Judgement.UNSTEADY if wavering else Judgement.EXACT
    compared = {name: len(table.rows) for name, table in first.tables.items()}
    return Verdict(judgement, compared, found, wavering, undecided, [*([stuck] if stuck else []), *faults])


def _once_each(results: Results) -> Results:
    """Dead letters have no dedupe id: one that is delivered again is set aside again."""
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


def by_table(found: Iterable[Difference]) -> dict[str, Counter[Change]]:
    """How many of each change, by table."""
    counts: dict[str, Counter[Change]] = {}
    for difference in found:
        counts.setdefault(difference.table, Counter())[difference.change] += 1
    return counts
