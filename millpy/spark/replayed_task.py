"""What runs inside the tasks of an exact batch: every bundle again as a worker made it, by the archived takes.

A source's task gives its bundles their own numbers. It looks up in the takes of each consumer which bundle took them,
and in which order, and addresses its parts so. A stage's task walks through its takes, one step each, at the time and
in the bounds of the worker's. What it gets must be what the worker got: numbers of records and watermarks are compared.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

import pyarrow as pa

from millpy.errors import CorruptionError
from millpy.graph import StageNode
from millpy.hosting.routing import Delivery
from millpy.model.checkpoint import Checkpoint, Cursor
from millpy.model.keys import Key, key_from_text
from millpy.model.stage import UNBOUNDED
from millpy.model.take import TakeRun
from millpy.model.time import INSTANT_MAX, Instant
from millpy.spark.hosted_task import CheckpointParts, IntervalTask, archived_turns
from millpy.spark.job import HostedPlan, plan_of
from millpy.spark.takes import ArchivedTake, run_places, takes_of
from millpy.store.codec import decode_slice

REPLAY_ORDER = ("owner", "turn", "again", "seq", "subject")
"""`turn` is the consumer's bundle that takes a part, `again` the run in it."""
BEHIND = INSTANT_MAX
"""The turn of what no take up to the cut has consumed."""
Row = Mapping[str, Any]


