"""A whole graph as a streaming query: Structured Streaming hosts the same stages that the workers run.

Spark gives batches, their times (`stream_clock`), tasks and shuffles. State, positions and rows are millpy's: a batch
changes them by one commit (`stream_commits`), so each record counts once, whatever fails and however often a batch is
run. The accounting (I8) must balance after each batch, or the query fails without a commit.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - Spark's own convention
from pyspark.sql.streaming.query import StreamingQuery

from millpy.clock import SystemClock
from millpy.errors import UsageError
from millpy.limits import Limits
from millpy.spark.archive_input import Archive
from millpy.spark.batch import SETTINGS, account, apply, undone
from millpy.spark.hosted_task import ORDER, PARTS_DDL
from millpy.spark.job import HostedPlan, make_job
from millpy.spark.spark_errors import readable_errors
from millpy.spark.stream_clock import CLOCK, ClockSource
from millpy.spark.stream_commits import StreamCommit, StreamCommits
from millpy.spark.stream_output import StreamOutput
from millpy.spark.stream_store import StreamStore
from millpy.spark.stream_tables import StreamTables
from millpy.spark.stream_task import StreamedEnd, StreamTasks, check_attempts, host_stages, read_sources

log = logging.getLogger("millpy.observability.status_line")
BUNDLES_MAX = 8
EVERY = timedelta(seconds=1)
POLL_S = 0.1
STOP_S = 60.0
SLOW_S = 60.0
"""Seconds after which the log says what a batch waits for."""
STREAM_SETTINGS = {**SETTINGS, "spark.sql.adaptive.enabled": "false"}


@dataclass(frozen=True, slots=True)
class StreamPlaces:
    """Where a query keeps its data: directories that the driver and all executors see under the same name.

    Attributes:
        checkpoint: state, commits, and Spark's own checkpoint; it must be on a file system with hard links.
        output: the result rows.
        database: a PostgreSQL database, as URL, whose tables of the graph get the result rows, too.
    """

    checkpoint: str | Path
    output: str | Path
    database: str | None = field(default=None, repr=False)


def stream(
    spark: SparkSession,
    graph: str | Path,
    inputs: Sequence[str] | Mapping[str, str | Sequence[str]] | Archive = (),
    *,
    places: StreamPlaces,
    every: timedelta = EVERY,
    available_now: bool = False,
    limits: Limits | None = None,
) -> GraphStream:
    """Start a graph as a streaming query, or resume it from its checkpoint.

    The query ends when all sources have ended, and otherwise runs until `GraphStream.stop`.

    Args:
        spark: a session of yours, or that of `millpy.spark.session`.
        graph: the graph's file, or `file.py:name`. Its sources must be `Files`, `Directory` or `Kafka`, or have an
            input or an archive.
        inputs: files in place of sources, as for `run`; or the archives of the graph, which may grow.
        places: the directories of the query.
        every: how often a batch begins; one that takes longer is followed by the next at once.
        available_now: whether to end when everything is read that the sources had at the start. Windows stay open, and
            a query that is started again continues.
        limits: the limits of bundles and caches.

    Raises:
        UsageError: the graph cannot run as a stream, or the places are those of another query, or of workers.
    """
    job = make_job(
        str(graph), inputs, limits=limits or Limits(), now_us=SystemClock().now_us(), state=False, streams=True
    )
    return stream_hosted(spark, HostedPlan(job), places, every, available_now=available_now)


def stream_hosted(
    spark: SparkSession, hosted: HostedPlan, places: StreamPlaces, every: timedelta, *, available_now: bool = False
) -> GraphStream:
    """Start a query whose graph has been loaded and checked; see `stream`."""
    if every <= timedelta(0):
        raise UsageError(f"every={every} must be positive")
    return GraphStream(spark, hosted, places, every, available_now=available_now)


class GraphStream:
    """A running query.

    Attributes:
        query: Spark's handle of it.
    """

    query: StreamingQuery

    def __init__(
        self,
        spark: SparkSession,
        hosted: HostedPlan,
        places: StreamPlaces,
        every: timedelta,
        *,
        available_now: bool = False,
    ) -> None:
        checkpoint = Path(places.checkpoint).absolute()
        self._available_now = available_now
        self._until: dict[int, int] = {}  # source interval -> the end at the start of this query
        self._told: set[str] = set()
        self._hosted = hosted
        self._output = Path(places.output).absolute()
        self._checkpoint = checkpoint
        self._published = StreamOutput(self._output, hosted.spec)
        self._commits = StreamCommits(checkpoint, hosted.query_spec)
        self._published.publish(self._commits.newest.outputs)
        self._published.sweep()
        self._tables: StreamTables | None = None
        self._store: StreamStore | None = None
        if places.database is not None:
            self._store = StreamStore(places.database, self._commits.worker_id, hosted)
            self._tables = StreamTables(self._store, hosted, self._output)
        self._running = threading.Lock()  # held by the batch that runs
        self._is_stopping = False
        self._has_ended = threading.Event()  # set when everything is published
        try:
            if self._store is not None and self._tables is not None:
                self._store.open()
                self._store.own()
                self._tables.open(self.newest)
            if self.newest.finished:
                self._has_ended.set()
            self.query = self._start(spark, every)
        except BaseException:
            self._disconnect()
            raise

    def _start(self, spark: SparkSession, every: timedelta) -> StreamingQuery:
        spark.dataSource.register(ClockSource)
        writer = spark.readStream.format(CLOCK).load().writeStream.foreachBatch(self._run_batch)
        writer = writer.option("checkpointLocation", str(self._checkpoint / "spark"))
        writer = writer.queryName(self._hosted.plan.permanent_name)
        return writer.trigger(processingTime=f"{every.total_seconds()} seconds").start()

    @property
    def newest(self) -> StreamCommit:
        """The newest commit."""
        return self._commits.newest

    def summary(self) -> dict[str, Any]:
        """Return the accounting and the undone work after the newest commit, as JSON data, as of a batch."""
        return summary_of(self._hosted, self.newest)

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until all sources have ended, or for some time; return whether they have.

        Raises:
            MillError: the query has failed.
        """
        waited_s = 0.0
        with readable_errors():
            while not self._has_ended.is_set() and (timeout_s is None or waited_s < timeout_s):
                if not self.query.isActive:
                    self.query.awaitTermination()  # raises its error
                    break
                self._has_ended.wait(POLL_S)
                waited_s += POLL_S
            if self._has_ended.is_set():
                self.stop()
        return self._has_ended.is_set()

    def stop(self) -> None:
        """Stop the query after the batch that is running, or before its end if that takes longer than `STOP_S`."""
        self._is_stopping = True
        if self._running.acquire(timeout=STOP_S):
            self._running.release()  # Spark's own stop waits for the batch, which must not wait for us
        self.query.stop()
        self._disconnect()

    def _disconnect(self) -> None:
        store, self._store, self._tables = self._store, None, None
        if store is not None:
            store.close()

    def _run_batch(self, frame: DataFrame, batch: int) -> None:
        """Run a batch of Spark's. All that it brings is the time, so nothing is lost with one that is left out."""
        with self._running:
            newest = self._commits.newest
            # One that is committed was published at the start; Spark did not come to note it.
            if self._is_stopping or batch <= newest.batch or newest.finished:
                return
            (row,) = frame.collect()
            spark = frame.sparkSession
            apply(spark, STREAM_SETTINGS)
            spark.sparkContext.setJobDescription(f"{self._hosted.plan.permanent_name}: batch {batch}")
            tasks = self._tasks(batch, row.now_us)
            with _slow_batch_reported(spark, batch):
                ends = self._ends(spark, tasks)
            commit = commit_of(self._hosted, newest, tasks, ends)
            self._commits.commit(commit)
            self._published.publish(commit.outputs)
            if self._tables is not None:
                self._tables.publish(commit)
            log.debug("Spark has committed batch %d", batch)
            if self._is_drained(ends) or commit.finished:
                self._has_ended.set()

    def _is_drained(self, ends: Mapping[int, StreamedEnd]) -> bool:
        """Tell whether the query is to end here; report what the sources have told."""
        news = {interval_id: ends[interval_id].news for interval_id in _sources(self._hosted)}
        told = {text for of in news.values() for text in of.told}
        for text in sorted(told - self._told):
            log.warning("%s", text)
        self._told = told
        if self._available_now or self._hosted.job.hands_over:
            for interval_id, of in news.items():
                if of.until is not None:
                    self._until.setdefault(interval_id, of.until)
        return self._available_now and all(of.drained for of in news.values())

    def _tasks(self, batch: int, now_us: int) -> StreamTasks:
        return StreamTasks(
            self._hosted.job.encoded(),
            str(self._checkpoint),
            str(self._output),
            batch,
            now_us,
            BUNDLES_MAX,
            self._commits.newest.intervals,
            self._until,
        )

    def _ends(self, spark: SparkSession, tasks: StreamTasks) -> dict[int, StreamedEnd]:
        """Run the batch as one job: the sources, and one stage after the other."""
        plan = self._hosted.plan
        ids = _sources(self._hosted)
        owners = spark.range(0, len(ids), 1, len(ids)).select(F.array(*map(F.lit, ids))[F.col("id")].alias("owner"))
        parts = owners.mapInArrow(partial(read_sources, tasks), PARTS_DDL)
        for computation in plan:
            if computation.stage is not None:
                ids = [interval.interval_id for interval in computation.intervals]
                placed = parts.repartitionById(len(ids), _place(ids)).sortWithinPartitions(*ORDER)
                parts = placed.mapInArrow(partial(host_stages, tasks, computation.name), PARTS_DDL)
        found: dict[int, StreamedEnd] = {}
        for row in parts.where(F.col("kind") == "end").select("owner", "payload").collect():
            found[row.owner] = msgspec.json.decode(row.payload, type=StreamedEnd)
        return found


