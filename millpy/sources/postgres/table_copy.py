"""The first copy of a table, along its primary key, in one snapshot as long as the connection lasts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import psycopg
from psycopg import sql

from millpy.sources.postgres.table_checks import SortColumn, TableFacts
from millpy.store.postgres.statements import statement

QUERY_ROWS_MAX = 1_000
"""Rows that one statement reads: by how many a piece may exceed its bounds where rows become large."""


@dataclass(frozen=True, slots=True)
class CopyPiece:
    """Rows that were copied.

    Attributes:
        columns: (name, OID of the type, whether it is part of the key) of each.
        rows: the values as text.
        keys: the key of each row, as text.
    """

    columns: Sequence[tuple[str, int, bool]]
    rows: list[Sequence[bytes | None]]
    keys: list[tuple[str, ...]]


@dataclass(frozen=True, slots=True)
class KeyRange:
    """The rows to read.

    Attributes:
        after: the key behind which they are; None for all.
        upto: the greatest key; None for all.
        of_one_value: whether to read only rows that have the value of `upto` in the first column.
    """

    after: tuple[str, ...] | None = None
    upto: tuple[str, ...] | None = None
    of_one_value: bool = False


def begin_snapshot(
    connection: psycopg.Connection[Any], table: sql.Identifier, *, is_partitioned: bool
) -> tuple[str, int, int]:
    """Begin the transaction of the copy. Return its snapshot, the position of the log behind it, and its time in µs.

    The table is locked first: a snapshot does not show the rows of a table that is truncated, or rewritten by ALTER
    TABLE, behind it. Without rights to all rows, the copy fails, because changes come of all rows.
    """
    connection.execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY; SET LOCAL row_security TO off")
    connection.execute(sql.SQL("LOCK TABLE {} IN ACCESS SHARE MODE").format(_rows_of(table, is_partitioned)))
    snapshot, until, at = connection.execute(statement("read_snapshot")).fetchone() or ("", 0, 0)
    return str(snapshot), int(until), int(at)


def _rows_of(table: sql.Identifier, is_partitioned: bool) -> sql.Composed:
    return sql.SQL("{}" if is_partitioned else "ONLY {}").format(table)


def pieces(
    connection: psycopg.Connection[Any],
    table: sql.Identifier,
    facts: TableFacts,
    wanted: KeyRange,
    *,
    rows_max: int,
    bytes_max: int,
) -> Iterator[CopyPiece]:
    """Yield the rows of a range, in pieces of about these bounds, which a statement exceeds by what it reads."""
    queries = [_query(table, facts, wanted, has_begun=has_begun).as_bytes(connection) for has_begun in (False, True)]
    after = wanted.after
    count, size, largest = min(QUERY_ROWS_MAX, rows_max), 0, 1
    piece = CopyPiece([], [], [])
    while True:
        given = {"count": count, **_bound(after or ()), **_bound(wanted.upto or (), "upto")}
        found = _read_rows(connection, queries[after is not None], given, facts)
        if found.columns != piece.columns and piece.rows:  # of a table that was altered
            yield piece
            piece, size = found, 0
        elif piece.rows:
            piece.rows.extend(found.rows)
            piece.keys.extend(found.keys)
        else:
            piece = found
        sizes = [sum(len(value or b"") for value in row) for row in found.rows]
        size, largest = size + sum(sizes), max(largest, *sizes, 1)
        is_end = len(found.rows) < count
        if piece.rows and (is_end or len(piece.rows) >= rows_max or size >= bytes_max):
            yield piece
            piece, size = CopyPiece([], [], []), 0
        if is_end:
            return
        after = found.keys[-1]
        count = max(1, min(QUERY_ROWS_MAX, rows_max - len(piece.rows), (bytes_max - size) // largest))


def _read_rows(
    connection: psycopg.Connection[Any],
    query: bytes,
    given: dict[str, Any],
    facts: TableFacts,
) -> CopyPiece:
    cursor = connection.execute(query, given, prepare=False)
    result = cursor.pgresult
    assert result is not None and cursor.description is not None
    named = [(column.name, column.type_code, column.name in facts.key_names) for column in cursor.description]
    places = [[name for name, _, _ in named].index(name) for name in facts.key_names]
    rows: list[Sequence[bytes | None]] = [
        [result.get_value(row, column) for column in range(len(named))] for row in range(result.ntuples)
    ]
    return CopyPiece(named, rows, [tuple((row[place] or b"").decode() for place in places) for row in rows])


def _query(table: sql.Identifier, facts: TableFacts, wanted: KeyRange, *, has_begun: bool) -> sql.Composed:
    key = [_name(column.name) for column in facts.key]
    conditions: list[sql.Composable] = [sql.SQL("true")]
    if has_begun:
        conditions.append(_is_behind(facts, key))
    if wanted.upto is not None:  # the first condition serves the index
        operator = "=" if wanted.of_one_value else "<="
        conditions.append(_compared(facts.key[0], key[0], operator, _given(facts.key[0], "upto0")))
        conditions.append(_is_before(facts, key, "upto"))
    return sql.SQL("SELECT {columns} FROM {table} WHERE {where} ORDER BY {key} LIMIT {count}").format(
        columns=sql.SQL(", ").join(map(_name, facts.columns)) if facts.columns else sql.SQL("*"),
        table=_doubled(_rows_of(table, facts.is_partitioned)),
        where=sql.SQL(" AND ").join(conditions),
        key=sql.SQL(", ").join(key),
        count=sql.Placeholder("count"),
    )


def is_upto(
    connection: psycopg.Connection[Any], facts: TableFacts, key: Sequence[str], bounds: Sequence[tuple[str, ...]]
) -> list[bool]:
    """Tell for each bound whether a key is at or before it, in the order of the table's types and collations."""
    values = [_given(column, f"value{place}") for place, column in enumerate(facts.key)]
    query = sql.SQL("SELECT NOT {}").format(_is_behind(facts, values))
    given = {f"value{place}": value for place, value in enumerate(key)}
    return [bool((connection.execute(query, given | _bound(bound)).fetchone() or (False,))[0]) for bound in bounds]


