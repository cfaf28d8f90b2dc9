"""Resetting computations in a `MemoryDatabase`, as `store.postgres.deployment.reset` does it."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import TYPE_CHECKING

from millpy.model.deployment import GraphSpec
from millpy.model.reset import drop_computations
from millpy.store.memory.tables import DeployedGraph

if TYPE_CHECKING:
    from millpy.store.memory.database import MemoryDatabase


def forget_computations(
    database: MemoryDatabase, deployed: DeployedGraph, spec: GraphSpec, names: Collection[str]
) -> None:
    """Forget some computations of a deployed graph, and all that is stored of them. No header may be locked.

    Raises:
        GraphError: a name is wrong, or other computations read the results of one of these.
    """
    lacking, before = drop_computations(spec, names), deployed.deployment
    gone = {interval.interval_id for interval in before.intervals if interval.computation in names}
    lost = {sub.subscription_id for sub in deployed.subscriptions if sub.consumer in names}
    for interval_id in gone:
        header = database.headers[interval_id]
        header.gone = True
        header.disown()
        header.keyed.clear()
        for of_sinks in (database.outbox, database.refused_messages, database.sink_reports):
            of_sinks.pop(interval_id, None)
    for header in database.headers.values():
        for subscription_id in lost & header.last_segments.keys():
            del header.last_segments[subscription_id]
    database.segments.remove(lambda s: s.segment.subscription_id in lost)
    database.deltas.remove(lambda d: d.interval_id in gone)
    database.dedupe_runs.remove(lambda r: r.interval_id in gone)
    database.requests.forget(gone)
    for table in (table for table in spec.tables if table.computation in names):
        del database.tables[before.table_ids[table.name]]
    kept = {table.name for table in lacking.tables}
    deployed.spec = lacking
    deployed.subscriptions = tuple(sub for sub in deployed.subscriptions if sub.subscription_id not in lost)
    deployed.deployment = replace(
        before,
        version=before.version + 1,
        intervals=tuple(interval for interval in before.intervals if interval.interval_id not in gone),
        subscription_ids={name: number for name, number in before.subscription_ids.items() if number not in lost},
        table_ids={name: number for name, number in before.table_ids.items() if name in kept},
    )
