"""`spark.readStream.format("millpy")`: the rows of a result table as they are committed.

    panes = spark.readStream.format("millpy").option("table", "factory.temperature_1m").load()

A batch holds the rows between two positions (`bundle_ranges`). What the stream promises:

* Every row of a table of records comes once. Of every window, the newest pane comes, and no pane comes twice.
* A pane that the next pane has replaced before its batch was read does not come: the table has one row a window. A
  batch that is run again after a failure may lack panes that the first attempt had; their successors come later.
* A batch holds one pane of a window at most. Panes of a window come in order of `pane_index`.
* Rows that are deleted, by users or because their window is gone, are not taken back.

A position is one of a single history of a single database: after a restore or a failover, commits may be missing, and
their numbers are given again. The stream notices, and ends, unless the option `after_restore` says what to do.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadLimit, ReadMaxRows, SupportsTriggerAvailableNow

from millpy.clock import SystemClock
from millpy.errors import ConfigError, TableSwitchedError
from millpy.spark.bundle_ranges import BEFORE_ALL, BundleRanges, StreamPosition
from millpy.spark.connection import RefusedError, SnapshotConnection, TooSlowError, connected, literal
from millpy.spark.pieces import SMALL_ROWS, one_table, where
from millpy.spark.row_ranges import RowRange, RowReader

COUNT_S_MAX = 30.0
LOOK_EVERY_S = 0.5
LOOK_SHARE_MAX = 0.1
"""The share of the time in which an idle stream looks for rows: without an index on bundles, a look scans the table."""
NO_LIMIT = 2**63 - 1

# A standby shows commits in their order, too. But the timeline that it follows shows late there.
_HEAD = """
SELECT c.system_identifier::text, (SELECT oid::text FROM pg_database WHERE datname = current_database()),
       CASE WHEN pg_is_in_recovery() THEN '' ELSE left(pg_walfile_name(pg_current_wal_lsn()), 8) END,
       w.interval_id, w.bundle
  FROM millpy.result_tables AS t
  JOIN millpy.watermarks AS w USING (graph, computation)
 CROSS JOIN pg_control_system() AS c
 WHERE t.graph = {schema} AND t.name = {name}
"""
# In order of commits as far as a batch can tell, but always in the order of an interval's bundles. The first bundle is
# taken whatever its size.
_COUNT = """
WITH found AS (
    SELECT t.interval_id, t.bundle, count(*) AS number, max(t.emitted_at) AS at FROM {table} AS t{where} GROUP BY 1, 2
), ordered AS (
    SELECT *, max(at) OVER (PARTITION BY interval_id ORDER BY bundle) AS reached FROM found
), summed AS (
    SELECT *, sum(number) OVER (ORDER BY reached, interval_id, bundle) AS total FROM ordered
), judged AS (
    SELECT *, total <= {limit} OR total = number AS taken FROM summed
)
SELECT interval_id, coalesce(max(bundle) FILTER (WHERE taken), {before_all})::bigint,
       coalesce(sum(number) FILTER (WHERE taken), 0)::bigint, bool_and(taken)
  FROM judged GROUP BY interval_id
