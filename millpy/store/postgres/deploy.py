"""Deploying a graph: its ids, intervals, cursors and result tables, in one transaction. The only DDL of the store."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import pairwise, takewhile
from typing import Any

import msgspec
import xxhash
from psycopg import sql

from millpy.errors import ConfigError, GraphError
from millpy.model.deployment import (
    ColumnSpec,
    ComputationSpec,
    DeployedInterval,
    Deployment,
    GraphSpec,
    TableSpec,
    fingerprint_of,
    grown,
    with_partitions,
)
from millpy.model.keys import KEY_SPACE, KeyInterval, tile
from millpy.store.postgres.arrays import Bigints, Texts
from millpy.store.postgres.connection import Connection, all_rows
from millpy.store.postgres.results import SQL_TYPES
from millpy.store.postgres.roles import Roles, worker_policy
from millpy.store.postgres.statements import statement

REFUSED_GRAPH_NAMES = frozenset(["mill", "millpy", "public", "information_schema"])
NAME_BYTES_MAX = 50
"""Leaves room for `_status` and `_pkey` in PostgreSQL's 63 bytes."""

_COMMITTED_COLUMNS = ("emitted_at", "interval_id", "bundle")


async def deploy(connection: Connection, spec: GraphSpec) -> Deployment:
    """Register a graph or find it; see `Store.deploy`. The connection is in autocommit mode."""
    _check_names(spec)
    async with connection.transaction():
        await connection.execute(statement("act_as_owner"))
        await connection.execute(statement("lock_deployment"), {"name": spec.name})
        found = await all_rows(connection, statement("read_graph"), {"name": spec.name})
        if found:
            graph_id, version, fingerprint, description = found[0]
            if fingerprint != spec.fingerprint():
                added = grown(description, _plain(spec))
                if added is None:
                    raise _refusal(spec, description)
                if added:
                    version = await _grow(connection, graph_id, with_partitions(description, added), added)
        else:
            await _check_rights(connection, spec)
            graph_id, version = await _insert_graph(connection, spec)
        return await _read_deployment(connection, graph_id, version, spec.name)


async def _check_rights(connection: Connection, spec: GraphSpec) -> None:
    may, role = (await all_rows(connection, statement("may_deploy"), {}))[0]
    if not may:
        raise ConfigError(
            f"graph {spec.name!r} is not deployed, and role {role} may not deploy it",
            hint="deploy it as a member of the owner's role: millpy deploy GRAPH.py",
        )


async def _insert_graph(connection: Connection, spec: GraphSpec) -> tuple[int, int]:
    parameters: dict[str, Any] = {
        "name": spec.name,
        "fingerprint": spec.fingerprint(),
        "description": msgspec.json.encode(spec.description()).decode(),
    }
    graph_id, version = (await all_rows(connection, statement("insert_graph"), parameters))[0]
    for place, computation in enumerate(spec.computations):
        await _insert_computation(connection, graph_id, version, place, computation)
    for stream in spec.streams:
        encoded = stream.schema.serialize().to_pybytes()
        digest = xxhash.xxh3_128_hexdigest(encoded)
        await connection.execute(statement("insert_schema"), {"encoded": encoded, "digest": digest})
        parameters = {"graph_id": graph_id, "name": stream.name, "producer": stream.producer, "digest": digest}
        await connection.execute(statement("insert_stream"), parameters)
    for subscription in spec.subscriptions:
        parameters = {
            "graph_id": graph_id,
            "stream": subscription.stream,
            "consumer": subscription.consumer,
            "input": subscription.input,
            "key_fields": list(subscription.key_fields),
        }
        await connection.execute(statement("insert_subscription"), parameters)
    await connection.execute(statement("insert_cursors"), {"graph_id": graph_id})
    await _create_tables(connection, graph_id, spec)
    return graph_id, version


async def _grow(
    connection: Connection, graph_id: int, description: dict[str, Any], added: Mapping[str, Sequence[str]]
) -> int:
    """Add source partitions to a deployed graph; the new version."""
    ids = {"graph_id": graph_id}
    await connection.execute(statement("lock_intervals"), ids)
    parameters = {
        **ids,
        "fingerprint": fingerprint_of(description),
        "description": msgspec.json.encode(description).decode(),
    }
    version = int((await all_rows(connection, statement("raise_version"), parameters))[0][0])
    for computation, partitions in added.items():
        found = await all_rows(connection, statement("read_injector"), {**ids, "computation": computation})
        computation_id, places, published = found[0]
        parameters = {
            **ids,
            "computation_id": computation_id,
            "graph_version": version,
            "places": Bigints(list(range(places, places + len(partitions)))),
            "key_los": Bigints([None] * len(partitions)),
            "key_his": Bigints([None] * len(partitions)),
            "partitions": Texts(list(partitions)),
        }
        await connection.execute(statement("insert_intervals"), parameters)
        await connection.execute(statement("insert_cursors"), ids)
        joining = {"computation_id": computation_id, "first_place": places, "published": published}
        await connection.execute(statement("join_intervals"), joining)
        await connection.execute(statement("join_cursors"), joining)
    return version


