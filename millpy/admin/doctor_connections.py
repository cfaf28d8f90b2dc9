"""Judge the connections of sources, as their workers said last."""

from __future__ import annotations

from collections.abc import Iterator

from millpy.admin.diagnosis import Facts
from millpy.limits import Limits
from millpy.model.finding import Finding, Severity


def judge_connections(facts: Facts, _: Limits) -> Iterator[Finding]:
    """Yield a finding for each source with partitions that are not connected."""
    for row in facts.disconnected:
        yield Finding(
            Severity.WARNING,
            "source connection",
            f"{row['graph']}.{row['stream']}: {row['partitions']} of its partitions have had no connection since"
            f" {row['since']:%Y-%m-%d %H:%M:%S} UTC, after {row['attempts']} failed attempts: {row['why']}",
            "its records wait at the source; what exceeds the limits of a broker is lost",
            "start the broker, or correct the address; the worker connects again by itself",
        )