def replay_source(job: str, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Read source partitions, given as interval ids, and yield their parts, addressed by the takes of the consumers."""
    hosted = plan_of(job)
    for batch in batches:
        for interval_id in batch.column(0).to_pylist():
            task = ReplayedTask(hosted, interval_id)
            for seq, bundle in archived_turns(hosted, interval_id):
                if bundle.finished:  # the takes say how far the watermark has come
                    break
                task.number(seq)
                yield from task.step((seq, 0), taken=bundle)
            yield from task.end()


def replay_stage(job: str, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Repeat the steps of a stage's intervals over parts that are sorted by `REPLAY_ORDER`, and yield their parts."""
    hosted = plan_of(job)
    rows = (row for batch in batches for row in batch.to_pylist())
    for interval_id, own in groupby(rows, key=lambda row: row["owner"]):
        task = ReplayedTask(hosted, interval_id)
        groups = groupby(own, key=lambda row: row["turn"])
        turn, parts = next(groups)
        for each in task.takes():
            mine: Iterable[Row] = ()
            if turn == each.bundle:
                mine = list(parts)
                turn, parts = next(groups)  # at least the positions behind all takes follow
            yield from task.repeat(each, mine)
        if turn != BEHIND:
            raise CorruptionError(f"bundle {turn} of {task.place} has input, but no take")
        task.count_pending(parts)
        yield from task.end()


class ReplayedTask(IntervalTask):
    """One interval, stepped through the bundles that a worker has made.

    Attributes:
        place: the interval's place, as takes name it.
    """

    def __init__(self, hosted: HostedPlan, interval_id: int) -> None:
        super().__init__(hosted, interval_id)
        self._intervals = {interval.place: interval.interval_id for interval in hosted.plan.deployment.intervals}
        self._places = {interval_id: place for place, interval_id in self._intervals.items()}
        self.place = self._places[interval_id]
        self._runs = {
            consumer: run_places(
                hosted.job.takes[hosted.plan.by_interval[consumer].name], self._places[consumer], [self.place]
            )[self.place]
            for consumer in self._of.consumers
        }
        if self._of.stage is not None:
            for producer in hosted.job.takes[self._of.name].later.get(self.place, ()):
                del self._host.interval.cursors[self._intervals[producer]]

    def takes(self) -> Iterator[ArchivedTake]:
        """Yield the interval's takes up to the cut."""
        history = self._hosted.job.takes[self._of.name]
        through = history.through[self.place]
        for each in takes_of(history.files, self.place) if through else ():
            if each.bundle > through:
                break
            yield each

    def number(self, bundle: int) -> None:
        """Give the next bundle its number."""
        self._host.interval.bundle = bundle - 1

    def repeat(self, each: ArchivedTake, rows: Iterable[Row]) -> Iterator[pa.RecordBatch]:
        """Repeat a step, and yield what the worker has committed.

        Raises:
            CorruptionError: the worker consumed something else, or the graph makes something else of it.
        """
        take = each.take
        cursors = self._host.interval.cursors
        for run in each.input.joined:
            producer = self._intervals[run.producer]
            cursors.setdefault(producer, Cursor(producer, 0, Instant(run.watermark)))
        by_run = {run: list(group) for run, group in groupby(rows, key=lambda row: row["again"])}
        delivered = [
            delivery
            for place, run in enumerate(each.input.runs)
            for delivery in self._deliveries(each, run, by_run.pop(place, []))
        ]
        moved = [Cursor(self._intervals[run.producer], run.through, Instant(run.watermark)) for run in each.input.moved]
        checkpoint = self._host.repeat(
            each.now_us,
            moved,
            delivered,
            panes_max=UNBOUNDED if each.input.panes_max is None else each.input.panes_max,
            fires=None if each.input.timers is None else self._fires(each.input.timers),
        )
        found = None if checkpoint is None else (checkpoint.bundle, checkpoint.input_watermark)
        if checkpoint is None or found != (each.bundle, take.watermark):
            raise self._differs(each, f"it has watermark {take.watermark} in the archive, the replay has {found}")
        self._at = (each.bundle, 0)
        yield from self.keep(checkpoint)

    def _deliveries(self, each: ArchivedTake, run: TakeRun, rows: Sequence[Row]) -> Iterator[Delivery]:
        records = sum(row["records"] for row in rows)
        if records != run.records:
            raise self._differs(each, f"it took {run.records} records of {run.producer}, the replay has {records}")
        producer = self._intervals[run.producer]
        at = (0, 0)
        for at, group in groupby(rows, key=lambda row: (row["seq"], row["watermark"])):
            slices = {
                row["subject"]: decode_slice(
                    self._of.incoming[row["subject"]].record_type, row["payload"], row["checksum"]
                )
                for row in group
            }
            yield from self._host.delivery(producer, at[0], Instant(at[1]), slices)
        if at[0] == run.through and at[1] != run.watermark:
            raise self._differs(each, f"{run.producer} had watermark {run.watermark}, the replay has {at[1]}")
        yield from self._host.delivery(producer, run.through, Instant(run.watermark))

    def _fires(self, timers: Sequence[tuple[str, int]]) -> dict[Key, int]:
        assert isinstance(self._of.node, StageNode)
        key_types = self._of.node.inputs[0].key_types
        return {key_from_text(key, key_types): number for key, number in timers}

    def _differs(self, each: ArchivedTake, how: str) -> CorruptionError:
        return CorruptionError(
            f"bundle {each.bundle} of {self.place} cannot be made again: {how}",
            hint="run the file of the graph that the workers ran then; or leave out --exact",
        )

    def _address(self, consumer: int, checkpoint: Checkpoint) -> Mapping[str, int]:
        """Return when a consumer takes a checkpoint's records."""
        found = self._runs[consumer].find(checkpoint.bundle)
        return {"turn": BEHIND, "again": 0} if found is None else {"turn": found[0], "again": found[1]}

    def _add_positions(self, parts: CheckpointParts) -> None:
        """Add none: the takes have them."""

    def end(self) -> Iterator[pa.RecordBatch]:
        """Yield the end of the interval, and one part for each consumer, which may get nothing else."""
        parts = CheckpointParts(self._id, (BEHIND, 0), self._hosted.ranks[self._id], None)
        for consumer in self._of.consumers:
            parts.add("position", None, owner=consumer)
        yield from parts.batches()
        yield from super().end()
