"""The result tables, late records and dead letters of a generation in PostgreSQL, written by a streaming query.

They go through the fenced commit of a worker. An interval's bundles there are those that its steps have made, so every
row, its pane, `interval_id` and `bundle` are as a worker would have written them; a bundle that is there already is
left out. A batch is written after its commit (`stream_commits`), and again after a crash between the two. State and
cursors are not written until the hand-over (`hand_over`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from millpy.errors import CorruptionError, UsageError
from millpy.model.checkpoint import Checkpoint, DeadLetter, DeletedRows, LateRows, ResultRows
from millpy.model.deployment import TableSpec
from millpy.model.time import Instant
from millpy.spark.hosted_rows import BUNDLE
from millpy.spark.job import HostedPlan
from millpy.spark.stream_commits import StreamCommit
from millpy.spark.stream_output import DELETED
from millpy.spark.stream_records import dead_letters_of, late_rows_of
from millpy.spark.stream_store import StreamStore


class StreamTables:
    """The result tables, late records and dead letters of one query."""

    def __init__(self, store: StreamStore, hosted: HostedPlan, output: Path) -> None:
        self._store = store
        self._hosted = hosted
        self._output = output
        self._tables = {table.name: table for table in hosted.spec.tables}

    def open(self, newest: StreamCommit, *, hands_over: bool = False) -> None:
        """Write what of the newest commit is missing.

        Args:
            newest: the newest commit.
            hands_over: whether bundles of a hand-over may follow those of the query.

        Raises:
            UsageError: the tables are at another position than the query.
        """
        self._bundles = self._stored(newest, hands_over=hands_over)
        self.publish(newest)

    def publish(self, commit: StreamCommit) -> None:
        """Write the rows of a commit; the second time it changes nothing.

        Raises:
            StaleSequencerError: another driver has taken the intervals.
            PoisonError: the database refuses a value.
        """
        rows = {interval_id: self._rows(commit, interval_id) for interval_id in commit.intervals}
        while checkpoints := [found for i in commit.intervals if (found := self._next(commit, i, rows[i]))]:
            self._store.commit(checkpoints)
            for checkpoint in checkpoints:
                self._bundles[checkpoint.grant.interval_id] = checkpoint.bundle

    def _stored(self, newest: StreamCommit, *, hands_over: bool) -> dict[int, int]:
        """Return the last bundle of each interval in the database, if it fits the newest commit."""
        found: dict[int, int] = {}
        self._watermarks: dict[int, tuple[Instant, Instant]] = {}
        locals_ = {there: here for here, there in self._store.ids.items()}
        for stored in self._store.read():
            here = locals_.get(stored.interval_id, 0)  # 0: of an archive, or a partition that the history lacks
            header = newest.intervals.get(here)
            lowest = newest.before.get(here, 0)
            highest = 0 if header is None else header.bundle
            if stored.bundle < lowest or (stored.bundle > highest and not hands_over):
                raise UsageError(
                    f"the tables of {self._store.deployment.name} are not those of this checkpoint: interval "
                    f"{stored.interval_id} is at bundle {stored.bundle}",
                    hint="give the graph another generation=, or drop the old one with `millpy drop`",
                )
            found[stored.interval_id] = stored.bundle
            self._watermarks[stored.interval_id] = stored.input_watermark, stored.low_watermark
        return found

    def _next(self, commit: StreamCommit, interval_id: int, rows: Mapping[int, _BundleRows]) -> Checkpoint | None:
        """Return the next bundle of an interval; None behind the last."""
        there, header = self._store.ids[interval_id], commit.intervals[interval_id]
        bundle = self._bundles[there] + 1
        if bundle > header.bundle:
            return None
        is_last = bundle == header.bundle
        found = rows.get(bundle) or _BundleRows()
        if is_last:  # until then the database keeps those that it has: only the end of a batch is known
            self._watermarks[there] = Instant(header.input_watermark), Instant(header.low_watermark)
        return Checkpoint(
            self._store.grants[there],
            bundle,
            *self._watermarks[there],
            processing_floor=Instant(commit.now_us),
            results=found.results,
            deleted=found.deleted,
            late=found.late,
            dead_letters=found.dead_letters,
        )

    def _rows(self, commit: StreamCommit, interval_id: int) -> dict[int, _BundleRows]:
        """Read the rows of an interval in a batch, by bundle."""
        found: dict[int, _BundleRows] = {}
        for name in commit.outputs.get(interval_id, ()):
            folder, _, rest = name.partition("/")
            for batch, bundle, deleted in _runs(self._output / name):
                into = found.setdefault(bundle, _BundleRows())
                if folder == "late_records":
                    into.late += late_rows_of(batch)
                elif folder == "dead_letters":
                    into.dead_letters += dead_letters_of(batch)
                else:
                    self._add_rows(into, self._tables[rest.partition("/")[0]], batch, deleted=deleted)
        return found

    def _add_rows(self, into: _BundleRows, spec: TableSpec, batch: pa.RecordBatch, *, deleted: bool) -> None:
        table_id = self._store.deployment.table_ids[spec.name]
        if deleted:
            key = spec.columns()[: len(spec.keys) + 2]
            into.deleted.append(DeletedRows(table_id, _columns(batch, spec, len(key)), len(batch)))
        else:
            columns = _columns(batch, spec, len(spec.columns()))
            into.results.append(ResultRows(table_id, columns, len(batch), _all_first(batch, spec)))


class _BundleRows:
    """The rows of one bundle."""

    def __init__(self) -> None:
        self.results: list[ResultRows] = []
        self.deleted: list[DeletedRows] = []
        self.late: list[LateRows] = []
        self.dead_letters: list[DeadLetter] = []


def _runs(path: Path) -> Iterator[tuple[pa.RecordBatch, int, bool]]:
    """Yield the rows of a file in their order, cut where the bundle changes, or rows to delete begin or end."""
    try:
        table = pq.read_table(path).combine_chunks()
    except FileNotFoundError as error:
        raise CorruptionError(f"{path} is missing, whose rows are not in the database yet") from error
    for batch in table.to_batches():
        bundles = batch.column(BUNDLE).to_numpy()
        deleted = np.zeros(len(batch), bool)
        if DELETED in batch.schema.names:
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
