"""The first copy of a table, along its primary key, in one snapshot as long as the connection lasts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import psycopg
from psycopg import sql

from millpy.sources.postgres.pgoutput import Value
from millpy.sources.postgres.table_checks import TableFacts
from millpy.store.postgres.statements import statement

FIRST_ROWS = 100
"""Rows of the first piece, by which the size of the next ones is chosen."""


@dataclass(frozen=True, slots=True)
class CopyPiece:
    """Rows that were copied.

    Attributes:
        columns: (name, OID of the type, whether it is part of the key) of each.
        rows: the values as text.
        keys: the key of each row, as text.
    """

    columns: Sequence[tuple[str, int, bool]]
    rows: Sequence[Sequence[Value]]
    keys: Sequence[tuple[str, ...]]


def begin_snapshot(connection: psycopg.Connection[Any]) -> tuple[str, int]:
    """Begin the transaction of the copy. Return its snapshot, and the position of the log behind it."""
    connection.execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
    snapshot, until = connection.execute(statement("read_snapshot")).fetchone() or ("", 0)
    return str(snapshot), int(until)


def pieces(
    connection: psycopg.Connection[Any],
    table: sql.Identifier,
    facts: TableFacts,
    after: tuple[str, ...] | None,
    *,
    rows_max: int,
    bytes_max: int,
    upto: str | None = None,
) -> Iterator[CopyPiece]:
    """Yield the rows behind a key, in pieces of at most about these bounds.

    `upto` is the greatest value of the key's first column; None for no bound.
    """
    count = min(FIRST_ROWS, rows_max)
    while True:
        given = [*(after or ()), *([] if upto is None else [upto]), count]
        query = _query(table, facts, has_begun=after is not None, has_end=upto is not None)
        cursor = connection.execute(query, given, prepare=False)
        result = cursor.pgresult
        assert result is not None and cursor.description is not None
        named = [(column.name, column.type_code, column.name in facts.key) for column in cursor.description]
        places = [[name for name, _, _ in named].index(name) for name in facts.key]
        rows = [[result.get_value(row, column) for column in range(len(named))] for row in range(result.ntuples)]
        keys = [tuple((row[place] or b"").decode() for place in places) for row in rows]
        if rows:
            yield CopyPiece(named, rows, keys)
            after = keys[-1]
        if len(rows) < count:
            return
        size = sum(len(value or b"") for row in rows for value in row) + len(rows)
        count = max(1, min(rows_max, 4 * count, bytes_max * len(rows) // size))


def _query(table: sql.Identifier, facts: TableFacts, *, has_begun: bool, has_end: bool) -> sql.Composed:
    key = sql.SQL(", ").join(map(sql.Identifier, facts.key))
    casts = [sql.SQL("CAST(%s::text AS {})").format(sql.SQL(type_)) for type_ in facts.key_types]
    conditions: list[sql.Composable] = []
    if has_begun:
        conditions.append(sql.SQL("({}) > ({})").format(key, sql.SQL(", ").join(casts)))
    if has_end:
        conditions.append(sql.SQL("{} <= {}").format(sql.Identifier(facts.key[0]), casts[0]))
    return sql.SQL("SELECT {columns} FROM {table} WHERE {where} ORDER BY {key} LIMIT %s").format(
        columns=sql.SQL(", ").join(map(sql.Identifier, facts.columns)),
        table=table,
        where=sql.SQL(" AND ").join([sql.SQL("true"), *conditions]),
        key=key,
    )


def is_upto(
    connection: psycopg.Connection[Any], facts: TableFacts, key: Sequence[str], bounds: Sequence[tuple[str, ...]]
) -> list[bool]:
    """Tell for each bound whether a key is at or before it, in the order of the table's types and collations."""
    side = sql.SQL(", ").join(sql.SQL("CAST(%s::text AS {})").format(sql.SQL(type_)) for type_ in facts.key_types)
    query = sql.SQL("SELECT ({}) <= ({})").format(side, side)
    return [bool((connection.execute(query, [*key, *bound]).fetchone() or (False,))[0]) for bound in bounds]
