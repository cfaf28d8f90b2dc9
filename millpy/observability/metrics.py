"""Metrics for Prometheus: commits update counters and histograms; a scrape reads the gauges from the worker.

Each process reports what it owns, so a sum over processes describes the graph. The backlog is the exception: each owner
of a source reports all of it (take the maximum).
"""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Iterable, Iterator, Mapping, Sequence

from prometheus_client import CollectorRegistry, Counter, GCCollector, Histogram, PlatformCollector, ProcessCollector
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from millpy.clock import Clock
from millpy.errors import MillError
from millpy.hosting.interval_state import PauseState
from millpy.model.checkpoint import Checkpoint, Kind
from millpy.model.time import INSTANT_MAX, INSTANT_MIN
from millpy.operators.interval_join import IntervalJoin
from millpy.operators.keyed import KeyedInterval
from millpy.runtime.observer import TurnTimes
from millpy.runtime.owned_interval import OwnedInterval
from millpy.runtime.turn import Turn
from millpy.runtime.worker import Worker

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
OUTCOMES = frozenset({"injected", "accepted", "duplicate", "produced", "consumed"})
"""Counters of I8 that only rise. A replay lowers that of dead letters, so these are counted as they are recorded."""
Counted = tuple[str, str]
OF_SOURCES = (("injected", "accepted", "duplicate"), ("undecodable", "oversize", "refused", "event_time", "future"))
OF_CONSUMERS = (("consumed",), ("user_error", "refused"))
"""Outcomes, and reasons of dead letters, that are shown as 0 from the start: Prometheus misses the first record of a
counter that appears with it.
"""


class Metrics:
    """Watches one worker process; an `Observer`."""

    def __init__(self, graph: str, clock: Clock) -> None:
        self.registry = CollectorRegistry()
        for collector in (ProcessCollector, PlatformCollector, GCCollector):
            collector(registry=self.registry)
        self._graph = graph
        self._gauges = Gauges(graph, clock)
        self.registry.register(self._gauges)
        self._known: dict[int, dict[Counted, int]] = {}
        self._names: dict[int, str] = {}
        self._commits = self._counter("millpy_commits", "Turns committed.")
        self._takeovers = self._counter("millpy_takeovers", "Intervals taken over from a lost worker, or claimed anew.")
        self._failures = self._counter("millpy_turn_failures", "Turns that failed and were retried.", "error")
        self._records = self._counter("millpy_records", "Records committed.", "computation", "outcome")
        self._dead = self._counter("millpy_dead_letters", "Records that became dead letters.", "computation", "reason")
        self._late = self._counter("millpy_late_records", "Records too late for a window.", "computation")
        self._turn_s = self._histogram("millpy_turn_seconds", "Seconds from gathering input to acknowledging it.")
        self._commit_s = self._histogram("millpy_commit_seconds", "Seconds of a turn's commit and acknowledgement.")

    def _counter(self, name: str, help_text: str, *labels: str) -> Counter:
        return Counter(name, help_text, ("graph", *labels), registry=self.registry)

    def _histogram(self, name: str, help_text: str) -> Histogram:
        return Histogram(name, help_text, ("graph",), buckets=SECONDS, registry=self.registry).labels(self._graph)

    def waiting(self, error: MillError) -> None:
        """Do nothing: without a worker there is nothing to count."""

    def begun(self, worker: Worker) -> None:
        """Read the gauges from this worker."""
        self._gauges.worker = worker

    def ended(self) -> None:
        """Forget the worker, which no longer owns intervals."""
        self._gauges.worker = None
        self._known.clear()

    def holds(self, intervals: Mapping[int, OwnedInterval], claimed: int) -> None:
        """Count takeovers, and begin the counters of new intervals where their last owner left them."""
        if claimed:
            self._takeovers.labels(self._graph).inc(claimed)
        for gone in self._known.keys() - intervals.keys():
            del self._known[gone]
        for interval_id in intervals.keys() - self._known.keys():
            interval = intervals[interval_id]
            self._names[interval_id] = interval.plan.name
            self._begin(interval.plan.name, *(OF_SOURCES if interval.intake is not None else OF_CONSUMERS))
            self._known[interval_id] = dict(interval.counters)
            if interval.intake is not None:
                stream = interval.plan.name
                self._known[interval_id] |= {(what, stream): n for what, n in interval.intake.counts.items()}

    def _begin(self, name: str, outcomes: tuple[str, ...], reasons: tuple[str, ...]) -> None:
        for outcome in outcomes:
            self._records.labels(self._graph, name, outcome)
        for reason in reasons:
            self._dead.labels(self._graph, name, reason)
        if "consumed" in outcomes:
            self._late.labels(self._graph, name)

    def committed(self, turn: Turn, at: TurnTimes) -> None:
        """Count the committed turn."""
        self._commits.labels(self._graph).inc()
        self._turn_s.observe(at.committed - at.gathered)
        self._commit_s.observe(at.committed - at.sent)
        for checkpoint in turn.checkpoints:
            self._count(checkpoint)

    def failed(self, error: MillError) -> None:
        """Count the failure by the kind of its error."""
        self._failures.labels(self._graph, type(error).__name__).inc()

    def _count(self, checkpoint: Checkpoint) -> None:
        interval_id = checkpoint.grant.interval_id
        name, known = self._names[interval_id], self._known.setdefault(interval_id, {})
        for outcome, records in _risen(known, checkpoint):
            self._records.labels(self._graph, name, outcome).inc(records)
        dead = Tally((x.computation, x.reason) for x in checkpoint.dead_letters)
        dead.update(checkpoint.unstored)
        for (computation, reason), letters in dead.items():
            self._dead.labels(self._graph, computation, reason).inc(letters)
        late = sum(map(len, checkpoint.late)) + checkpoint.unstored_late
        if late:
            self._late.labels(self._graph, name).inc(late)