async def _insert_computation(
    connection: Connection, graph_id: int, version: int, place: int, computation: ComputationSpec
) -> None:
    parameters: dict[str, Any] = {
        "graph_id": graph_id,
        "name": computation.name,
        "kind": computation.kind,
        "place": place,
        "meaning": computation.meaning,
    }
    rows = await all_rows(connection, statement("insert_computation"), parameters)
    keys: list[KeyInterval | None]
    if computation.kind == "injector":
        keys, partitions = [None] * len(computation.partitions), list(computation.partitions)
    else:
        keys = list(tile(computation.intervals))
        partitions = [""] * len(keys)
    parameters = {
        "graph_id": graph_id,
        "computation_id": rows[0][0],
        "graph_version": version,
        "places": Bigints(list(range(len(keys)))),
        "key_los": Bigints([None if key is None else key.lo for key in keys]),
        "key_his": Bigints([None if key is None else key.hi for key in keys]),
        "partitions": Texts(partitions),
    }
    await connection.execute(statement("insert_intervals"), parameters)


async def _create_tables(connection: Connection, graph_id: int, spec: GraphSpec) -> None:
    if not spec.tables:
        return
    await connection.execute(sql.SQL("CREATE SCHEMA IF NOT EXISTS {}").format(sql.Identifier(spec.name)))
    names = [name for table in spec.tables for name in (table.name, f"{table.name}_status")]
    taken = await all_rows(connection, statement("find_relations"), {"schema": spec.name, "names": names})
    if taken:
        raise GraphError(
            f"{spec.name}.{taken[0][0]} exists already and is not a result table of this graph",
            hint="rename the result table in the graph, or move the existing one away",
        )
    roles = await all_rows(connection, statement("read_roles"), {})
    for table in spec.tables:
        parameters = {
            "graph_id": graph_id,
            "name": table.name,
            "kind": table.kind,
            "computation": table.computation,
            "stream": table.stream,
            "key_columns": _columns_text(table.keys),
            "value_columns": _columns_text(table.values),
            "allowed_lateness_us": table.allowed_lateness_us,
        }
        await connection.execute(statement("insert_result_table"), parameters)
        await connection.execute(_create_table(spec.name, table))
        await connection.execute(_create_status_view(spec.name, table))
        for recorded in roles:
            await connection.execute(worker_policy(spec.name, table.name, Roles(*recorded)))


def _columns_text(columns: tuple[ColumnSpec, ...]) -> str:
    return msgspec.json.encode([[c.name, c.sql_type, c.nullable] for c in columns]).decode()


def _create_table(schema: str, table: TableSpec) -> sql.Composed:
    lines: list[sql.Composable] = [
        sql.SQL("{} {}{}").format(
            sql.Identifier(column.name), sql.SQL(column.sql_type), sql.SQL("" if column.nullable else " NOT NULL")
        )
        for column in table.columns()
    ]
    lines.append(sql.SQL("emitted_at timestamptz NOT NULL DEFAULT now()"))
    lines.append(sql.SQL("interval_id bigint NOT NULL"))
    lines.append(sql.SQL("bundle bigint NOT NULL"))
    if table.kind == "windowed":
        identity = [*(column.name for column in table.keys), "window_start", "window_end"]
    else:
        identity = ["interval_id", "bundle", "ordinal"]
    lines.append(
        sql.SQL("CONSTRAINT {} PRIMARY KEY ({})").format(
            sql.Identifier(f"{table.name}_pkey"), sql.SQL(", ").join(map(sql.Identifier, identity))
        )
    )
    return sql.SQL("CREATE TABLE {} ({}) WITH (fillfactor = 90)").format(
        sql.Identifier(schema, table.name), sql.SQL(", ").join(lines)
    )


def _create_status_view(schema: str, table: TableSpec) -> sql.Composed:
    """A window is final when nothing can join it any more; computed, so that no row is written twice for it.

    With the rights of whoever asks: row-level security of the table would not hold for the view's owner.
    """
    view, name = sql.Identifier(schema, f"{table.name}_status"), sql.Identifier(schema, table.name)
    if table.kind == "records":
        return sql.SQL("CREATE VIEW {} WITH (security_invoker) AS SELECT t.*, true AS is_final FROM {} AS t").format(
            view, name
        )
    return sql.SQL(
        "CREATE VIEW {} WITH (security_invoker) AS"
        " SELECT t.*, coalesce(i.input_watermark >= mill.instant(t.window_end) + {}, false) AS is_final"
        " FROM {} AS t LEFT JOIN millpy.input_watermarks AS i ON i.interval_id = t.interval_id"
    ).format(view, sql.Literal(table.allowed_lateness_us), name)


