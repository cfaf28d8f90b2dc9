"""Judge the sinks of deployed graphs: whether they are connected, how long messages wait, and what is refused."""

from __future__ import annotations

from collections.abc import Iterator

from millpy.admin.diagnosis import Facts
from millpy.limits import Limits
from millpy.model.finding import Finding, Severity
from millpy.sinks.protocol import UNDELIVERED

CHECK = "sink"
WAITS_S_MAX = 60.0
"""Seconds that messages may wait before the doctor warns."""


def judge_sinks(facts: Facts, _: Limits) -> Iterator[Finding]:
    """Yield a finding for each sink with an outbox."""
    for row in facts.sinks:
        name = f"{row['graph']}.{row['sink']}"
        waits = f"{row['messages']:,} messages, {row['bytes'] / 1e6:.1f} MB, wait"
        if row["disconnected"]:
            yield Finding(
                Severity.WARNING,
                CHECK,
                f"{name}: {row['disconnected']} of its intervals have had no connection since"
                f" {row['since']:%Y-%m-%d %H:%M:%S} UTC, after {row['attempts']} failed attempts: {row['why']};"
                f" {waits}",
                UNDELIVERED,
                "start the other side, or correct the address; the worker connects again by itself",
            )
        elif row["waits_s"] is not None and row["waits_s"] > WAITS_S_MAX:
            yield Finding(
                Severity.WARNING,
                CHECK,
                f"{name}: {waits} since {row['waits_s']:.0f} s",
                "what reads there is behind",
                "look at the load of the other side and of the workers; more intervals deliver more",
            )
        elif not row["refused"]:
            yield Finding(Severity.OK, CHECK, f"{name}: {waits}")
        if row["refused"]:
            parked = f"; {row['parked_keys']} keys are parked" if row["parked_keys"] else ""
            why = row["refused_because"] or "they were released, and are sent again"
            yield Finding(
                Severity.WARNING,
                CHECK,
                f"{name}: the other side refuses messages since {row['refused_since']:%Y-%m-%d %H:%M:%S} UTC:"
                f" {why}; {row['refused']:,} messages wait for it{parked}",
                "those of the same keys wait; when they reach their bound, all messages wait",
                "correct the other side, or release parked keys with `millpy parked release`; they are in"
                " millpy.refused_messages",
            )
