"""Hosts: run stages by the worker's own walk, for a caller that brings the input and keeps what is committed.

    HostedInterval   one interval: input goes in, and the checkpoint that a worker would commit comes out
    HostedGraph      all intervals of a graph over a `CommittedState`, one commit a turn

A step depends on nothing else: time is what the caller says, so the same input at the same time gives the same
checkpoint, and no step ends early because it is slow. Where a worker commits a cursor that moved without data once a
second, a host commits it at once: its caller need not bring the same position again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from millpy.graph import Graph
from millpy.hosting.failpoints import NoFailpoints
from millpy.hosting.interval_state import IntervalState, intake_of, state_of
from millpy.hosting.isolation import Isolation
from millpy.hosting.plan import ComputationPlan, Plan, plan
from millpy.hosting.routing import Delivery, Observe, segment_queries
from millpy.hosting.step import CURSOR_ONLY_EVERY_S, Steps, StoreLoader, TurnInput
from millpy.ingest.protocol import SourceBatch
from millpy.limits import Limits
from millpy.model.bundle import Bundle
from millpy.model.checkpoint import Checkpoint, Cursor, DedupeRun, Entries, Grant
from millpy.model.deployment import Deployment, GraphSpec
from millpy.model.keys import Key, KeyHasher
from millpy.model.lookup import LookupTable, TableVersion
from millpy.model.record import Records
from millpy.model.stage import UNBOUNDED, StoredInterval, no_windows
from millpy.model.stored_windows import WindowQuery, no_query
from millpy.model.time import INSTANT_MIN, ClockReading, Instant
from millpy.model.watermark import input_watermark
from millpy.store.protocol import OwnerSnapshot, PollResult, SegmentQuery


class CommittedState(Protocol):
    """What a hosted graph has committed; the host is its only owner. `store.memory.state.MemoryState` is one."""

    def deploy(self, spec: GraphSpec) -> Deployment:
        """Register a graph, or find it deployed."""
        ...

    def claim(self, interval_ids: Sequence[int]) -> Sequence[Grant]:
        """Take intervals over from their owners, whose grants are stale from now on; return the new grants."""
        ...

    def read(self, grant: Grant, *, state_rows_max: int) -> OwnerSnapshot:
        """Read what an interval has committed; leave out its state if that has more than `state_rows_max` rows."""
        ...

    def load_state(self, grant: Grant, keys: Sequence[bytes]) -> Sequence[Entries]:
        """Read the state of these keys, given as JSON text."""
        ...

    def load_windows(self, grant: Grant, folded_bundle: int, subkeys: Sequence[str], keys: Sequence[bytes]) -> Entries:
        """Read folded entries of windows; see `Store.load_windows`."""
        ...

    def query_windows(self, grant: Grant, folded_bundle: int, query: WindowQuery) -> Entries:
        """Read the folded entries that a query asks for; see `Store.query_windows`."""
        ...

    def load_dedupe_runs(self, grant: Grant) -> Sequence[DedupeRun]:
        """Read the interval's dedupe runs that have not expired, oldest first."""
        ...

    def poll(self, queries: Sequence[SegmentQuery], bytes_max: int) -> Sequence[PollResult]:
        """Answer each query with its producer's position and the segments above the consumer's cursor."""
        ...

    def commit(self, checkpoints: Sequence[Checkpoint], *, graph_version: int) -> None:
        """Commit a turn as a whole, or raise and change nothing."""
        ...


