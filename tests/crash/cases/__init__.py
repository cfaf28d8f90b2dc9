"""The whole matrix, by kind of fault."""

from __future__ import annotations

from tests.crash.cases import (
    broker,
    database,
    early,
    failover,
    freezing,
    joins,
    kafka_to_kafka,
    killing,
    live,
    lookups,
    network,
    panes,
    pressure,
    retention,
    sinks,
    sources,
    takes,
    tools,
)
from tests.crash.world import Case


def all_cases() -> list[Case]:
    """Every case, in the order of the table."""
    first = (killing, freezing, database, network, pressure, failover, broker, sources)
    parts = (*first, takes, early, panes, retention, live, tools, joins, lookups, sinks, kafka_to_kafka)
    return [case for part in parts for case in part.cases()]


def find(fault: str, variant: str = "") -> Case:
    """The one of that name."""
    (case,) = (case for case in all_cases() if (case.fault, case.variant) == (fault, variant))
    return case
