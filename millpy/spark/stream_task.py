"""What runs inside the tasks of a streaming query: a batch's turns, from the state that the batch before it committed.

A batch is one Spark job. Source tasks read bundles; after each shuffle, the tasks of one computation step their
intervals and pass on everything else. Only the last rows, one "end" an interval, reach the driver, which commits them.

Three things guard against a batch that is not whole. Each producer gives each consumer one tick, whether it has records
or not, with the position at which the consumer must be in the end; a consumer without one, or elsewhere, fails. A tick
carries the token of its attempt, so the driver sees whether all consumers have read the attempt whose state it commits:
a source that is read again may give something else. And an opened interval that a Python worker keeps is used only from
the state of its own attempt.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any
from uuid import uuid4

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from millpy.errors import CorruptionError
from millpy.ingest.protocol import SourceBatch
from millpy.model.checkpoint import Checkpoint
from millpy.model.time import INSTANT_MAX, Instant
from millpy.spark.hosted_task import At, CheckpointParts, IntervalEnd, IntervalTask
from millpy.spark.job import HostedPlan, plan_of
from millpy.spark.stream_offsets import OffsetLog
from millpy.spark.stream_output import StagedRows
from millpy.spark.stream_sources import SourceNews, SourceTurn, StreamSource, source_of
from millpy.spark.stream_state import IntervalHeader, StateChanges, StateDirectory, header_of

LAST: At = (INSTANT_MAX, 0)


class StreamTasks(msgspec.Struct, frozen=True):
    """The description of one batch, for its tasks.

    Attributes:
        job: the job as JSON text; the same in all batches, so that a process loads the graph once.
        checkpoint, output: directories that every machine sees under these names.
        batch: its number.
        now_us: its processing time.
        bundles_max: the number of bundles that a source partition may give.
        headers: interval -> what it has committed; of new intervals nothing.
        until: source interval -> the position at which a query ends that reads what there was at its start.
    """

    job: str
    checkpoint: str
    output: str
    batch: int
    now_us: int
    bundles_max: int
    headers: dict[int, IntervalHeader]
    until: dict[int, int] = {}


class StreamedEnd(msgspec.Struct, frozen=True):
    """What an interval has to commit after a batch.

    Attributes:
        header: its header.
        read: producer -> the token of the attempt that was read.
        outputs: files of rows, below the output directory.
        rows: table -> number of rows of this batch.
        left: its counters, and what it has left undone.
        unfinished: whether due work is left undone.
        news: of a source.
    """

    header: IntervalHeader
    read: dict[int, str]
    outputs: list[str]
    rows: dict[int, int]
    left: IntervalEnd
    unfinished: bool
    news: SourceNews = SourceNews()


_opened: dict[tuple[str, int], _StreamedInterval] = {}
"""(checkpoint, interval) -> the interval as this process has left it; never in use by two tasks, as it is taken out."""


def read_sources(tasks: StreamTasks, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Read source partitions, given as interval ids."""
    for batch in batches:
        for interval_id in batch.column(0).to_pylist():
            with _taken_out(tasks, interval_id) as interval:
                yield from interval.read_source(tasks)
                yield from interval.end()


