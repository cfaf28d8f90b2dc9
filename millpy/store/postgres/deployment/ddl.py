"""The building blocks of a deployment: they create and drop a graph's catalog rows, result tables and views."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import psycopg
import xxhash
from psycopg import sql

from millpy.errors import GraphError
from millpy.model.deployment import ColumnSpec, ComputationSpec, GraphSpec, StreamSpec, SubscriptionSpec, TableSpec
from millpy.model.keys import KeyInterval, tile_key_space
from millpy.model.retention import partition_us
from millpy.store.postgres.arrays import Bigints, Texts
from millpy.store.postgres.connection import Connection, all_rows
from millpy.store.postgres.deployment.comments import create_schema, table_comments
from millpy.store.postgres.deployment.live_view import has_live_view, live_view
from millpy.store.postgres.deployment.roles import Roles, worker_policy
from millpy.store.postgres.history import ENDING, RETRACTION, create_history, history_name, partitioned_by
from millpy.store.postgres.results import SQL_TYPES
from millpy.store.postgres.statements import statement

REFUSED_GRAPH_NAMES = frozenset(["mill", "millpy", "public", "information_schema"])
NAME_BYTES_MAX = 50
"""Bytes of a result table's name, so that `_status` and `_history_pkey` still fit in PostgreSQL's 63 bytes."""
SYSTEM_COLUMNS = frozenset(["tableoid", "xmin", "cmin", "xmax", "cmax", "ctid"])
BESIDE = ("_status", "_live", "_pkey")
FIND_SCHEMA = b"SELECT 1 FROM pg_namespace WHERE nspname = %(schema)s"
COMMITTED_COLUMNS = ("emitted_at", "interval_id", "bundle")
FINAL = "is_final"
_FINALS = {
    "records": sql.SQL("true"),
    "windowed": sql.SQL(
        "coalesce(greatest(i.input_watermark - {}, i.horizon_floor) >= mill.instant(t.window_end), false)"
    ),
}


async def insert_computation(
    connection: Connection, graph_id: int, version: int, place: int, computation: ComputationSpec
) -> None:
    """Register a computation with its intervals."""
    parameters: dict[str, Any] = {
        "graph_id": graph_id,
        "name": computation.name,
        "kind": computation.kind,
        "place": place,
    }
    rows = await all_rows(connection, statement("insert_computation"), parameters)
    keys: list[KeyInterval | None]
    if computation.kind == "injector":
        keys, partitions = [None] * len(computation.partitions), list(computation.partitions)
    else:
        keys = list(tile_key_space(computation.intervals))
        partitions = [""] * len(keys)
    await insert_intervals(connection, graph_id, rows[0][0], version, 0, keys, partitions)


async def insert_intervals(
    connection: Connection,
    graph_id: int,
    computation_id: int,
    version: int,
    first_place: int,
    keys: Sequence[KeyInterval | None],
    partitions: Sequence[str],
) -> None:
    """Register intervals of a computation.

    Args:
        connection: in a transaction.
        graph_id: the graph.
        computation_id: the computation.
        version: the graph's version, with which they begin.
        first_place: place of the first of them among the computation's intervals.
        keys: the key interval of each; None for a source partition.
        partitions: the name of each source partition; empty for a key interval.
    """
    parameters = {
        "graph_id": graph_id,
        "computation_id": computation_id,
        "graph_version": version,
        "places": Bigints(list(range(first_place, first_place + len(keys)))),
        "key_los": Bigints([None if key is None else key.lo for key in keys]),
        "key_his": Bigints([None if key is None else key.hi for key in keys]),
        "partitions": Texts(list(partitions)),
    }
    await connection.execute(statement("insert_intervals"), parameters)


async def insert_schema(connection: Connection, stream: StreamSpec) -> str:
    """Store a stream's Arrow schema unless it is stored. Return its digest."""
    encoded = stream.schema.serialize().to_pybytes()
    digest = xxhash.xxh3_128_hexdigest(encoded)
    await connection.execute(statement("insert_schema"), {"encoded": encoded, "digest": digest})
    return digest


async def insert_stream(connection: Connection, graph_id: int, stream: StreamSpec) -> None:
    """Register a stream and its schema. Its producer is registered already."""
    digest = await insert_schema(connection, stream)
    parameters = {"graph_id": graph_id, "name": stream.name, "producer": stream.producer, "digest": digest}
    await connection.execute(statement("insert_stream"), parameters)


