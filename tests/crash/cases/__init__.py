"""The whole matrix, by kind of fault."""

from __future__ import annotations

from tests.crash.cases import (
    api,
    broker,
    database,
    database_sources,
    early,
    failover,
    freezing,
    joins,
    kafka_to_kafka,
    killing,
    live,
    lookups,
    mqtt_sinks,
    network,
    panes,
    pressure,
    retention,
    sessions,
    sinks,
    sources,
    takes,
    tools,
    webhooks,
)
from tests.crash.world import Case


def all_cases() -> list[Case]:
    """Every case, in the order of the table."""
    first = (killing, freezing, database, network, pressure, failover, broker, sources, database_sources)
    leaving = (sinks, kafka_to_kafka, mqtt_sinks, webhooks)
    parts = (*first, takes, early, panes, sessions, retention, live, tools, joins, lookups, *leaving, api)
    return [case for part in parts for case in part.cases()]


def find(fault: str, variant: str = "") -> Case:
    """The one of that name."""
    (case,) = (case for case in all_cases() if (case.fault, case.variant) == (fault, variant))
    return case