def host_stages(tasks: StreamTasks, computation: str, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Step the intervals of a computation over parts that are sorted by `ORDER`, and pass on what is for others."""
    hosted = plan_of(tasks.job)
    ids = pa.array([interval.interval_id for interval in hosted.computation(computation).intervals], pa.int32())
    others: list[pa.RecordBatch] = []
    for interval_id, own in groupby(_own_rows(batches, ids, others), key=lambda row: row["owner"]):
        with _taken_out(tasks, interval_id) as interval:
            yield from interval.host_stage(own)
            yield from interval.end()
        yield from _drained(others)
    yield from _drained(others)


def _own_rows(
    batches: Iterable[pa.RecordBatch], ids: pa.Array, others: list[pa.RecordBatch]
) -> Iterator[Mapping[str, Any]]:
    for batch in batches:
        is_own = pc.is_in(batch.column("owner"), value_set=ids)
        if len(passed := batch.filter(pc.invert(is_own))):
            others.append(passed)
        yield from batch.filter(is_own).to_pylist()


def _drained(batches: list[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    while batches:
        yield batches.pop(0)


@contextmanager
def _taken_out(tasks: StreamTasks, interval_id: int) -> Iterator[_StreamedInterval]:
    """Yield an interval for one batch: the one that this process has kept, or one opened from the state.

    It is kept only after the whole batch, so an attempt that fails leaves nothing.
    """
    name = tasks.checkpoint, interval_id
    header = tasks.headers.get(interval_id)
    interval = _opened.pop(name, None)
    if interval is not None and (header is None or interval.token != header.token):
        interval.close()
        interval = None
    if interval is None:
        interval = _StreamedInterval(plan_of(tasks.job), interval_id, tasks, header)
    interval.begin(tasks, header)
    try:
        yield interval
    except BaseException:
        interval.close()
        raise
    _opened[name] = interval


class _StreamedInterval(IntervalTask):
    """One interval that is stepped batch by batch.

    Attributes:
        token: of the attempt that it is the result of.
    """

    def __init__(self, hosted: HostedPlan, interval_id: int, tasks: StreamTasks, header: IntervalHeader | None) -> None:
        self._state = StateDirectory(Path(tasks.checkpoint) / "state")
        self.token = ""
        self._source: StreamSource | None = None
        if header is None:
            super().__init__(hosted, interval_id)
        else:
            snapshot, runs = self._state.snapshot(interval_id, header)
            super().__init__(hosted, interval_id, snapshot=snapshot, runs=runs)

    def begin(self, tasks: StreamTasks, header: IntervalHeader | None) -> None:
        """Begin a batch as an attempt of its own."""
        self.token = uuid4().hex
        self._header = header
        self._attempt = f"{tasks.batch:010}-{self._id}-{self.token}"
        self._changes = StateChanges()
        self._staged = StagedRows(Path(tasks.output), self._hosted.database, self._attempt)
        self._read: dict[int, str] = {}
        self._heads: dict[int, int] = {}
        self._now, self._at = Instant(tasks.now_us), (0, 0)
        self._is_at_end = header is not None and header.finished
        self._news = SourceNews(drained=self._is_at_end)

    def read_source(self, tasks: StreamTasks) -> Iterator[pa.RecordBatch]:
        """Step a source partition over what it has, at most `bundles_max` bundles."""
        turn = 0
        if not self._is_at_end:
            if self._source is None:
                self._source = source_of(self._hosted, self._of, self._host.interval)
            log = OffsetLog(Path(tasks.checkpoint))
            bounds = SourceTurn(tasks.batch, self._now, tasks.bundles_max, tasks.until.get(self._id), log)
            for taken in self._source.batches(bounds):
                turn += 1
                yield from self.step((turn, 0), taken=self._without_end(taken))
            if turn == 0:
                yield from self.step((1, 0), quiet=self._source.is_quiet)
                self._is_at_end = self._hosted.job.hands_over and self._source.is_quiet
            self._news = self._source.news
            if self._hosted.job.hands_over and self._news.until is not None:
                self._is_at_end |= self._news.drained  # the topic has no end: workers continue at this offset
        yield from self.finish_before(LAST)
        self._is_at_end |= self._host.interval.finished
        if self._is_at_end:
            self.close()

    def _without_end(self, taken: SourceBatch) -> SourceBatch:
        """Return a batch without the end of a history, behind which the source itself has more."""
        job = self._hosted.job
        if not (taken.finished and job.hands_over and self._of.name in job.replaced):
            return taken
        self._is_at_end = True
        return replace(taken, finished=False)

    def host_stage(self, rows: Iterable[Mapping[str, Any]]) -> Iterator[pa.RecordBatch]:
        """Step an interval of a stage over the turns of a batch.

        Raises:
            CorruptionError: a producer has given no tick, or more than was consumed.
        """
        was_stepped = False
        for at, group in groupby(rows, key=lambda row: (row["turn"], row["again"])):
            parts = self._without_ticks(group)
            if parts:
                yield from self.finish_before(at)
                yield from self.step(at, polled=self.answers(parts))
                was_stepped = True
        if not was_stepped:  # time has passed
            yield from self.step((1, 0))
        yield from self.finish_before(LAST)
        self._check_positions()

    def _check_positions(self) -> None:
        for producer in self._of.producers:
            at = self._host.interval.cursors[producer].seq
            if self._heads.get(producer) != at:
                raise CorruptionError(
                    f"interval {self._id} of {self._of.name} has consumed interval {producer} up to bundle {at}, "
                    f"and its tick says {self._heads.get(producer, 'nothing')}"
                )

    def _without_ticks(self, rows: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        parts = []
        for row in rows:
            if row["kind"] == "tick":
                self._read[row["producer"]] = row["payload"].decode()
                self._heads[row["producer"]] = row["seq"]
            else:
                parts.append(row)
        return parts

    def end(self) -> Iterator[pa.RecordBatch]:
        """Write the state, and yield a tick for each consumer and what has to be committed."""
        files = self._state.append(self._attempt, self._changes, self._header.files if self._header else ())
        ended = StreamedEnd(
            header_of(self._host.interval, self.token, files, finished=self._is_at_end),
            self._read,
            self._staged.close(),
            self._staged.rows,
            self._kept.end(),
            self._host.interval.unfinished,
            msgspec.structs.replace(self._news, drained=self._news.drained or self._is_at_end),
        )
        parts = CheckpointParts(self._id, LAST, self._hosted.ranks[self._id], None)
        for consumer in self._of.consumers:
            parts.add("tick", self.token.encode(), owner=consumer, seq=self._host.interval.bundle)
        parts.add("end", msgspec.json.encode(ended))
        yield from parts.batches()

    def close(self) -> None:
        """Close the source."""
        source, self._source = self._source, None
        if source is not None:
            source.close()

    def _commit(self, checkpoint: Checkpoint) -> Iterator[pa.RecordBatch]:
        self._changes.add(checkpoint.delta)
        if checkpoint.dedupe_run is not None:
            self._changes.add_run(checkpoint.bundle, checkpoint.dedupe_run)
        self._staged.add(checkpoint)
        yield from self._sent(checkpoint).batches()


def check_attempts(ends: Mapping[int, StreamedEnd], ids: Sequence[int]) -> None:
    """Check that every interval has come to its end once, and that all have read what is committed.

    Raises:
        CorruptionError: they have not.
    """
    if missing := [interval_id for interval_id in ids if interval_id not in ends]:
        raise CorruptionError(f"the intervals {missing} have not come to the end of the batch")
    for interval_id, end in ends.items():
        if end.unfinished:
            raise CorruptionError(f"interval {interval_id} has left due work undone")
        for producer, token in end.read.items():
            if token != ends[producer].header.token:
                raise CorruptionError(
                    f"interval {interval_id} has read another attempt of interval {producer} than came to its end",
                    hint="start the query again: it continues after the last batch",
                )
