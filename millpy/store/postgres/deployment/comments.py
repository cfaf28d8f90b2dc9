"""The comments on a result table, its history, its status view and their columns, for psql and other tools."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from psycopg import sql

from millpy.model.deployment import PANE_INFO, TableSpec
from millpy.store.postgres.deployment.live_view import has_live_view, unread_columns
from millpy.store.postgres.history import RETRACTION, history_name

_COLUMNS = {
    "window_start": "Start of the window, included. Event time.",
    "window_end": "End of the window, excluded. Event time.",
    "pane_index": "Number of the pane among those of its window, from 0.",
    "pane_timing": "early: before the end of its window; on_time; late: with late records in it.",
    "late_count": "Number of late records that this window has taken.",
    "pane_on_time_index": "Number of the pane among those that are not early, from 0; -1 for an early pane.",
    "pane_last": "Whether no later pane of this window follows.",
    "event_time": "Event time of the record.",
    "ordinal": "Place of the row among those of its interval and bundle, from 0.",
    "emitted_at": "Time of the transaction that wrote the row, on the clock of the server.",
    "interval_id": "Technical: the interval of keys that wrote the row (millpy.watermarks).",
    "bundle": "Technical: the bundle of that interval that wrote the row.",
    "is_final": "Whether no record can change the row any more.",
    RETRACTION: "Whether the row takes back the pane of the same number.",
}


def create_schema(schema: str) -> sql.Composed:
    """Compose the statements that create a graph's schema. A schema that the user has made keeps its comment."""
    return sql.SQL("CREATE SCHEMA IF NOT EXISTS {name}; COMMENT ON SCHEMA {name} IS {text}").format(
        name=sql.Identifier(schema), text=sql.Literal("Result tables of a graph of millpy.")
    )


def table_comments(schema: str, table: TableSpec) -> sql.Composed:
    """Compose the statements that comment on a result table, its status view and its history, if it keeps one."""
    source = f"stream {table.stream!r} of computation {table.computation!r}"
    what = (
        "One row for each window of a key: its newest pane" if table.kind == "windowed" else "One row for each record"
    )
    relations = [
        ("TABLE", table.name, f"{what}. From {source}. Written by millpy."),
        ("VIEW", f"{table.name}_status", f"The rows of {table.name}, with is_final."),
    ]
    if has_live_view(table):
        text = f"The rows of {table.name}, and its open windows as they stand (pane_timing open)."
        relations.append(("VIEW", f"{table.name}_live", text))
    if table.history:
        text = f"Every pane and retraction of {table.name}, with the time of its commit. Read it with millpy.as_of."
        relations.append(("TABLE", history_name(table.name), text))
    lines: list[sql.Composable] = []
    for kind, name, text in relations:
        target = sql.Identifier(schema, name)
        lines.append(sql.SQL("COMMENT ON {} {} IS {}").format(sql.SQL(kind), target, sql.Literal(text)))
    lines += column_comments(schema, table, [column.name for column in table.columns()])
    added: dict[str, tuple[str, ...]] = {
        table.name: (),
        f"{table.name}_status": ("is_final",),
        f"{table.name}_live": ("is_final",),
        history_name(table.name): (RETRACTION,),
    }
    for _, name, _ in relations:
        for column in ("emitted_at", "interval_id", "bundle", *added[name]):
            lines.append(column_comment(schema, name, column, _COLUMNS[column]))
    return sql.SQL("; ").join(lines)


def column_comments(schema: str, table: TableSpec, columns: Sequence[str]) -> list[sql.Composed]:
    """Compose the statements that comment on columns of a spec, in each of its relations that has them."""
    relations = [table.name, f"{table.name}_status", *([history_name(table.name)] if table.history else [])]
    texts = dict(_meanings(table))
    comments = [column_comment(schema, relation, column, texts[column]) for relation in relations for column in columns]
    if has_live_view(table):
        unread = unread_columns(table)
        for column in columns:
            text = f"{texts[column]}{' NULL in open windows: SQL cannot read it there.' if column in unread else ''}"
            comments.append(column_comment(schema, f"{table.name}_live", column, text))
    return comments


def _meanings(table: TableSpec) -> Iterator[tuple[str, str]]:
    windowed = table.kind == "windowed"
    for column in table.columns():
        yield column.name, _COLUMNS.get(column.name, "")
    for column in table.keys:
        yield column.name, "Key of the window."
    for column in table.values:
        if not windowed:
            yield column.name, "Field of the record."
        elif column.name not in PANE_INFO:
            yield column.name, "Aggregate of the records of the window."


def view_comment(schema: str, view: str, text: str) -> sql.Composed:
    """Compose the statement that comments on a view."""
    return sql.SQL("COMMENT ON VIEW {} IS {}").format(sql.Identifier(schema, view), sql.Literal(text))


def column_comment(schema: str, relation: str, column: str, text: str) -> sql.Composed:
    """Compose the statement that comments on a column."""
    return sql.SQL("COMMENT ON COLUMN {} IS {}").format(sql.Identifier(schema, relation, column), sql.Literal(text))