@contextmanager
def _slow_batch_reported(spark: SparkSession, batch: int) -> Iterator[None]:
    """Say in the log which tasks a batch waits for, if it takes long: one that hangs looks like one without records."""

    def report() -> None:
        tracker, stages = spark.sparkContext.statusTracker(), []
        for stage in sorted(tracker.getActiveStageIds()):
            if (info := tracker.getStageInfo(stage)) is not None:
                stages.append(f"stage {stage}: {info.numCompletedTasks} of {info.numTasks} tasks")
        log.warning("batch %d has run for %g s; %s", batch, SLOW_S, ", ".join(stages) or "no stage is active")

    timer = threading.Timer(SLOW_S, report)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def summary_of(hosted: HostedPlan, commit: StreamCommit) -> dict[str, Any]:
    """Return the accounting and the undone work after a commit, as JSON data."""
    if commit.batch < 0:
        return {"accounting": {}, "undone": {}, "finished": False}
    accounting = asdict(account(hosted, commit.left, commit.rows))
    return {"accounting": accounting, "undone": undone(hosted, commit.left), "finished": commit.finished}


def commit_of(
    hosted: HostedPlan, newest: StreamCommit, tasks: StreamTasks, ends: Mapping[int, StreamedEnd]
) -> StreamCommit:
    """Return the commit of a batch that is whole and whose accounting balances.

    Args:
        hosted: the job.
        newest: the commit before it.
        tasks: the description of the batch.
        ends: interval -> what its task has come to.

    Raises:
        CorruptionError: an interval is missing, has read an attempt that is not committed, or counts differ.
    """
    check_attempts(ends, list(hosted.plan.by_interval))
    rows = dict(newest.rows)
    for end in ends.values():
        for table_id, count in end.rows.items():
            rows[table_id] = rows.get(table_id, 0) + count
    left = {interval_id: end.left for interval_id, end in ends.items()}
    account(hosted, left, rows)
    return StreamCommit(
        batch=tasks.batch,
        now_us=tasks.now_us,
        intervals={interval_id: end.header for interval_id, end in ends.items()},
        before={interval_id: header.bundle for interval_id, header in newest.intervals.items()},
        outputs={interval_id: end.outputs for interval_id, end in ends.items() if end.outputs},
        rows=rows,
        left=left,
        finished=all(ends[source].header.finished for source in _sources(hosted)),
    )


def _sources(hosted: HostedPlan) -> list[int]:
    """Return the intervals of the sources."""
    return [interval_id for interval_id, of in hosted.plan.by_interval.items() if of.stage is None]


def _place(ids: Sequence[int]) -> Any:
    """Return the partition of a row: of an interval among `ids` its place there, of another any."""
    own = F.array_position(F.array(*map(F.lit, ids)), F.col("owner")).cast("int")
    return F.when(own > 0, own - 1).otherwise(F.col("owner") % len(ids))
