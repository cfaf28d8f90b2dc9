"""Deploying a graph: registers it, or migrates the deployed one, in one transaction."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import msgspec

from millpy.errors import ConfigError
from millpy.model.deployment import DeployedInterval, Deployment, GraphSpec, Upgrade, check_format
from millpy.model.graph_changes import GraphChange, changes_between, changes_text
from millpy.model.keys import KEY_SPACE, KeyInterval
from millpy.model.taking_back import cannot_take_back, changes_back, refuse_taken_back
from millpy.model.versions import only_grows, refuse_changes
from millpy.store.postgres.connection import Connection, all_rows
from millpy.store.postgres.deployment.copied_results import begin_copies, check_begun
from millpy.store.postgres.deployment.ddl import (
    check_names,
    create_tables,
    insert_computation,
    insert_stream,
    insert_subscription,
)
from millpy.store.postgres.deployment.generations import begin_beside, name_of_new
from millpy.store.postgres.deployment.live_changes import LOCK_S, StoredGraph, limit_lock_wait, migrate
from millpy.store.postgres.statements import statement


async def deploy(  # noqa: PLR0913 - the options of a deployment
    connection: Connection,
    spec: GraphSpec,
    *,
    on_purpose: bool = False,
    upgrades: Mapping[str, Upgrade] | None = None,
    back: bool = False,
    copy_results: bool = False,
    dry_run: bool = False,
    reset: Collection[str] = (),
) -> Deployment:
    """Register a graph, or migrate the deployed one; see `Store.deploy`. `connection` is in autocommit mode.

    With `dry_run`, roll it back, and wait for no lock for long. `reset` names what the caller adds again at once.
    """
    check_names(spec)
    async with connection.transaction(force_rollback=dry_run):
        if dry_run:
            await limit_lock_wait(connection, LOCK_S)
        await connection.execute(statement("act_as_owner"))
        stored = await _locked_graph(connection, spec)
        if stored is None:
            await check_rights(connection, f"cannot deploy graph {spec.name!r}")
            await connection.execute(statement("lock_names"))
            stored = await _locked_graph(connection, spec)  # another process may have deployed it in between
        if stored is None:
            return await _begin(connection, spec, copy_results=copy_results)
        if copy_results:
            await check_begun(connection, spec, stored.graph_id)
        before, after = stored.description, spec.description()
        changes = _changes(stored, spec, upgrades or {}, back=back)
        refuse_changes(
            spec.name, stored.version, before, after, on_purpose=on_purpose, changes=changes, upgrades=upgrades or {}
        )
        if not on_purpose:
            refuse_taken_back(spec.name, stored.version, before, changes)
        version = stored.version
        if changes:
            if not only_grows(before, after, changes):
                await check_rights(
                    connection, f"cannot deploy changes of graph {spec.name!r} ({changes_text(changes)})"
                )
            version = await migrate(connection, stored, spec, changes, upgrades or {}, dry_run=dry_run, reset=reset)
        deployment = await _read_deployment(connection, stored.graph_id, version, stored.name)
    return replace(deployment, changes=tuple(map(str, changes)))


async def check_rights(connection: Connection, missing: str, command: str = "deploy GRAPH.py") -> None:
    """Raise ConfigError unless this role may create and change graphs."""
    may, role = (await all_rows(connection, statement("may_deploy"), {}))[0]
    if not may:
        raise ConfigError(
            f"{missing}: role {role} may not deploy",
            hint=f"run this as a member of the owner's role: millpy {command}",
        )


def _changes(
    stored: StoredGraph, spec: GraphSpec, upgrades: Mapping[str, Upgrade], *, back: bool
) -> Sequence[GraphChange]:
    """Return the changes from the stored graph to `spec`.

    Raises:
        GraphError: with `back`, `spec` is not the stored graph without some of its additions.
    """
    before, after = stored.description, spec.description()
    changes = changes_between(before, after)
    if not back:
        return changes
    found = changes_back(before, after, changes, upgrades)
    if found is None:
        raise cannot_take_back(spec.name, stored.version, before, after)
    return found


async def compare(
    connection: Connection, spec: GraphSpec, *, upgrades: Mapping[str, Upgrade] | None = None, back: bool = False
) -> tuple[int, Sequence[GraphChange]] | None:
    """Return the deployed version, and the changes that a deployment would make; None for a new graph or generation."""
    check_names(spec)
    stored = await read_deployed(connection, spec)
    if stored is None:
        await name_of_new(connection, spec)
    return None if stored is None else (stored.version, _changes(stored, spec, upgrades or {}, back=back))


async def _locked_graph(connection: Connection, spec: GraphSpec) -> StoredGraph | None:
    """Read the deployed graph, and keep others from deploying it until the end of the transaction."""
    await connection.execute(statement("lock_deployment"), {"name": spec.name})
    return await read_deployed(connection, spec)


async def read_deployed(connection: Connection, spec: GraphSpec) -> StoredGraph | None:
    """Read the deployed graph of this name and generation; None if there is none."""
    ids = {"family": spec.name, "generation": spec.generation}
    found = await all_rows(connection, statement("read_graph"), ids)
    if not found:
        return None
    stored = StoredGraph(*found[0])
    check_format(spec.name, stored.description)
    return stored


async def _begin(connection: Connection, spec: GraphSpec, *, copy_results: bool) -> Deployment:
    """Register a new graph, or a new generation beside the current one. The caller holds the lock on names."""
    name = await name_of_new(connection, spec)
    graph_id, version = await _insert_graph(connection, spec, name)
    changes = await begin_beside(connection, spec, name) if name != spec.name else ()
    if copy_results:
        changes = (*changes, *await begin_copies(connection, spec, graph_id))
    return replace(await _read_deployment(connection, graph_id, version, name), changes=changes)


async def _insert_graph(connection: Connection, spec: GraphSpec, name: str) -> tuple[int, int]:
    parameters: dict[str, Any] = {
        "name": name,
        "family": spec.name,
        "generation": spec.generation,
        "description": msgspec.json.encode(spec.description()).decode(),
    }
    graph_id, version = (await all_rows(connection, statement("insert_graph"), parameters))[0]
    for place, computation in enumerate(spec.computations):
        await insert_computation(connection, graph_id, version, place, computation)
    for stream in spec.streams:
        await insert_stream(connection, graph_id, stream)
    for subscription in spec.subscriptions:
        await insert_subscription(connection, graph_id, subscription)
    await connection.execute(statement("insert_cursors"), {"graph_id": graph_id})
    await connection.execute(statement("register_injection_readers"), {"graph_id": graph_id})
    await create_tables(connection, graph_id, name, spec.tables)
    return graph_id, version


async def _read_deployment(connection: Connection, graph_id: int, version: int, name: str) -> Deployment:
    ids = {"graph_id": graph_id}
    intervals = tuple(
        DeployedInterval(
            interval_id, computation, place, None if lo is None else KeyInterval(lo, hi), partition, joined
        )
        for interval_id, computation, place, lo, hi, partition, joined in await all_rows(
            connection, statement("read_intervals"), ids
        )
    )
    for computation in {i.computation for i in intervals if i.keys is not None}:
        _check_tiling([i.keys for i in intervals if i.computation == computation and i.keys is not None])
    subscriptions = await all_rows(connection, statement("read_subscriptions"), ids)
    tables = await all_rows(connection, statement("read_result_tables"), ids)
    (secret,) = (await all_rows(connection, statement("read_secret"), ids))[0]
    return Deployment(
        graph_id=graph_id,
        version=version,
        name=name,
        intervals=intervals,
        subscription_ids={(stream, consumer, place): id_ for id_, stream, consumer, place in subscriptions},
        table_ids={row[1]: row[0] for row in tables},
        secret=secret,
    )


def _check_tiling(keys: list[KeyInterval]) -> None:
    keys = sorted(keys)
    assert keys[0].lo == 0, keys
    assert keys[-1].hi == KEY_SPACE, keys
    assert all(a.hi == b.lo for a, b in pairwise(keys)), keys