"""


@dataclass(frozen=True)
class _CommittedHead:
    """The newest committed bundle of each interval that writes the table, and the database that said so."""

    database: str
    bundles: Mapping[int, int]


@dataclass(frozen=True)
class _PlannedBatch:
    """The end of a batch, and its number of rows when it was planned."""

    end: StreamPosition
    rows: int


class PaneStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Reads batches of committed rows; Spark keeps one in a process of its own, and copies of it in its tasks."""

    def __init__(self, rows: RowReader, max_rows: int, after_restore: str) -> None:
        self._rows = rows
        self._max_rows = max_rows
        self._after_restore = after_restore
        self._clock = SystemClock()
        self._target: Mapping[int, int] | None = None
        self._planned: _PlannedBatch | None = None
        self._empty_until: tuple[StreamPosition, Mapping[int, int]] | None = None
        self._next_look = 0.0

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802 - Spark's name
        """Return the position before the first row."""
        with self._connected() as connection:
            return StreamPosition(self._head(connection).database).as_json()

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802 - Spark's name
        """Return the limit of a batch; a bundle is never cut, so a batch of one bundle may be larger."""
        return ReadMaxRows(self._max_rows)

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802 - Spark's name
        """Remember what is committed now; this query reads nothing beyond it."""
        with self._connected() as connection:
            self._target = self._head(connection).bundles

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802 - Spark's name
        """Return the end of the next batch, or `start` while there is no row for one.

        Raises:
            TableSwitchedError: the checkpoint is one of another table of this name.
            ConfigError: the checkpoint is one of another database, or of another history of it.
            StoreUnavailableError: the database went away, or takes too long to find new rows.
        """
        asyncio.run(self._clock.sleep(max(0.0, self._next_look - self._clock.monotonic())))
        began = self._clock.monotonic()
        with self._connected() as connection:
            head = self._head(connection)  # first: the next snapshot shows the rows of these bundles
            position = self._position(StreamPosition.from_json(start), head)
            most = limit.max_rows if isinstance(limit, ReadMaxRows) else NO_LIMIT
            batch = self._next_batch(connection, position, head, most)
        if batch is not None:
            self._planned = batch
            return batch.end.as_json()
        took_s = self._clock.monotonic() - began
        self._next_look = began + took_s + max(LOOK_EVERY_S, took_s / LOOK_SHARE_MAX)
        self._empty_until = position, self._bounded(head.bundles)
        return start

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        """Return the rows between two positions in ranges of about equal size; a small batch is one range."""
        last = StreamPosition.from_json(end)
        ranges = StreamPosition.from_json(start).ranges_to(last)
        if not ranges.ranges:
            return []
        if self._planned is not None and self._planned.end == last and self._planned.rows < SMALL_ROWS:
            return [RowRange((None, None), ranges)]
        return self._rows.ranges(ranges)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield one range, piece by piece; runs in a process of Spark's."""
        assert isinstance(partition, RowRange)
        yield from self._rows.read(partition)

    def _connected(self) -> AbstractContextManager[SnapshotConnection]:
        return connected(self._rows.location.open(), COUNT_S_MAX)

    @property
    def _name(self) -> str:
        return f"{self._rows.table.schema}.{self._rows.table.name}"

    def _head(self, connection: SnapshotConnection) -> _CommittedHead:
        schema, name = (literal(text, "text") for text in (self._rows.table.schema, self._rows.table.name))
        found = []
        try:
            found = connection.rows(_HEAD.format(schema=schema, name=name))
        except RefusedError as error:
            if error.sqlstate not in ("42P01", "3F000"):  # a database without millpy
                raise
        if not found:
            raise ConfigError(
                f"{self._name} is no result table of millpy, so its rows have no order of commits",
                hint="read it with spark.read",
            )
        system, database, timeline, *_ = found[0]
        if not timeline:
            raise ConfigError(
                "this server is a standby, whose history may change unseen", hint="stream from the primary"
            )
        return _CommittedHead(f"{system}/{database}/{timeline}", {interval: bundle for *_, interval, bundle in found})

    def _position(self, start: StreamPosition, head: _CommittedHead) -> StreamPosition:
        """Return from where to read: `start`, unless the database is not the one that it was a position of."""
        if start.bundles and not start.bundles.keys() & head.bundles.keys():
            raise TableSwitchedError(
                f"{self._name} is not the table of the checkpoint: another generation has the name, or the graph"
                " was deployed anew",
                hint="start a query with a new checkpoint",
            )
        lost = [i for i, bundle in start.bundles.items() if bundle > head.bundles.get(i, bundle)]
        if start.database == head.database and not lost:
            return start
        if self._after_restore == "reread":
            return start.restarted(head.database)
        if lost:
            raise ConfigError(
                f"{self._name} has lost commits that the stream has read, so the database was set back",
                hint='.option("after_restore", "reread") reads all rows again; or start with a new checkpoint',
            )
        if self._after_restore == "continue":
            return StreamPosition(head.database, start.reading, start.bundles)
        raise ConfigError(
            f"the database of {self._name} was restored, upgraded, or failed over since the checkpoint",
            hint='.option("after_restore", "reread") reads all rows again; "continue" is for one that lost no commit',
        )

    def _bounded(self, bundles: Mapping[int, int]) -> dict[int, int]:
        """Return the bundles, none beyond the target of a query over what is available."""
        if self._target is None:
            return dict(bundles)
        target = self._target
        return {i: min(bundle, target.get(i, BEFORE_ALL)) for i, bundle in bundles.items()}

    def _next_batch(
        self, connection: SnapshotConnection, position: StreamPosition, head: _CommittedHead, most: int
    ) -> _PlannedBatch | None:
        reached = self._bounded(head.bundles)
        begin = dict(position.bundles)
        if self._empty_until is not None and self._empty_until[0] == position:
            begin.update(self._empty_until[1])
            if all(bundle <= begin.get(i, BEFORE_ALL) for i, bundle in reached.items()):
                return None
        highest = dict.fromkeys([*begin, *reached], NO_LIMIT) if self._target is None else {**begin, **reached}
        unread = BundleRanges({i: (begin.get(i, BEFORE_ALL), high) for i, high in highest.items()}, others=not begin)
        found = self._count(connection, unread, most)
        if not found:
            return None
        # Bundles without rows are passed, too, once everything is read: later looks begin behind them.
        complete = all(taken for *_, taken in found)
        ends = {i: max(bundle, begin.get(i, BEFORE_ALL)) for i, bundle, *_ in found}
        if complete:
            ends = {**ends, **{i: max(bundle, ends.get(i, BEFORE_ALL)) for i, bundle in reached.items()}}
        return _PlannedBatch(position.moved(ends), sum(rows for _, _, rows, _ in found))

    def _count(self, connection: SnapshotConnection, unread: BundleRanges, most: int) -> list[tuple[Any, ...]]:
        """Return (interval, last bundle to read, rows, whether that is all) for each interval with unread rows."""
        table = self._rows.table
        condition = where(table, [*self._rows.conditions, unread], None, None)
        query = _COUNT.format(table=table.qualified(), where=condition, limit=most, before_all=BEFORE_ALL)
        try:
            with one_table(table):
                return connection.rows(query)
        except TooSlowError as error:
            raise TooSlowError(
                f"finding the new rows of {self._name} takes longer than {COUNT_S_MAX:.0f} s",
                sqlstate=error.sqlstate,
                hint=f"CREATE INDEX ON {table.qualified()} USING brin (bundle); or read less by from, to and keys",
            ) from error
