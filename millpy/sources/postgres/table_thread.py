"""The thread that reads a table: copies it, follows its changes, and confirms to the slot what is committed."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import msgspec
import psycopg
from psycopg import sql

from millpy.errors import ConfigError, SourceUnavailableError
from millpy.ingest.protocol import SourceSetup
from millpy.sources.postgres.change_records import ChangeRecords, Layout, key_of
from millpy.sources.postgres.page_thread import CONNECT_S_MAX, PageThread, TablePage
from millpy.sources.postgres.pgoutput import Begin, Change, PgoutputDecoder, Relation
from millpy.sources.postgres.replication import ReplicationError, ReplicationStream, is_readable
from millpy.sources.postgres.table import PostgresTable
from millpy.sources.postgres.table_checks import (
    COPY_ANEW,
    LogContinuity,
    TableFacts,
    as_lsn,
    ensure_slot,
    forms,
    look_at_table,
    publication_name,
)
from millpy.sources.postgres.table_copy import KeyRange, begin_snapshot, is_upto, pieces
from millpy.sources.postgres.table_position import CopiedPart, TablePosition
from millpy.store.postgres.statements import statement

PAGE_RECORDS = 2_000
MESSAGES_MAX = 10_000
"""Messages that are read without a page, where none of them is a record."""
LOG_BYTES_MAX = 1_000_000
"""How much of the log without changes of the table is read before that is committed, so that the slot may forget it."""
GATHER_S = 0.005
"""How long a page waits for more changes."""
_STATUS_EVERY_S, _LOOK_EVERY_S = 1.0, 10.0
_SILENT_S_MAX = 30.0
_OPEN_EVERY_S = 0.2


class TableThread(PageThread):
    """A reader of one table and its changes.

    Args:
        setup, source: what to read.
        url: the database of the table.
        slot: the name of its slot.
        position: the committed position; None if there is none.
        call: runs a function in the event loop.
    """

    _also_locks = ", or another one of its publication,"  # pg_publication_tables opens all, from version 16 on

    def __init__(
        self,
        setup: SourceSetup,
        source: PostgresTable,
        url: str,
        slot: str,
        position: TablePosition | None,
        call: Callable[[Callable[[], None]], object],
    ) -> None:
        super().__init__(setup, source.table, url, call)
        self._source, self._slot = source, slot
        self._change_fields = source.fields
        self._is_new = position is None
        self._position = position or TablePosition(copied=not source.copy)
        self._committed_lsn = self._position.lsn
        self._stream: ReplicationStream | None = None
        self._sent_at = self._heard_at = float("-inf")
        self._awaited: tuple[float, int] | None = None
        """When we asked for the end of the log, and where it was, until the stream has reached it."""

    def committed(self, records: int, position: TablePosition) -> None:
        """Note what is committed, so that the slot may forget it."""
        with self.changed:
            self._committed_lsn = max(self._committed_lsn, position.lsn)
        super().committed(records, position)

    def _read(self, connection: psycopg.Connection[Any]) -> None:
        """Copy what is not copied yet, and follow."""
        if self._is_new:
            self._position = msgspec.structs.replace(self._position, published="")
        facts = self._look_at_table(connection)
        position = self._position
        if self._is_new:
            self._await_open(connection)  # as the creation of a slot does, without a word
        begin = ensure_slot(connection, self._setup, self._slot, None if self._is_new else position)
        if self._is_new:
            self._position = msgspec.structs.replace(position, lsn=begin)
        of_type, fields, form_of = self._setup.record_type, self._source.fields, forms(connection)
        records = ChangeRecords(of_type, fields, form_of, facts.partition_keys)
        if not position.copied:
            self._copy(connection, records)
        elif self._is_new:
            self._begin()
        if self.stopped():
            return
        try:
            self._follow(connection, self._look_at_table(connection), records)
        finally:
            stream, self._stream = self._stream, None
            if stream is not None:
                stream.close()

    def _look_at_table(self, connection: psycopg.Connection[Any]) -> TableFacts:
        """Check the table.

        Raises:
            ConfigError: an operator has to do something.
            SourceUnavailableError: the table is not there, or not published, any more.
        """
        position = self._position
        facts = look_at_table(connection, self._source, position.published)
        if not position.published:
            self._position = msgspec.structs.replace(position, published=facts.published)
        is_partial = not position.copied or len(position.copies) > 1
        if is_partial and position.key not in ((), facts.order):
            raise ConfigError(
                f"the primary key of table {self._table} was changed while its first copy was interrupted",
                hint=COPY_ANEW,
            )
        return facts

    def _begin(self) -> None:
        """Let the position be committed without a record, so that the slot is never made anew."""
        self._is_new = False
        self._put_page(self._page_of(self._position))

    def _page_of(self, position: TablePosition) -> TablePage:
        """Return a page without records, by which a position is committed."""
        return TablePage([], [], lambda _: position, lambda _: self._table)

    # -- the first copy -------------------------------------------------------------------------------------------

    def _copy(self, connection: psycopg.Connection[Any], records: ChangeRecords) -> None:
        if self._is_new:
            self._await_open(connection)
        self._connected()
        begin, table = self._position, sql.Identifier(self._source.schema, self._source.name)
        parts = begin.copies
        after = parts[-1].upto if parts else None
        is_partitioned = self._look_at_table(connection).is_partitioned
        try:
            snapshot, until, now_us = begin_snapshot(connection, table, is_partitioned=is_partitioned)
            self._flush_log()
            facts = self._look_at_table(connection)  # as the snapshot shows it
            at = begin.copied_at or now_us  # so no row is younger than a change that the copy does not have

            def position(key: tuple[str, ...] | None) -> TablePosition:
                copies = (*parts, CopiedPart(snapshot, key))
                return msgspec.structs.replace(
                    begin,
                    copied=key is None,
                    copies=copies,
                    until=max(until, begin.until),
                    key=facts.order,
                    copied_at=at,
                )

            if "snapshot" in self._source.operations:
                limits = self._setup.limits
                rows_max, bytes_max = limits.bundle_records_max, limits.bundle_bytes_max // 2
                for piece in pieces(connection, table, facts, KeyRange(after), rows_max=rows_max, bytes_max=bytes_max):
                    self._put_page(self._copied_page(records, piece, at, position))
                    self._position = position(piece.keys[-1])
                    self._is_new = False
                    if self.stopped():
                        return
        finally:
            connection.execute("ROLLBACK")
        self._position = position(None)
        self._begin()

    def _flush_log(self) -> None:
        """Flush the log of all that the snapshot shows to the server's disk.

        A server that crashes earlier gives the ids of transactions in the lost log, such as rolled back ones, to later
        transactions, and the snapshot would show those. Its connection cannot write, so this takes another one.
        """
        with self._connect() as connection:
            connection.execute(statement("flush_log"))

    def _await_open(self, connection: psycopg.Connection[Any]) -> None:
        """Wait for the transactions that are open now.

        A commit that is in the log before the slot begins may not be visible yet, for example while it waits for a
        standby. After this wait, a snapshot shows all that the slot does not have.

        A snapshot names the running transactions below its xmax, which is behind the last one that has ended. So one of
        ours, with a greater id than theirs, ends first.
        """
        connection.execute("SELECT pg_current_xact_id()")
        snapshot = (connection.execute("SELECT pg_current_snapshot()::text").fetchone() or ("",))[0]
        named, has_told = {"open": snapshot.rpartition(":")[2]}, False
        while named["open"] and not self.stopped():
            found = connection.execute(statement("find_open"), named).fetchone()
            if found is None:
                if has_told:  # what follows may wait for others
                    self._disconnected("the first read waits for transactions that have begun since it began")
                break
            has_told = True
            count, oldest, since = found
            self._disconnected(f"the first read waits for {count} older transactions, such as {oldest} since {since}")
            self._wait(_OPEN_EVERY_S)

    # -- changes --------------------------------------------------------------------------------------------------

    def _follow(self, connection: psycopg.Connection[Any], facts: TableFacts, records: ChangeRecords) -> None:
        self._stream = stream = self._open_stream(connection)
        begin = ensure_slot(connection, self._setup, self._slot, self._position)  # nobody else moves it any more
        log = LogContinuity(self._setup.stream, self._position, begin)
        self._connected()
        self._heard_at = looked_at = self.now
        for page in self._changes(stream, connection, facts, records, log):
            if page is not None:
                self._put_page(page)
                self._position = page.position_of(len(page.payloads) - 1)
                self._heard_at = self.now  # we did not listen while the page waited for room
            if self.stopped():
                return
            now = self.now
            if now - self._sent_at >= _STATUS_EVERY_S:
                self._send_status()
            if now - self._heard_at > _SILENT_S_MAX:
                self._look_at_stream(connection)
            if now - looked_at >= _LOOK_EVERY_S:
                looked_at = now
                # While it is locked, it has no changes. The other error is of a table that is dropped at this moment.
                with suppress(psycopg.errors.LockNotAvailable, psycopg.errors.InternalError_):
                    self._look_at_table(connection)

    def _look_at_stream(self, connection: psycopg.Connection[Any]) -> None:
        """Find out whether a server that is silent still reads the log for us.

        While it decodes a large transaction that has nothing for us, it answers after half of `wal_sender_timeout`. To
        begin again would let it decode the same for ever.

        Raises:
            SourceUnavailableError: it does not.
        """
        if connection.execute(statement("look_at_reader_of_slot"), {"slot": self._slot}).fetchone() is None:
            raise SourceUnavailableError(f"the database of {self._table} is silent")
        self._heard_at = self.now

    def _open_stream(self, connection: psycopg.Connection[Any]) -> ReplicationStream:
        try:
            return ReplicationStream(self._url, self._slot, publication_name(self._source), CONNECT_S_MAX)
        except ReplicationError as error:
            # The owner before us may be frozen, and its connection open for another minute.
            if error.is_in_use and self._setup.trusted():
                connection.execute(statement("end_reader_of_slot"), {"slot": self._slot})
            raise

    def _changes(
        self,
        stream: ReplicationStream,
        connection: psycopg.Connection[Any],
        facts: TableFacts,
        records: ChangeRecords,
        log: LogContinuity,
    ) -> Iterator[TablePage | None]:
        """Yield pages of changes, and None from time to time, also while many changes come and none is a record.

        Changes that are not in a page yet are lost with the connection, so `self._position` is not behind them.
        """
        decoder, layouts = PgoutputDecoder(), dict[int, Layout]()
        begin, place, position = Begin(0, 0, 0), 0, self._position
        rows = _ChangeRows(position, self._source.table)
        for number in itertools.count(1):
            message = stream.next(GATHER_S if rows.payloads else 0.25)
            if message is not None:
                self._heard_at = self.now
            if not message:
                if rows.payloads:
                    yield rows.page()
                    rows = _ChangeRows(position, self._source.table)
                else:
                    self._note_drained(stream, connection)
                    log.check_reached(stream.reached)
                    position, page = self._reached(stream, position)
                    yield page
                continue
            for found in decoder.decode(message):
                if isinstance(found, Begin):
                    begin, place = found, 0
                    log.check_begin(begin)
                elif isinstance(found, Relation):
                    layouts[found.relation_id] = self._layout(connection, facts, records, found)
                elif found.relation.relation_id == facts.oid:
                    place += 1
                    if position.has(begin.lsn, place):
                        log.check_read(begin, position)
                        continue
                    change = self._judged(connection, facts, position, begin, found)
                    position = position.advance(begin.lsn, place, begin.committed_at)
                    if change is not None and change.operation in self._source.operations:
                        layout = layouts[found.relation.relation_id]
                        rows.add(*records.of_change(layout, change, begin.committed_at), begin, place)
            is_full = len(rows.payloads) >= PAGE_RECORDS or rows.size >= self._setup.limits.bundle_bytes_max // 4
            if is_full or number % MESSAGES_MAX == 0:
                yield rows.page() if rows.payloads else None
                rows = _ChangeRows(position, self._source.table)

    def _layout(
        self, connection: psycopg.Connection[Any], facts: TableFacts, records: ChangeRecords, relation: Relation
    ) -> Layout:
        """Return the layout of a table that is new in the stream, or was altered, as may be one of its partitions."""
        if relation.relation_id != facts.oid:
            return records.layout(relation.columns)
        if facts.is_partitioned:
            records.partition_keys = self._look_at_table(connection).partition_keys
        return self._layout_of(records, relation.columns)

    def _reached(self, stream: ReplicationStream, position: TablePosition) -> tuple[TablePosition, TablePage | None]:
        """Return the position behind what has no changes of the table, and a page that commits it if that is much."""
        if stream.reached - position.lsn < LOG_BYTES_MAX:
            return position, None
        position = position.reach(stream.reached)
        return position, self._page_of(position)

    def _judged(
        self,
        connection: psycopg.Connection[Any],
        facts: TableFacts,
        position: TablePosition,
        begin: Begin,
        change: Change,
    ) -> Change | None:
        """Return what of a change the first copy does not have; None if it has all.

        Raises:
            ConfigError: a part of the copy was truncated after another part had been copied, or the change has no key.
        """
        if not position.copies or begin.lsn >= position.until:
            return change
        shown = [part.shows(begin.xid) for part in position.copies]
        if len(set(shown)) == 1:
            return None if shown[0] else change
        if change.operation == "truncate":
            raise ConfigError(
                f"table {self._source.table} was truncated while its first copy was interrupted",
                hint=COPY_ANEW,
            )
        identity = {name for name, _, is_key in change.relation.columns if is_key}
        if not identity.issuperset(facts.key_names):
            raise self._lacks_key()
        bounds = [part.upto for part in position.copies[:-1] if part.upto is not None]

        def is_shown(row: Any) -> bool:
            key = key_of(change, facts.key_names, row)
            if key is None:
                raise self._lacks_key()  # that of a partition
            return shown[[*is_upto(connection, facts, key, bounds), True].index(True)]

        before = is_shown(change.before) if change.before is not None else None
        after = is_shown(change.row) if change.row is not None else None
        if before is None or after is None or before == after:
            return None if (after if after is not None else before) else change
        if after:  # the copy has the new key already, and the old one still
            return Change(change.relation, "delete", None, change.before, change.is_whole)
        return Change(change.relation, "insert", change.row, None, is_whole=False)

    def _lacks_key(self) -> ConfigError:
        return ConfigError(
            f"the replica identity of table {self._table}, or of a partition of it, lacks the primary key, and its copy"
            " was interrupted",
            hint=COPY_ANEW,
        )

    def _note_drained(self, stream: ReplicationStream, connection: psycopg.Connection[Any]) -> None:
        """Find out whether everything that was committed a moment ago was read."""
        if self.now - self._sent_at < _STATUS_EVERY_S:
            return
        asked_at = self.now
        (end,) = connection.execute("SELECT (pg_current_wal_insert_lsn() - '0/0'::pg_lsn)::bigint").fetchone() or (0,)
        if stream.reached >= end:
            self.drained_at = asked_at
        elif self._awaited and stream.reached >= self._awaited[1]:
            self.drained_at = self._awaited[0]
            self._awaited = None
        if self._awaited is None:
            self._awaited = (asked_at, end)

    def _send_status(self) -> None:
        """Say what is committed. Notice a server that shuts down: it waits for the end of the stream, and ends this."""
        stream, connection = self._stream, self._connection
        if stream is None or connection is None:
            return
        if is_readable(connection.fileno()):
            connection.execute("SELECT 1")
        with self.changed:
            flushed = self._committed_lsn
        stream.send_status(flushed, asks=True)
        self._sent_at = self.now

    def _while_waiting(self) -> None:
        if self.now - self._sent_at >= _STATUS_EVERY_S:
            self._send_status()


class _ChangeRows:
    """The rows of the next page, each with its place in the log."""

    def __init__(self, before: TablePosition, table: str) -> None:
        self.payloads: list[bytes] = []
        self._before = before
        self.size = 0
        self._table = table
        self._places: list[tuple[int, int]] = []
        self._arrivals: list[int] = []
        self._refused: dict[int, str] = {}

    def add(self, payload: bytes, why_not: str, begin: Begin, place: int) -> None:
        """Append a row."""
        if why_not:
            self._refused[len(self.payloads)] = why_not
        self.payloads.append(payload)
        self.size += len(payload)
        self._places.append((begin.lsn, place))
        self._arrivals.append(begin.committed_at)

    def page(self) -> TablePage:
        """Return the page."""
        places, arrivals, table, before = self._places, self._arrivals, self._table, self._before

        def position(row: int) -> TablePosition:
            return before.advance(*places[row], arrivals[row])

        def place(row: int) -> str:
            lsn, number = places[row]
            return f"{table}@{as_lsn(lsn)}:{number}"

        return TablePage(self.payloads, self._arrivals, position, place, self._refused)
