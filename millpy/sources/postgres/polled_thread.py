"""The thread that polls a table by a column that grows.

At each look it notes the greatest value. A value that was noted `lag` ago is safe: the transactions that took a smaller
one have committed since. Rows up to it are read behind the last one, in the order of the column and the primary key.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import msgspec
import psycopg
from psycopg import sql

from millpy.errors import ConfigError, SourceUnavailableError
from millpy.ingest.protocol import SourceSetup
from millpy.sources.postgres.change_records import ChangeRecords
from millpy.sources.postgres.page_thread import PageThread
from millpy.sources.postgres.polled import PolledTable
from millpy.sources.postgres.table import NO_CHANGE_FIELDS, table_name
from millpy.sources.postgres.table_checks import TableFacts, forms, look_at_key
from millpy.sources.postgres.table_copy import pieces
from millpy.sources.postgres.table_reader import Call, PageReader, database_of
from millpy.store.postgres.statements import statement

TOPS_MAX = 10_000
"""Values that are kept until they are safe; with more, some are left out, and reading lags a little more."""


class PolledPosition(msgspec.Struct, frozen=True):
    """The last row that was read.

    Attributes:
        key: its value of the column, then its primary key, as text.
        order: the order of these (`TableFacts.order`).
    """

    key: tuple[str, ...]
    order: tuple[str, ...]


def poll_table(setup: SourceSetup, source: PolledTable) -> PageReader:
    """Return the injector of a table that is polled.

    Raises:
        ConfigError: there is no database, or its URL cannot be read.
    """
    url, _ = database_of(source.table, source.database, setup.database)

    def begin(position: bytes | None, call: Call) -> PageThread:
        read_to = None if position is None else msgspec.json.decode(position, type=PolledPosition)
        return PolledThread(setup, source, url, read_to, call)

    return PageReader(setup, begin)


def look_at_polled_table(connection: psycopg.Connection[Any], source: PolledTable) -> TableFacts:
    """Read the table: its order is the column, and then the primary key.

    Raises:
        SourceUnavailableError: it is not there.
        ConfigError: it lacks the column, or a primary key.
    """
    (schema, name), wanted = table_name(source.table, "PolledTable"), source.column
    found = connection.execute(statement("look_at_polled_table"), {"schema": schema, "table": name}).fetchone()
    if found is None:
        raise SourceUnavailableError(
            f"there is no table {schema}.{name}", hint="create it, or correct the name in the graph"
        )
    key = look_at_key(connection, schema, name, wanted)
    if len(key) < 2 or key[0].name != wanted or wanted not in found[0]:
        lacks = f"column {wanted!r}" if wanted not in found[0] else "a primary key"
        raise ConfigError(f"table {schema}.{name} lacks {lacks}", hint="add it, or choose another table or column")
    return TableFacts(key, tuple(found[0]))


class PolledThread(PageThread):
    """A reader of one table.

    Args:
        setup, source: what to read.
        url: the database of the table.
        position: the committed position; None if there is none.
        call: runs a function in the event loop.
    """

    def __init__(
        self, setup: SourceSetup, source: PolledTable, url: str, position: PolledPosition | None, call: Call
    ) -> None:
        super().__init__(setup, source.table, url, call)
        self._source = source
        self._schema, self._name = table_name(source.table, "PolledTable")
        self._position = position

    def _read(self, connection: psycopg.Connection[Any]) -> None:
        facts = self._look_at_table(connection)
        records = ChangeRecords(self._setup.record_type, NO_CHANGE_FIELDS, forms(connection))
        tops: deque[tuple[float, str]] = deque()
        lag_s, every_s = self._source.lag.total_seconds(), self._source.every.total_seconds()
        self._connected()
        done: str | None = None
        while not self.stopped():
            looked_at, top = self.now, self._top(connection)
            if top is not None and len(tops) < TOPS_MAX and (not tops or tops[-1][1] != top):
                tops.append((self.now, top))  # it may be as new as the answer
            safe: str | None = None
            while tops and tops[0][0] <= looked_at - lag_s:
                safe = tops.popleft()[1]
            if safe is not None:
                self._read_to(connection, facts, records, safe)
                done = safe
            if top == done and not self.stopped():
                self.drained_at = looked_at
            self._wait(every_s)

    def _look_at_table(self, connection: psycopg.Connection[Any]) -> TableFacts:
        facts = look_at_polled_table(connection, self._source)
        if self._position is not None and self._position.order != facts.order:
            raise ConfigError(
                f"column {self._source.column} or the primary key of table {self._schema}.{self._name} was changed, so"
                " its order is another one",
                hint="deploy a new generation of the graph, which reads the table anew",
            )
        return facts

    def _top(self, connection: psycopg.Connection[Any]) -> str | None:
        query = sql.SQL(
            "SELECT t.{column}::text FROM {table} AS t WHERE t.{column} IS NOT NULL"
            " ORDER BY t.{column} DESC LIMIT 1"  # without `t.`, it would be the order of the text
        ).format(column=sql.Identifier(self._source.column), table=sql.Identifier(self._schema, self._name))
        (top,) = connection.execute(query).fetchone() or (None,)
        return top if top is None else str(top)

    def _read_to(
        self, connection: psycopg.Connection[Any], facts: TableFacts, records: ChangeRecords, upto: str
    ) -> None:
        limits, place = self._setup.limits, sql.Identifier(self._schema, self._name)
        rows_max, bytes_max = limits.bundle_records_max, limits.bundle_bytes_max // 2
        after = None if self._position is None else self._position.key

        def position(key: tuple[str, ...]) -> PolledPosition:
            return PolledPosition(key, facts.order)

        for piece in pieces(connection, place, facts, after, rows_max=rows_max, bytes_max=bytes_max, upto=upto):
            self._put_page(self._copied_page(records, piece, int(self._setup.clock.now_us()), position))
            if self.stopped():
                return
            self._position = position(piece.keys[-1])
