"""Reads a table in bounded pieces by its primary key, as Arrow. Each piece is one statement, so one short snapshot.

Columns come over by COPY in PostgreSQL's binary format and become Arrow in the driver (ADBC); no Python runs per row.
The driver's own interface is used, not its DB-API: that one imports polars and pandas where there are any, in each of
the processes that Spark starts for a query.
"""

from __future__ import annotations

import datetime as dt
import json
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import adbc_driver_manager as adbc
import adbc_driver_postgresql
import pyarrow as pa

from millpy.errors import ConfigError, StoreUnavailableError

SNAPSHOT_S_MAX = 5.0
PIECE_ROWS_MIN = 100
_PASSWORD = re.compile(r"(//[^/:@\s]*):[^@\s]*@")
SAMPLE_ROWS = 2_000
SMALL_ROWS = 20_000
"""A table with fewer rows, as far as the server knows, is not cut."""

Position = tuple[str, ...]
_ARROW_TYPES: dict[str, pa.DataType] = {
    "bigint": pa.int64(),
    "integer": pa.int32(),
    "smallint": pa.int16(),
    "double precision": pa.float64(),
    "real": pa.float32(),
    "boolean": pa.bool_(),
    "bytea": pa.binary(),
    "timestamp with time zone": pa.timestamp("us", "UTC"),
}
"""Any other type is read as the text that PostgreSQL makes of it."""

_COLUMNS = """
SELECT a.attname::text, format_type(a.atttypid, NULL), a.attnotnull
  FROM pg_attribute AS a WHERE a.attrelid = to_regclass({name}) AND a.attnum > 0 AND NOT a.attisdropped
 ORDER BY a.attnum
"""
_KEY = """
SELECT a.attname::text
  FROM pg_index AS i
 CROSS JOIN unnest(i.indkey::int[]) WITH ORDINALITY AS k (attnum, place)
  JOIN pg_attribute AS a ON a.attrelid = i.indrelid AND a.attnum = k.attnum
 WHERE i.indrelid = to_regclass({name}) AND i.indisprimary ORDER BY k.place
"""
_NEIGHBOURS = """
SELECT c.relname::text FROM pg_class AS c JOIN pg_namespace AS n ON n.oid = c.relnamespace
 WHERE n.nspname = {schema} AND c.relkind = 'r' ORDER BY 1
"""
_SIZE = """
SELECT greatest(c.reltuples, pg_relation_size(c.oid) / 200.0)::float8
  FROM pg_class AS c WHERE c.oid = to_regclass({name})
"""
_WINDOWED = """
SELECT computation, key_columns::text FROM millpy.result_tables
 WHERE graph = {schema} AND name = {name} AND kind = 'windowed'
"""


@dataclass(frozen=True, slots=True)
class Condition:
    """`column comparison value`, the value as text; `= ANY` takes any number, of which one must be equal."""

    column: str
    comparison: str
    values: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Table:
    """A table with a primary key.

    Attributes:
        types: column -> type of PostgreSQL, in the table's order.
        required: the columns that are never null.
        key: the columns of the primary key.
    """

    schema: str
    name: str
    types: dict[str, str]
    required: frozenset[str]
    key: tuple[str, ...]

    def select(self, names: Sequence[str]) -> tuple[str, ...]:
        """The names, all of which the table has.

        Raises:
            ConfigError: it does not have one.
        """
        for name in names:
            if name not in self.types:
                raise ConfigError(
                    f"{self.schema}.{self.name} has no column {name!r}", hint=f"it has: {', '.join(self.types)}"
                )
        return tuple(names)

    def arrow_schema(self, names: Sequence[str]) -> pa.Schema:
        """The Arrow schema of some columns."""
        return pa.schema([pa.field(n, self.arrow_type(n), nullable=n not in self.required) for n in names])

    def arrow_type(self, name: str) -> pa.DataType:
        """What a column is read as."""
        return _ARROW_TYPES.get(self.types[name], pa.string())


