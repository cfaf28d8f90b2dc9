"""Taking additions back: removes the parts that a deployed graph has and a file lacks, with their stored data.

This happens in the transaction that raises the version, whose locks keep every other writer out. The remaining parts
keep their ids, positions and rows. Stored windows lose the removed accumulators, keys the removed cells, and stored or
parked records the removed fields. So the same addition, or another one of the same name, can be deployed again, and
starts empty.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import msgspec
import pyarrow as pa
from psycopg import sql

from millpy.model.checkpoint import StoredSlice
from millpy.model.deployment import GraphSpec
from millpy.model.taking_back import aggregate_names, cell_names, column_names, field_names, lost_names
from millpy.store.codec import without_fields
from millpy.store.join_log import log_without_fields
from millpy.store.postgres.arrays import Bigints
from millpy.store.postgres.connection import Connection, all_rows
from millpy.store.postgres.deployment.comments import column_comment, view_comment
from millpy.store.postgres.deployment.ddl import (
    drop_tables,
    forget_intervals,
    nothing_depends,
    status_view,
    with_history,
)
from millpy.store.postgres.deployment.live_view import ENDING, has_live_view, live_view
from millpy.store.postgres.deployment.privileges import give_rights, read_rights
from millpy.store.postgres.deployment.state_migration import fold
from millpy.store.postgres.history import history_name
from millpy.store.postgres.statements import statement

SEGMENTS_AT_A_TIME = 20


async def take_back(
    connection: Connection, graph_id: int, schema: str, spec: GraphSpec, before: Mapping[str, Any]
) -> None:
    """Remove the parts of the graph described by `before` that `spec` lacks. The caller has locked the headers.

    Raises:
        GraphError: users' views read a table or column that would be dropped.
    """
    after = spec.description()
    if gone := lost_names(before["computations"], after["computations"]):
        named = {"graph_id": graph_id, "names": gone}
        intervals = [row[0] for row in await all_rows(connection, statement("read_gone_intervals"), named)]
        await forget_intervals(connection, intervals)
        await connection.execute(statement("forget_ends"), named)
        await connection.execute(statement("forget_computations"), named)
    await _shorten_state(connection, graph_id, spec, before, after)
    for stream in spec.streams:
        kept = field_names(after["streams"][stream.name])
        if lost_names(field_names(before["streams"][stream.name]), kept):
            await _shorten_records(connection, graph_id, stream.name, stream.names or kept, len(kept))
    tables = lost_names(before["tables"], after["tables"])
    histories = [history_name(name) for name in tables if "history" in before["tables"][name]]
    await drop_tables(connection, schema, [*tables, *histories])
    for name, table in after["tables"].items():
        if lost := lost_names(column_names(before["tables"][name]), column_names(table)):
            await _drop_columns(connection, graph_id, schema, spec, name, lost)
    await connection.execute(statement("forget_tables"), {"graph_id": graph_id, "names": tables})
    streams = lost_names(before["streams"], after["streams"])
    await connection.execute(statement("forget_streams"), {"graph_id": graph_id, "names": streams})


async def _shorten_state(
    connection: Connection, graph_id: int, spec: GraphSpec, before: Mapping[str, Any], after: Mapping[str, Any]
) -> None:
    """Remove accumulators from windows, and cells from keys."""
    for computation in spec.computations:
        was, now = before["computations"][computation.name], after["computations"][computation.name]
        cells = lost_names(cell_names(was), cell_names(now))
        aggregates = lost_names(aggregate_names(was), aggregate_names(now))
        if not (cells or aggregates):
            continue
        for interval in await _folded(connection, graph_id, computation.name):
            if cells:
                await connection.execute(statement("forget_cells"), {"interval": interval, "names": cells})
            if aggregates:
                shorter = {"interval": interval, "accumulators": computation.accumulators}
                await connection.execute(statement("shorten_windows"), shorter)


async def _folded(connection: Connection, graph_id: int, computation: str) -> list[int]:
    """Fold all deltas of a computation into rows, and return its intervals."""
    named = {"graph_id": graph_id, "computation": computation}
    headers = await all_rows(connection, statement("read_headers_of"), named)
    for interval_id, sequencer, _ in headers:
        await fold(connection, interval_id, sequencer)
    return [interval_id for interval_id, *_ in headers]


async def _shorten_records(connection: Connection, graph_id: int, stream: str, names: Sequence[str], kept: int) -> None:
    """Remove fields from records of a stream that are stored in segments, parked, or kept until it is their turn.

    The first `kept` fields stay, and of JSON the `names`.
    """
    named = {"graph_id": graph_id, "stream": stream}
    for (consumer,) in await all_rows(connection, statement("read_consumers_of"), named):
        await _folded(connection, graph_id, consumer)
    await connection.execute(statement("shorten_parked"), {**named, "names": list(names), "kept": kept})
    encoded = (await all_rows(connection, statement("read_schema"), named))[0][0]
    schema = pa.ipc.read_schema(pa.py_buffer(encoded))
    async with connection.cursor("segments") as cursor:
        await cursor.execute(statement("read_segments"), named)
        while segments := await cursor.fetchmany(SEGMENTS_AT_A_TIME):
            for segment in segments:
                await _shorten_segment(connection, segment, schema, kept)
    async with connection.cursor("logs") as cursor:
        await cursor.execute(statement("read_join_logs"), named)
        while logs := await cursor.fetchmany(SEGMENTS_AT_A_TIME):
            for slot, interval, bundle, log in logs:
                shorter = {"slot": slot, "interval": interval, "bundle": bundle}
                shorter["log"] = log_without_fields(log, schema, kept)
                await connection.execute(statement("change_join_log"), shorter)


async def _shorten_segment(connection: Connection, segment: Sequence[Any], schema: pa.Schema, kept: int) -> None:
    """Rewrite a stored segment with only the first `kept` fields of its records."""
    slot, subscription, producer, seq, records, ends, checksums, payload = segment
    bounds = pairwise([0, *ends])
    slices = [
        without_fields(StoredSlice(count, payload[lo:hi], checksum), schema, kept)
        for count, (lo, hi), checksum in zip(records, bounds, checksums, strict=True)
    ]
    length, found = 0, []
    for piece in slices:
        length += len(piece.payload)
        found.append(length)
    parameters: dict[str, Any] = {
        "slot": slot,
        "subscription": subscription,
        "producer": producer,
        "seq": seq,
        "slice_ends": Bigints(found),
        "slice_checksums": Bigints([piece.checksum for piece in slices]),
        "payload": b"".join(piece.payload for piece in slices),
    }
    await connection.execute(statement("change_segment"), parameters)


async def _drop_columns(
    connection: Connection, graph_id: int, schema: str, spec: GraphSpec, name: str, lost: Sequence[str]
) -> None:
    """Drop columns of a result table. Its views are created again, with the same rights and comments."""
    table = next(table for table in spec.tables if table.name == name)
    view, live = f"{name}_status", f"{name}{ENDING}"
    rights = await read_rights(connection, schema, [view, live])
    named = {"schema": schema, "relations": [view, live]}
    comments = await all_rows(connection, statement("read_comments"), named)
    shown = await all_rows(connection, statement("read_columns"), {"schema": schema, "relation": view})
    kept = [row[0] for row in shown if row[0] not in lost]
    async with nothing_depends(f"column {', '.join(lost)} of result table {name!r}"):
        for dropped in (live, view):
            await connection.execute(sql.SQL("DROP VIEW IF EXISTS {}").format(sql.Identifier(schema, dropped)))
        lines = [sql.SQL("DROP COLUMN {}").format(sql.Identifier(column)) for column in lost]
        for relation in with_history(table):
            altered = sql.SQL("ALTER TABLE {} {}").format(sql.Identifier(schema, relation), sql.SQL(", ").join(lines))
            await connection.execute(altered)
    await connection.execute(status_view(schema, table, kept))
    if has_live_view(table):
        await connection.execute(live_view(schema, table, kept))
    for relation, column, text in comments:
        if column in lost or (relation == live and not has_live_view(table)):
            continue
        if column is None:
            await connection.execute(view_comment(schema, relation, text))
        else:
            await connection.execute(column_comment(schema, relation, column, text))
    for relation, made in (await read_rights(connection, schema, [view, live])).items():
        wanted = rights.get(relation, made).on_columns(kept)
        await give_rights(connection, schema, relation, made, wanted, is_table=False)
    stored = {
        row[1]: row[4] for row in await all_rows(connection, statement("read_result_tables"), {"graph_id": graph_id})
    }
    columns = msgspec.json.encode([column for column in stored[name] if column[0] not in lost]).decode()
    parameters = {"graph_id": graph_id, "name": name, "value_columns": columns}
    await connection.execute(statement("change_result_table"), parameters)
