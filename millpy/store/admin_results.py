"""Result tables, for people: which there are, their rows by key and time, and what is written to them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import (
    BigInteger,
    Boolean,
    Double,
    LargeBinary,
    Numeric,
    Select,
    Text,
    and_,
    asc,
    cast,
    column,
    desc,
    literal,
    or_,
    select,
    table,
)
from sqlalchemy.dialects.postgresql import JSONB, TIMESTAMP, UUID
from sqlalchemy.sql.elements import ColumnElement

from millpy.errors import UsageError
from millpy.store.admin import Admin, Row

_TYPES: Mapping[str, Any] = {
    "text": Text(),
    "bigint": BigInteger(),
    "numeric": Numeric(),
    "double precision": Double(),
    "boolean": Boolean(),
    "bytea": LargeBinary(),
    "timestamptz": TIMESTAMP(timezone=True),
    "uuid": UUID(as_uuid=False),
    "jsonb": JSONB(),
}
TABLES = """
    SELECT graph, name, kind, computation, key_columns, value_columns, current
      FROM millpy.result_tables JOIN millpy.graphs USING (graph) ORDER BY graph, name
"""
PROGRESS = "SELECT interval_id, bundle FROM millpy.watermarks WHERE graph = :graph AND computation = :computation"


@dataclass(frozen=True, slots=True)
class ResultTable:
    """A result table as it is deployed.

    Attributes:
        kind: windowed or records.
        keys: name -> SQL type; empty for records.
        values: the same.
        current: of the generation that has the graph's name.
    """

    graph: str
    name: str
    kind: str
    computation: str
    keys: Mapping[str, str]
    values: Mapping[str, str]
    current: bool = True

    @property
    def time(self) -> str:
        """The column that says when: a window's beginning, or a record's event time."""
        return "window_start" if self.kind == "windowed" else "event_time"

    @property
    def identity(self) -> tuple[str, ...]:
        """The columns that tell a row from all others."""
        if self.kind == "windowed":
            return (*self.keys, "window_start", "window_end")
        return ("interval_id", "bundle", "ordinal")

    @property
    def columns(self) -> tuple[str, ...]:
        """All columns, in the table's order, and whether a row can change."""
        written = ("emitted_at", "interval_id", "bundle", "is_final")
        if self.kind == "records":
            return (*self.values, "event_time", "ordinal", *written)
        window = ("window_start", "window_end", *self.values, "pane_index", "pane_timing", "late_count")
        return (*self.keys, *window, *written)

    def type_of(self, name: str) -> str:
        """The SQL type of a key or value column.

        Raises:
            UsageError: there is no such column.
        """
        types = {**self.keys, **self.values}
        if name not in types:
            raise UsageError(f"{self.graph}.{self.name} has no column {name!r}", hint=f"it has: {', '.join(types)}")
        return types[name]


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """Which rows: with these values, within this span of time [start, end), final or not; the newest `limit`.

    Moments are text that PostgreSQL reads; empty for no bound.
    """

    values: Mapping[str, str]
    start: str = ""
    end: str = ""
    final: bool | None = None
    limit: int


def result_tables(admin: Admin) -> list[ResultTable]:
    """The result tables of all graphs."""
    return [
        ResultTable(
            row["graph"],
            row["name"],
            row["kind"],
            row["computation"],
            {name: kind for name, kind, _ in row["key_columns"]},
            {name: kind for name, kind, _ in row["value_columns"]},
            row["current"],
        )
        for row in admin.ask(TABLES)
    ]


def newest(admin: Admin, asked: ResultTable, wanted: Wanted) -> list[Row]:
    """The newest rows by time, oldest first.

    Raises:
        UsageError: an unknown column, a value that is none of its type, or a table too large to look through at once.
    """
    order: list[ColumnElement[Any]] = [
        desc(column(asked.time)),
        *(asc(column(name)) for name in asked.identity if name != asked.time),
    ]
    found = admin.select(_select(asked, wanted).order_by(*order).limit(wanted.limit))
    return _in_time(asked, found)


def progress(admin: Admin, asked: ResultTable) -> dict[int, int]:
    """The newest committed bundle of every interval that writes the table."""
    rows = admin.ask(PROGRESS, graph=asked.graph, computation=asked.computation)
    return {row["interval_id"]: row["bundle"] for row in rows}


def written_since(admin: Admin, asked: ResultTable, wanted: Wanted, bundles: Mapping[int, int]) -> list[Row]:
    """Rows that bundles after these have written, in order of time; all of them, whatever `limit` says.

    An interval's bundles are committed in their order (I2), so nothing is overtaken.
    """
    newer = or_(
        *(
            and_(column("interval_id") == literal(interval, BigInteger), column("bundle") > literal(bundle, BigInteger))
            for interval, bundle in bundles.items()
        )
    )
    order: list[ColumnElement[Any]] = [asc(column(name)) for name in asked.identity]
    return _in_time(asked, admin.select(_select(asked, wanted).where(newer).order_by(*order)))


def _select(asked: ResultTable, wanted: Wanted) -> Select[Any]:
    names: Sequence[str] = asked.columns
    view = table(f"{asked.name}_status", *map(column, names), schema=asked.graph)
    conditions: list[ColumnElement[bool]] = [
        column(name) == cast(literal(text, Text), _TYPES[asked.type_of(name)]) for name, text in wanted.values.items()
    ]
    moment = TIMESTAMP(timezone=True)
    if wanted.start:
        conditions.append(column(asked.time) >= cast(literal(wanted.start, Text), moment))
    if wanted.end:
        conditions.append(column(asked.time) < cast(literal(wanted.end, Text), moment))
    if wanted.final is not None:
        conditions.append(column("is_final") == literal(wanted.final, Boolean))
    return select(*view.columns).where(*conditions)


def _in_time(asked: ResultTable, rows: Sequence[Row]) -> list[Row]:
    return sorted(rows, key=lambda row: str(row[asked.time]))  # rows of one time stay in the order of their keys
