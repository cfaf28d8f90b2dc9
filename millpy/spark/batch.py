"""A whole graph as a Spark batch: the same file, the same rows and the same state as its workers would make.

Each computation is one Spark job over the parts of those before it (`hosted_task`). Parts are kept on the executors'
disks; a lost executor's are made again, and are the same. At the end the accounting (I8) must balance over all
intervals, or the run fails: nothing is left out in silence.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec
from pyspark import StorageLevel
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - Spark's own convention

from millpy.clock import SystemClock
from millpy.errors import CorruptionError
from millpy.hosting.interval_state import NO_KEY
from millpy.hosting.plan import ComputationPlan
from millpy.limits import Limits
from millpy.model.checkpoint import Kind, Segment, StoredSlice
from millpy.model.time import INSTANT_MAX, INSTANT_MIN
from millpy.spark.archive_input import Archive
from millpy.spark.hosted_rows import dead_letter_frame, late_frame, state_frame, table_frame
from millpy.spark.hosted_task import ORDER, PARTS_DDL, IntervalEnd, host_stage, read_source
from millpy.spark.job import HostedPlan, make_job
from millpy.spark.replayed_task import REPLAY_ORDER, replay_source, replay_stage
from millpy.spark.spark_errors import readable_errors
from millpy.store.memory.tables import KeyedRow, Ring, StoredAccounting, StoredSegment

log = logging.getLogger("millpy.observability.status_line")
SETTINGS = {
    "spark.sql.session.timeZone": "UTC",
    # Parts are slices of up to megabytes: a task holds a batch of them, which these bytes bound, not their number.
    "spark.sql.execution.arrow.maxRecordsPerBatch": "1024",
    "spark.sql.execution.arrow.maxBytesPerBatch": str(32 << 20),
}
"""Set while a batch runs and its frames are read; `BatchResult.close` restores the session's own."""


@dataclass(slots=True)
class BatchResult:
    """What a batch has computed. Its frames can be read until it is closed.

    Attributes:
        tables: result table -> its rows, of each window the newest pane, in the columns of the SQL table.
        late_records: records that missed a window, as in `millpy.late_records`.
        dead_letters: records that could not be processed, as in `millpy.dead_letters`.
        state: the final state, one row an entry; None unless it was asked for.
        accounting: the counts of sources, subscriptions and tables, all of which balance.
        undone: what is left undone at the end, by computation: "parked" records, and timers by time domain.
        through: of an exact batch, the number of the last bundle of each interval of a stage; else None.
    """

    tables: dict[str, DataFrame]
    late_records: DataFrame
    dead_letters: DataFrame
    state: DataFrame | None
    accounting: StoredAccounting
    undone: dict[str, dict[str, int]]
    through: dict[str, int] | None
    _kept: Sequence[DataFrame] = field(repr=False)
    _settings: Mapping[str, str | None] = field(repr=False)

    def summary(self) -> dict[str, Any]:
        """Return accounting and undone work as JSON data; for an exact batch, the last bundle of each interval, too."""
        found = {"accounting": dataclasses.asdict(self.accounting), "undone": self.undone}
        return found if self.through is None else {**found, "through": self.through}

    def write(self, directory: str) -> None:
        """Write everything as Parquet, a folder for each table, below a directory that Spark can reach.

        `summary` comes last: a directory that has it is complete.
        """
        for name, frame in self.tables.items():
            _write(frame, f"{directory}/tables/{name}")
        _write(self.late_records, f"{directory}/late_records")
        _write(self.dead_letters, f"{directory}/dead_letters")
        if self.state is not None:
            _write(self.state, f"{directory}/state")
        spark = self.late_records.sparkSession
        text = msgspec.json.encode(self.summary()).decode()
        _write(spark.createDataFrame([(text,)], "summary string").coalesce(1), f"{directory}/summary")

    def close(self) -> None:
        """Free the executors' disks, and restore the session's settings."""
        for frame in self._kept:
            frame.unpersist()
        if self._kept:
            restore(self._kept[0].sparkSession, self._settings)
        self._kept = ()

    def __enter__(self) -> BatchResult:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _write(frame: DataFrame, path: str) -> None:
    frame.sparkSession.sparkContext.setJobDescription(f"write {Path(path).name}")
    frame.write.mode("error").parquet(path)


