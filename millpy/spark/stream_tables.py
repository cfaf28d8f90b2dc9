"""The result tables of a generation in PostgreSQL, written by a streaming query through the fenced commit of a worker.

The query is one worker with a name of its own, which owns all intervals of the generation and writes nothing but
rows and watermarks. An interval's bundles in the tables are those that its steps have made, so every row, its pane,
`interval_id` and `bundle` are as a worker would have written them; a bundle that is there already is left out. A batch
is written after its commit (`stream_commits`), and again after a crash between the two.

A driver that starts registers under the same name, which ends all earlier grants: what an earlier driver still sends is
refused by the database.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import threading
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar
from uuid import UUID

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from millpy.errors import CorruptionError, TransientError, UsageError
from millpy.limits import Limits
from millpy.model.checkpoint import AbsorbedRows, Checkpoint, Grant, ResultRows
from millpy.model.deployment import TableSpec
from millpy.model.time import Instant
from millpy.spark.hosted_rows import BUNDLE
from millpy.spark.job import HostedPlan
from millpy.spark.stream_commits import StreamCommit
from millpy.spark.stream_output import DELETED
from millpy.store.postgres.store import PostgresStore
from millpy.store.protocol import WorkerInfo

T = TypeVar("T")
log = logging.getLogger(__name__)
LEASE_S = 15.0
"""How long the intervals stay the query's when its driver is dead; workers must not take them."""
HEARTBEAT_S = LEASE_S / 5


