"""The thread that polls a table by a column that grows.

At each look it notes the last row in the order of the column and the primary key. A row that was noted `lag` ago is
safe: the transactions that took a smaller value have committed since, and where keys grow, too, those that took the
same value and a smaller key. The rows up to it are read in this order, behind the last one that was read. Keys need not
grow: rows of the same value that have come before the last one since are read first (`polled_position.py`).
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import msgspec
import psycopg
from psycopg import sql

from millpy.errors import ConfigError, SourceUnavailableError
from millpy.ingest.protocol import SourceSetup
from millpy.sources.postgres.change_records import ChangeRecords
from millpy.sources.postgres.page_thread import PageThread
from millpy.sources.postgres.polled import PolledTable
from millpy.sources.postgres.polled_position import Key, PolledPosition
from millpy.sources.postgres.polled_rows import find_begins, late_rows
from millpy.sources.postgres.table import NO_CHANGE_FIELDS, table_name
from millpy.sources.postgres.table_checks import TableFacts, forms, look_at_key
from millpy.sources.postgres.table_copy import CopyPiece, KeyRange, pieces
from millpy.sources.postgres.table_reader import Call, PageReader, database_of
from millpy.store.postgres.statements import statement

log = logging.getLogger(__name__)
TOPS_MAX = 10_000
"""Rows that are kept until they are safe; with more, some are left out, and reading lags a little more."""
_LOOK_EVERY_S = 1.0
"""How often to look whether a table without new rows still has its order."""


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


def look_at_polled_table(
    connection: psycopg.Connection[Any], source: PolledTable, *, has_read: bool = False
) -> TableFacts:
    """Read the table: its order is the column, and then the primary key.

    Raises:
        SourceUnavailableError: it is not there, or it was read and lacks what it had.
        ConfigError: it lacks the column, or a primary key.
    """
    (schema, name), wanted = table_name(source.table, "PolledTable"), source.column
    found = connection.execute(statement("look_at_polled_table"), {"schema": schema, "table": name}).fetchone()
    if found is None:
        raise SourceUnavailableError(
            f"there is no table {schema}.{name}",
            hint="create it, or correct the name in the graph: views and foreign tables are not read",
        )
    key = look_at_key(connection, schema, name, wanted)
    if len(key) < 2 or key[0].name != wanted or wanted not in found[0]:
        lacks = f"column {wanted!r}" if wanted not in found[0] else "a primary key"
        raise (SourceUnavailableError if has_read else ConfigError)(  # it may get it again
            f"table {schema}.{name} lacks {lacks}", hint="add it, or choose another table or column"
        )
    return TableFacts(key, ())  # all: one that is added while we read has its values from the first row on


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
        self._has_warned = False  # of the last value

    def _read(self, connection: psycopg.Connection[Any]) -> None:
        facts = self._look_at_table(connection)
        records = ChangeRecords(self._setup.record_type, NO_CHANGE_FIELDS, forms(connection))
        tops: deque[tuple[float, Key]] = deque()
        lag_s, every_s = self._source.lag.total_seconds(), self._source.every.total_seconds()
        self._connected()
        done: Key | None = None
        checked_at = self.now
        while not self.stopped():
            looked_at, top = self.now, self._top(connection, facts)
            if top is not None and len(tops) < TOPS_MAX and (not tops or tops[-1][1] != top):
                tops.append((self.now, top))  # it may be as new as the answer
            safe: Key | None = None
            while tops and tops[0][0] <= looked_at - lag_s:
                safe = tops.popleft()[1]
            if safe is not None:
                self._read_to(connection, facts, records, safe)
                done = safe
            if self.now - checked_at >= _LOOK_EVERY_S:
                checked_at = self.now
                self._check_order(connection, facts)
            if top == done and not self.stopped():
                self.drained_at = looked_at
            self._wait(every_s)

    def _look_at_table(self, connection: psycopg.Connection[Any]) -> TableFacts:
        facts = look_at_polled_table(connection, self._source, has_read=self._position is not None)
        if self._position is not None and self._position.order != facts.order:
            raise ConfigError(
                f"column {self._source.column} or the primary key of table {self._schema}.{self._name} was changed, so"
                " its order is another one",
                hint="deploy a new generation of the graph, which reads the table anew",
            )
        return facts

    def _check_order(self, connection: psycopg.Connection[Any], facts: TableFacts) -> None:
        """Check that the table still has the order in which it was read.

        Raises:
            SourceUnavailableError: its columns have other types: the reader begins again.
            ConfigError: its order is another one.
        """
        if self._look_at_table(connection) != facts:
            raise SourceUnavailableError(f"table {self._table} was altered")

    def _top(self, connection: psycopg.Connection[Any], facts: TableFacts) -> Key | None:
        key = [sql.SQL("t.{}").format(sql.Identifier(name)) for name in facts.key_names]
        query = sql.SQL("SELECT {texts} FROM {table} AS t WHERE {column} IS NOT NULL ORDER BY {order} LIMIT 1").format(
            texts=sql.SQL(", ").join(sql.SQL("{}::text").format(column) for column in key),
            table=sql.Identifier(self._schema, self._name),
            column=key[0],
            order=sql.SQL(", ").join(sql.SQL("{} DESC").format(column) for column in key),  # without `t.`: of the texts
        )
        found = connection.execute(query).fetchone()
        return None if found is None else tuple(map(str, found))

    def _read_to(
        self, connection: psycopg.Connection[Any], facts: TableFacts, records: ChangeRecords, upto: Key
    ) -> None:
        limits, table = self._setup.limits, sql.Identifier(self._schema, self._name)
        rows_max, bytes_max = limits.bundle_records_max, limits.bundle_bytes_max // 2
        position, after = self._position or PolledPosition((), facts.order, floor=()), None
        if self._position is not None:  # of the value that is about to be passed
            after, position = position.key, position.begin_pass()
            for late in late_rows(connection, table, facts, position, rows_max=rows_max, bytes_max=bytes_max):
                self._check_order(connection, facts)  # of the rows
                position = self._put_rows(records, late.piece, late.seen, late.behind, position.pass_late)
                if self.stopped():
                    return
            self._position = position = position.end_late()
        for piece in pieces(connection, table, facts, KeyRange(after, upto), rows_max=rows_max, bytes_max=bytes_max):
            begins = find_begins(connection, facts.key[0], after, piece.keys)
            self._check_order(connection, facts)
            advance, counts = partial(position.advance, begins=begins), range(1, len(piece.keys) + 1)
            position, after = self._put_rows(records, piece, piece.keys, counts, advance), piece.keys[-1]
            if self.stopped():
                return
            self._has_warned = self._has_warned and not begins
        self._warn_of_forgotten(position)

    def _put_rows(
        self,
        records: ChangeRecords,
        piece: CopyPiece,
        seen: Sequence[Key],
        counts: Sequence[int],
        advance: Callable[[Sequence[Key]], PolledPosition],
    ) -> PolledPosition:
        """Hand rows to the injector.

        Args:
            records: what makes records of them.
            piece: the rows.
            seen: the keys of all rows that were passed.
            counts: for each row, how many of these are at or before it.
            advance: returns the position behind some of these.

        Returns:
            The position behind all.
        """
        if piece.rows:
            page = self._copied_page(records, piece, int(self._setup.clock.now_us()), lambda key: key)
            page.position_of = lambda row: advance(seen[: counts[row]])
            self._put_page(page)
        self._position = advance(seen)
        return self._position

    def _warn_of_forgotten(self, position: PolledPosition) -> None:
        if position.forgets and not self._has_warned:
            self._has_warned = True
            log.warning(
                "table %s.%s has more rows with %s = %s than a position remembers: new ones whose primary key comes"
                " before %s are not read. Let the primary key grow, or choose a finer column",
                self._schema, self._name, self._source.column, position.key[0],
                ", ".join((position.floor or position.key)[1:]),
            )  # fmt: skip
