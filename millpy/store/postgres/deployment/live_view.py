"""The view `…_live` of a result table of windows: its rows, and the windows that are open, as they stand.

SQL computes the results of open windows from their stored accumulators (`millpy.windows`), for the aggregates whose
accumulator has a `stored_form`. The others are NULL in rows of open windows, and their columns say so.

    a window without a pane, or with records since its newest one   one row of the state, `pane_timing` is open
    any other window                                                its row in the table

The view has its caller's rights, on the table and on `millpy.windows`. Row-level security knows nothing of state, so
where it applies, open windows are left out. A query reads all open windows of the table.
"""

from __future__ import annotations

from collections.abc import Sequence

from psycopg import sql

from millpy.model.deployment import PANE_INFO, ColumnSpec, TableSpec
from millpy.model.field_types import DAY_0, DIGITS_MAX

ENDING = "_live"
OPEN = "open"
"""The timing of a row of an open window."""
_SMALLEST = "4.94e-324"
_EXACT = 2**53
_VIEW = """
CREATE OR REPLACE VIEW {view} WITH (security_invoker) AS
WITH opened AS MATERIALIZED (
    SELECT {opened}
      FROM millpy.watermarks AS i
     CROSS JOIN LATERAL (SELECT * FROM millpy.windows AS o WHERE o.interval_id = i.interval_id OFFSET 0) AS w
     CROSS JOIN LATERAL (SELECT w.key::json AS key, w.value -> 'values' AS has, w.value AS pane) AS s
     WHERE i.computation = {computation} AND NOT row_security_active({table}::regclass)
       AND i.graph = (SELECT n.nspname FROM pg_class AS c JOIN pg_namespace AS n ON n.oid = c.relnamespace
                       WHERE c.oid = {table}::regclass)
       AND (NOT coalesce((s.pane ->> 'emitted')::boolean, false)
            OR coalesce((s.pane #>> '{{firing,since}}')::bigint, 0) > 0)
)
SELECT {columns} FROM {status} AS t
 WHERE NOT EXISTS (SELECT FROM opened AS o WHERE {same})
 UNION ALL
SELECT {columns} FROM opened AS t
"""


def has_live_view(table: TableSpec) -> bool:
    """Tell whether SQL can read the open windows of a table, and the result of at least one of their aggregates."""
    return table.kind == "windowed" and any(form for _, form in table.live)


def live_view(schema: str, table: TableSpec, columns: Sequence[str]) -> sql.Composed:
    """Compose the live view of a table that has one.

    Args:
        schema: the graph's schema.
        table: the table's spec.
        columns: the columns of its status view, in the order of the live view; a view that is replaced keeps its order.
    """
    identity = [*(column.name for column in table.keys), "window_start", "window_end"]
    meanings = _meanings(table)
    return sql.SQL(_VIEW).format(
        view=sql.Identifier(schema, f"{table.name}{ENDING}"),
        status=sql.Identifier(schema, f"{table.name}_status"),
        table=sql.Literal(sql.Identifier(schema, table.name).as_string()),
        computation=sql.Literal(table.computation),
        columns=sql.SQL(", ").join(sql.Identifier("t", name) for name in columns),
        opened=sql.SQL(", ").join(sql.SQL("{} AS {}").format(meanings[name], sql.Identifier(name)) for name in columns),
        same=sql.SQL(" AND ").join(
            sql.SQL("{} = {}").format(sql.Identifier("o", name), sql.Identifier("t", name)) for name in identity
        ),
    )


def unread_columns(table: TableSpec) -> list[str]:
    """Return the names of the columns that are NULL in rows of open windows."""
    return [column.name for column, (_, form) in zip(table.values, table.live, strict=False) if not _form(column, form)]


def _form(column: ColumnSpec, form: str) -> str:
    """Return the stored form that SQL can read; a JSON value may be stored in more than one way."""
    return "" if column.sql_type == "jsonb" else form


