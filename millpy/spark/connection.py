"""A read-only connection: the driver (ADBC) turns PostgreSQL's binary COPY into Arrow, so no Python runs per row.

This module uses the driver's own interface, not its DB-API, which imports polars and pandas, if installed, in each of
the processes that Spark starts for a query.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from functools import lru_cache
from typing import Any

import adbc_driver_manager as adbc
import adbc_driver_postgresql
import pyarrow as pa

from millpy.clock import Clock, SystemClock
from millpy.config.database_url import with_setting
from millpy.config.secrets import redacted
from millpy.errors import StoreUnavailableError
from millpy.store.postgres.session_settings import settings_query

SNAPSHOT_S_MAX = 5.0
BATCH_BYTES = 8 << 20
_PLAIN = "SET TRANSACTION ISOLATION LEVEL READ COMMITTED, READ ONLY"
_STATEMENT = re.compile(r" (?:LINE \d+|Query was): .*")
_ERRORS = (adbc.Error, pa.ArrowException, OSError)
_LEVEL = re.compile(r"^.*?\b(?:ERROR|FATAL): ")


class RefusedError(StoreUnavailableError):
    """The server did not run a statement; `sqlstate` is set where the driver reports it."""

    def __init__(self, message: str, *, sqlstate: str = "", hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.sqlstate = sqlstate


class TooSlowError(RefusedError):
    """The server cancelled a statement that took too long."""


class SnapshotConnection:
    """A connection that runs one query at a time; every answer is one statement and one snapshot.

    Settings hold for the query's transaction only: a pool would pass a session's settings on to its other users.
    """

    def __init__(
        self, connection: adbc.AdbcConnection, settings: Mapping[str, str], statement_s_max: float, clock: Clock
    ) -> None:
        self._connection = connection
        self._statement_s_max = statement_s_max
        self._clock = clock
        self._settings = settings_query(settings, local=True).decode()

    def batches(self, query: str, *, bytes_max: float = float("inf")) -> tuple[list[pa.RecordBatch], bool]:
        """Return the answer, and whether it is complete: beyond `bytes_max` the query is cancelled.

        Raises:
            TooSlowError: the query takes too long.
            RefusedError: the server refuses the query, or goes away.
        """
        started = self._clock.monotonic()
        try:
            with self._transaction():
                with adbc.AdbcStatement(self._connection) as statement:
                    statement.set_sql_query(_PLAIN)  # first: a snapshot keeps its isolation level
                    statement.execute_update()
                self._answer(self._settings, float("inf"))
                return self._answer(query, bytes_max)
        except _ERRORS as error:
            # Within an answer the driver reports no SQLSTATE, and the server's message may be in any language.
            late = self._clock.monotonic() - started >= self._statement_s_max
            raise _refusal_of(error, unnamed="57014" if late else "") from error

    def rows(self, query: str) -> list[tuple[Any, ...]]:
        """Return a short answer as Python values; raise what `batches` raises."""
        found, _ = self.batches(query)
        return [row for batch in found for row in zip(*(column.to_pylist() for column in batch.columns), strict=True)]

    def _answer(self, query: str, bytes_max: float) -> tuple[list[pa.RecordBatch], bool]:
        found: list[pa.RecordBatch] = []
        size = 0
        with adbc.AdbcStatement(self._connection) as statement:
            size_hint = str(int(min(BATCH_BYTES, bytes_max)))
            statement.set_options(**{"adbc.postgresql.batch_size_hint_bytes": size_hint})
            statement.set_sql_query(query)
            stream, _ = statement.execute_query()
            with pa.RecordBatchReader._import_from_c(stream.address) as answer:
                for batch in answer:
                    found.append(batch)
                    size += batch.nbytes
                    if size > bytes_max:
                        statement.cancel()  # otherwise the driver would read the rest and discard it
                        return found, False
        return found, True

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        self._connection.set_autocommit(False)
        try:
            yield
        except BaseException:
            with suppress(adbc.Error):  # the connection may be gone
                self._connection.set_autocommit(True)
            raise
        self._connection.set_autocommit(True)


@contextmanager
def connected(url: str, statement_s_max: float = SNAPSHOT_S_MAX) -> Iterator[SnapshotConnection]:
    """Open a connection that cancels statements after `statement_s_max`.

    Raises:
        RefusedError: the database cannot be reached.
    """
    settings = {
        "statement_timeout": f"{statement_s_max * 1000:.0f}ms",
        "max_parallel_workers_per_gather": "0",  # the connections run in parallel
        "work_mem": "32MB",  # for a bitmap over a few GB
    }
    with ExitStack() as stack:
        try:
            connection = stack.enter_context(adbc.AdbcConnection(_database(url)))
        except _ERRORS as error:
            raise _refusal_of(error) from error
        yield SnapshotConnection(connection, settings, statement_s_max, SystemClock())


@lru_cache(maxsize=4)
def _database(url: str) -> adbc.AdbcDatabase:
    """Return the driver's database, which reads the server's types (20 ms of CPU) and holds no connection."""
    database: adbc.AdbcDatabase = adbc_driver_postgresql.connect(url)
    if _knows_types(database):
        return database
    database.close()
    # The driver knows types by the names of their functions, which this setting quotes.
    unquoted: adbc.AdbcDatabase = adbc_driver_postgresql.connect(with_setting(url, "quote_all_identifiers", "off"))
    return unquoted


def _knows_types(database: adbc.AdbcDatabase) -> bool:
    with adbc.AdbcConnection(database) as connection, adbc.AdbcStatement(connection) as statement:
        statement.set_sql_query("SELECT true")
        stream, _ = statement.execute_query()
        with pa.RecordBatchReader._import_from_c(stream.address) as answer:
            return bool(pa.types.is_boolean(answer.schema.field(0).type))


def quoted(name: str) -> str:
    """Quote a name for SQL."""
    return '"' + name.replace('"', '""') + '"'


def literal(value: str, kind: str) -> str:
    """Write a constant in SQL; backslashes are plain, because connections have standard_conforming_strings on.

    The driver uses COPY only for statements without parameters.
    """
    return "'" + value.replace("'", "''") + f"'::{kind}"


def _refusal_of(error: Exception, unnamed: str = "") -> RefusedError:
    """Convert a driver's error, less the statement that the driver adds; `unnamed` stands in for a missing SQLSTATE."""
    sqlstate = getattr(error, "sqlstate", None) or unnamed
    detail = redacted(_STATEMENT.sub("", " ".join(str(error).split())))
    refusal = _LEVEL.sub("", detail)
    if sqlstate == "57014":
        return TooSlowError(
            f"the database takes too long: {refusal}", sqlstate=sqlstate, hint="read fewer columns or rows"
        )
    if sqlstate == "42501":
        message, hint = (
            f"missing rights: {refusal}",
            "name only columns that the role may read, among them the key's",
        )
    elif sqlstate == "42703":
        message, hint = f"the table has changed: {refusal}", "load it again"
    elif sqlstate[:2] == "22":
        message, hint = f"the database refuses a value: {refusal}", "check keys, and the table's types"
    elif sqlstate[:2] not in ("", "08", "53", "57", "58") or "]: ERROR: " in detail:
        message, hint = f"the database refuses: {refusal}", "its log may say more"
    else:
        message, hint = f"the database does not answer: {detail}", "is it running, and is the URL right?"
    return RefusedError(message, sqlstate=sqlstate, hint=hint)
