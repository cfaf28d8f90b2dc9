"""Result tables for operators: list them, select rows by key and time, follow new rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from sqlalchemy import (
    BigInteger,
    Boolean,
    ColumnClause,
    Date,
    Double,
    Interval,
    LargeBinary,
    Numeric,
    Select,
    Text,
    and_,
    asc,
    cast,
    column,
    desc,
    func,
    literal,
    literal_column,
    or_,
    select,
    table,
    tuple_,
)
from sqlalchemy.dialects.postgresql import JSONB, TIMESTAMP, UUID
from sqlalchemy.sql.elements import ColumnElement

from millpy.admin.pages import BYTES_MAX, RowPage, cut
from millpy.admin.queries import Admin, Row
from millpy.errors import UsageError

_TYPES: Mapping[str, Any] = {
    "text": Text(),
    "bigint": BigInteger(),
    "numeric": Numeric(),
    "decimal": Numeric(),
    "double precision": Double(),
    "boolean": Boolean(),
    "bytea": LargeBinary(),
    "timestamptz": TIMESTAMP(timezone=True),
    "date": Date(),
    "uuid": UUID(as_uuid=False),
    "jsonb": JSONB(),
}
TABLES = """
    SELECT graph, name, kind, computation, key_columns, value_columns, current,
           CAST(extract(epoch FROM allowed_lateness) * 1000000 AS bigint) AS allowed_lateness_us
      FROM millpy.result_tables JOIN millpy.graphs USING (graph) ORDER BY graph, name
"""
LIVE_VIEW = """
SELECT to_regclass(format('%I.%I', CAST(:graph AS text), CAST(:name AS text) || '_live')) IS NOT NULL AS found
"""
LAST_PAGES = """
SELECT CASE WHEN c.relkind = 'r'
            THEN greatest(0, pg_relation_size(c.oid) / current_setting('block_size')::bigint - 32) END AS page,
       CAST(now() AS text) AS moment
  FROM pg_class AS c JOIN pg_namespace AS n ON n.oid = c.relnamespace
 WHERE n.nspname = CAST(:schema AS text) AND c.relname = CAST(:name AS text)
"""
SPANS = ("1 minute", "8 minutes", "1 hour", "8 hours", "64 hours", "21 days", "6 months")
"""How much of a large table is looked through for the newest rows, one after another, and then all of it."""
HISTORY = """
SELECT coalesce(has_table_privilege(to_regclass(format('%I.%I', CAST(:graph AS text), CAST(:history AS text))),
                                    'SELECT'), false) AS readable
"""
PROGRESS = "SELECT interval_id, bundle FROM millpy.watermarks WHERE graph = :graph AND computation = :computation"


@dataclass(frozen=True, slots=True)
class DeployedTable:
    """A deployed result table.

    Attributes:
        kind: windowed or records.
        keys: name -> SQL type of the key columns; empty for records.
        values: name -> SQL type of the value columns.
        current: whether it belongs to the generation that has the graph's name.
        allowed_lateness_us: how long after its end a window still takes late records, or less.
    """

    graph: str
    name: str
    kind: str
    computation: str
    keys: Mapping[str, str]
    values: Mapping[str, str]
    current: bool = True
    allowed_lateness_us: int = 0

    @property
    def time(self) -> str:
        """Return the time column: a window's start, or a record's event time."""
        return "window_start" if self.kind == "windowed" else "event_time"

    @property
    def identity(self) -> tuple[str, ...]:
        """Return the columns that identify a row."""
        if self.kind == "windowed":
            return (*self.keys, "window_start", "window_end")
        return ("interval_id", "bundle", "ordinal")

    @property
    def columns(self) -> tuple[str, ...]:
        """Return all columns in the table's order, then `is_final`."""
        written = ("emitted_at", "interval_id", "bundle", "is_final")
        if self.kind == "records":
            return (*self.values, "event_time", "ordinal", *written)
        window = ("window_start", "window_end", *self.values, "pane_index", "pane_timing", "late_count")
        return (*self.keys, *window, *written)

    def type_of(self, name: str) -> str:
        """Return the SQL type of a key or value column.

        Raises:
            UsageError: the table has no such column.
        """
        types = {**self.keys, **self.values}
        if name not in types:
            raise UsageError(f"{self.graph}.{self.name} has no column {name!r}", hint=f"it has: {', '.join(types)}")
        return types[name]

    def type_in_order(self, name: str) -> Any:
        """Return the type of a column of `identity` or of `time`."""
        if name in ("window_start", "window_end", "event_time"):
            return TIMESTAMP(timezone=True)
        return BigInteger() if name in ("interval_id", "bundle", "ordinal") else _TYPES[self.type_of(name)]


@dataclass(frozen=True, slots=True, kw_only=True)
class RowFilter:
    """Selects the newest `limit` rows with these values in the time span [start, end).

    Attributes:
        values: column -> value, as text that PostgreSQL reads.
        start, end: times as text that PostgreSQL reads; empty for no bound.
        final: whether the rows must be final, or must not be; None for both.
        after: only rows behind this one in the order of `newest`: its time, then its other identifying columns, as
            text; empty for all.
    """

    values: Mapping[str, str]
    start: str = ""
    end: str = ""
    final: bool | None = None
    after: Sequence[str] = ()
    limit: int


