"""The tables that `millpy analytics` keeps: each batch is one transaction, which also stores the batch's number.

A driver takes a table (`seize`), and from then on an older driver commits nothing. A batch that is committed already
changes nothing either: its transaction finds another number than the one before its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Self

import msgspec
import psycopg

from millpy.errors import OwnershipError, TableSwitchedError
from millpy.store.postgres.errors import connect_error, translate
from millpy.store.postgres.session import connect
from millpy.store.postgres.statements import statement

STATEMENT_S_MAX = 30
LOCK_S_MAX = 5
ROWS_MAX = 5_000
"""The number of rows that one statement writes."""
_OWN = {
    "statement_timeout": f"{STATEMENT_S_MAX}s",
    "lock_timeout": f"{LOCK_S_MAX}s",
    "idle_in_transaction_session_timeout": f"{STATEMENT_S_MAX}s",
}
Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class AnalyzedTable:
    """A table of windows; `bundles` are those that its intervals have committed."""

    table_id: int
    name: str
    bundles: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class AnalyticsDirectory:
    """A Parquet directory in the manifest; the instants are the starts of its first and its last window, in µs."""

    name: str
    level: int
    start_us: int
    end_us: int


@dataclass(frozen=True, slots=True)
class AnalyticsBatch:
    """What one batch changes.

    Attributes:
        number: the batch's number, from 0.
        windows: the number of panes in it.
        hours: rows of `mill.device_hours`.
        anomalies: rows of `mill.device_anomalies`; one without a score removes the row of its window.
        added, removed: the directories of the manifest.
        oldest_us: the start of the retention.
    """

    number: int
    windows: int
    hours: Sequence[Row] = ()
    anomalies: Sequence[Row] = ()
    added: Sequence[AnalyticsDirectory] = ()
    removed: Sequence[str] = ()
    oldest_us: int | None = None


class AnalyticsTables:
    """A connection that keeps the tables; use it as a context."""

    def __init__(self, url: str) -> None:
        try:
            self._connection = connect(url, _OWN)
        except psycopg.Error as error:
            raise connect_error(error) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()

    def find(self, graph: str) -> list[AnalyzedTable]:
        """Return the tables of windows of a graph, by its present name."""
        with _translated():
            found = self._connection.execute(statement("find_analyzed_tables"), {"graph": graph}).fetchall()
        return [AnalyzedTable(table_id, name, tuple(bundles)) for table_id, name, bundles in found]

    def seize(self, table_id: int, query: str) -> AnalyticsOwner:
        """Become the only driver of a table; rows of another query are removed."""
        named = {"table_id": table_id, "query": query}
        with _translated(), self._connection.transaction():
            self._connection.execute(statement("reset_analytics"), named)
            found = self._connection.execute(statement("seize_analytics"), named).fetchone()
        assert found is not None
        return AnalyticsOwner(self._connection, table_id, query, *found)


class AnalyticsOwner:
    """The driver of one table.

    Attributes:
        batch: the number of the last committed batch; -1 before the first.
        directories: the manifest, in the order of names.
    """

    def __init__(self, connection: psycopg.Connection[Any], table_id: int, query: str, epoch: int, batch: int) -> None:
        self._connection = connection
        self._named = {"table_id": table_id, "query": query, "epoch": epoch}
        self.batch = batch
        with _translated():
            found = connection.execute(statement("find_analytics_files"), {"table_id": table_id}).fetchall()
        self.directories = [AnalyticsDirectory(*row) for row in found]

    def commit(self, batch: AnalyticsBatch) -> None:
        """Commit the batch behind the last.

        Raises:
            OwnershipError: another driver has the table.
            TableSwitchedError: the table was dropped.
        """
        named = {**self._named, "batch": batch.number, "count": batch.windows}
        with _translated(), self._connection.transaction():
            if self._connection.execute(statement("advance_analytics"), named).fetchone() is None:
                self._refuse(batch.number)
            self._put(statement("put_device_hours"), batch.hours)
            self._put(statement("put_device_anomalies"), batch.anomalies)
            added = [_as_row(each) for each in batch.added]
            changed = {**self._named, "names": [*batch.removed], "document": _document(added)}
            self._connection.execute(statement("replace_analytics_files"), changed)
            if batch.oldest_us is not None:
                age = {**self._named, "oldest": batch.oldest_us}
                self._connection.execute(statement("expire_device_hours"), age)
                self._connection.execute(statement("expire_device_anomalies"), age)
        self.batch = batch.number
        gone = {*batch.removed}
        kept = [each for each in self.directories if each.name not in gone]
        self.directories = sorted([*kept, *batch.added], key=lambda each: each.name)

    def _put(self, query: bytes, rows: Sequence[Row]) -> None:
        for place in range(0, len(rows), ROWS_MAX):
            named = {**self._named, "document": _document(rows[place : place + ROWS_MAX])}
            self._connection.execute(query, named)

    def _refuse(self, number: int) -> None:
        found = self._connection.execute(statement("read_analytics"), self._named).fetchone()
        if found is None:
            raise TableSwitchedError("the table was dropped", hint="its analytics went with it")
        raise OwnershipError(
            f"another driver analyzes this table: it is at epoch {found[1]}, batch {found[2]}; this one is at epoch"
            f" {self._named['epoch']}, batch {number}",
            hint="let only one of them run",
        )


def _as_row(directory: AnalyticsDirectory) -> Row:
    return {name: getattr(directory, name) for name in AnalyticsDirectory.__slots__}


def _document(rows: Sequence[Row]) -> str:
    return msgspec.json.encode(rows).decode()


@contextmanager
def _translated() -> Iterator[None]:
    try:
        yield
    except psycopg.Error as error:
        raise translate(error) from error