class StreamTables:
    """The result tables of one query; the database is reached from a thread of its own."""

    def __init__(self, url: str, worker_id: UUID, hosted: HostedPlan, output: Path) -> None:
        self._hosted = hosted
        self._output = output
        self._worker_id = worker_id
        self._store = PostgresStore(url, limits=Limits(lease_ttl_s=LEASE_S))
        self._tables = {table.name: table for table in hosted.spec.tables}
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="millpy-stream-tables", daemon=True)
        self._thread.start()
        self._beating: Future[None] | None = None

    def open(self, newest: StreamCommit) -> None:
        """Deploy the graph, take its intervals, and write what of the newest commit is missing.

        Raises:
            UsageError: workers run this generation, or its tables are at another position than the query.
            TransientError: the database cannot be reached.
        """
        self._run(self._store.open())
        deployment = self._run(self._store.deploy(self._hosted.spec))
        self._version, self._table_ids = deployment.version, deployment.table_ids
        ids = {(interval.computation, interval.index): interval.interval_id for interval in deployment.intervals}
        self._ids = {
            interval.interval_id: ids[interval.computation, interval.index]
            for interval in self._hosted.plan.deployment.intervals
        }
        info = WorkerInfo(
            self._worker_id, deployment.graph_id, deployment.version, host=socket.gethostname(), pid=os.getpid()
        )
        self._run(self._store.register(info, LEASE_S))
        grants = self._run(self._store.claim(self._worker_id, list(self._ids.values())))
        if len(grants) < len(self._ids):
            self._run(self._store.release(self._worker_id, grants))
            raise UsageError(
                f"workers run {deployment.name}, so a stream cannot write its tables",
                hint="stop them, or give the graph another generation=",
            )
        self._grants = {grant.interval_id: grant for grant in grants}
        self._beating = asyncio.run_coroutine_threadsafe(self._beat(), self._loop)
        self._bundles = self._stored(deployment.name, grants, newest)
        self.publish(newest)

    def publish(self, commit: StreamCommit) -> None:
        """Write the rows of a commit; the second time it changes nothing.

        Raises:
            StaleSequencerError: another driver, or a worker, has taken the intervals.
            PoisonError: the database refuses a value.
        """
        rows = {interval_id: self._rows(commit, interval_id) for interval_id in commit.intervals}
        while checkpoints := [found for i in commit.intervals if (found := self._next(commit, i, rows[i]))]:
            self._run(self._store.commit(checkpoints, graph_version=self._version))
            for checkpoint in checkpoints:
                self._bundles[checkpoint.grant.interval_id] = checkpoint.bundle

    def close(self) -> None:
        """Disconnect. The intervals stay the query's until another one takes them."""
        if self._beating is not None:
            self._beating.cancel()
        self._run(self._store.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    async def _beat(self) -> None:
        while True:
            with suppress(TransientError):  # the next commit tells whether the intervals are lost
                if not await self._store.heartbeat(self._worker_id, LEASE_S):
                    log.warning("the stream's lease in the database has expired; workers may take its intervals")
                    return
            with suppress(TimeoutError):
                async with asyncio.timeout(HEARTBEAT_S):
                    await asyncio.Event().wait()

    def _stored(self, name: str, grants: Sequence[Grant], newest: StreamCommit) -> dict[int, int]:
        """Return the last bundle of each interval in the database, if it fits the newest commit."""
        found: dict[int, int] = {}
        self._watermarks: dict[int, tuple[Instant, Instant]] = {}
        locals_ = {there: here for here, there in self._ids.items()}
        for snapshot in self._run(self._store.read(grants, state_rows_max=0)):
            recovered = snapshot.recovered
            header = newest.intervals.get(locals_[recovered.interval_id])
            lowest = newest.before.get(locals_[recovered.interval_id], 0)
            highest = 0 if header is None else header.bundle
            has_state = bool(recovered.entries or snapshot.last_segments) or any(
                s for s, _ in snapshot.cursors.values()
            )
            if has_state or not lowest <= recovered.bundle <= highest:
                raise UsageError(
                    f"the tables of {name} are not those of this checkpoint: interval {recovered.interval_id} is at "
                    f"bundle {recovered.bundle}{', with the state of a worker' if has_state else ''}",
                    hint="give the graph another generation=, or drop the old one with `millpy drop`",
                )
            found[recovered.interval_id] = recovered.bundle
            self._watermarks[recovered.interval_id] = recovered.input_watermark, recovered.low_watermark
        return found

    def _next(self, commit: StreamCommit, interval_id: int, rows: Mapping[int, _BundleRows]) -> Checkpoint | None:
        """Return the next bundle of an interval; None behind the last."""
        there, header = self._ids[interval_id], commit.intervals[interval_id]
        bundle = self._bundles[there] + 1
        if bundle > header.bundle:
            return None
        is_last = bundle == header.bundle
        found = rows.get(bundle) or _BundleRows()
        if is_last:  # until then the database keeps those that it has: only the end of a batch is known
            self._watermarks[there] = Instant(header.input_watermark), Instant(header.low_watermark)
        return Checkpoint(
            self._grants[there],
            bundle,
            *self._watermarks[there],
            processing_floor=Instant(commit.now_us),
            results=found.results,
            absorbed=found.absorbed,
        )

    def _rows(self, commit: StreamCommit, interval_id: int) -> dict[int, _BundleRows]:
        """Read the rows of an interval in a batch, by bundle."""
        found: dict[int, _BundleRows] = {}
        for name in commit.outputs.get(interval_id, ()):
            folder, _, rest = name.partition("/")
            if folder != "tables":
                continue
            spec = self._tables[rest.partition("/")[0]]
            table_id = self._table_ids[spec.name]
            for batch, bundle, deleted in _runs(self._output / name):
                into = found.setdefault(bundle, _BundleRows())
                if deleted:
                    key = spec.columns()[: len(spec.keys) + 2]
                    into.absorbed.append(AbsorbedRows(table_id, _columns(batch, spec, len(key)), len(batch)))
                else:
                    columns = _columns(batch, spec, len(spec.columns()))
                    into.results.append(ResultRows(table_id, columns, len(batch), _all_first(batch, spec)))
        return found


class _BundleRows:
    """The rows of one bundle."""

    def __init__(self) -> None:
        self.results: list[ResultRows] = []
        self.absorbed: list[AbsorbedRows] = []


def _runs(path: Path) -> Iterator[tuple[pa.RecordBatch, int, bool]]:
    """Yield the rows of a file in their order, cut where the bundle changes, or rows to delete begin or end."""
    try:
        table = pq.read_table(path).combine_chunks()
    except FileNotFoundError as error:
        raise CorruptionError(f"{path} is missing, whose rows are not in the database yet") from error
    for batch in table.to_batches():
        bundles = batch.column(BUNDLE).to_numpy()
        deleted = batch.column(DELETED).to_numpy(zero_copy_only=False)
        cuts = np.flatnonzero((np.diff(bundles) != 0) | (np.diff(deleted.astype(np.int8)) != 0)) + 1
        for start, end in zip([0, *cuts.tolist()], [*cuts.tolist(), len(batch)], strict=True):
            yield batch.slice(start, end - start), int(bundles[start]), bool(deleted[start])


def _columns(batch: pa.RecordBatch, spec: TableSpec, count: int) -> list[pa.Array | list[Any]]:
    """Return the first columns of a table as a checkpoint has them: times in µs, JSON as bytes."""
    forms = {"timestamptz": pa.int64(), "jsonb": pa.binary()}
    columns = spec.columns()[:count]
    found = [batch.column(column.name) for column in columns]
    return [
        array.cast(forms[column.sql_type]) if column.sql_type in forms else array
        for column, array in zip(columns, found, strict=True)
    ]


def _all_first(batch: pa.RecordBatch, spec: TableSpec) -> bool:
    return spec.kind == "records" or not np.any(batch.column("pane_index").to_numpy())