def result_tables(admin: Admin) -> list[DeployedTable]:
    """Return the result tables of all graphs."""
    return [
        DeployedTable(
            row["graph"],
            row["name"],
            row["kind"],
            row["computation"],
            {name: kind for name, kind, _ in row["key_columns"]},
            {name: kind for name, kind, _ in row["value_columns"]},
            row["current"],
            row["allowed_lateness_us"],
        )
        for row in admin.ask(TABLES)
    ]


def newest(admin: Admin, result_table: DeployedTable, wanted: RowFilter) -> list[Row]:
    """Return the newest rows by time, oldest first. Rows that are not final include the open windows as they stand.

    Raises:
        UsageError: a column is unknown, a value does not fit its type, or the table is too large for one scan.
    """
    if wanted.final is False and admin.ask(LIVE_VIEW, graph=result_table.graph, name=result_table.name)[0]["found"]:
        order = _newest_first([column(name) for name in _names_in_order(result_table)])
        selected = _select(result_table, wanted, "_live").order_by(*order).limit(wanted.limit)
        return _in_time(result_table, admin.select(selected))
    found: list[Row] = []
    after: Sequence[str] | None = ()
    while after is not None and len(found) < wanted.limit:
        more = page(admin, result_table, replace(wanted, after=after, limit=wanted.limit - len(found)))
        found += more.rows
        after = more.next
    return _in_time(result_table, found)


def page(admin: Admin, result_table: DeployedTable, wanted: RowFilter) -> RowPage:
    """Return a page of rows in the order of `newest`: the newest first, behind `wanted.after`.

    Of a large table, only the newest minutes are sorted if they have enough rows, and otherwise more and more of what
    lies before them.

    Raises:
        UsageError: a column is unknown, a value does not fit its type, or the table is too large for one scan.
    """
    if wanted.after and len(wanted.after) != len(result_table.identity) + (result_table.kind != "windowed"):
        raise UsageError("the cursor belongs to another table", hint="begin without a cursor")
    last = wanted.after[0] if wanted.after else _newest_time(admin, result_table, wanted)
    rows: list[Row] = []
    size, upper = 0, ""
    for span in (*SPANS, "") if last else ("",):
        missing = replace(wanted, limit=wanted.limit - len(rows))
        found = admin.select(_page_statement(result_table, missing, (last, span, upper)))
        rows += found
        size += found[-1]["page_bytes"] if found else 0
        if found and (found[0]["page_found"] > min(len(found), missing.limit) or size >= BYTES_MAX):
            return cut([{**row, "page_found": len(rows) + 1} for row in rows], wanted.limit)
        upper = span
    return cut([{**row, "page_found": len(rows)} for row in rows], wanted.limit)


def _names_in_order(result_table: DeployedTable) -> list[str]:
    """Return the columns by which rows are in order: the time first."""
    return [result_table.time, *(name for name in result_table.identity if name != result_table.time)]


def _newest_first(keys: Sequence[ColumnElement[Any]]) -> list[ColumnElement[Any]]:
    return [desc(keys[0]), *map(asc, keys[1:])]


def _newest_time(admin: Admin, result_table: DeployedTable, wanted: RowFilter) -> str:
    """Return a time that is about that of the newest row, by those that were written last; empty if none is known.

    The column's index (BRIN) finds spans of time, and not the greatest one.
    """
    if next(iter(result_table.keys), "") in wanted.values:
        return ""  # the primary key finds the rows of a key
    found = admin.ask(LAST_PAGES, schema=result_table.graph, name=result_table.name)
    if not found or found[0]["page"] is None:  # a table with partitions, which a retention keeps near to the present
        return str(found[0]["moment"]) if found else ""
    written = table(result_table.name, column("ctid"), column(result_table.time), schema=result_table.graph)
    time: ColumnElement[Any] = func.max(written.c[result_table.time])
    if wanted.end:
        time = func.least(time, cast(literal(wanted.end, Text), TIMESTAMP(timezone=True)))
    beginning: ColumnElement[Any] = literal_column(f"CAST('({int(found[0]['page'])},0)' AS tid)")
    (row,) = admin.select(select(cast(time, Text).label("newest")).where(written.c.ctid >= beginning))
    return str(row["newest"] or "")


