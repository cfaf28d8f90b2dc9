"""Judge the sources of injected records."""

from __future__ import annotations

from collections.abc import Iterator

from millpy.admin.diagnosis import Facts
from millpy.config.durations import format_duration
from millpy.limits import Limits
from millpy.model.finding import Finding, Severity

CHECK = "injected records"
OLD_S_MAX = 60.0
"""Age of a waiting record from which a source is behind."""
OPEN_S_MAX = 600.0
NEAR_BOUND = 0.8


def judge_injections(facts: Facts, limits: Limits) -> Iterator[Finding]:
    """Yield a finding for each source of injected records, and one for transactions that stay open."""
    del limits
    for row in facts.injections:
        found = f"{row['graph']}.{row['source']}: {row['waiting']:,} injected records wait"
        oldest_s = row["oldest_s"] or 0.0
        if row["waiting"]:
            found += f", the oldest for {format_duration(oldest_s)}"
        if row["waiting"] >= NEAR_BOUND * row["waiting_max"]:
            yield Finding(
                Severity.WARNING,
                CHECK,
                f"{found}; the bound is {row['waiting_max']:,}",
                f"at the bound millpy.inject({row['stream']!r}, …) raises an error in the transactions that call it",
                "start a worker of the graph, or raise waiting_max= of InjectedStream",
            )
        elif oldest_s > OLD_S_MAX:
            yield Finding(
                Severity.WARNING, CHECK, found, "its windows are behind by as much", "start a worker of the graph"
            )
        else:
            yield Finding(Severity.OK, CHECK, found)
    if facts.injections and (facts.injections[0]["open_s"] or 0.0) > OPEN_S_MAX:
        row = facts.injections[0]
        yield Finding(
            Severity.WARNING,
            CHECK,
            f"{row['open_transactions']} open transactions have injected records, the oldest has been open for "
            f"{format_duration(row['open_s'])}",
            "their records do not exist before they commit, and may be late then; no other record waits for them",
            "commit or end them: pg_stat_activity shows them by xact_start, and pg_prepared_xacts the prepared ones",
        )
