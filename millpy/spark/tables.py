"""Result tables as the database describes them: columns, their types in Arrow, the key that identifies rows."""

from __future__ import annotations

import datetime as dt
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import pyarrow as pa
import pyarrow.compute as pc

from millpy.errors import ConfigError
from millpy.spark.connection import connected, literal, quoted

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
"""A value of any other type is read as PostgreSQL's text."""
FIRST_DAY = dt.datetime(1, 1, 2, tzinfo=dt.UTC)
LAST_DAY = dt.datetime(9999, 12, 31, tzinfo=dt.UTC)
"""The values shown for -infinity and infinity: Python can represent them in every zone."""
_EPOCH_US = 946_684_800_000_000
_LOWEST_US = -211_813_488_000_000_000 + _EPOCH_US
_PAST_US = -(2**63) + _EPOCH_US
"""PostgreSQL's epoch, its first instant and -infinity, in µs since 1970."""

_COLUMNS = """
SELECT a.attrelid::bigint, a.attname::text, format_type(a.atttypid, -1), a.attnotnull
  FROM pg_attribute AS a WHERE a.attrelid = to_regclass({name}) AND a.attnum > 0 AND NOT a.attisdropped
 ORDER BY a.attnum
"""
_KEY = """
SELECT a.attname::text
  FROM pg_index AS i
 CROSS JOIN unnest(i.indkey::int[]) WITH ORDINALITY AS k (attnum, place)
  JOIN pg_attribute AS a ON a.attrelid = i.indrelid AND a.attnum = k.attnum
 WHERE i.indrelid = {oid} AND i.indisprimary ORDER BY k.place
"""
_Neighbors = """
SELECT c.relname::text FROM pg_class AS c JOIN pg_namespace AS n ON n.oid = c.relnamespace
 WHERE n.nspname = {schema} AND c.relkind IN ('r', 'p') ORDER BY 1
"""
_WINDOWED = """
SELECT computation, key_columns::text FROM millpy.result_tables
 WHERE graph = {schema} AND name = {name} AND kind = 'windowed'
"""


@dataclass(frozen=True, slots=True)
class SparkTable:
    """A table with a primary key, as of its look-up.

    Attributes:
        oid: the server's number for the table; another table has another one, even under the same name.
        types: column -> PostgreSQL type, in the table's order.
        required: the columns that are never null.
        key: the columns of the primary key.
    """

    schema: str
    name: str
    oid: int
    types: dict[str, str]
    required: frozenset[str]
    key: tuple[str, ...]

    def select(self, names: Sequence[str]) -> tuple[str, ...]:
        """Return the names if the table has all of them.

        Raises:
            ConfigError: the table lacks one.
        """
        for name in names:
            if name not in self.types:
                raise ConfigError(
                    f"{self.schema}.{self.name} has no column {name!r}", hint=f"it has: {', '.join(self.types)}"
                )
        return tuple(names)

    def qualified(self) -> str:
        """Return the table's name in SQL."""
        return f"{quoted(self.schema)}.{quoted(self.name)}"

    def expression(self, column: str) -> str:
        """Write a column in SQL, as a type that has an Arrow type here."""
        kind = self.types[column]
        return f"t.{quoted(column)}" + ("" if kind in _ARROW_TYPES or kind == "text" else "::text")

    def arrow_schema(self, names: Sequence[str]) -> pa.Schema:
        """Return the Arrow schema of some columns."""
        return pa.schema([pa.field(n, self.arrow_type(n), nullable=n not in self.required) for n in names])

    def arrow_type(self, name: str) -> pa.DataType:
        """Return the Arrow type that a column is read as."""
        return _ARROW_TYPES.get(self.types[name], pa.string())


class RowCondition(Protocol):
    """What rows must be like to be read."""

    def expression(self, table: SparkTable) -> str:
        """Write the condition in SQL; the table is called `t`."""
        ...


