"""A connection that reads: PostgreSQL's binary COPY becomes Arrow in the driver (ADBC), so no Python runs per row.

The driver's own interface is used, not its DB-API: that one imports polars and pandas where there are any, in each of
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
from millpy.errors import StoreUnavailableError
from millpy.secret import redacted
from millpy.session_settings import settings_query

SNAPSHOT_S_MAX = 5.0
BATCH_BYTES = 8 << 20
_PLAIN = "SET TRANSACTION ISOLATION LEVEL READ COMMITTED, READ ONLY"
_STATEMENT = re.compile(r" (?:LINE \d+|Query was): .*")
_ERRORS = (adbc.Error, pa.ArrowException, OSError)
_LEVEL = re.compile(r"^.*?\b(?:ERROR|FATAL): ")


class RefusedError(StoreUnavailableError):
    """The server did not do what a statement said; `sqlstate` where the driver tells it."""

    def __init__(self, message: str, *, sqlstate: str = "", hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.sqlstate = sqlstate


class TooSlowError(RefusedError):
    """The server gave a statement up, because it took too long."""


class Connection:
    """Asks one question at a time; every answer is a statement and a snapshot of its own.

    Settings are of a question's own transaction: a pool would give those of a session to its other users.
    """

    def __init__(
        self, connection: adbc.AdbcConnection, settings: Mapping[str, str], statement_s_max: float, clock: Clock
    ) -> None:
        self._connection = connection
        self._statement_s_max = statement_s_max
        self._clock = clock
        self._settings = settings_query(settings, local=True).decode()

    def batches(self, query: str, *, bytes_max: float = float("inf")) -> tuple[list[pa.RecordBatch], bool]:
        """The answer, when it is here, and whether that is all: after `bytes_max` the server is told to stop.

        Raises:
            TooSlowError: it took too long.
            RefusedError: the server refused it, or went away.
        """
        started = self._clock.monotonic()
        try:
            with self._transaction():
                with adbc.AdbcStatement(self._connection) as statement:
                    statement.set_sql_query(_PLAIN)  # before any other: a snapshot has its isolation for good
                    statement.execute_update()
                self._answer(self._settings, float("inf"))
                return self._answer(query, bytes_max)
        except _ERRORS as error:
            # In the middle of an answer the driver passes no SQLSTATE on, and the server's words may be German.
            late = self._clock.monotonic() - started >= self._statement_s_max
            raise _in_words(error, unnamed="57014" if late else "") from error

    def rows(self, query: str) -> list[tuple[Any, ...]]:
        """The answer as Python's values; for short ones. Raises what `batches` raises."""
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
                        statement.cancel()  # otherwise the driver would take the rest, to throw it away
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
def connected(url: str, statement_s_max: float = SNAPSHOT_S_MAX) -> Iterator[Connection]:
    """A connection whose statements are given up after `statement_s_max`.

    Raises:
        RefusedError: the database cannot be reached.
    """
    settings = {
        "statement_timeout": f"{statement_s_max * 1000:.0f}ms",
        "max_parallel_workers_per_gather": "0",  # what is parallel here are the connections
        "work_mem": "32MB",  # a bitmap of a few GB
    }
    with ExitStack() as stack:
        try:
            connection = stack.enter_context(adbc.AdbcConnection(_database(url)))
        except _ERRORS as error:
            raise _in_words(error) from error
        yield Connection(connection, settings, statement_s_max, SystemClock())


@lru_cache(maxsize=4)
def _database(url: str) -> adbc.AdbcDatabase:
    """The server's types, which the driver asks for anew each time (20 ms of CPU); it holds no connection."""
    database: adbc.AdbcDatabase = adbc_driver_postgresql.connect(url)
    return database


def quoted(name: str) -> str:
    """A name in SQL."""
    return '"' + name.replace('"', '""') + '"'


def literal(value: str, kind: str) -> str:
    """A constant; a backslash means nothing in it, because connections have standard_conforming_strings on.

    The driver reads by COPY only what has no parameters.
    """
    return "'" + value.replace("'", "''") + f"'::{kind}"


def _in_words(error: Exception, unnamed: str = "") -> RefusedError:
    """Without the statement, which the driver adds; `unnamed` is the SQLSTATE of an error that has none."""
    sqlstate = getattr(error, "sqlstate", None) or unnamed
    detail = redacted(_STATEMENT.sub("", " ".join(str(error).split())))
    refusal = _LEVEL.sub("", detail)
    if sqlstate == "57014":
        return TooSlowError(
            f"the database takes too long: {refusal}", sqlstate=sqlstate, hint="read fewer columns or rows"
        )
    if sqlstate == "42501":
        message, hint = f"missing rights: {refusal}", "who may read some columns names them, and needs the key's too"
    elif sqlstate == "42703":
        message, hint = f"the table has changed: {refusal}", "load it again"
    elif sqlstate[:2] == "22":
        message, hint = f"the database refuses a value: {refusal}", "look at keys, and at the table's types"
    elif sqlstate[:2] not in ("", "08", "53", "57", "58") or "]: ERROR: " in detail:
        message, hint = f"the database refuses: {refusal}", "its log may say more"
    else:
        message, hint = f"the database does not answer: {detail}", "is it running, and is the URL right?"
    return RefusedError(message, sqlstate=sqlstate, hint=hint)
