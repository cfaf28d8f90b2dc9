"""Judge the result tables and sinks that refuse the turns of a worker."""

from __future__ import annotations

from collections.abc import Iterator

from millpy.admin.diagnosis import Facts
from millpy.limits import Limits
from millpy.model.finding import Finding, Severity

CHECK = "result tables"


def judge_refused_results(facts: Facts, limits: Limits) -> Iterator[Finding]:
    """Yield a finding for each table that a live worker waits for."""
    del limits
    for row in facts.refused_results:
        yield Finding(
            Severity.ERROR,
            CHECK,
            f"{row['graph']}.{row['refused']}: a worker cannot write since {row['since']}: {row['why']}",
            "all steps of its turns wait; nothing is lost, and it tries again at least once a minute",
            row["hint"],
        )
