"""A thread that reads rows of a database in pages, and hands them to an injector in the event loop."""

from __future__ import annotations

import logging
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import psycopg

from millpy.errors import ConfigError, CorruptionError, MillError, SourceUnavailableError, TransientError
from millpy.ingest.protocol import SourceSetup
from millpy.sources.postgres.change_records import ChangeRecords, Columns, Layout, unfilled
from millpy.sources.postgres.replication import SETTINGS, ReplicationError
from millpy.sources.postgres.table import NO_CHANGE_FIELDS
from millpy.sources.postgres.table_copy import CopyPiece
from millpy.store.postgres.errors import translate
from millpy.store.postgres.session import connect
from millpy.store.postgres.session_settings import KEEPALIVES
from millpy.store.postgres.timeouts import hang_up

log = logging.getLogger(__name__)
CONNECT_S_MAX = 5
COPY_IS_LONG = {"statement_timeout": "600000", "lock_timeout": "5000", "idle_in_transaction_session_timeout": "0"}
ROOM_S = 1.0
"""How long a page waits for room before `_while_waiting` is called."""
_RETRY_S_MIN, _RETRY_S_MAX = 0.1, 5.0


@dataclass(slots=True)
class TablePage:
    """Records that were read, each with the position behind it.

    Attributes:
        payloads: the records.
        arrivals: when each was committed, or copied, in µs.
        refused: row -> why it is no record.
        position_of: returns the position behind the row.
        place_of: names the row for a dead letter.
    """

    payloads: list[bytes]
    arrivals: list[int]
    position_of: Callable[[int], Any]
    place_of: Callable[[int], str]
    refused: dict[int, str] = field(default_factory=dict)
    begin: int = 0
    """The first row that was not taken yet."""
    size: int = field(init=False)
    """Bytes of the payloads."""

    def __post_init__(self) -> None:
        self.size = sum(map(len, self.payloads))


