"""Judge the sites of sources with a watermark for each site."""

from __future__ import annotations

from collections.abc import Iterator

from millpy.admin.diagnosis import Facts
from millpy.limits import Limits
from millpy.model.finding import Finding, Severity


def judge_sites(facts: Facts, _: Limits) -> Iterator[Finding]:
    """Yield a finding for each source partition with silent sites, or with more sites than the bound."""
    for row in facts.sites:
        name = f"{row['graph']}.{row['stream']} ({row['source_partition']})"
        if row["silent"]:
            sites = "1 site has" if row["silent"] == 1 else f"{row['silent']:,} sites have"
            yield Finding(
                Severity.WARNING,
                "sites",
                f"{name}: {sites} sent nothing for an hour; the longest silent is {row['silent_most'] or 'a new one'}, "
                f"since {row['silent_since']}",
                "the windows of a silent site stay open, unless the source has an idle policy; other sites do not wait",
                "see `millpy watermarks --sites`; idle=AdvanceWithClock(...) closes them",
            )
        if row["records_beyond"]:
            yield Finding(
                Severity.WARNING,
                "sites",
                f"{name}: more than {row['sites']:,} sites; records of the later ones: {row['records_beyond']:,}",
                "the later sites share one watermark, so one of them can make the records of another late",
                "check that watermark_by names a field with few values, and look for a device that invents them",
            )
