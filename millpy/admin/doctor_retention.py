"""Judge what keeps expired rows of result tables."""

from __future__ import annotations

from collections.abc import Iterator

from millpy.admin.diagnosis import Facts
from millpy.limits import Limits
from millpy.model.finding import Finding, Severity


def judge_references(facts: Facts, _: Limits) -> Iterator[Finding]:
    """Yield a finding for each foreign key to a result table with a retention."""
    for row in facts.references:
        yield Finding(
            Severity.NOTE,
            "retention",
            f"{row['result_table']}: foreign key {row['name']} of {row['referring']} refers to its rows",
            "a partition with such rows stays after its retention",
            f"delete rows of {row['referring']} that refer to expired rows, and give it an index on the columns of the"
            " key: commits wait while they are looked for",
        )
        if not row["is_read"]:
            yield Finding(
                Severity.WARNING,
                "retention",
                f"{row['result_table']}: its owner {row['owner']} may not read {row['referring']}, which refers to it",
                "none of its partitions is dropped",
                f"GRANT SELECT ON {row['referring']} TO {row['owner']}",
            )