def _page_statement(result_table: DeployedTable, wanted: RowFilter, span: tuple[str, str, str]) -> Select[Any]:
    """Return the statement of a page.

    Args:
        result_table: the table.
        wanted: which of its rows.
        span: a time, and how much older the rows are at most, and more than at least; both empty for any.
    """
    names = _names_in_order(result_table)
    keys: list[ColumnElement[Any]] = [column(name) for name in names]
    cursor = func.jsonb_build_array(*(cast(key, Text) for key in keys)).label("page_cursor")
    chosen = _select(result_table, wanted).add_columns(cursor)
    if wanted.after:
        last = [
            cast(literal(text, Text), result_table.type_in_order(name))
            for name, text in zip(names, wanted.after, strict=True)
        ]
        chosen = chosen.where(or_(keys[0] < last[0], and_(keys[0] == last[0], tuple_(*keys[1:]) > tuple_(*last[1:]))))
        chosen = chosen.where(keys[0] <= last[0])  # for the index
    newest_time, most, least = span
    reference: ColumnElement[Any] = cast(literal(newest_time, Text), TIMESTAMP(timezone=True))
    if most:
        chosen = chosen.where(keys[0] >= reference - cast(literal(most, Text), Interval))
    if least:
        chosen = chosen.where(keys[0] < reference - cast(literal(least, Text), Interval))
    rows = chosen.order_by(*_newest_first(keys)).limit(wanted.limit + 1).subquery("page rows")
    over: dict[str, Any] = {"order_by": _newest_first([rows.c[name] for name in names])}
    size = func.octet_length(cast(literal_column('"page rows"'), Text))
    numbered = select(
        *rows.c,
        func.row_number().over(**over).label("page_row"),
        func.count().over().label("page_found"),
        func.sum(size).over(**over).label("page_bytes"),
    ).subquery("numbered")
    kept = or_(numbered.c.page_row == 1, numbered.c.page_bytes <= BYTES_MAX)
    return select(*numbered.c).where(kept).order_by(numbered.c.page_row)


def panes(admin: Admin, result_table: DeployedTable, wanted: RowFilter) -> list[Row]:
    """Return panes of windows, the newest window first: all of a table with a history, and else the newest of each.

    Rows of a history have `is_retraction`, the others `is_final`.

    Raises:
        UsageError: a column is unknown, or a value does not fit its type.
    """
    kept = admin.ask(HISTORY, graph=result_table.graph, history=f"{result_table.name}_history")[0]["readable"]
    names = (*result_table.columns[:-1], "is_retraction" if kept else "is_final")
    chosen = _select(result_table, wanted, "_history" if kept else "_status", names)
    order: list[ColumnElement[Any]] = [
        desc(column(result_table.time)),
        *(asc(column(name)) for name in result_table.identity),
    ]
    if kept:
        order += [asc(column("pane_index")), asc(column("is_retraction"))]
    return admin.select(chosen.order_by(*order).limit(wanted.limit))


def progress(admin: Admin, result_table: DeployedTable) -> dict[int, int]:
    """Return the newest committed bundle of every interval that writes the table."""
    rows = admin.ask(PROGRESS, graph=result_table.graph, computation=result_table.computation)
    return {row["interval_id"]: row["bundle"] for row in rows}


def written_since(
    admin: Admin, result_table: DeployedTable, wanted: RowFilter, bundles: Mapping[int, int]
) -> list[Row]:
    """Return the rows written by bundles after these, in order of time; all of them, whatever `limit` says.

    An interval's bundles commit in order (I2), so no row is missed.
    """
    newer = or_(
        *(
            and_(column("interval_id") == literal(interval, BigInteger), column("bundle") > literal(bundle, BigInteger))
            for interval, bundle in bundles.items()
        )
    )
    order: list[ColumnElement[Any]] = [asc(column(name)) for name in result_table.identity]
    return _in_time(result_table, admin.select(_select(result_table, wanted).where(newer).order_by(*order)))


def _select(
    result_table: DeployedTable, wanted: RowFilter, ending: str = "_status", names: Sequence[str] = ()
) -> Select[Any]:
    names = names or result_table.columns
    view = table(f"{result_table.name}{ending}", *map(column, names), schema=result_table.graph)
    conditions: list[ColumnElement[bool]] = [
        column(name) == cast(literal(text, Text), _TYPES[result_table.type_of(name)])
        for name, text in wanted.values.items()
    ]
    moment = TIMESTAMP(timezone=True)
    if wanted.start:
        conditions.append(column(result_table.time) >= cast(literal(wanted.start, Text), moment))
    if wanted.end:
        conditions.append(column(result_table.time) < cast(literal(wanted.end, Text), moment))
    if wanted.final is not None:
        conditions.append(column("is_final") == literal(wanted.final, Boolean))
    if wanted.final and result_table.kind == "windowed":
        conditions.append(column(result_table.time) < _final_before(result_table))
    return select(*view.columns).where(*conditions)


def _final_before(result_table: DeployedTable) -> ColumnElement[Any]:
    """Return a time at which no window is final that begins then or later, for the index of the time.

    It is that of all intervals, because rows may have those of another generation; a millisecond more for the rounding.
    """
    watermark: ColumnClause[Any] = column("input_watermark")
    floor: ColumnClause[Any] = column("horizon_floor")
    horizon_us = func.max(func.greatest(watermark - result_table.allowed_lateness_us, floor))
    seconds = func.greatest(horizon_us, 0) / 1e6 + 0.001
    return (
        select(func.to_timestamp(seconds))
        .select_from(table("input_watermarks", watermark, floor, schema="millpy"))
        .scalar_subquery()
    )


def _in_time(result_table: DeployedTable, rows: Sequence[Row]) -> list[Row]:
    return sorted(rows, key=lambda row: str(row[result_table.time]))  # rows of one time keep the order of their keys