class HostedInterval:
    """One interval of a graph, stepped by itself.

    Args:
        plan: the graph and its ids.
        snapshot: what the interval has committed; empty by default.
        runs: its dedupe runs that have not expired.
        load: loads state and windows that the snapshot leaves out.

    Attributes:
        interval: its soft state, with its cursors and watermarks.
    """

    def __init__(
        self,
        plan: Plan,
        interval_id: int,
        limits: Limits,
        *,
        snapshot: OwnerSnapshot | None = None,
        runs: Sequence[DedupeRun] = (),
        load: StoreLoader | None = None,
    ) -> None:
        snapshot = snapshot or OwnerSnapshot(StoredInterval(interval_id, 1), {}, {}, 0)
        grant = Grant(interval_id, snapshot.recovered.sequencer)
        self.interval = open_interval(grant, plan.by_interval[interval_id], snapshot, runs, limits)
        self._hasher = KeyHasher()
        self._turns = 0
        self._budget = HostBudget()
        self._steps = _steps(plan, limits, load or LOAD_NOTHING, self._budget)

    def delivery(
        self, producer: int, seq: int, watermark: Instant, records: Mapping[int, Records] | None = None
    ) -> list[Delivery]:
        """Return a producer's bundle as input of a step, from records that are decoded already.

        Args:
            producer: interval that has made the bundle.
            seq: its bundle number; the cursor moves there.
            watermark: its low watermark at that position.
            records: subscription -> this interval's records; nothing if only the position moves.
        """
        deliveries = []
        for subscription_id, part in (records or {}).items():
            subscription = self.interval.plan.incoming[subscription_id]
            bundle = Bundle(
                subscription.input, producer, seq, watermark, part, part.keys(subscription.key_fields, self._hasher)
            )
            deliveries.append(Delivery(producer, seq, watermark, bundle, False, polled=True))
        return [*deliveries, Delivery(producer, seq, watermark, None, True)]

    def step(
        self,
        now_us: Instant,
        *,
        polled: Sequence[PollResult] = (),
        delivered: Sequence[Delivery] = (),
        taken: SourceBatch | None = None,
        quiet: bool = False,
    ) -> Checkpoint | None:
        """Step once; return what has to be committed, or None if nothing has changed.

        Args:
            now_us: the processing time.
            polled: a store's answers for a stage.
            delivered: the same as decoded records, from `delivery`.
            taken: the batch of a source.
            quiet: whether the source is proven idle.
        """
        own = self.interval.interval_id
        self._turns += 1
        inbox = TurnInput(
            ClockReading.certain(now_us),
            self._turns * CURSOR_ONLY_EVERY_S,
            polled={own: polled},
            delivered={own: delivered},
            taken={} if taken is None else {own: taken},
            quiet=frozenset((own,)) if quiet else frozenset(),
            progress_due=True,
        )
        checkpoints = self._steps.run(inbox, {own: self.interval}, Isolation())
        return checkpoints[0] if checkpoints else None

    def repeat(
        self,
        now_us: Instant,
        moved: Sequence[Cursor],
        delivered: Sequence[Delivery],
        *,
        panes_max: int = UNBOUNDED,
        fires: Mapping[Key, int] | None = None,
    ) -> Checkpoint | None:
        """Step a stage as a worker did, whose take says how; see `model.take.Take`.

        Args:
            now_us: the processing time.
            moved: cursors that had moved before, without records.
            delivered: the input in the worker's order, from `delivery`.
            panes_max: number of panes that may be emitted.
            fires: key -> number of timers that fired at the end; None for all that are due.
        """
        own, interval = self.interval.interval_id, self.interval
        for cursor in moved:
            interval.advance_cursor(cursor.producer, cursor.seq, cursor.watermark)
        interval.input_watermark = input_watermark(cursor.watermark for cursor in interval.cursors.values())
        self._turns += 1
        self._budget.panes = panes_max
        inbox = TurnInput(
            ClockReading.certain(now_us),
            self._turns * CURSOR_ONLY_EVERY_S,
            delivered={own: delivered},
            progress_due=True,
        )
        again = Isolation(again=True, fired={} if fires is None else {own: fires})
        checkpoints = self._steps.run(inbox, {own: interval}, again)
        return interval.sampler.keep(checkpoints[0], now_us) if checkpoints else None