async def insert_subscription(connection: Connection, graph_id: int, subscription: SubscriptionSpec) -> None:
    """Register a subscription, without its cursors."""
    parameters = {
        "graph_id": graph_id,
        "stream": subscription.stream,
        "consumer": subscription.consumer,
        "input": subscription.input,
        "key_fields": list(subscription.key_fields),
    }
    await connection.execute(statement("insert_subscription"), parameters)


async def create_tables(connection: Connection, graph_id: int, schema: str, tables: Sequence[TableSpec]) -> None:
    """Create result tables and their status views.

    Raises:
        GraphError: another object has one of the names.
    """
    if not tables:
        return
    if not await all_rows(connection, FIND_SCHEMA, {"schema": schema}):
        await connection.execute(create_schema(schema))
    await check_free(connection, schema, [name for table in tables for name in with_history(table)])
    roles = await all_rows(connection, statement("read_roles"), {})
    for table in tables:
        parameters = {
            "graph_id": graph_id,
            "name": table.name,
            "kind": table.kind,
            "computation": table.computation,
            "stream": table.stream,
            "key_columns": columns_text(table.keys),
            "value_columns": columns_text(table.values),
            "allowed_lateness_us": table.allowed_lateness_us,
            "history": table.history,
            **retention_of(table),
        }
        await connection.execute(statement("insert_result_table"), parameters)
        await connection.execute(_create_table(schema, table))
        if table.history:
            await connection.execute(create_history(schema, table))
        if table.kind == "records" or table.keys:
            await connection.execute(_time_index(schema, table))
        names = [*(column.name for column in table.columns()), *COMMITTED_COLUMNS, FINAL]
        await connection.execute(status_view(schema, table, names))
        if has_live_view(table):
            await connection.execute(live_view(schema, table, names))
        await connection.execute(table_comments(schema, table))
        for recorded in roles:
            for name in with_history(table):
                await connection.execute(worker_policy(schema, name, Roles(*recorded)))


def retention_of(table: TableSpec) -> dict[str, int | None]:
    """Return how long a result table keeps rows, and the length of its new partitions, as the catalog has them."""
    kept = table.retention_us
    return {"retention_us": kept, "partition_us": None if kept is None else partition_us(kept)}


def with_history(table: TableSpec) -> list[str]:
    """Return the name of a result table, followed by that of its history, if it keeps one."""
    return [table.name, history_name(table.name)] if table.history else [table.name]


async def drop_tables(connection: Connection, schema: str, tables: Sequence[str]) -> None:
    """Drop result tables, histories among them, and their status views.

    Raises:
        GraphError: users' views read them, or other objects depend on them.
    """
    readers = await all_rows(connection, statement("find_readers"), {"schema": schema, "names": with_views(tables)})
    if readers:
        raise GraphError(
            f"these views read a result table that would be dropped: {', '.join(row[0] for row in readers)}",
            hint="drop the views, or make them read other tables",
        )
    for table in tables:
        async with nothing_depends(f"result table {table!r}"):
            for kind, relation in (("VIEW", f"{table}_live"), ("VIEW", f"{table}_status"), ("TABLE", table)):
                query = sql.SQL("DROP {} IF EXISTS {}").format(sql.SQL(kind), sql.Identifier(schema, relation))
                await connection.execute(query)


@asynccontextmanager
async def nothing_depends(what: str) -> AsyncIterator[None]:
    """Raise GraphError when the block cannot drop `what` because a user's object depends on it."""
    try:
        yield
    except psycopg.errors.DependentObjectsStillExist as error:
        detail = (error.diag.message_detail or "").replace("\n", "; ")
        raise GraphError(f"an object depends on {what}: {detail}", hint="drop that object first") from error


async def forget_intervals(connection: Connection, intervals: Sequence[int]) -> None:
    """Delete the data of intervals. The caller deletes their rows in the catalog."""
    for interval in intervals:
        await connection.execute(statement("forget_state"), {"interval": interval})  # one by one: each may take long
    await connection.execute(statement("forget_intervals"), {"intervals": Bigints(intervals)})


def with_views(tables: Sequence[str]) -> list[str]:
    """Return the names of result tables, each followed by those of its views."""
    return [name for table in tables for name in (table, f"{table}_status", f"{table}_live")]


async def check_free(connection: Connection, schema: str, tables: Sequence[str]) -> None:
    """Raise GraphError when an object in the schema has the name of one of these tables, or of a view of it."""
    taken = await all_rows(connection, statement("find_relations"), {"schema": schema, "names": with_views(tables)})
    if taken:
        raise GraphError(
            f"{schema}.{taken[0][0]} exists already and is not a result table of this graph",
            hint="rename the result table in the graph, or the existing object",
        )