def describe(url: str, schema: str, name: str, key: Sequence[str] = ()) -> Table:
    """Look a table up.

    Arguments:
        url: of the database.
        schema: of the table.
        name: of the table, or of a view.
        key: columns that tell its rows apart and are never null; default: its primary key.

    Raises:
        ConfigError: there is none, it has no primary key to read it by, or it lacks a column of `key`.
        StoreUnavailableError: the database cannot be reached.
    """
    qualified = _literal(f"{_quoted(schema)}.{_quoted(name)}", "text")
    with _connected(url) as ask:
        columns = _rows(ask(_COLUMNS.format(name=qualified)))
        if not columns:
            neighbours = _rows(ask(_NEIGHBOURS.format(schema=_literal(schema, "text"))))
            there = ", ".join(row[0] for row in neighbours) or "none"
            raise ConfigError(f"there is no table {schema}.{name}", hint=f"tables in schema {schema}: {there}")
        key = tuple(key) or tuple(row[0] for row in _rows(ask(_KEY.format(name=qualified))))
    if not key:
        raise ConfigError(
            f"{schema}.{name} has no primary key to read it by",
            hint=f"it is a view: read {schema}.{name.removesuffix('_status')}"
            if name.endswith("_status")
            else "name columns that tell its rows apart and are never null, in the option key",
        )
    types = {column: kind for column, kind, _ in columns}
    table = Table(schema, name, types, frozenset(column for column, _, required in columns if required), key)
    table.select(key)
    return table


def windowed(url: str, schema: str, name: str) -> tuple[str, tuple[str, ...]]:
    """(computation, key columns) of a table of windows.

    Raises:
        ConfigError: it is none.
        StoreUnavailableError: the database cannot be reached, or has no tables of millpy.
    """
    with _connected(url) as ask:
        found = _rows(ask(_WINDOWED.format(schema=_literal(schema, "text"), name=_literal(name, "text"))))
    if not found:
        raise ConfigError(
            f"{schema}.{name} is not a table of windows", hint="name a table that a windowed stream is written to"
        )
    computation, keys = found[0]
    return computation, tuple(column for column, *_ in json.loads(keys))