def equal_pairs(connection: psycopg.Connection[Any], column: SortColumn, pairs: Sequence[tuple[str, str]]) -> list[int]:
    """Return the places of pairs of texts that are equal values of a column, such as the numbers 1.0 and 1.00."""
    sides = [sql.SQL("CAST({} AS {})").format(sql.SQL(name), _doubled(column.type)) for name in ("one", "other")]
    if column.collation:
        sides = [sql.SQL("{} COLLATE {}").format(side, _doubled(column.collation)) for side in sides]
    query = sql.SQL(
        "SELECT place - 1 FROM ROWS FROM (unnest(%(ones)s::text[]), unnest(%(others)s::text[])) WITH ORDINALITY"
        " AS pair (one, other, place) WHERE {} ORDER BY place"
    ).format(_compared(column, sides[0], "=", sides[1]))
    given = {"ones": [one for one, _ in pairs], "others": [other for _, other in pairs]}
    return [int(place) for (place,) in connection.execute(query, given, prepare=False).fetchall()]


def _bound(values: Sequence[str], name: str = "bound") -> dict[str, str]:
    return {f"{name}{place}": value for place, value in enumerate(values)}


def _is_behind(facts: TableFacts, values: Sequence[sql.Composable], name: str = "bound") -> sql.Composed:
    """Return the condition that values are behind the bound of this name, in the order of the key."""
    bounds = [_given(column, f"{name}{place}") for place, column in enumerate(facts.key)]
    if _compare_as_rows(facts):
        return sql.SQL("({})").format(_compared(facts.key[0], _row(values), ">", _row(bounds)))
    *first, (column, value, bound) = zip(facts.key, values, bounds, strict=True)
    condition = _compared(column, value, ">", bound)
    for column, value, bound in reversed(first):
        condition = sql.SQL("({} AND ({} OR {}))").format(
            _compared(column, value, ">=", bound), _compared(column, value, ">", bound), condition
        )
    return condition


def _is_before(facts: TableFacts, values: Sequence[sql.Composable], name: str) -> sql.Composed:
    """Return the condition that values are at or before the bound of this name, in a form for which an index serves."""
    if not _compare_as_rows(facts):
        return sql.SQL("NOT {}").format(_is_behind(facts, values, name))
    bounds = [_given(column, f"{name}{place}") for place, column in enumerate(facts.key)]
    return sql.SQL("({})").format(_compared(facts.key[0], _row(values), "<=", _row(bounds)))


def _compare_as_rows(facts: TableFacts) -> bool:
    return len({column.operators for column in facts.key}) == 1


def _row(values: Sequence[sql.Composable]) -> sql.Composed:
    return sql.SQL("({})").format(sql.SQL(", ").join(values))


def _compared(column: SortColumn, left: sql.Composable, operator: str, right: sql.Composable) -> sql.Composed:
    """Compare by the operator of the column's type: the search path may have another one, such as that of text."""
    name = sql.SQL(operator)
    return sql.SQL("{} OPERATOR({}.{}) {}").format(left, _name(column.operators), name, right)


def _given(column: SortColumn, name: str) -> sql.Composed:
    type_, collation = _doubled(column.type), _doubled(column.collation or "")
    value = sql.SQL("CAST({}::text AS {})").format(sql.Placeholder(name), type_)
    return sql.SQL("{} COLLATE {}").format(value, collation) if column.collation else value


def _name(name: str) -> sql.SQL:
    """Return an identifier of a statement with parameters."""
    return _doubled(sql.Identifier(name))


def _doubled(part: sql.Composable | str) -> sql.SQL:
    """Return a part of a statement with parameters: in these, psycopg reads % as the begin of a placeholder."""
    text = part if isinstance(part, str) else part.as_string(None)
    return sql.SQL(text.replace("%", "%%"))