def run(
    spark: SparkSession,
    graph: str | Path,
    inputs: Sequence[str] | Mapping[str, str | Sequence[str]] | Archive = (),
    *,
    state: bool = False,
    limits: Limits | None = None,
) -> BatchResult:
    """Run a graph over its whole history.

    Every source needs an input, unless it ends by itself (`Files`). The input of each source is read to its end, and
    then all windows close. Processing time does not pass, so processing-time timers do not fire: they are counted in
    `undone`. Tasks are repeatable, so a lost task or executor changes nothing.

    Args:
        spark: a session of yours, or that of `millpy.spark.session`.
        graph: the graph's file, or `file.py:name`. It is sent as text; modules that it imports must be on all machines.
        inputs: names and patterns of NDJSON, CSV and Parquet files: of the only source (`["data/*.csv"]`), or by source
            (`{"readings": "data/*.parquet"}`); or an `Archive`. They must be at the same place on all machines.
        state: whether to return the final state.
        limits: the limits of bundles and caches; as in a worker, they never change results except the order in which
            floats are added.

    Raises:
        UsageError: the graph cannot run as a batch, with the reason.
        CorruptionError: the accounting does not balance.
        MillError: Spark has given up.
    """
    job = make_job(str(graph), inputs, limits=limits or Limits(), now_us=SystemClock().now_us(), state=state)
    return run_hosted(spark, HostedPlan(job))


def run_hosted(spark: SparkSession, hosted: HostedPlan) -> BatchResult:
    """Run a job whose graph has been loaded and checked; see `run`."""
    return _BatchRun(spark, hosted).run()


class _BatchRun:
    """One run. Computations run one after the other, each as one Spark job."""

    def __init__(self, spark: SparkSession, hosted: HostedPlan) -> None:
        self._spark = spark
        self._job = hosted.job.encoded()
        self._hosted = hosted
        self._parts: dict[str, DataFrame] = {}
        self._ends: dict[int, IntervalEnd] = {}
        self._rows: dict[int, int] = {}
        self._changed: set[int] = set()

    def run(self) -> BatchResult:
        settings = apply(self._spark, SETTINGS)
        try:
            with readable_errors():
                for computation in self._hosted.plan:
                    self._run_computation(computation)
            accounting = account(self._hosted, self._ends, self._rows)
        except BaseException:
            for frame in self._parts.values():
                frame.unpersist()
            restore(self._spark, settings)
            raise
        parts = self._union(self._parts.values())
        return BatchResult(
            tables={spec.name: self._table(spec.name) for spec in self._hosted.spec.tables},
            late_records=late_frame(parts),
            dead_letters=dead_letter_frame(parts),
            state=state_frame(parts) if self._hosted.job.keeps_state else None,
            accounting=accounting,
            undone=undone(self._hosted, self._ends),
            through=self._through(),
            _kept=tuple(self._parts.values()),
            _settings=settings,
        )

    def _run_computation(self, computation: ComputationPlan) -> None:
        name = computation.name
        log.debug("Spark computes %s", name)
        self._spark.sparkContext.setJobDescription(f"{self._hosted.plan.permanent_name}: {name}")
        made = self._source(computation) if computation.stage is None else self._stage(computation)
        self._parts[name] = made.persist(StorageLevel.DISK_ONLY)
        counted = (
            made.where(F.col("kind").isin("end", "rows", "later_rows", "deleted"))
            .groupBy("kind", "subject", F.when(F.col("kind") == "end", F.col("owner")).alias("owner"))
            .agg(F.sum("records").alias("records"), F.any_value("payload").alias("payload"))
            .withColumn("payload", F.when(F.col("kind") == "end", F.col("payload")))
        )
        for row in counted.collect():
            if row.kind == "end":
                self._ends[row.owner] = msgspec.json.decode(row.payload, type=IntervalEnd)
            elif row.kind != "deleted":
                self._rows[row.subject] = self._rows.get(row.subject, 0) + row.records
            if row.kind in ("later_rows", "deleted"):
                self._changed.add(row.subject)

    def _source(self, computation: ComputationPlan) -> DataFrame:
        ids = [interval.interval_id for interval in computation.intervals]
        intervals = self._spark.createDataFrame([(one,) for one in ids], "owner int")
        spread = intervals.repartitionById(len(ids), _place("owner", ids))
        read = replay_source if self._hosted.job.takes else read_source
        return spread.mapInArrow(partial(read, self._job), PARTS_DDL)

    def _stage(self, computation: ComputationPlan) -> DataFrame:
        ids = [interval.interval_id for interval in computation.intervals]
        producers = {self._hosted.plan.by_interval[producer].name for producer in computation.producers}
        taken = self._union(self._parts[producer] for producer in sorted(producers))
        own = taken.where(F.col("kind").isin("segment", "position") & F.col("owner").isin(ids))
        order, step = (REPLAY_ORDER, replay_stage) if self._hosted.job.takes else (ORDER, host_stage)
        ordered = own.repartitionById(len(ids), _place("owner", ids)).sortWithinPartitions(*order)
        return ordered.mapInArrow(partial(step, self._job), PARTS_DDL)

    def _through(self) -> dict[str, int] | None:
        takes = self._hosted.job.takes.values()
        return {place: last for of in takes for place, last in of.through.items()} if takes else None

    def _union(self, frames: Iterable[DataFrame]) -> DataFrame:
        first, *others = frames
        for other in others:
            first = first.unionAll(other)
        return first

    def _table(self, name: str) -> DataFrame:
        table_id = self._hosted.plan.deployment.table_ids[name]
        spec = next(spec for spec in self._hosted.spec.tables if spec.name == name)
        return table_frame(self._parts[spec.computation], spec, table_id, changed=table_id in self._changed)


