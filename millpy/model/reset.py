"""Resetting computations of a deployed graph: the graph without them, which is deployed for an instant."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from millpy.errors import GraphError
from millpy.model.deployment import GraphSpec


def drop_computations(spec: GraphSpec, names: Collection[str]) -> GraphSpec:
    """Return a graph without some computations, their streams and result tables.

    Raises:
        GraphError: there is no computation of such a name, or another one reads what one of these makes.
    """
    known = [computation.name for computation in spec.computations]
    if unknown := [name for name in names if name not in known]:
        raise GraphError(
            f"graph {spec.name!r} has no computation {unknown[0]!r}", hint=f"choose from {', '.join(known)}"
        )
    lost = {stream.name: stream.producer for stream in spec.streams if stream.producer in names}
    for subscription in spec.subscriptions:
        if subscription.stream in lost and subscription.consumer not in names:
            raise GraphError(
                f"{subscription.consumer} reads {lost[subscription.stream]}, and would get its records again",
                hint=f"reset it, too: --reset {subscription.consumer}",
            )
    return replace(
        spec,
        computations=tuple(computation for computation in spec.computations if computation.name not in names),
        streams=tuple(stream for stream in spec.streams if stream.name not in lost),
        subscriptions=tuple(found for found in spec.subscriptions if found.consumer not in names),
        tables=tuple(table for table in spec.tables if table.computation not in names),
    )