class PageThread(threading.Thread, ABC):
    """A reader of one table. `pages` and `failure` are for the injector, under `changed`.

    Args:
        setup: what to read for.
        table: the name of the table.
        url: its database.
        call: runs a function in the event loop.
    """

    _also_locks = ""
    """What else the reader locks."""
    _change_fields = NO_CHANGE_FIELDS
    """The fields that a change itself fills."""

    def __init__(self, setup: SourceSetup, table: str, url: str, call: Callable[[Callable[[], None]], object]) -> None:
        super().__init__(name=f"millpy-table-{setup.stream}", daemon=True)
        self._setup, self._table, self._url, self._call = setup, table, url, call
        self.changed = threading.Condition()
        self.pages: deque[TablePage] = deque()
        self.failure: MillError | None = None
        self.drained_at = float("-inf")
        self._put = self._committed = 0  # records; a page without any counts as one
        self._stopping = threading.Event()
        self._connection: psycopg.Connection[Any] | None = None
        self._unfilled: list[str] = []

    @property
    def now(self) -> float:
        """Seconds of the monotonic clock."""
        return self._setup.clock.monotonic()

    def stopped(self) -> bool:
        """Tell whether the thread has to end."""
        return self._stopping.is_set()

    @abstractmethod
    def _read(self, connection: psycopg.Connection[Any]) -> None:
        """Read until stopped. `connection` is in autocommit mode."""

    def _while_waiting(self) -> None:
        """Do what is due while a page waits for room."""
        return

    # -- for the injector -----------------------------------------------------------------------------------------

    def committed(self, records: int, position: Any) -> None:
        """Note that some more records are committed, and the position behind them."""
        del position
        with self.changed:
            self._committed += records
            self.changed.notify_all()

    def stop(self) -> None:
        """End the thread; it may take a moment."""
        self._stopping.set()
        with self.changed:
            self.changed.notify_all()
        connection = self._connection
        if connection is not None:
            hang_up(connection)

    # -- the thread -----------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Read until stopped. What is no error of millpy or of the database is a fault, and ends the worker."""
        try:
            self._keep_reading()
        finally:
            if not self.stopped() and self.failure is None:  # Python prints the cause
                self.failure = CorruptionError(f"the reader of table {self._table} has ended: see the log")
                self._call(self._setup.ready.set)

    def _keep_reading(self) -> None:
        retry_s = _RETRY_S_MIN
        while not self.stopped():
            begun_at = self.now
            failure: MillError = SourceUnavailableError(f"the reader of table {self._table} begins again")
            try:
                self._connect_and_read()
            except psycopg.Error as error:
                failure = self._translated(error)
            except MillError as error:
                failure = error
            if self.stopped():
                return
            if not isinstance(failure, TransientError):
                self._disconnected(failure.message)
                self.failure = failure
                self._call(self._setup.ready.set)
                return
            self._disconnected(failure.message, attempted=True)
            log.info("%s; trying again", failure.message)
            if self.now - begun_at > _RETRY_S_MAX:
                retry_s = _RETRY_S_MIN
            self._wait(retry_s)
            retry_s = min(_RETRY_S_MAX, retry_s * 2)

    def _connect_and_read(self) -> None:
        self._connection = connection = self._connect()
        try:
            self._read(connection)
        finally:
            self._connection = None
            connection.close()

    def _connect(self) -> psycopg.Connection[Any]:
        return connect(
            self._url, {**SETTINGS, **COPY_IS_LONG}, connect_timeout=CONNECT_S_MAX, application_name="millpy table",
            **KEEPALIVES,
        )  # fmt: skip

    def _connected(self) -> None:
        self._call(self._setup.connection.connected)

    def _disconnected(self, why: str, *, attempted: bool = False) -> None:
        self._call(partial(self._setup.connection.disconnected, why, attempted=attempted))

    def _translated(self, error: psycopg.Error) -> MillError:
        if isinstance(error, ReplicationError) or error.sqlstate is None:
            said = " ".join(str(error).split())  # libpq's has lines
            return SourceUnavailableError(f"the database of {self._table} does not answer: {said}")
        said = error.diag.message_primary or str(error)
        if error.sqlstate == "42501":
            return ConfigError(
                f"table {self._table} cannot be read: {said}",
                hint="grant the role of the workers USAGE on the schema and SELECT on the table, and BYPASSRLS where"
                " row security hides rows",
            )
        if error.sqlstate == "55P03":
            locked = f"table {self._table}{self._also_locks} is locked"
            return SourceUnavailableError(f"{locked}: another session alters or rewrites it, or waits to do so")
        # It was altered, or dropped at this moment: the next look says what is wrong, if anything still is.
        if error.sqlstate[:2] in ("22", "42") or error.sqlstate == "XX000":
            return SourceUnavailableError(f"table {self._table} cannot be read: {said}")
        return translate(error)

    def _wait(self, seconds: float) -> None:
        self._stopping.wait(seconds)

    def _layout_of(self, records: ChangeRecords, columns: Columns) -> Layout:
        """Return the layout of rows with these columns. Warn of fields that none of them fills."""
        if self._setup.record_type is not None:
            found = unfilled(self._setup.record_type, self._change_fields, [name for name, _, _ in columns])
            if found and found != self._unfilled:
                log.warning(
                    "table %s has no column for field %s of %s, so each record has its default",
                    self._table, ", ".join(found), self._setup.record_type.struct.__name__,
                )  # fmt: skip
            self._unfilled = found
        return records.layout(columns)

    def _copied_page(
        self, records: ChangeRecords, piece: CopyPiece, at: int, position: Callable[[tuple[str, ...]], Any]
    ) -> TablePage:
        """Return rows as a page.

        Args:
            records: what makes records of them.
            piece: the rows.
            at: their time, in µs.
            position: returns the position behind a key.
        """
        layout, keys = self._layout_of(records, piece.columns), piece.keys
        return TablePage(
            [records.of_row(layout, row, at) for row in piece.rows],
            [at] * len(piece.rows),
            lambda row: position(keys[row]),
            lambda row: f"{self._table} {', '.join(keys[row])}",
        )

    def _put_page(self, page: TablePage) -> None:
        """Hand a page to the injector; wait for room."""
        limits = self._setup.limits
        while not self.stopped():
            with self.changed:
                waiting = sum(len(waiting.payloads) - waiting.begin for waiting in self.pages)
                size = sum(waiting.size for waiting in self.pages)
                if not self.pages or (waiting < limits.bundle_records_max and size < limits.bundle_bytes_max):
                    self.pages.append(page)
                    self._put += max(1, len(page.payloads))
                    break
                self.changed.wait(ROOM_S)
            self._while_waiting()
        self._call(self._setup.ready.set)