def ranges(
    url: str, table: Table, partitions: int, conditions: Sequence[Condition]
) -> list[tuple[Position | None, Position | None]]:
    """Cut the table into at most so many ranges of about as many rows, by a sample of its pages.

    Each is (after, up to and with); None is without a bound. Together they cover every key there can be.
    """
    with _connected(url) as ask:
        ((rows,),) = _rows(ask(_SIZE.format(name=_literal(_qualified(table), "text"))))
        if partitions == 1 or rows < SMALL_ROWS:
            return [(None, None)]
        percent = min(100.0, 100.0 * SAMPLE_ROWS / rows)
        where = _where(table, conditions, None, None)
        keys = ", ".join(f"t.{_quoted(name)}::text" for name in table.key)
        order = ", ".join(f"t.{_quoted(name)}" for name in table.key)
        sampled = f"TABLESAMPLE SYSTEM ({percent:f}){where} ORDER BY {order}"
        sample = _rows(ask(f"SELECT {keys} FROM {_qualified(table)} AS t {sampled}"))  # noqa: S608
    places = sorted({len(sample) * place // partitions for place in range(1, partitions)})
    bounds: list[Position] = []
    for place in places:
        if place < len(sample) and (bound := tuple(sample[place])) not in bounds:
            bounds.append(bound)
    return list(zip([None, *bounds], [*bounds, None], strict=True))


def read_range(
    url: str,
    table: Table,
    schema: pa.Schema,
    conditions: Sequence[Condition],
    *,
    after: Position | None,
    upto: Position | None,
    batch_rows: int,
    piece_s_max: float = SNAPSHOT_S_MAX,
) -> Iterator[pa.RecordBatch]:
    """Rows of one range, a batch of `schema` a piece of at most `batch_rows`, in the order of the key.

    A piece is in memory before it is handed on, so that no snapshot waits for whoever takes the rows. One that takes
    longer than `piece_s_max` is given up, and asked for again with a quarter of the rows.

    Raises:
        StoreUnavailableError: the database went away, or even `PIECE_ROWS_MIN` rows take longer than that.
    """
    read = [*schema.names, *(name for name in table.key if name not in schema.names)]
    selected = ", ".join(_expression(table, name) for name in read)
    order = ", ".join(f"t.{_quoted(name)}" for name in table.key)
    rows = batch_rows
    with _connected(url, piece_s_max) as ask:
        while True:
            where = _where(table, conditions, after, upto)
            piece = f"SELECT {selected} FROM {_qualified(table)} AS t{where} ORDER BY {order} LIMIT {rows}"  # noqa: S608
            try:
                found = ask(piece).combine_chunks()
            except _TooSlowError:
                if rows <= PIECE_ROWS_MIN:
                    raise
                rows = max(rows // 4, PIECE_ROWS_MIN)
                continue
            if found.num_rows:
                columns = [_column(found.column(place), field.type) for place, field in enumerate(schema)]
                yield _batch(columns, schema, found.num_rows)
                last = found.num_rows - 1
                after = tuple(as_text(found.column(read.index(name))[last].as_py()) for name in table.key)
            if found.num_rows < rows:
                return


def as_text(value: object) -> str:
    """A value as text that PostgreSQL reads."""
    if isinstance(value, dt.datetime):
        # Without a zone it is a time of this process's zone, as in Spark's own literals.
        return value.astimezone(dt.UTC).isoformat()
    if isinstance(value, bool):
        return "true" if value else "false"
    return f"\\x{value.hex()}" if isinstance(value, bytes) else str(value)


def _batch(columns: list[pa.Array], schema: pa.Schema, rows: int) -> pa.RecordBatch:
    if not columns:  # `count()` wants none
        return pa.RecordBatch.from_struct_array(pa.StructArray.from_buffers(pa.struct([]), rows, [None]))
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def _column(column: pa.ChunkedArray, wanted: pa.DataType) -> pa.Array:
    found = column.chunk(0)  # the table's chunks are combined, and it has rows
    return found if found.type == wanted else found.cast(wanted)


def _expression(table: Table, name: str) -> str:
    return f"t.{_quoted(name)}" + ("" if table.types[name] in _ARROW_TYPES or table.types[name] == "text" else "::text")


def _where(table: Table, conditions: Sequence[Condition], after: Position | None, upto: Position | None) -> str:
    """Conditions and range as SQL. The values are literals: the driver reads by COPY only what has no parameters."""
    parts = []
    for condition in conditions:
        name = _quoted(condition.column)
        given = [_literal(value, table.types[condition.column]) for value in condition.values]
        if condition.comparison == "= ANY":
            parts.append(f"{name} IN ({', '.join(given)})" if given else "false")
        else:
            parts.append(f"{name} {condition.comparison} {given[0]}")
    key = ", ".join(map(_quoted, table.key))
    for comparison, position in ((">", after), ("<=", upto)):
        if position is not None:
            given = [_literal(value, table.types[column]) for column, value in zip(table.key, position, strict=True)]
            parts.append(f"({key}) {comparison} ({', '.join(given)})")
    return f" WHERE {' AND '.join(parts)}" if parts else ""


def _qualified(table: Table) -> str:
    return f"{_quoted(table.schema)}.{_quoted(table.name)}"


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def _literal(value: str, kind: str) -> str:
    """A constant; a backslash means nothing in it, because connections have standard_conforming_strings on."""
    return "'" + value.replace("'", "''") + f"'::{kind}"


class _TooSlowError(StoreUnavailableError):
    """The server gave a statement up, because it took too long."""


@contextmanager
def _connected(url: str, statement_s_max: float = SNAPSHOT_S_MAX) -> Iterator[Callable[[str], pa.Table]]:
    """A function that asks one question, whose answer it returns when all of it is here."""
    settings = (
        f"statement_timeout = '{statement_s_max * 1000:.0f}ms'",
        "timezone = 'UTC'",
        "standard_conforming_strings = on",
    )
    with ExitStack() as stack:
        with _errors_in_words():
            database = stack.enter_context(adbc_driver_postgresql.connect(url))
            connection = stack.enter_context(adbc.AdbcConnection(database))

        def ask(query: str) -> pa.Table:
            with _errors_in_words(), adbc.AdbcStatement(connection) as statement:
                statement.set_sql_query(query)
                stream, _ = statement.execute_query()
                return pa.RecordBatchReader._import_from_c(stream.address).read_all()

        for setting in settings:
            ask(f"SET {setting}")
        yield ask


def _rows(answer: pa.Table) -> list[tuple[Any, ...]]:
    return list(zip(*(column.to_pylist() for column in answer.columns), strict=True))


@contextmanager
def _errors_in_words() -> Iterator[None]:
    try:
        yield
    except (adbc.Error, pa.ArrowException, OSError) as error:
        detail = _PASSWORD.sub(r"\1:***@", " ".join(str(error).split()))
        if "statement timeout" in detail:
            raise _TooSlowError(f"the database takes too long: {detail}", hint="read fewer columns or rows") from error
        raise StoreUnavailableError(
            f"the database does not answer: {detail}", hint="is it running, and is the URL right?"
        ) from error
