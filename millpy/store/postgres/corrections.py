"""Corrections of finished windows by late records: reading the rows, and recording the change in a commit.

The commit locks the row, and compares it with the one that the owner read: a row that somebody else changed meanwhile
voids the turn, like a request that was withdrawn, and the owner reads it again. `mill.corrections` gets both rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from psycopg import sql

from millpy.model.checkpoint import Checkpoint, PastWindow, Request, RequestOutcome
from millpy.model.time import INSTANT_MIN
from millpy.store.postgres.arrays import Bigints, Booleans, Texts
from millpy.store.postgres.connection import Connection, all_rows
from millpy.store.postgres.history import history_name
from millpy.store.postgres.results import ResultTable
from millpy.store.postgres.statements import statement

_READ = """
SELECT l.late_record_id, to_jsonb(t.*)::text, {newest}, coalesce(l.recomputed -> 'row' = to_jsonb(t.*), false)
  FROM mill.late_records AS l JOIN {table} AS t ON {same} WHERE l.late_record_id = ANY (%(ids)s)
"""
_OVERLAPPING = """
SELECT l.late_record_id, to_jsonb(t.*)::text, {newest}
  FROM mill.late_records AS l
 CROSS JOIN LATERAL (SELECT t.* FROM {table} AS t
                      WHERE {same} AND t.window_start < mill.moment(l.window_end)
                        AND t.window_end > mill.moment(l.window_start)
                      ORDER BY t.window_start, t.window_end LIMIT 2) AS t
 WHERE l.late_record_id = ANY (%(ids)s)
 ORDER BY l.late_record_id, t.window_start, t.window_end
"""
# `FOR UPDATE` gives the newest version of a row that another transaction has just changed.
_BEGIN = """
WITH sent AS (
    SELECT * FROM unnest(%s::bigint[], %s::bigint[], %s::bigint[], %s::bigint[], %s::bigint[], %s::text[],
                         %s::boolean[])
        AS e (late_record_id, window_start, window_end, interval_id, bundle, old_row, recomputed)
), found AS (
    SELECT l.late_record_id, to_jsonb(t.*) AS old_row
      FROM sent AS w JOIN mill.late_records AS l USING (late_record_id) JOIN {table} AS t ON {same} FOR UPDATE OF t
), noted AS (
    INSERT INTO mill.corrections (graph_id, table_name, key, window_start, window_end, late_record_id, dead_letter_id,
                                  recomputed, bundle, old_row, why, requested_by)
    SELECT i.graph_id, {name}, l.key, s.window_start, s.window_end, l.late_record_id, l.dead_letter_id, s.recomputed,
           s.bundle, f.old_row, l.why, l.requested_by
      FROM sent AS s
      JOIN mill.late_records AS l USING (late_record_id)
      JOIN mill.intervals AS i ON i.interval_id = s.interval_id
      LEFT JOIN found AS f USING (late_record_id)
     WHERE f.old_row IS NOT DISTINCT FROM s.old_row::jsonb
    RETURNING 1
)
SELECT mill.check_settled((SELECT count(*) FROM noted), (SELECT count(*) FROM sent))
"""
# A repair adds panes to a history, but not to the table: its next pane comes behind them.
_SKIP = """
UPDATE {table} AS t SET pane_index = w.pane
  FROM unnest(%s::bigint[], %s::bigint[], %s::bigint[], %s::bigint[])
       AS w (late_record_id, window_start, window_end, pane)
  JOIN mill.late_records AS l USING (late_record_id)
 WHERE {same} AND t.pane_index < w.pane