def _risen(known: dict[Counted, int], checkpoint: Checkpoint) -> Iterator[tuple[str, int]]:
    """Yield the outcomes whose counters have risen, and by how much; remember the new values."""
    for entries in checkpoint.delta:
        if entries.kind is not Kind.COUNTER or entries.namespace not in OUTCOMES:
            continue
        for of, value in zip(entries.subkeys, entries.values, strict=True):
            assert value is not None, "counters are never deleted"
            counted, count = (entries.namespace, of), int(value)
            risen = count - known.get(counted, 0)
            known[counted] = count
            if risen > 0:
                yield entries.namespace, risen


class Gauges(Collector):
    """The gauges of one worker's intervals and progress, read at each scrape, from another thread."""

    def __init__(self, graph: str, clock: Clock) -> None:
        self._graph = graph
        self._clock = clock
        self.worker: Worker | None = None

    def describe(self) -> Iterable[Metric]:
        """Return the gauges without values, because registration must not read the worker."""
        return [
            *(self._lease(None), *self._of_computations([]), *self._of_backlog(None)),
            *(*self._of_joins([]), self._of_silences([]), *self._of_lookups(None), *self._of_sources(None)),
            *self._of_sinks(None),
        ]

    def collect(self) -> Iterable[Metric]:
        """Return the present values of all gauges."""
        worker = self.worker
        intervals = [] if worker is None else list(worker.owned.intervals.values())
        return [
            *(self._lease(worker), *self._of_computations(intervals), *self._of_backlog(worker)),
            *(*self._of_joins(intervals), self._of_silences(intervals)),
            *(*self._of_lookups(worker), *self._of_sources(worker), *self._of_sinks(worker)),
        ]

    def _gauge(self, name: str, help_text: str, *labels: str) -> GaugeMetricFamily:
        return GaugeMetricFamily(name, help_text, labels=("graph", *labels))

    def _lease(self, worker: Worker | None) -> Metric:
        gauge = self._gauge("millpy_lease_trusted", "1 while the worker may trust its lease, else 0.")
        gauge.add_metric([self._graph], float(worker is not None and worker.context.lease.is_trusted()))
        return gauge

    def _of_computations(self, intervals: Sequence[OwnedInterval]) -> list[Metric]:
        held = self._gauge("millpy_intervals", "Key intervals and source partitions owned.", "computation")
        lag = self._gauge(
            "millpy_watermark_lag_seconds", "Seconds from the lowest low watermark to the clock.", "computation"
        )
        unfolded = self._gauge("millpy_unfolded_bytes", "Bytes of deltas not folded yet.", "computation")
        paused = self._gauge("millpy_sources_paused", "Source partitions paused until resumed by hand.", "computation")
        backpressured = self._gauge(
            "millpy_sources_backpressured", "Source partitions waiting for the backlog.", "computation"
        )
        by_name: dict[str, list[OwnedInterval]] = {}
        for interval in intervals:
            by_name.setdefault(interval.plan.name, []).append(interval)
        now_us = self._clock.now_us()
        for name, own in by_name.items():
            labels = [self._graph, name]
            held.add_metric(labels, len(own))
            unfolded.add_metric(labels, sum(interval.unfolded_bytes for interval in own))
            known = [i.low_watermark for i in own if INSTANT_MIN < i.low_watermark < INSTANT_MAX]
            if known:
                lag.add_metric(labels, (now_us - min(known)) / 1e6)
            if own[0].intake is not None:
                paused.add_metric(labels, sum(interval.pause is not PauseState.NO for interval in own))
                backpressured.add_metric(labels, sum(interval.backpressured for interval in own))
        return [held, lag, unfolded, paused, backpressured]

    def _of_backlog(self, worker: Worker | None) -> list[Metric]:
        records = self._gauge("millpy_backlog_records", "Stored records waiting for a consumer.", "producer")
        size = self._gauge("millpy_backlog_bytes", "Bytes of the stored records waiting for a consumer.", "producer")
        for producer, pending in worker.maintenance.backlog.items() if worker is not None else ():
            records.add_metric([self._graph, producer], pending.records)
            size.add_metric([self._graph, producer], pending.bytes)
        return [records, size]

    def _of_joins(self, intervals: Sequence[OwnedInterval]) -> list[Metric]:
        records = self._gauge("millpy_join_records", "Records that joins keep for a match.", "computation", "side")
        size = self._gauge("millpy_join_bytes", "Bytes of the records that joins keep for a match.", "computation")
        kept: dict[str, list[int]] = {}
        for interval in intervals:
            if isinstance(interval.stage, IntervalJoin):
                of = kept.setdefault(interval.plan.name, [0, 0, 0])
                numbers = (*interval.stage.buffered, interval.stage.buffered_bytes)
                of[:] = [before + more for before, more in zip(of, numbers, strict=True)]
        for name, (left, right, used) in kept.items():
            records.add_metric([self._graph, name, "left"], left)
            records.add_metric([self._graph, name, "right"], right)
            size.add_metric([self._graph, name], used)
        return [records, size]

    def _of_silences(self, intervals: Sequence[OwnedInterval]) -> Metric:
        devices = self._gauge(
            "millpy_silent_devices", "Devices that a silent_after step has found silent.", "computation"
        )
        silent: Tally[str] = Tally()
        for interval in intervals:
            if isinstance(interval.stage, KeyedInterval) and "silent" in interval.stage.gauges:
                silent[interval.plan.name] += interval.counters.get(("silent", ""), 0)
        for name, count in silent.items():
            devices.add_metric([self._graph, name], count)
        return devices

    def _of_lookups(self, worker: Worker | None) -> list[Metric]:
        rows = self._gauge("millpy_lookup_rows", "Rows of the version of a lookup table that is in use.", "table")
        misfits = self._gauge("millpy_lookup_misfits", "Rows of it that do not fit their class.", "table")
        age = self._gauge("millpy_lookup_age_seconds", "Seconds since a lookup table was last read.", "table")
        failing = self._gauge("millpy_lookup_failing", "1 while a lookup table cannot be read, else 0.", "table")
        if worker is None:
            return [rows, misfits, age, failing]
        lookups, now = worker.context.lookups, worker.context.clock.monotonic()
        for table in lookups.tables:
            labels, status = [self._graph, table.name], lookups.statuses[table]
            failing.add_metric(labels, float(bool(status.error) or table not in lookups.versions))
            if status.checked_at is not None:
                age.add_metric(labels, now - status.checked_at)
            if (version := lookups.versions.get(table)) is not None:
                rows.add_metric(labels, version.rows)
                misfits.add_metric(labels, version.misfits)
        return [rows, misfits, age, failing]

    def _of_sources(self, worker: Worker | None) -> list[Metric]:
        labels = ("computation", "partition")
        connected = self._gauge("millpy_source_connected", "1 while a source partition is connected, else 0.", *labels)
        away = self._gauge(
            "millpy_source_disconnected_seconds", "Seconds since its connection was lost; 0 while connected.", *labels
        )
        answers = self._gauge("millpy_database_answers", "1 while the database answers heartbeats, else 0.")
        failing = self._gauge("millpy_database_failing_seconds", "Seconds since the first failed heartbeat, or 0.")
        if worker is None:
            return [connected, away, answers, failing]
        health, now_us = worker.context.sources, worker.context.clock.now_us()
        for part in list(health.parts.values()):
            state, of = part.connection, [self._graph, part.stream, part.partition]
            if state.is_connected is not None:
                connected.add_metric(of, float(state.is_connected))
                away.add_metric(of, 0.0 if state.is_connected else max(0.0, (now_us - state.since_us) / 1e6))
        answers.add_metric([self._graph], float(health.database.answers))
        failing.add_metric([self._graph], health.database.failing_s)
        return [connected, away, answers, failing]

    def _of_sinks(self, worker: Worker | None) -> list[Metric]:
        connected = self._gauge(
            "millpy_sink_connected", "1 while all intervals of a sink are connected, else 0.", "sink"
        )
        messages = self._gauge("millpy_sink_messages", "Committed messages that are not known to be delivered.", "sink")
        size = self._gauge("millpy_sink_bytes", "Their bytes in the outbox.", "sink")
        full = self._gauge("millpy_sink_full", "1 while a sink takes no input, because too much waits, else 0.", "sink")
        refused = self._gauge(
            "millpy_sink_refused", "Messages that the other side refuses, and those that wait behind them.", "sink"
        )
        parked = self._gauge("millpy_sink_parked_keys", "Keys that wait until an operator releases them.", "sink")
        for sink, state in ({} if worker is None else worker.context.drains.states()).items():
            labels = [self._graph, sink]
            connected.add_metric(labels, float(state.connected))
            messages.add_metric(labels, state.messages)
            size.add_metric(labels, state.size)
            full.add_metric(labels, float(state.full))
            refused.add_metric(labels, state.refused)
            parked.add_metric(labels, state.parked_keys)
        return [connected, messages, size, full, refused, parked]
