"""The committed state of a driven graph, as a test reads it: in memory, or in a database (`transcripts`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import Any, Protocol
from uuid import UUID

import msgspec

from millpy.hosting.host import CommittedState
from millpy.model.checkpoint import DeadLetter, LateRows
from millpy.model.deployment import TableSpec
from millpy.model.time import Instant, to_datetime
from millpy.sinks.messages import decode
from millpy.store.memory.state import MemoryState
from millpy.store.memory.tables import Row

Rows = list[dict[str, Any]]
_HISTORY = {"emitted_at": "timestamptz", "is_retraction": "boolean"}
WRITTEN = ("interval_id", "bundle")
"""Columns that name the commit of a row, and are left out."""


class ReadableState(CommittedState, Protocol):
    """A committed state whose results can be read."""

    def rows(self, table: str) -> Rows:
        """Return the rows of a result table by column, in the order of its key."""
        ...

    def history(self, table: str) -> Rows:
        """Return the history of a result table by column, in the order of its key, then of commits."""
        ...

    def late_rows(self) -> Sequence[LateRows]:
        """Return the stored late records, oldest first."""
        ...

    def dead_letters(self) -> Sequence[DeadLetter]:
        """Return the stored dead letters, oldest first."""
        ...

    def unbalanced(self) -> list[str]:
        """Describe the accounts that do not add up (I8): records that are lost or counted twice."""
        ...


class ReadableMemory(MemoryState):
    """The committed state of one graph in memory."""

    def rows(self, table: str) -> Rows:
        """Return the rows of a result table by column, in the order of its key."""
        stored = self.database.table(table)
        return sorted_rows([_plain(row, stored.spec) for row in stored.rows.values()], stored.spec)

    def history(self, table: str) -> Rows:
        """Return the history of a result table by column, in the order of its key, then of commits."""
        stored = self.database.table(table)
        return sorted_rows([_plain(row, stored.spec) for rows in stored.history.values() for row in rows], stored.spec)

    def late_rows(self) -> Sequence[LateRows]:
        """Return the stored late records, oldest first."""
        return [rows for _, _, rows in self.database.late_records]

    def dead_letters(self) -> Sequence[DeadLetter]:
        """Return the stored dead letters, oldest first."""
        return [letter for _, _, letter in self.database.dead_letters]

    def sent(self, sink: str, interval_ids: Sequence[int]) -> list[tuple[Any, ...]]:
        """Return what a sink was given, by interval, in order."""
        found: list[tuple[Any, ...]] = []
        for (_, name), parameters in self.database.statements.items():
            found += parameters if name == sink else ()
        for interval_id in interval_ids:
            for rows in self.database.outbox.get(interval_id, ()):
                messages = decode(rows)
                names = [messages.topic_of(place) or key for place, key in enumerate(messages.keys)]
                found += zip(names, messages.values, strict=True)
        return found

    def unbalanced(self) -> list[str]:
        """Describe the accounts that do not add up (I8)."""
        found: list[str] = []
        for account in map(self.database.accounting, self.database.graphs):
            for parts in (account.sources, account.subscriptions, account.tables):
                found += [str(part) for part in parts if not part.balanced]
        return found


def sorted_rows(rows: Sequence[Mapping[str, Any]], spec: TableSpec) -> Rows:
    """Return rows in the order of the table's key; rows of records in the order in which they were committed."""
    if spec.kind == "records":
        return [dict(row) for row in rows]
    names = [*(column.name for column in spec.keys), "window_start", "window_end"]
    return sorted(map(dict, rows), key=lambda row: [_orderable(row[name]) for name in names])


def _orderable(value: Any) -> Any:
    return str(value) if isinstance(value, UUID) else value


def _plain(row: Row, spec: TableSpec) -> dict[str, Any]:
    """Return a row as SQL shows it: instants as datetimes, structs as dicts, whole decimals as integers."""
    types = {column.name: column.sql_type for column in spec.columns()} | _HISTORY
    return {name: _plain_value(value, types[name]) for name, value in row.items() if name not in WRITTEN}


def _plain_value(value: Any, sql_type: str) -> Any:
    if value is None:
        return None
    if sql_type == "timestamptz" and isinstance(value, int):
        return to_datetime(Instant(value))
    if sql_type == "numeric":
        return int(value) if isinstance(value, Decimal) else value
    if sql_type == "decimal":
        return Decimal(value)
    if sql_type == "uuid":
        return UUID(str(value))
    if sql_type == "jsonb":
        if isinstance(value, bytes):  # JSON text
            return msgspec.json.decode(value)
        entries = isinstance(value, list) and all(isinstance(item, tuple) and len(item) == 2 for item in value)
        return msgspec.to_builtins(dict(value) if entries and value else value)
    return value