@dataclass(frozen=True, slots=True)
class Condition:
    """`column comparison value`, the value as text; `= ANY` takes several values, one of which must be equal."""

    column: str
    comparison: str
    values: tuple[str, ...]

    def expression(self, table: SparkTable) -> str:
        """Write the condition in SQL."""
        column = f"t.{quoted(self.column)}"
        given = [literal(value, table.types[self.column]) for value in self.values]
        if self.comparison == "= ANY":
            return f"{column} IN ({', '.join(given)})" if given else "false"
        return f"{column} {self.comparison} {given[0]}"


def describe(url: str, schema: str, name: str, key: Sequence[str] = ()) -> SparkTable:
    """Look up a table.

    Arguments:
        url: the URL of the database.
        schema: the schema of the table.
        name: the name of the table, or of a view.
        key: the columns that identify its rows and are never null; default: its primary key.

    Raises:
        ConfigError: the table does not exist, has no primary key to read it by, or lacks a column of `key`.
        StoreUnavailableError: the database cannot be reached.
    """
    qualified = literal(f"{quoted(schema)}.{quoted(name)}", "text")
    with connected(url) as connection:
        columns = connection.rows(_COLUMNS.format(name=qualified))
        if not columns:
            neighbors = connection.rows(_Neighbors.format(schema=literal(schema, "text")))
            there = ", ".join(row[0] for row in neighbors) or "none"
            raise ConfigError(f"there is no table {schema}.{name}", hint=f"tables in schema {schema}: {there}")
        oid = columns[0][0]
        key = tuple(key) or tuple(row[0] for row in connection.rows(_KEY.format(oid=oid)))
    if not key:
        raise ConfigError(
            f"{schema}.{name} has no primary key to read it by",
            hint=f"it is a view: read {schema}.{name.removesuffix('_status')}"
            if name.endswith("_status")
            else "give the columns that identify its rows and are never null in the option key",
        )
    types = {column: kind for _, column, kind, _ in columns}
    required = frozenset(column for _, column, _, required in columns if required)
    table = SparkTable(schema, name, oid, types, required, key)
    table.select(key)
    return table


def windowed(url: str, schema: str, name: str) -> tuple[str, tuple[str, ...]]:
    """Return (computation, key columns) of a table of windows.

    Raises:
        ConfigError: the table is not one of windows.
        StoreUnavailableError: the database cannot be reached, or has no tables of millpy.
    """
    with connected(url) as connection:
        found = connection.rows(_WINDOWED.format(schema=literal(schema, "text"), name=literal(name, "text")))
    if not found:
        raise ConfigError(
            f"{schema}.{name} is not a table of windows", hint="name a table that a windowed stream writes"
        )
    computation, keys = found[0]
    return computation, tuple(column for column, *_ in json.loads(keys))


def finite(column: pa.Array) -> pa.Array:
    """Replace infinite instants; the driver's arithmetic overflows at infinity, which then precedes all others."""
    if not pa.types.is_timestamp(column.type):
        return column
    instants = column.cast(pa.int64())
    lowest = pc.min(instants).as_py()
    if lowest is None or lowest >= _LOWEST_US:
        return column
    ends = pc.if_else(pc.equal(instants, _PAST_US), _instant(FIRST_DAY), _instant(LAST_DAY))
    return pc.if_else(pc.less(instants, _LOWEST_US), ends, instants).cast(column.type)


def _instant(moment: dt.datetime) -> pa.Scalar:
    return pa.scalar(moment, pa.timestamp("us", "UTC")).cast(pa.int64())


def as_text(value: object) -> str:
    """Return a value as text that PostgreSQL reads."""
    if isinstance(value, dt.datetime):
        # A time without a zone is in this process's zone, as in Spark's own literals.
        return value.astimezone(dt.UTC).isoformat()
    if isinstance(value, bool):
        return "true" if value else "false"
    return f"\\x{value.hex()}" if isinstance(value, bytes) else str(value)