def undone(hosted: HostedPlan, ends: Mapping[int, IntervalEnd]) -> dict[str, dict[str, int]]:
    """Return what intervals have left undone, by computation."""
    found: dict[str, dict[str, int]] = {}
    for interval_id, end in ends.items():
        left = {f"{domain} timers": number for domain, number in end.timers.items()}
        if end.parked:
            left["parked"] = sum(end.parked.values())
        if end.pending:
            left["records that were not taken yet"] = sum(end.pending.values())
        for what, number in left.items():
            of = found.setdefault(hosted.plan.by_interval[interval_id].name, {})
            of[what] = of.get(what, 0) + number
    return found


def account(hosted: HostedPlan, ends: Mapping[int, IntervalEnd], rows: Mapping[int, int]) -> StoredAccounting:
    """Return the accounting (I8) over all intervals.

    Args:
        hosted: the job.
        ends: interval -> its counters.
        rows: table -> number of its rows that came out.

    Raises:
        CorruptionError: it does not balance, an interval is missing, or rows are.
    """
    database, plan = hosted.database, hosted.plan
    database.segments = Ring(INSTANT_MIN)
    for interval_id, of in plan.by_interval.items():
        if interval_id not in ends:
            raise CorruptionError(f"interval {interval_id} of {of.name} has not come to its end")
        keyed = database.headers[interval_id].keyed
        keyed.clear()
        for counter, subject, count in ends[interval_id].counters:
            keyed[Kind.COUNTER, counter, NO_KEY, subject] = KeyedRow(0, b"%d" % count, INSTANT_MAX, 1)
        for subscription, number in ends[interval_id].parked.items():
            for place in range(number):
                keyed[Kind.PARKED, subscription, NO_KEY, str(place)] = KeyedRow(0, b"0", INSTANT_MAX, 1)
        for subscription, number in ends[interval_id].pending.items():
            database.segments.append(_pending(hosted, interval_id, int(subscription), number))
    accounting = database.accounting(plan.deployment.graph_id)
    if not accounting.balanced:
        raise CorruptionError(f"the accounting does not balance: {accounting}")
    for table in accounting.tables:
        there = rows.get(plan.deployment.table_ids[table.table], 0)
        if there != table.consumed:
            raise CorruptionError(f"table {table.table} has {there} rows, but {table.consumed} were written")
    return accounting


def _pending(hosted: HostedPlan, consumer: int, subscription_id: int, records: int) -> StoredSegment:
    """Return a segment that stands for the records that a consumer has not taken."""
    (outgoing, producer) = next(
        (outgoing, of.intervals[0].interval_id)
        for of in hosted.plan
        for outgoing in of.outgoing
        if outgoing.subscription_id == subscription_id
    )
    slices = tuple(StoredSlice(records, b"", 0) if one == consumer else None for one in outgoing.consumer_ids)
    return StoredSegment(
        producer, Segment(subscription_id, INSTANT_MAX, 0, INSTANT_MIN, slices, INSTANT_MIN, INSTANT_MAX)
    )


def _place(column: str, ids: Sequence[int]) -> Any:
    """Return the place of an interval among its computation's, as the partition in which it is stepped."""
    return F.array_position(F.array(*map(F.lit, ids)), F.col(column)).cast("int") - 1


def apply(spark: SparkSession, settings: Mapping[str, str]) -> dict[str, str | None]:
    """Set a session's settings; return those that it had."""
    before = {name: spark.conf.get(name, None) for name in settings}
    for name, value in settings.items():
        spark.conf.set(name, value)
    return before


def restore(spark: SparkSession, settings: Mapping[str, str | None]) -> None:
    """Set a session's settings back."""
    for name, value in settings.items():
        if value is None:
            spark.conf.unset(name)
        else:
            spark.conf.set(name, value)
