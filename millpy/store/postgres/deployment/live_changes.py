"""Migrating a deployed graph: its additions (or the way back), in the transaction that raises its version.

    1. It locks the headers, which waits for the commits in flight, and raises the version. Workers that know the
       earlier version wait until COMMIT; from then on the fence refuses them (MW002).
    2. It registers the new parts. Existing parts keep their ids, positions, state and rows.

A process that is killed half way has changed nothing. A worker that is frozen inside a commit holds its headers: once
its lease has expired, its backend is terminated, as in a takeover. The wait for a result table is at most LOCK_S: a
long transaction that reads it makes the deployment fail, so that readers and workers do not queue behind it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import psycopg
from psycopg import sql

from millpy.errors import TransientError
from millpy.model.changed_meaning import with_marks
from millpy.model.deployment import GraphSpec, TableSpec, Upgrade
from millpy.model.graph_changes import GraphChange, new_columns, new_partitions, nullable_columns, of_kind
from millpy.model.horizons import horizon_changes
from millpy.model.taking_back import description_after
from millpy.model.time import INSTANT_MAX
from millpy.model.united_streams import ended_source
from millpy.model.versions import only_grows
from millpy.store.postgres.arrays import Bigints, Jsonbs, Texts
from millpy.store.postgres.connection import Connection, all_rows
from millpy.store.postgres.deployment.changed_horizons import change_horizons
from millpy.store.postgres.deployment.comments import column_comments
from millpy.store.postgres.deployment.ddl import (
    columns_text,
    create_tables,
    insert_computation,
    insert_intervals,
    insert_schema,
    insert_stream,
    insert_subscription,
    retention_of,
    status_view,
    with_history,
)
from millpy.store.postgres.deployment.live_view import has_live_view, live_view
from millpy.store.postgres.deployment.rollback import take_back
from millpy.store.postgres.deployment.state_migration import upgrade
from millpy.store.postgres.deployment.united_streams import unite
from millpy.store.postgres.statements import statement

LOCK_S = 2.0
HEADER_ATTEMPTS = 10
HEADERS_S = 1.0
"""How long each attempt waits for commits in flight. Between attempts, other transactions proceed."""
FOLDS_S = 30.0
"""How long to wait for folds in flight, of at most `PIECE_BYTES` each. Only what changes folded rows waits with it."""


@dataclass(frozen=True, slots=True)
class StoredGraph:
    """A deployed graph as the catalog describes it."""

    graph_id: int
    name: str
    version: int
    description: dict[str, Any]


async def migrate(
    connection: Connection,
    stored: StoredGraph,
    spec: GraphSpec,
    changes: Sequence[GraphChange],
    upgrades: Mapping[str, Upgrade],
    *,
    dry_run: bool = False,
    reset: Collection[str] = (),
) -> int:
    """Apply `changes` to a deployed graph, in the caller's transaction. Return the new version.

    Args:
        connection: in a transaction.
        stored: the deployed graph.
        spec: the graph that it becomes.
        changes: the differences between the two.
        upgrades: functions that migrate state, by computation.
        dry_run: whether the caller rolls it back: the sessions of frozen workers are not ended then.
        reset: computations that are removed only to begin anew: injected records that wait for them stay.
    """
    before, after = stored.description, spec.description()
    description = description_after(before, after, changes)
    ids = {"graph_id": stored.graph_id}
    if of_kind("back", changes) or of_kind("state", changes):
        await hold_off_folds(connection, LOCK_S if dry_run else FOLDS_S)
    await lock_headers(connection, stored.graph_id, ends_frozen=not dry_run)
    await limit_lock_wait(connection, LOCK_S)
    changed = {change.computation for change in of_kind("setting", changes) if change.computation}
    marks = await all_rows(connection, statement("read_marks"), ids) if changed else []
    description = with_marks(description, before, {name: at for name, at in marks if name in changed})
    parameters = {**ids, "description": msgspec.json.encode(description).decode()}
    version = int((await all_rows(connection, statement("raise_version"), parameters))[0][0])
    if of_kind("back", changes):
        await take_back(connection, stored.graph_id, stored.name, spec, before)
    await _grow(connection, stored.graph_id, version, new_partitions(before, after))
    if not only_grows(before, after, changes):
        await _add_computations(connection, stored.graph_id, version, spec, before)
        await connection.execute(statement("forget_injection_readers"), {**ids, "kept": Texts(list(reset))})
        await connection.execute(statement("register_injection_readers"), ids)
        await _change_tables(connection, stored, spec, after)
        await change_horizons(connection, stored.graph_id, stored.name, spec, horizon_changes(before, after))
    migrated = sorted({change.computation for change in of_kind("state", changes)})
    await upgrade(connection, stored.graph_id, {name: upgrades[name] for name in migrated})
    await _tell(connection, stored.graph_id, version, changes)
    return version


async def _tell(connection: Connection, graph_id: int, version: int, changes: Sequence[GraphChange]) -> None:
    """Add the event of a deployment, with the watermarks that the changed computations have reached."""
    ids = {"graph_id": graph_id}
    changed = {change.subject for change in changes}
    reached = {name: at for name, at in await all_rows(connection, statement("read_reached"), ids) if name in changed}
    detail = {"version": version, "changes": [str(change) for change in changes], "watermarks": reached}
    events: dict[str, Any] = {
        **ids,
        "kinds": Texts(["deployed"]),
        "details": Jsonbs([msgspec.json.encode(detail)]),
    }
    await connection.execute(statement("append_events"), events)


async def hold_off_folds(connection: Connection, wait_s: float) -> None:
    """Wait for the folds in flight, and keep others from beginning. Before the headers are locked.

    A fold locks rows of state, then the header of their interval. A deployment that changes such rows, which may be
    millions, has locked the headers before: each would wait for the other.
    """
    await limit_lock_wait(connection, wait_s)
    await connection.execute(statement("hold_off_folds"))


async def lock_headers(connection: Connection, graph_id: int, *, ends_frozen: bool = True) -> None:
    """Lock the headers of a graph. Wait for the commits in flight; with `ends_frozen`, end those of frozen workers.

    Raises:
        TransientError: a commit does not end.
    """
    await limit_lock_wait(connection, HEADERS_S)
    for attempt in range(1, HEADER_ATTEMPTS + 1):
        try:
            async with connection.transaction():  # a savepoint
                await connection.execute(statement("lock_intervals"), {"graph_id": graph_id})
            return
        except psycopg.errors.LockNotAvailable:
            if attempt == HEADER_ATTEMPTS or not ends_frozen:
                raise await _held_up(connection, graph_id) from None
        intervals = await all_rows(connection, statement("read_intervals"), {"graph_id": graph_id})
        await connection.execute(statement("terminate_owners"), {"intervals": Bigints([row[0] for row in intervals])})


async def _held_up(connection: Connection, graph_id: int) -> TransientError:
    """Return the error for a commit that does not end. Ending it requires the right to signal its backend."""
    frozen = await all_rows(connection, statement("find_expired"), {"graph_id": graph_id})
    if not frozen:
        return TransientError(
            "a commit of one of this graph's workers takes too long", hint="nothing was changed: try again"
        )
    host, pid, backend = frozen[0]
    return TransientError(
        f"a commit does not end: worker {pid} on {host} holds it, and its lease has expired",
        hint=f"end that process; or, as an administrator, its session: SELECT pg_terminate_backend({backend})",
    )


async def limit_lock_wait(connection: Connection, wait_s: float) -> None:
    """Limit each wait for a lock until the end of the transaction; a longer wait is an error."""
    await connection.execute(b"SELECT set_config('lock_timeout', %s, true)", [f"{int(wait_s * 1000)}ms"])


async def _grow(connection: Connection, graph_id: int, version: int, added: Mapping[str, Sequence[str]]) -> None:
    """Add source partitions to deployed injectors. Raises GraphError if one has ended."""
    ids = {"graph_id": graph_id}
    for computation, partitions in added.items():
        found = await all_rows(connection, statement("read_injector"), {**ids, "computation": computation})
        computation_id, places, published = found[0]
        if published >= INSTANT_MAX:
            raise ended_source(computation, partitions[0])
        no_keys = [None] * len(partitions)
        await insert_intervals(connection, graph_id, computation_id, version, places, no_keys, partitions)
        await connection.execute(statement("insert_cursors"), ids)
        joining = {"computation_id": computation_id, "first_place": places, "published": published}
        await connection.execute(statement("join_intervals"), joining)
        await connection.execute(statement("join_cursors"), joining)


async def _add_computations(
    connection: Connection, graph_id: int, version: int, spec: GraphSpec, before: Mapping[str, Any]
) -> None:
    """Add the new computations, streams and subscriptions, and store the new schemas of deployed streams."""
    new = []
    for place, computation in enumerate(spec.computations):
        named = {"graph_id": graph_id, "computation": computation.name}
        if computation.name in before["computations"]:
            await connection.execute(statement("place_computation"), {**named, "place": place})
            continue
        await insert_computation(connection, graph_id, version, place, computation)
        new.append(named)
    for stream in spec.streams:
        if stream.name not in before["streams"]:
            await insert_stream(connection, graph_id, stream)
        else:
            digest = await insert_schema(connection, stream)
            parameters = {"graph_id": graph_id, "name": stream.name, "digest": digest}
            await connection.execute(statement("change_schema"), parameters)
    known = {(found["stream"], found["consumer"], found["input"]) for found in before["subscriptions"]}
    united = []
    for subscription in spec.subscriptions:
        if (subscription.stream, subscription.consumer, subscription.input) not in known:
            await insert_subscription(connection, graph_id, subscription)
            if subscription.consumer in before["computations"]:
                united.append(subscription)
    for named in new:
        await connection.execute(statement("join_consumer_cursors"), named)
        await connection.execute(statement("join_consumer_intervals"), named)
    kinds = {computation.name: computation.kind for computation in spec.computations}
    new_sources = {s.name for s in spec.streams if kinds[s.producer] == "injector" and s.name not in before["streams"]}
    await unite(connection, graph_id, united, new_sources)


async def _change_tables(
    connection: Connection, stored: StoredGraph, spec: GraphSpec, after: Mapping[str, Any]
) -> None:
    before, graph_id = stored.description, stored.graph_id
    new = [table for table in spec.tables if table.name not in before["tables"]]
    await create_tables(connection, graph_id, stored.name, new)
    for table in spec.tables:
        if table not in new:
            was, now = before["tables"][table.name], after["tables"][table.name]
            added, nullable = new_columns(was, now), nullable_columns(was, now)
            if was.get("retention") != now.get("retention"):
                named = {"graph_id": graph_id, "name": table.name}
                await connection.execute(statement("change_retention"), {**named, **retention_of(table)})
            if added or nullable:
                await _change_table(connection, graph_id, stored.name, table, added, nullable)


async def _change_table(
    connection: Connection, graph_id: int, schema: str, table: TableSpec, added: Sequence[str], nullable: Sequence[str]
) -> None:
    """Add columns, which are NULL in existing rows, to a result table and its view. Rights on both stay."""
    types = {column.name: column.sql_type for column in table.columns()}
    lines = [sql.SQL("ADD COLUMN {} {}").format(sql.Identifier(name), sql.SQL(types[name])) for name in added]
    lines += [sql.SQL("ALTER COLUMN {} DROP NOT NULL").format(sql.Identifier(name)) for name in nullable]
    for relation in with_history(table):
        name = sql.Identifier(schema, relation)
        await connection.execute(sql.SQL("ALTER TABLE {} {}").format(name, sql.SQL(", ").join(lines)))
    shown = await all_rows(
        connection, statement("read_columns"), {"schema": schema, "relation": f"{table.name}_status"}
    )
    names = [*(row[0] for row in shown), *added]
    await connection.execute(status_view(schema, table, names))
    if has_live_view(table):
        await connection.execute(live_view(schema, table, names))
    for comment in column_comments(schema, table, added):
        await connection.execute(comment)
    tables = await all_rows(connection, statement("read_result_tables"), {"graph_id": graph_id})
    stored = {row[1]: {name: may_be_null for name, _, may_be_null in row[4]} for row in tables}[table.name]
    loose = {*added, *nullable, *(name for name, may_be_null in stored.items() if may_be_null)}
    columns = tuple(replace(column, nullable=column.name in loose) for column in table.values)
    parameters = {"graph_id": graph_id, "name": table.name, "value_columns": columns_text(columns)}
    await connection.execute(statement("change_result_table"), parameters)