async def _read_deployment(connection: Connection, graph_id: int, version: int, name: str) -> Deployment:
    ids = {"graph_id": graph_id}
    intervals = tuple(
        DeployedInterval(interval_id, computation, place, None if lo is None else KeyInterval(lo, hi), partition)
        for interval_id, computation, place, lo, hi, partition in await all_rows(
            connection, statement("read_intervals"), ids
        )
    )
    for computation in {i.computation for i in intervals if i.keys is not None}:
        _check_tiling([i.keys for i in intervals if i.computation == computation and i.keys is not None])
    subscriptions = await all_rows(connection, statement("read_subscriptions"), ids)
    tables = await all_rows(connection, statement("read_result_tables"), ids)
    return Deployment(
        graph_id=graph_id,
        version=version,
        name=name,
        intervals=intervals,
        subscription_ids={(stream, consumer, place): id_ for id_, stream, consumer, place in subscriptions},
        table_ids={row[1]: row[0] for row in tables},
    )


def _check_tiling(keys: list[KeyInterval]) -> None:
    keys = sorted(keys)
    assert keys[0].lo == 0, keys
    assert keys[-1].hi == KEY_SPACE, keys
    assert all(a.hi == b.lo for a, b in pairwise(keys)), keys


def _check_names(spec: GraphSpec) -> None:
    if spec.name in REFUSED_GRAPH_NAMES or spec.name.startswith("pg_"):
        raise GraphError(f"a graph cannot be named {spec.name!r}", hint="its name is the schema of its result tables")
    _check_identifier(spec.name, "graph")
    for table in spec.tables:
        _check_identifier(table.name, "result table")
        names = [*(column.name for column in table.columns()), *_COMMITTED_COLUMNS, "is_final"]
        doubled = {name for name in names if names.count(name) > 1}
        if doubled:
            raise GraphError(
                f"result table {table.name!r} has more than one column {sorted(doubled)[0]!r}", hint="rename the field"
            )
        for column in table.columns():
            _check_identifier(column.name, "column")
            if column.sql_type not in SQL_TYPES:
                raise GraphError(f"column {column.name!r} of {table.name!r} has the unknown type {column.sql_type!r}")


def _check_identifier(name: str, what: str) -> None:
    if not name or len(name.encode()) > NAME_BYTES_MAX or re.search(r"[\x00-\x1f]", name):
        raise GraphError(
            f"{name!r} cannot be the name of a {what}", hint=f"at most {NAME_BYTES_MAX} bytes, no control characters"
        )


def _plain(spec: GraphSpec) -> dict[str, Any]:
    """The description as it would be stored."""
    found: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(spec.description()))
    return found


def _refusal(spec: GraphSpec, stored: dict[str, Any]) -> GraphError:
    differences = list(_differences(stored, _plain(spec)))
    return GraphError(
        f"graph {spec.name!r} is deployed with another meaning: "
        + "; ".join(differences[:5] or ["its description differs"]),
        hint="give the changed graph another name, so that both run side by side",
    )


def _differences(stored: dict[str, Any], wanted: dict[str, Any]) -> list[str]:
    found = []
    for what in ("computations", "streams", "tables"):
        before, after = stored.get(what, {}), wanted.get(what, {})
        word = what.removesuffix("s")
        found += [f"{word} {name!r} is gone" for name in before if name not in after]
        found += [f"{word} {name!r} is new" for name in after if name not in before]
        found += [
            f"{word} {name!r}: {_change(before[name], after[name])}"
            for name in after
            if name in before and before[name] != after[name]
        ]
    if stored.get("subscriptions") != wanted.get("subscriptions"):
        found.append("subscriptions differ")
    return found


def _change(before: object, after: object) -> str:
    """What differs, and a little of what stands before it: the whole of a long meaning would hide it."""
    if isinstance(before, dict) and isinstance(after, dict):
        fields = [field for field in after if before.get(field) != after[field]]
        return ", ".join(f"{field} {_change(before.get(field), after[field])}" for field in fields)
    was, now = (value if isinstance(value, str) else msgspec.json.encode(value).decode() for value in (before, after))
    same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(was, now, strict=False)))
    start = max(same - 40, 0)
    return f"was {_short(was, start)} and is {_short(now, start)}"


def _short(text: str, start: int) -> str:
    end = start + 160
    return ("..." if start else "") + text[start:end] + ("..." if end < len(text) else "")
