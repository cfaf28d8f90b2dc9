"""Copying the rows of finished windows to the result tables of a new generation (`model/copied_results.py`).

1. The transaction that begins the generation notes for each table which windows are closed, and lets its steps take
   them for over: they give no pane to a window that ends by then, whatever they read.
2. The rows are copied in pieces, oldest windows first, each in a transaction that also notes how far the copy has
   come. So each row is copied once, and a copy that was killed continues where it was. Workers may run meanwhile.
3. One look at the table divides it into pieces. The index of a table is on the begin of windows, so a piece also has
   bounds of that: no window is longer than the longest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from psycopg import sql

from millpy.errors import GraphError, UsageError
from millpy.model.copied_results import ResultCopy, copies_between
from millpy.model.deployment import GraphSpec
from millpy.model.time import INSTANT_MIN, Instant
from millpy.store.postgres.arrays import Bigints
from millpy.store.postgres.connection import Connection, all_rows
from millpy.store.postgres.deployment.generations import Generation, read_generations
from millpy.store.postgres.statements import statement

ROWS = 100_000
"""Rows of a piece, and the others of its last windows."""
PIECES_MAX = 100
"""Pieces of a table, about: those of a large one have more rows. Each may read a table that is not stored by time."""
PARTITIONS_MAX = 512
"""Partitions that the rows of a piece may need, at most."""


async def plan_copies(connection: Connection, spec: GraphSpec) -> tuple[Generation, list[ResultCopy]]:
    """Return the current generation, and what a new one gets from it.

    Raises:
        GraphError: there is no other generation, or the tables do not fit.
    """
    known = await read_generations(connection, spec.name)
    current = next((found for found in known if found.name == spec.name), None)
    if current is None or current.generation == spec.generation:
        raise GraphError(
            f"there is no other generation of graph {spec.name!r} whose rows could be copied",
            hint="--copy-results is for the first deployment of a new generation: Graph(…, generation=…)",
        )
    ids = {"family": spec.name, "generation": current.generation}
    ((graph_id, name, _, description),) = await all_rows(connection, statement("read_graph"), ids)
    return current, [
        replace(copy, closed_end=await _closed_end(connection, graph_id, name, copy.table))
        for copy in copies_between(description, spec.description())
    ]


async def begin_copies(connection: Connection, spec: GraphSpec, graph_id: int) -> list[str]:
    """Note what a new generation gets, in the transaction that begins it. Return notes for the operator."""
    current, copies = await plan_copies(connection, spec)
    for copy in copies:
        of: dict[str, Any] = {"graph_id": graph_id, "closed_end": copy.closed_end}
        begin = INSTANT_MIN if copy.retention_us is None else max(copy.closed_end - copy.retention_us, INSTANT_MIN)
        copied = {"name": copy.table, "copied_from": current.graph_id, "copied_to": begin}
        await connection.execute(statement("begin_copy"), {**of, **copied})
        if copy.closed_end > INSTANT_MIN:
            await connection.execute(statement("close_windows"), {**of, "computation": copy.computation})
            await connection.execute(statement("mark_closed_end"), {**of, "computation": copy.computation})
    return list(map(str, copies))


async def check_begun(connection: Connection, spec: GraphSpec, graph_id: int) -> None:
    """Raise UsageError if a deployed generation was begun without a copy: its windows may overlap the rows."""
    ((number,),) = await all_rows(connection, statement("count_copies"), {"graph_id": graph_id})
    if not number:
        raise UsageError(
            f"generation {spec.generation} of graph {spec.name!r} was deployed without --copy-results",
            hint="drop it and deploy it again, or create a view over the tables of both generations",
        )


async def copies_left(connection: Connection, spec: GraphSpec, graph_id: int) -> list[ResultCopy]:
    """Return what a generation that was begun with a copy has not got yet.

    Raises:
        UsageError: as `check_begun`.
        GraphError: as `copies_between`.
    """
    await check_begun(connection, spec, graph_id)
    left = await all_rows(connection, statement("read_copies_left"), {"graph_id": graph_id})
    return [
        replace(copy, closed_end=until)
        for name, until, description in left
        for copy in copies_between(description, spec.description())
        if copy.table == name
    ]


@dataclass(frozen=True, slots=True)
class CopyPlan:
    """The pieces of a table.

    Attributes:
        bounds: the last end of a window of each, in order; of the last one, where the copy ends.
        longest: the length of the longest window, in µs; None if one is infinite.
    """

    bounds: Sequence[int]
    longest: int | None


async def copy_piece(
    connection: Connection, spec: GraphSpec, graph_id: int, plans: dict[int, CopyPlan]
) -> tuple[str, int, Instant] | None:
    """Copy the next rows, in the caller's transaction.

    Args:
        connection: in a transaction.
        spec: the new generation.
        graph_id: its number.
        plans: the plan of each table of which this process copies pieces, by its number; it is made when it is missing.

    Returns:
        The table, the number of rows, and the end up to which its windows are copied; None when all are.

    Raises:
        GraphError: the earlier generation was dropped, or the tables do not fit any more.
    """
    found = await all_rows(connection, statement("read_next_copy"), {"graph_id": graph_id})
    if not found:
        return None
    table_id, name, target, source, until, done_to, partitioned, interval, description = found[0]
    if source is None:
        raise GraphError(
            f"the rows of {name} cannot be copied: the earlier generation was dropped",
            hint="drop this generation, and deploy it again without --copy-results, if it is to have them all",
        )
    copy = next(copy for copy in copies_between(description, spec.description()) if copy.table == name)
    names = {"source": sql.Identifier(source, name), "target": sql.Identifier(target, name)}
    if table_id not in plans:
        asked = {"after": done_to, "until": until, "rows": ROWS, "pieces": PIECES_MAX}
        found = await (await connection.execute(_PLAN.format(between=_BETWEEN, **names), asked)).fetchall()
        lengths = [longest for _, longest in found]
        bounds = [*[end for end, _ in found[:-1]], until]  # a correction may add a row behind the last one
        plans[table_id] = CopyPlan(bounds, None if None in lengths else max(lengths, default=None))
    plan = plans[table_id]
    bound = next(end for end in plan.bounds if end > done_to)
    begin = INSTANT_MIN if plan.longest is None else max(INSTANT_MIN, done_to - plan.longest)
    piece = {"after": done_to, "until": bound, "begin": begin}
    if partitioned:
        ends = await (await connection.execute(_ENDS.format(between=_PIECE, **names), piece)).fetchall()
        await _make_partitions(connection, table_id, [end for (end,) in ends])
    columns = sql.SQL(", ").join(map(sql.Identifier, copy.columns))
    query = _COPY.format(columns=columns, interval=sql.Literal(interval), between=_PIECE, **names)
    copied = await connection.execute(query, piece)
    await connection.execute(statement("advance_copy"), {"table_id": table_id, "copied_to": bound})
    return name, copied.rowcount, Instant(bound)


_BETWEEN = sql.SQL("window_end > mill.moment(%(after)s::bigint) AND window_end <= mill.moment(%(until)s::bigint)")
_PIECE = _BETWEEN + sql.SQL(
    " AND window_start >= mill.moment(%(begin)s::bigint) AND window_start < mill.moment(%(until)s::bigint)"
)
_PLAN = sql.SQL("""
WITH ends AS (
    SELECT window_end, count(*) AS n, bool_and(isfinite(window_start) AND isfinite(window_end)) AS finite,
           max(window_end - window_start) FILTER (WHERE isfinite(window_start) AND isfinite(window_end)) AS longest
      FROM {source} WHERE {between} GROUP BY window_end
), numbered AS (
    SELECT window_end, finite, longest,
           div(sum(n) OVER (ORDER BY window_end) - n, greatest(%(rows)s, sum(n) OVER () / %(pieces)s)) AS piece
      FROM ends
)
SELECT mill.instant(max(window_end)),
       CASE WHEN bool_and(finite) THEN (extract(epoch FROM max(longest)) * 1000000)::bigint END
  FROM numbered GROUP BY piece ORDER BY 1