"""
_NEWEST = "(SELECT coalesce(max(h.pane_index), -1) FROM {history} AS h WHERE {own})"
_END = """
WITH made AS (
    UPDATE mill.corrections AS c SET new_row = to_jsonb(t.*)
      FROM unnest(%s::bigint[], %s::bigint[], %s::bigint[]) AS w (late_record_id, window_start, window_end)
      JOIN mill.late_records AS l USING (late_record_id)
      LEFT JOIN {table} AS t ON {same}
     WHERE c.late_record_id = l.late_record_id AND c.new_row IS NULL
    RETURNING c.*
)
INSERT INTO mill.events (graph_id, kind, detail) SELECT graph_id, 'corrected', mill.correction(made) FROM made
"""

Command = tuple[bytes, list[Any]]


async def with_windows(
    connection: Connection, requests: Sequence[Request], numbers: set[int], tables: Mapping[int, ResultTable]
) -> list[Request]:
    """Add their windows and rows to the requests with these numbers, which are for finished windows."""
    if not numbers:
        return list(requests)
    found = await all_rows(connection, statement("read_past_windows"), {"letters": Bigints(sorted(numbers))})
    by_table: dict[int, list[int]] = {}
    for number, *_, table_id, _ in found:
        if table_id in tables:
            by_table.setdefault(table_id, []).append(number)
    of_rows: dict[int, dict[str, Any]] = {}
    for table_id, of_table in by_table.items():
        of_rows |= await _rows_of(connection, tables[table_id], of_table)
    # After the rows: a partition that was dropped before they were read shows here.
    dropped = await all_rows(connection, statement("read_dropped_to"), {"tables": Bigints(list(by_table))})
    dropped_to: dict[int, int] = dict(dropped)
    windows: dict[int, PastWindow] = {}
    for number, key, start, end, whole, table_id, recomputed in found:
        window = PastWindow(key.encode(), start, end, whole, table_id=table_id if table_id in tables else None)
        given = None if recomputed is None else recomputed.encode()
        gone = dropped_to.get(table_id, INSTANT_MIN)
        windows[number] = replace(window, dropped_to=gone, recomputed=given, **of_rows.get(number, {}))
    answer = []
    for request in requests:
        if request.table != "late_records" or request.id not in numbers:
            answer.append(request)
        elif request.id in windows:  # else it was withdrawn between the statements
            answer.append(replace(request, window=windows[request.id]))
    return answer


async def _rows_of(connection: Connection, table: ResultTable, numbers: Sequence[int]) -> dict[int, dict[str, Any]]:
    """Return what the table has of the windows of late records, as attributes of `PastWindow`."""
    found: dict[int, dict[str, Any]] = {}
    for number, row, newest, fits in await all_rows(connection, _composed(_READ, table), {"ids": Bigints(numbers)}):
        found[number] = {"row": row.encode(), "newest_pane": newest, "recomputed_fits": fits}
    without = Bigints([number for number in numbers if number not in found])
    if len(found) < len(numbers):
        query = _composed(_OVERLAPPING, table, bounds="")
        for number, row, newest in await all_rows(connection, query, {"ids": without}):
            others = found.setdefault(number, {"overlapping": ()})
            others["overlapping"] = (*others["overlapping"], (row.encode(), newest))
    return found


def tables_of(checkpoints: Sequence[Checkpoint]) -> set[int]:
    """Return the result tables whose rows are corrected."""
    windows = [s.request.window for c in checkpoints for s in c.outcomes if s.corrects and s.request.window is not None]
    return {window.table_id for window in windows if window.table_id is not None}


def record(checkpoints: Sequence[Checkpoint], tables: Mapping[int, ResultTable]) -> tuple[list[Command], list[Command]]:
    """Return the statements that check and note the rows before they are written, and those that note them after."""
    by_table: dict[int, list[tuple[Checkpoint, RequestOutcome, PastWindow]]] = {}
    for checkpoint in checkpoints:
        for outcome in checkpoint.outcomes:
            window = outcome.request.window
            if outcome.corrects and window is not None and window.table_id is not None:
                by_table.setdefault(window.table_id, []).append((checkpoint, outcome, window))
    before: list[Command] = []
    after: list[Command] = []
    for table_id, made in sorted(by_table.items()):
        windows = [
            Bigints([outcome.request.id for _, outcome, _ in made]),
            Bigints([window.start for _, _, window in made]),
            Bigints([window.end for _, _, window in made]),
        ]
        parameters = [
            *windows,
            Bigints([checkpoint.grant.interval_id for checkpoint, _, _ in made]),
            Bigints([checkpoint.bundle for checkpoint, _, _ in made]),
            Texts([None if window.row is None else window.row.decode() for _, _, window in made]),
            Booleans([window.recomputed_fits for _, _, window in made]),
        ]
        before.append((_composed(_BEGIN, tables[table_id], bounds="w"), parameters))
        if tables[table_id].history is not None:
            panes = Bigints([window.newest_pane for _, _, window in made])
            before.append((_composed(_SKIP, tables[table_id], bounds="w"), [*windows, panes]))
        after.append((_composed(_END, tables[table_id], bounds="w"), windows))
    return before, after


def _composed(query: str, table: ResultTable, bounds: str = "l") -> bytes:
    """Compose a statement that joins late records (l) with rows (t): of the windows `bounds`, or of their keys."""
    key = sql.SQL("l.key::jsonb" if len(table.keys) > 1 else "jsonb_build_array(l.key::jsonb)")
    conditions: list[sql.Composable] = []
    for place, column in enumerate(table.keys):
        text = sql.SQL("{} ->> {}").format(key, sql.Literal(place))
        if column.sql_type == "bytea":
            value = sql.SQL("decode({}, 'base64')").format(text)
        else:
            value = sql.SQL("CAST({} AS {})").format(text, sql.SQL(column.sql_type))
        conditions.append(sql.SQL("t.{} = {}").format(sql.Identifier(column.name), value))
    newest: sql.Composable = sql.SQL("-1::bigint")
    if table.history is not None:
        identity = [*(column.name for column in table.keys), "window_start", "window_end"]
        names = map(sql.Identifier, identity)
        own = sql.SQL(" AND ").join(sql.SQL("h.{0} = t.{0}").format(name) for name in names)
        history = sql.Identifier(table.schema, history_name(table.name))
        newest = sql.SQL(_NEWEST).format(history=history, own=own)
    if bounds:
        of = sql.Identifier(bounds)
        conditions.append(sql.SQL("t.window_start = mill.moment({}.window_start)").format(of))
        conditions.append(sql.SQL("t.window_end = mill.moment({}.window_end)").format(of))
    return (
        sql.SQL(query)
        .format(
            table=sql.Identifier(table.schema, table.name),
            name=sql.Literal(table.name),
            newest=newest,
            same=sql.SQL(" AND ").join(conditions),
        )
        .as_bytes()
    )