def status_view(schema: str, table: TableSpec, columns: Sequence[str]) -> sql.Composed:
    """Compose the status view of a result table.

    A window is final when no record can join it any more. The view computes this, so that no row is written twice for
    it. The view has its caller's rights, because the table's row-level security does not apply to the view's owner.

    Args:
        schema: the graph's schema.
        table: the table's spec.
        columns: names in their order, with `FINAL` among them. A view that is replaced must keep its order.
    """
    final = _FINALS[table.kind].format(sql.Literal(table.allowed_lateness_us))
    selected = [
        sql.SQL("{} AS {}").format(final, sql.Identifier(FINAL)) if name == FINAL else sql.Identifier("t", name)
        for name in columns
    ]
    joined = sql.SQL("LEFT JOIN millpy.input_watermarks AS i ON i.interval_id = t.interval_id")
    return sql.SQL("CREATE OR REPLACE VIEW {} WITH (security_invoker) AS SELECT {} FROM {} AS t {}").format(
        sql.Identifier(schema, f"{table.name}_status"),
        sql.SQL(", ").join(selected),
        sql.Identifier(schema, table.name),
        joined if table.kind == "windowed" else sql.SQL(""),
    )


def columns_text(columns: tuple[ColumnSpec, ...]) -> str:
    """Encode columns as the catalog stores them."""
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
        identity = ["interval_id", "bundle", "ordinal", *(["event_time"] if table.retention_us else [])]
    lines.append(
        sql.SQL("CONSTRAINT {} PRIMARY KEY ({})").format(
            sql.Identifier(f"{table.name}_pkey"), sql.SQL(", ").join(map(sql.Identifier, identity))
        )
    )
    # A table with partitions has no rows of its own: `mill.make_partitions` gives the factor to its partitions.
    ending = sql.SQL("WITH (fillfactor = 90)") if table.retention_us is None else partitioned_by(table)
    return sql.SQL("CREATE TABLE {} ({}) {}").format(
        sql.Identifier(schema, table.name), sql.SQL(", ").join(lines), ending
    )


def _time_index(schema: str, table: TableSpec) -> sql.Composed:
    """Compose the index on time of a table whose primary key begins with something else.

    Rows arrive about in the order of their time, so a BRIN index finds a range of it. A commit pays almost nothing for
    it, while a B-tree would get an entry for each row.
    """
    column = "window_start" if table.kind == "windowed" else "event_time"
    return sql.SQL("CREATE INDEX ON {} USING brin ({}) WITH (pages_per_range = 32)").format(
        sql.Identifier(schema, table.name), sql.Identifier(column)
    )


def check_names(spec: GraphSpec) -> None:
    """Raise GraphError for names that PostgreSQL or millpy does not allow."""
    if spec.name in REFUSED_GRAPH_NAMES or spec.name.startswith("pg_"):
        raise GraphError(f"a graph cannot be named {spec.name!r}", hint="its name is also a schema: choose another")
    _check_identifier(spec.name, "graph")
    beside = {
        f"{name}{ending}": table.name for table in spec.tables for name in with_history(table) for ending in BESIDE
    }
    beside |= {history_name(table.name): table.name for table in spec.tables if table.history}
    for table in spec.tables:
        _check_identifier(table.name, "result table")
        if table.name in beside:
            raise GraphError(
                f"result table {table.name!r} has a name that is reserved for {beside[table.name]!r}",
                hint=f"rename it: the endings {', '.join(BESIDE)} are those of its views and its primary key,"
                f" and its history has the ending {ENDING}",
            )
        names = [*(column.name for column in table.columns()), *COMMITTED_COLUMNS, FINAL]
        names += [RETRACTION] if table.history else []
        doubled = {name for name in names if names.count(name) > 1}
        if doubled:
            raise GraphError(
                f"result table {table.name!r} has more than one column {sorted(doubled)[0]!r}", hint="rename the field"
            )
        for column in table.columns():
            _check_identifier(column.name, "column")
            if column.name in SYSTEM_COLUMNS:
                raise GraphError(
                    f"column {column.name!r} of {table.name!r} has the name of a system column of PostgreSQL",
                    hint="rename the field or the aggregate",
                )
            if column.sql_type not in SQL_TYPES:
                raise GraphError(f"column {column.name!r} of {table.name!r} has the unknown type {column.sql_type!r}")


def _check_identifier(name: str, what: str) -> None:
    if not name or len(name.encode()) > NAME_BYTES_MAX or re.search(r"[\x00-\x1f]", name):
        raise GraphError(
            f"{name!r} cannot be the name of a {what}", hint=f"use 1 to {NAME_BYTES_MAX} bytes, no control characters"
        )