""")
_ENDS = sql.SQL("SELECT DISTINCT mill.instant(window_end) FROM {source} WHERE {between}")
_COPY = sql.SQL(
    "INSERT INTO {target} ({columns}, emitted_at, interval_id, bundle)"
    " SELECT {columns}, emitted_at, {interval}, 0 FROM {source} WHERE {between}"
)


async def _closed_end(connection: Connection, graph_id: int, schema: str, table: str) -> Instant:
    """Return up to which end all windows of a table are closed; at most that of its newest row."""
    asked = {"graph_id": graph_id, "name": table}
    ((closed,),) = await all_rows(connection, statement("read_closed_end"), asked)
    query = sql.SQL("SELECT mill.instant(max(window_end)) FROM {}").format(sql.Identifier(schema, table))
    ((newest,),) = await (await connection.execute(query)).fetchall()
    return Instant(max(min(closed, newest), INSTANT_MIN)) if closed is not None and newest is not None else INSTANT_MIN


async def _make_partitions(connection: Connection, table_id: int, instants: Sequence[int]) -> None:
    """Make the partitions that rows need, of which each call makes some."""
    missing = list(instants)
    for _ in range(PARTITIONS_MAX):
        asked = {"table_id": table_id, "instants": Bigints(missing)}
        ranges = await all_rows(connection, statement("make_partitions"), asked)
        missing = [at for at in missing if not any(lo <= at < hi for lo, hi in ranges)]
        if not missing:
            return
