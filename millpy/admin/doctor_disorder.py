"""Judge the disorder bounds that sources learn."""

from __future__ import annotations

from collections.abc import Iterator

from millpy.admin.diagnosis import Facts
from millpy.limits import Limits
from millpy.model.finding import Finding, Severity

RECORDS_MIN = 131_072
"""Fewer records say little: until a bound is learned, it is `max_disorder`, and then it may follow a change."""
LATE_MANY = 3
"""How many times the share that a percentile leaves out may be late because of it."""


def judge_disorder(facts: Facts, _: Limits) -> Iterator[Finding]:
    """Yield a finding for each source partition whose percentile does not do what it is there for."""
    for row in facts.disorder:
        if row["records"] < RECORDS_MIN:
            continue
        name = f"{row['graph']}.{row['stream']} ({row['source_partition']})"
        left_out, late = 1 - row["percentile"], row["late_by_percentile"] / row["records"]
        if late > LATE_MANY * left_out:
            yield Finding(
                Severity.WARNING,
                "percentile",
                f"{name}: {late:.2%} of its records were late because of percentile={row['percentile']}",
                f"{left_out:.2%} are usual: the disorder changes too quickly, or one device sends most records",
                "raise the percentile, or leave it out; `millpy deploy` changes it",
            )
        elif row["within"] < row["percentile"]:
            yield Finding(
                Severity.WARNING,
                "percentile",
                f"{name}: max_disorder of {row['max_disorder']} covers {row['within']:.2%} of its newest records, "
                f"less than percentile={row['percentile']}",
                "the learned bound is max_disorder, and the other records are late",
                "see `millpy watermarks --disorder`; raise max_disorder, or lower the percentile",
            )