def _meanings(table: TableSpec) -> dict[str, sql.Composable]:
    """Return the expression of each column in rows of open windows."""
    found: dict[str, sql.Composable] = {
        "window_start": sql.SQL("w.window_start"),
        "window_end": sql.SQL("w.window_end"),
        "pane_index": sql.SQL("coalesce((s.pane ->> 'pane_index')::bigint, 0)"),
        "pane_timing": sql.SQL("{}::text").format(sql.Literal(OPEN)),
        "late_count": sql.SQL("coalesce((s.pane ->> 'late_count')::bigint, 0)"),
        "emitted_at": sql.SQL("now()"),
        "interval_id": sql.SQL("w.interval_id"),
        "bundle": sql.SQL("coalesce((s.pane ->> 'bundle')::bigint, 0)"),
        "is_final": sql.SQL("false"),
    }
    for place, column in enumerate(table.keys):
        text = (
            sql.SQL("(s.key ->> {})").format(sql.Literal(place)) if len(table.keys) > 1 else sql.SQL("(s.key #>> '{}')")
        )
        found[column.name] = _value(text, column.sql_type, is_key=True)
    for column, (place, form) in zip(table.values, table.live, strict=False):
        found[column.name] = _result(column, place, _form(column, form))
    for column in table.values[len(table.live) :]:
        assert column.name in PANE_INFO, column
        found[column.name] = sql.SQL("NULL::{}").format(sql.SQL(column.sql_type))
    return found


def _result(column: ColumnSpec, place: int, form: str) -> sql.Composable:
    """Compose the result of an aggregate whose accumulator is at a place; the forms are those of `Accumulator`."""
    part = sql.SQL("(s.has #>> {})")
    if form == "value":
        return _value(part.format(sql.Literal(f"{{{place}}}")), column.sql_type)
    if form == "timed value":
        return _value(part.format(sql.Literal(f"{{{place},1}}")), column.sql_type)
    if not form:
        return sql.SQL("NULL::{}").format(sql.SQL(column.sql_type))
    total, count = (part.format(sql.Literal(f"{{{place},{at}}}")) for at in (0, 1))
    # A double divided by a count, rounded once. PostgreSQL raises an error where the result is too small for a double.
    total_text = total
    total, count = (sql.SQL("{}::double precision").format(text) for text in (total, count))
    divided = sql.SQL(
        "CASE WHEN abs({total}) >= 1e-300 THEN {total} / {count}"
        " WHEN abs({total}) * 2 <= {count} * {smallest}::double precision THEN 0 ELSE {total} / {count} END"
    ).format(total=total, count=count, smallest=sql.Literal(_SMALLEST))
    if form == "mean of integers":
        # Python divides integers without rounding them first.
        divided = sql.SQL(
            "CASE WHEN abs({total}::numeric) <= {exact} THEN {divided}"
            " ELSE ({total}::numeric(1000, 30) / {count}::numeric)::double precision END"
        ).format(total=total_text, count=count, exact=sql.Literal(_EXACT), divided=divided)
    else:
        assert form == "mean", form
    return sql.SQL("CASE WHEN {} > 0 THEN {} END").format(count, divided)


def _value(text: sql.Composable, sql_type: str, *, is_key: bool = False) -> sql.Composable:
    """Compose a value of a type from its JSON text, which is that of `plain_value`; but a time in a key is text."""
    if sql_type == "timestamptz" and not is_key:
        return sql.SQL("mill.moment({}::bigint)").format(text)
    if sql_type == "decimal":
        return sql.SQL("trim_scale({}::numeric * {}::numeric)").format(text, sql.Literal(f"1e-{DIGITS_MAX}"))
    if sql_type == "date":
        return sql.SQL("({}::date + {}::integer)").format(sql.Literal(DAY_0.isoformat()), text)
    if sql_type == "bytea":
        return sql.SQL("decode({}, 'base64')").format(text)
    return sql.SQL("{}::{}").format(text, sql.SQL(sql_type))