class HostedGraph:
    """All intervals of a graph in one process.

    Args:
        graph: the graph; it is deployed unless it is already.
        state: what is committed. The host takes all intervals from their owners.
        now_us: the processing time at the beginning.
        observe: called with what each bundle produces; all streams are then made, also those without a consumer.

    Attributes:
        now_us: the processing time, which `advance_clock` moves.
        tables: the versions of lookup tables for the next turn. A stage takes no step while one of its tables has none.
        intervals: the soft state of each interval.
    """

    def __init__(
        self, graph: Graph, state: CommittedState, limits: Limits, now_us: Instant, observe: Observe | None = None
    ) -> None:
        self._state = state
        self._limits = limits
        self.plan = plan(graph, state.deploy(graph.spec()), limits, observed=observe is not None)
        self._steps = _steps(
            self.plan,
            limits,
            StoreLoader(state.load_state, state.load_windows, state.query_windows),
            HostBudget(),
            observe,
        )
        self._turns = 0
        self.now_us = now_us
        self.tables: dict[LookupTable, TableVersion] = {}
        self.intervals: dict[int, IntervalState] = {}
        self.restart()

    def restart(self) -> None:
        """Drop all soft state, as a crash does, and open every interval from what is committed."""
        self.intervals.clear()
        for grant in self._state.claim(list(self.plan.by_interval)):
            of = self.plan.by_interval[grant.interval_id]
            snapshot = self._state.read(grant, state_rows_max=self._limits.state_preload_rows_max)
            runs = self._state.load_dedupe_runs(grant) if of.keeps_runs else ()
            self.intervals[grant.interval_id] = open_interval(grant, of, snapshot, runs, self._limits)

    def feed(self, source: str, payloads: Sequence[bytes], partition: str | None = None) -> None:
        """Give JSON payloads to a source as one bundle. They may become dead letters, duplicates or late records."""
        self.take(source, SourceBatch("json", self.now_us, payloads=payloads), partition)

    def advance_watermark(self, source: str, watermark: Instant, partition: str | None = None) -> None:
        """Let a source say that nothing before `watermark` comes any more; a watermark never moves back."""
        self.take(source, SourceBatch("json", self.now_us, watermark=watermark), partition)

    def end(self, source: str, partition: str | None = None) -> None:
        """End the input of a source."""
        self.take(source, SourceBatch("json", self.now_us, finished=True), partition)

    def take(self, source: str, batch: SourceBatch, partition: str | None = None) -> None:
        """Give any batch to a source; a source with several partitions needs the name of one."""
        self.turn({self._partition(source, partition): batch})

    def advance_clock(self, now_us: Instant) -> None:
        """Move the processing time; sources without input are proven idle."""
        assert now_us >= self.now_us, (now_us, self.now_us)
        self.now_us = now_us
        self.turn({})

    def turn(self, taken: Mapping[int, SourceBatch]) -> None:
        """Step all intervals and commit, again until no due work is left.

        Raises:
            PoisonError: a value cannot be stored. The host restarts from what is committed.
        """
        try:
            self._commit(self.step(taken))
            while any(interval.unfinished for interval in self.intervals.values()):
                self._commit(self.step({}))
        except BaseException:
            self.restart()
            raise

    def step(self, taken: Mapping[int, SourceBatch]) -> list[Checkpoint]:
        """Step all intervals and commit nothing. A `restart` after it has the effect of a crash before the commit."""
        sources = {i for i, interval in self.intervals.items() if interval.intake is not None and not interval.finished}
        polled: dict[int, list[PollResult]] = {}
        for interval in self.intervals.values():
            interval.use_tables(self.tables)
        for answer in self._state.poll(segment_queries(self.intervals), UNBOUNDED):
            polled.setdefault(answer.query.consumer, []).append(answer)
        quiet = frozenset(sources)
        clock = ClockReading.certain(self.now_us)
        self._turns += 1
        at = self._turns * CURSOR_ONLY_EVERY_S
        inbox = TurnInput(
            clock, at, polled=polled, taken=taken, quiet=quiet, progress_due=True, tables=dict(self.tables)
        )
        return self._steps.run(inbox, self.intervals, Isolation())

    def low_watermark(self, computation: str) -> Instant:
        """Return the low watermark of a source or stage."""
        deployed = self.plan.deployment.intervals_of(computation)
        return min((self.intervals[i.interval_id].low_watermark for i in deployed), default=INSTANT_MIN)

    def _commit(self, checkpoints: Sequence[Checkpoint]) -> None:
        if checkpoints:
            self._state.commit(checkpoints, graph_version=self.plan.deployment.version)

    def _partition(self, source: str, partition: str | None) -> int:
        (found,) = [
            interval.interval_id
            for interval in self.plan.deployment.intervals_of(source)
            if interval.keys is None and partition in (None, interval.partition)
        ]
        return found


def open_interval(
    grant: Grant, of: ComputationPlan, snapshot: OwnerSnapshot, runs: Sequence[DedupeRun], limits: Limits
) -> IntervalState:
    """Build the whole soft state of an interval from what it has committed."""
    interval = state_of(IntervalState, grant, of, snapshot, limits)
    if of.stage is None:
        interval.intake = intake_of(of, snapshot.recovered, runs, limits)
    else:
        interval.stage = of.stage.open(replace(snapshot.recovered, dedupe_runs=runs))
    return interval


@dataclass(slots=True)
class HostBudget:
    """A budget without bounds, unless a caller sets some: a step takes all of its input and does all due work."""

    records: int = UNBOUNDED
    panes: int = UNBOUNDED
    timers: int = UNBOUNDED


def _steps(plan: Plan, limits: Limits, load: StoreLoader, budget: HostBudget, observe: Observe | None = None) -> Steps:
    return Steps(plan, limits, load, NoFailpoints(), budget, lambda: 0.0, observe)


LOAD_NOTHING = StoreLoader(
    lambda grant, keys: (),
    lambda grant, folded, subkeys, keys: no_windows(folded, subkeys, keys),
    lambda grant, folded, query: no_query(folded, query),
)
"""For a host whose snapshots leave nothing out."""
