"""Rows of result tables that were changed, deleted and added, and whether an audit names them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import psycopg
from psycopg import sql
from psycopg.rows import dict_row

from millpy.model.deployment import TableSpec

NOBODY = "nobody"
Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Planted:
    """A difference that an audit has to name.

    Attributes:
        kind: "changed", "missing" or "added".
        row: what identifies the row: key and window, or all columns of a record.
        expected, stored: of a changed window, the column with its value before and after.
    """

    kind: str
    row: Row
    expected: Row
    stored: Row

    def is_named(self, found: Sequence[Row], *, with_records: bool) -> bool:
        """Tell whether one of the differences that an audit has found is this one."""
        return any(self._is(one) and (not with_records or self._has_records(one)) for one in found)

    def _is(self, found: Row) -> bool:
        if found["kind"] != self.kind or any(_text(found["row"][name]) != _text(self.row[name]) for name in self.row):
            return False
        return self.kind != "changed" or (found["expected"], found["stored"]) == (self.expected, self.stored)

    def _has_records(self, found: Row) -> bool:
        """Tell whether the difference comes with records, of this key only; an added row has none."""
        keys = {name: value for name, value in self.row.items() if not name.startswith("window_")}
        records = [json.loads(record) for record in found["records"]]
        return bool(records) != (self.kind == "added") and all(
            record[name] == value for record in records for name, value in keys.items()
        )


class Falsifier:
    """Changes, deletes and adds a row of each result table, and puts everything back.

    Args:
        url: the database.
        schema: the graph's schema.
    """

    def __init__(self, url: str, schema: str) -> None:
        self._connection = psycopg.connect(url, autocommit=True, row_factory=dict_row)
        self._connection.execute("SET timezone TO 'UTC'")
        self._schema = schema

    def falsify(self, table: TableSpec) -> list[Planted]:
        """Change a row, delete one and add one; return the differences."""
        windowed = table.kind == "windowed"
        identity = [key.name for key in table.keys] + ["window_start", "window_end"]
        if not windowed:
            identity = [value.name for value in table.values] + ["event_time"]
        floats = [value.name for value in table.values if value.sql_type == "double precision"]
        column = next(iter(floats), table.values[0].name)
        owner = next(one.name for one in (*table.keys, *table.values) if one.sql_type == "text")
        self._run("CREATE TABLE {saved} AS TABLE {table}", table)
        (changed, deleted, copied) = self._some_rows(table, identity, column)

        (now,) = self._run(
            "UPDATE {table} SET {column} = {column} + 1 WHERE ctid = %s::tid RETURNING *",
            table,
            column,
            changed["ctid"],
        )
        self._run("DELETE FROM {table} WHERE ctid = %s::tid RETURNING *", table, column, deleted["ctid"])
        added = {name: value for name, value in copied.items() if name != "ctid"} | {owner: NOBODY}
        added |= {} if windowed else {"ordinal": copied["ordinal"] + 1_000_000_000}
        names = sql.SQL(", ").join(map(sql.Identifier, added))
        values = sql.SQL(", ").join(sql.Placeholder() * len(added))
        self._connection.execute(
            sql.SQL("INSERT INTO {} ({}) VALUES ({})").format(self._name(table), names, values), list(added.values())
        )

        def planted(kind: str, row: Row, expected: Row | None = None, stored: Row | None = None) -> Planted:
            return Planted(kind, {name: row[name] for name in identity}, expected or {}, stored or {})

        found = [planted("missing", deleted), planted("added", added)]
        if windowed:
            return [*found, planted("changed", now, {column: changed[column]}, {column: now[column]})]
        return [*found, planted("missing", changed), planted("added", now)]

    def restore(self, table: TableSpec) -> None:
        """Put the rows of a table back."""
        self._run("TRUNCATE {table}", table)
        self._run("INSERT INTO {table} TABLE {saved}", table)
        self._run("DROP TABLE {saved}", table)

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()

    def _some_rows(self, table: TableSpec, identity: Sequence[str], column: str) -> list[Row]:
        """Return the first row, one in the middle, and the last, by what identifies them."""
        (of,) = self._run("SELECT count(*) AS rows FROM {table} WHERE {column} IS NOT NULL", table, column)
        order = ", ".join(f'"{name}"' for name in identity)
        query = f"SELECT ctid::text AS ctid, * FROM {{table}} WHERE {{column}} IS NOT NULL ORDER BY {order}"
        return [
            self._run(f"{query} LIMIT 1 OFFSET %s", table, column, at)[0] for at in (0, of["rows"] // 2, of["rows"] - 1)
        ]

    def _run(self, statement: str, table: TableSpec, column: str = "", *given: Any) -> list[Row]:
        composed = sql.SQL(statement).format(  # type: ignore[arg-type]
            table=self._name(table),
            saved=sql.Identifier(f"saved_{table.name}"),
            column=sql.Identifier(column or "none"),
        )
        found = self._connection.execute(composed, given or None)
        return found.fetchall() if found.description else []

    def _name(self, table: TableSpec) -> sql.Identifier:
        return sql.Identifier(self._schema, table.name)


def _text(value: Any) -> str:
    return str(value.isoformat()) if hasattr(value, "isoformat") else str(value)
