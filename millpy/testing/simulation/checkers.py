"""The checkers of I1 to I9 (ARCHITECTURE.md), which run after every step on stored documents and recorded history.

There is one `Evidence` for each generation of the graph; `ending.py` judges a finished graph.

Each checker receives a bundle that was just committed, and yields the faults. It shares no code with the engine: it
reads states from the stored documents by plain JSON, and takes expected inputs and results from the oracle.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from uuid import UUID

from millpy.model.checkpoint import Checkpoint
from millpy.store.memory.tables import Row
from millpy.testing.simulation.branches import Branches
from millpy.testing.simulation.broker import Broker
from millpy.testing.simulation.deployments import BRANCH_OF
from millpy.testing.simulation.folded_state import folds_keep_values
from millpy.testing.simulation.graphs import (
    DISORDER_US,
    IDLE_US,
    MAX_SKEW_US,
    MORE_SOURCE,
    SOURCE,
    Shape,
    home_of,
)
from millpy.testing.simulation.headers import cursors_stay, joins_in_time, one_owner, watermarks_never_regress
from millpy.testing.simulation.history import CommittedBundle, Name, ObservedInterval, RunHistory, hashable, pending
from millpy.testing.simulation.names import name_is_current, rows_in_own_tables
from millpy.testing.simulation.oracle import BEGINNING, END, Arrival, SourceOracle, WatchOracle
from millpy.testing.simulation.pane_order import panes_in_order
from millpy.testing.simulation.repairs import dropped_rows_stay_away
from millpy.testing.simulation.sites import SiteFollower, sites_in
from millpy.testing.simulation.windowed import BY_TABLE, EARLY_RECORDS, EVERY_US, SLIDING_US

SOURCES = (SOURCE, MORE_SOURCE)
WITH_EARLY_PANES = ("per_early", "per_early_visit", "per_discard")
CLOCK_SLACK_US = 400_000
"""How far a worker's reading of the server's clock may be ahead: it drifts for a minute at most."""
COMMITTED_WITHIN_US = 30_000_000
"""The longest time between taking and committing a record."""
QUIET_S = 1.2
"""A source that was busy for less than this may still count as quiet."""


class Violation(NamedTuple):
    """A fault, and the checker that found it."""

    checker: str
    what: str


@dataclass(slots=True)
class Evidence:
    """Everything that the checkers use, for one generation of the graph.

    Attributes:
        brokers: by source partition.
        file: the lines of the file, if that is the source.
        sources: the oracle of each source partition, by interval.
        clocked: whether clocks step far.
        ahead: whether some readings are ahead of their arrival; readings that waited at the broker may then be late.
        latest_us: the latest time that every worker accepts: the highest that the server's clock has shown, except by
            steps that workers must reject, or that a worker which started during one doubts.
        arrived_us, earliest_us: the latest and the earliest time that any worker may believe.
        batches: by interval, the numbers of the committed batches of a topic.
        lines: by interval, the committed position in a log or the file.
        committed: the numbers of the committed messages.
        marks: by watcher interval, every committed mark.
        now_s: the seconds of the world's clock.
        clocks: for each source partition, when its newest records arrived, and the dedupe clock at that time.
        quiet_at: for each source partition, when it was last known to be quiet.
        read_on: for each source partition, the newest bundle with input.
        sites: by interval of windows, what is known of the sites there.
        longest_us: branch -> the longest allowed lateness since the first change.
        moved: faults of deployments.
        foreign_batches: messages that were committed and never delivered here.
        frozen_at: when a worker was last frozen: its next commits contain input that it read long before.
    """

    history: RunHistory
    brokers: Mapping[str, Broker]
    file: Sequence[bytes] | None
    sources: dict[int, SourceOracle]
    shape: Shape
    branches: Branches
    ahead: bool = False
    clocked: bool = False
    latest_us: int = BEGINNING
    arrived_us: int = BEGINNING
    earliest_us: int = BEGINNING
    watchers: dict[int, WatchOracle] = field(default_factory=dict)
    batches: dict[int, set[int]] = field(default_factory=dict)
    lines: Counter[int] = field(default_factory=Counter)
    committed: dict[str, set[int]] = field(default_factory=dict)
    acknowledged: Counter[str] = field(default_factory=Counter)
    panes: dict[tuple[Any, ...], int] = field(default_factory=dict)
    closed: set[tuple[Any, ...]] = field(default_factory=set)
    marks: dict[int, Counter[tuple[str, str, int, int, int]]] = field(default_factory=dict)
    now_s: float = 0.0
    quiet_at: dict[int, float] = field(default_factory=dict)
    read_on: dict[int, int] = field(default_factory=dict)
    frozen_at: dict[UUID, float] = field(default_factory=dict)
    clocks: dict[int, tuple[int, int]] = field(default_factory=dict)
    sites: dict[int, SiteFollower] = field(default_factory=dict)
    longest_us: dict[str, int] = field(default_factory=dict)
    moved: list[Violation] = field(default_factory=list)
    foreign_batches: list[str] = field(default_factory=list)

    @property
    def source(self) -> SourceOracle:
        """The only source partition of a generation."""
        (source,) = self.sources.values()
        return source

    def check(self) -> list[Violation]:
        """Check everything that has changed since the last call; return the violations."""
        history = self.history
        if self.shape.skew:
            self._note_quiet()
        if history.nothing_moved() and not history.freed:
            return [Violation("acknowledgement", what) for what in acknowledged_after_commit(self)]
        found = [Violation("I1", what) for what in one_owner(history)]
        found.extend(Violation("I5", what) for what in watermarks_never_regress(history))
        found.extend(self.moved)
        folds = [
            observed for observed in history.by_interval.values() if observed.header.folded_bundle != observed.folded
        ]
        commits = history.collect_commits()
        for commit in commits:
            if commit.observed.computation in SOURCES:
                self._take_input(commit)
        for commit in commits:
            self._follow_sites(commit)
            for name, check in COMMIT_CHECKS.items():
                found.extend(Violation(name, what) for what in check(self, commit))
        if commits:
            found.extend(Violation("I8", what) for what in accounts_add_up(self))
        for observed in folds:
            found.extend(
                Violation("I2", what)
                for what in folds_keep_values(observed, self.shape.lateness_of(BRANCH_OF.get(observed.computation, "")))
            )
        if history.freed or commits:
            found.extend(Violation("I3", what) for what in unread_segments_exist(history))
            history.freed = False
        found.extend(Violation("acknowledgement", what) for what in acknowledged_after_commit(self))
        return found

    def change(self, shape: Shape) -> None:
        """Expect another meaning from now on."""
        history, self.shape = self.history, shape
        added, gone = history.follow_deployment()
        self.moved += [Violation("I3", what) for what in cursors_stay(history)]
        for observed in history.by_interval.values():
            observed.cursors = dict(observed.header.cursors)
        for observed in added:
            if observed.computation in SOURCES:
                self._begin_source(observed)
                self.moved += [Violation("I5", what) for what in joins_in_time(history, observed)]
        bundles = {interval_id: observed.bundle for interval_id, observed in history.by_interval.items()}
        self.branches.change(bundles, shape)
        self._forget_tables({observed.computation for observed in gone})
        self.branches.begin(added, gone)
        for source in self.sources.values():
            source.change(shape.within_us, shape.disorder_us)
        for branch in shape.branches:
            self.longest_us[branch] = max(self.longest_us.get(branch, 0), shape.lateness_of(branch))

    def _begin_source(self, observed: ObservedInterval) -> None:
        """Follow a source that a deployment has added, from the watermark on at which it begins."""
        (truths,) = {id(source.truths): source.truths for source in self.sources.values()}.values()
        begun = observed.low_watermark
        source = SourceOracle(truths, self.shape.by_arrival, self.shape.within_us, begun=begun, watermark=begun)
        source.disorder_us = self.shape.disorder_us
        self.sources[observed.interval_id] = source
        self.branches.readings.others.add(observed.interval_id)

    def _forget_tables(self, tables: set[str]) -> None:
        """Expect result tables of computations that were reset to begin anew."""
        history = self.history
        self.panes = {name: index for name, index in self.panes.items() if name[0] not in tables}
        self.closed = {name for name in self.closed if name[0] not in tables}
        history.dropped = {name for name in history.dropped if name[0] not in tables}
        history.dropped_to = {table: end for table, end in history.dropped_to.items() if table not in tables}

    def correct(self, table: str, window: tuple[Any, ...], row: Row) -> None:
        """Expect the row that an operator has corrected."""
        self.panes[table, row.get("device", row.get("group")), *window[-2:]] = row["pane_index"]
        self.branches.correct(table, window, row)

    def _note_quiet(self) -> None:
        for observed in self.history.intervals_of("readings"):
            broker = self.brokers[observed.header.interval.partition]
            if broker.is_drained() or self.history.database.quiet.get(observed.interval_id, False):
                self.quiet_at[observed.interval_id] = self.now_s

    def _take_input(self, commit: CommittedBundle) -> None:
        """Pass the input of a bundle of the source to the oracle, by its position."""
        interval_id = commit.observed.interval_id
        source = self.sources[interval_id]
        change = commit.changes.get(("position", "source", "", ""))
        stored: Any = change[0] if change is not None else {}
        finished = bool(stored.get("finished"))
        payloads = self._payloads(commit, stored.get("position"))
        if payloads:
            self.read_on[interval_id] = commit.bundle
            self.clocks[interval_id] = (stored["arrived_at"], stored["arrived_at"] + stored["dedupe_shift_us"])
        outcomes = () if commit.checkpoint is None else commit.checkpoint.outcomes
        again = [s.request.payload for s in outcomes if s.dead_letter is None]
        sites = sites_in(commit)
        idle = self.shape.idle
        allowed = self.latest_us + CLOCK_SLACK_US - IDLE_US - DISORDER_US if idle else BEGINNING
        if payloads or finished or again:
            refused = self.refused(interval_id, commit.bundle)
            shift_us = stored["dedupe_shift_us"]
            if again and not payloads and (run := commit.checkpoint and commit.checkpoint.dedupe_run):
                shift_us = run.clock - stored["arrived_at"]  # a replay has an arrival of its own, which is not stored
            arrival = Arrival(stored["arrived_at"], stored["unsure_us"], shift_us)
            source.take(commit.bundle, payloads, arrival, finished=finished, refused=refused, again=again)
            source.follow_clock(commit.bundle, sites, allowed)
        else:
            source.follow_clock(commit.bundle, sites, allowed)
            source.advance(commit.bundle, min(commit.observed.low_watermark, allowed))

    def _follow_sites(self, commit: CommittedBundle) -> None:
        """Advance what is known of the sites at an interval of windows."""
        observed = commit.observed
        if self.shape.sites and observed.computation != "readings":
            follower = self.sites.setdefault(observed.interval_id, SiteFollower(self.sources))
            follower.advance(observed.cursors)

    def reached(self, commit: CommittedBundle, key: Any) -> tuple[int, int]:
        """Return which watermark the windows of a key had reached before a bundle at least, and have after it at most.

        Args:
            commit: the bundle.
            key: a device or group.
        """
        sites = self.sites.get(commit.observed.interval_id)
        if sites is None:
            return commit.input_before, commit.observed.input_watermark
        return sites.between(key, before=True)[0], sites.between(key)[1]

    def longest_lateness(self, table: str) -> int:
        """Return the longest allowed lateness that the windows of a table have had."""
        branch = BRANCH_OF.get(table, "")
        return 0 if table == "per_op" else max(self.shape.lateness_us, self.longest_us.get(branch, 0))

    def _payloads(self, commit: CommittedBundle, position: Any) -> Sequence[bytes]:
        """Return what this bundle has taken: from the position committed before, up to `position`, which is kept."""
        interval_id, partition = commit.observed.interval_id, commit.observed.header.interval.partition
        if position is None:
            return ()
        if self.file is not None:
            before, self.lines[interval_id] = self.lines[interval_id], position["line"]
            return self.file[before : position["line"]]
        broker = self.brokers[partition]
        if self.shape.feed == "log":
            before, self.lines[interval_id] = self.lines[interval_id], position
            messages: Sequence[Any] = broker.published[before:position]
        else:
            batches = self.batches.setdefault(interval_id, set())
            if position > len(broker.batches):
                self.foreign_batches.append(f"{_name(commit)} has batch {position}, of another session than its own")
                return ()
            messages = () if position in batches else broker.batches[position - 1].messages
            batches.add(position)
        self.committed.setdefault(partition, set()).update(message.number for message in messages)
        return [message.payload for message in messages]

    def refused(self, interval_id: int, bundle: int | None = None) -> Counter[int]:
        """Count the readings that the database refused, by id, in one bundle of an interval or in all."""
        return Counter(
            json.loads(letter.payload)["seq"]
            for _, where, when, letter in self.history.dead_letters()
            if letter.reason == "refused" and where == interval_id and bundle in (None, when)
        )


def submitted_by_owner(evidence: Evidence, commit: CommittedBundle) -> Iterator[str]:
    """Yield violations of I1: every commit is submitted by the owner, under the present sequencer."""
    if commit.attempts and commit.attempt is None:
        used = [c.grant.sequencer for a in commit.attempts for c in a.checkpoints if c.bundle == commit.bundle]
        yield f"{_name(commit)} was committed under sequencer {commit.sequencer}, submitted under {sorted(set(used))}"


def whole_or_not_at_all(evidence: Evidence, commit: CommittedBundle) -> Iterator[str]:
    """Yield violations of I2: whole or not at all, once, with the next number, and as submitted."""
    if commit.bundle != commit.bundle_before + 1:
        yield f"{_name(commit)} follows bundle {commit.bundle_before}"
    if not commit.attempts:
        yield f"{_name(commit)} was committed and never submitted"
    attempt, checkpoint = commit.attempt, commit.checkpoint
    if attempt is None or checkpoint is None:
        return
    for other in attempt.checkpoints:
        reached = evidence.history.by_interval[other.grant.interval_id].bundle
        if reached < other.bundle:
            yield f"{_name(commit)} was committed without bundle {other.bundle} of interval {other.grant.interval_id}"
    if submitted(checkpoint) != commit.changes:
        yield f"{_name(commit)}: the stored delta is not the submitted one"
    stored = sum(len(rows) for rows in commit.rows.values())
    if stored != sum(rows.count for rows in checkpoint.results):
        yield f"{_name(commit)}: {stored} result rows are stored, {sum(r.count for r in checkpoint.results)} submitted"
    if list(commit.segments) != list(checkpoint.segments):
        yield f"{_name(commit)}: the stored segments are not the submitted ones"
    if checkpoint.dedupe_run is not None and commit.runs != [checkpoint.dedupe_run]:
        yield f"{_name(commit)}: the stored dedupe run is not the submitted one"


def submitted(checkpoint: Checkpoint) -> dict[Name, tuple[Any, int] | None]:
    """Return the delta of a checkpoint in the form of the stored one."""
    found: dict[Name, tuple[Any, int] | None] = {}
    for part in checkpoint.delta:
        for place, value in enumerate(part.values):
            name = (part.kind.value, part.namespace, hashable(json.loads(part.keys[place])), part.subkeys[place])
            found[name] = None if value is None else (json.loads(value), part.fire_ats[place])
    return found


def cursors_without_gaps(evidence: Evidence, commit: CommittedBundle) -> Iterator[str]:
    """Yield violations of I3: cursors move forward to existing bundles that their owner has received."""
    history, observed, attempt = evidence.history, commit.observed, commit.attempt
    for producer, (seq, _) in observed.cursors.items():
        before = commit.cursors_before[producer][0]
        if seq < before:
            yield f"{_name(commit)}: the cursor on {producer} went back from {before} to {seq}"
        if seq > history.by_interval[producer].bundle:
            yield f"{_name(commit)}: the cursor on {producer} is at {seq}, ahead of its producer"
        if seq == before or attempt is None:
            continue
        for unread in history.unread:
            if unread.producer != producer or not before < unread.segment.seq <= seq:
                continue
            subscription = unread.subscription
            if observed.interval_id not in subscription.consumers:
                continue
            part = unread.segment.slices[subscription.consumers.index(observed.interval_id)]
            place = (attempt.worker, observed.interval_id, producer, subscription.subscription_id, unread.segment.seq)
            if part is not None and place not in history.given:
                yield f"{_name(commit)}: the cursor on {producer} passed segment {unread.segment.seq} unread"


def unread_segments_exist(history: RunHistory) -> Iterator[str]:
    """Yield violations of I3: a segment exists until all cursors have passed it."""
    stored = {(s.interval_id, s.segment.subscription_id, s.segment.seq) for s in history.database.segments}
    for unread in history.unread:
        if history.is_read(unread):
            continue
        name = (unread.producer, unread.segment.subscription_id, unread.segment.seq)
        if name not in stored:
            yield f"segment {unread.segment.seq} of {unread.producer} was freed before all had read it"


def ids_once(evidence: Evidence, commit: CommittedBundle) -> Iterator[str]:
    """Yield violations of I4: a dedupe id takes effect at most once within its horizon."""
    stream = commit.observed.computation
    if stream not in SOURCES:
        return
    source = evidence.sources[commit.observed.interval_id]
    for what, expected in (("duplicate", source.duplicate), ("accepted", source.accepted)):
        count = commit.observed.count(what, stream)
        if count != expected:
            yield f"{_name(commit)}: {count} records are counted {what}, {expected} were"


def watermarks_within_work(evidence: Evidence, commit: CommittedBundle) -> Iterator[str]:
    """Yield violations of I5: never above the oldest work, the input, or a producer at the consumed position."""
    observed, history = commit.observed, evidence.history
    if observed.computation in SOURCES:
        source = evidence.sources[observed.interval_id]
        if observed.low_watermark > source.watermark:
            yield f"{_name(commit)}: the source publishes {observed.low_watermark}, its records say {source.watermark}"
        # A worker that believed a step longer than the horizon may count a duplicate as a new reading.
        believed = evidence.latest_us - evidence.earliest_us < source.within_us
        if evidence.shape.idle and not evidence.ahead and believed and source.overtaken:
            yield f"{_name(commit)}: the clock has overtaken readings {source.overtaken} that waited"
        return
    if observed.cursors and observed.input_watermark != min(mark for _, mark in observed.cursors.values()):
        yield f"{_name(commit)}: the input watermark {observed.input_watermark} is not the least of {observed.cursors}"
    for producer, (seq, watermark) in observed.cursors.items():
        there = history.by_interval[producer].lows.get(seq, BEGINNING)
        if watermark != there:
            yield f"{_name(commit)}: takes {watermark} for the watermark of {producer} at {seq}, which was {there}"
        if observed.input_watermark > there:
            yield f"{_name(commit)}: input watermark {observed.input_watermark} is above {producer}'s {there} at {seq}"
    allowed = max(commit.low_before, min(oldest_work(evidence, commit), observed.input_watermark))
    if observed.low_watermark > allowed:
        yield f"{_name(commit)}: publishes {observed.low_watermark}, its oldest work and input allow {allowed}"


def oldest_work(evidence: Evidence, commit: CommittedBundle) -> int:
    """Return what holds an interval's watermark, from its stored windows and timers."""
    held, observed = END, commit.observed
    for (kind, namespace, key, subkey), (value, fire_at) in observed.keyed.items():
        if kind == "window" and observed.computation == "per_slide":
            # The stored value is a slice, which several windows share; windows up to the watermark have fired.
            start = int(subkey.partition("/")[0])
            ends = range(start + EVERY_US, start + SLIDING_US + 1, EVERY_US)
            held = min([held, *(end - 1 for end in ends if end > evidence.reached(commit, home_of(key))[1])])
        elif kind == "window" and not (value.get("emitted") if "firing" not in value else _holds_nothing(value)):
            held = min(held, int(subkey.partition("/")[2]) - 1)
        elif kind == "timer" and value.get("holds", True):
            named = value.get("event_time")
            held = min(held, fire_at if named is None else named)
        elif kind == "parked" and namespace != "key" and value["event_time"] >= value["watermark"]:
            held = min(held, value["event_time"])
    return held


def _holds_nothing(pane: Mapping[str, Any]) -> bool:
    """Tell whether a pane with a trigger has passed the end of its window, and emitted what was on time."""
    return bool(pane["firing"].get("passed")) and not pane["firing"].get("holds")


def timers_in_time(evidence: Evidence, commit: CommittedBundle) -> Iterator[str]:
    """Yield violations of I6: a timer or window fires at its time and not before; a deleted timer never."""
    for table, rows in commit.rows.items():
        for row in rows:
            before, reached = evidence.reached(commit, row.get("device", row.get("group")))
            if table == "marks" and row["kind"] == "ghost":
                yield f"{_name(commit)}: a deleted timer of {row['device']} has fired"
            windowed = "window_end" in row
            due = row["window_end"] if windowed else row["event_time"]
            if row.get("pane_timing") == "early":
                if not BY_TABLE[table].trigger.per_pane or before >= due:
                    yield f"{_name(commit)}: {table} has an early pane of {due}, the watermark was at {reached}"
                continue
            if (windowed or table == "totals" or (table == "marks" and row["kind"] == "quiet")) and due > reached:
                yield f"{_name(commit)}: {table} has fired for {due}, the watermark is at {reached}"
    reached = commit.observed.input_watermark
    for (kind, domain, key, name), (_, fire_at) in commit.observed.keyed.items():
        if kind == "timer" and domain == "event" and fire_at <= reached:
            yield f"{_name(commit)}: timer {name} of {key} for {fire_at} has not fired, the watermark is at {reached}"
    yield from _ticks(commit)


def _ticks(commit: CommittedBundle) -> Iterator[str]:
    """Yield the early panes that should have been emitted by the processing time of a bundle, or by their records."""
    if commit.observed.computation not in WITH_EARLY_PANES or commit.checkpoint is None:
        return
    now_us = commit.checkpoint.processing_floor
    for (kind, _, key, subkey), (pane, _) in commit.observed.keyed.items():
        if kind != "window" or pane["firing"].get("passed"):
            continue
        _, (_, (_, records), (_, tick)), _ = pane["firing"]["trigger"][1:]
        if records >= EARLY_RECORDS or 0 < tick <= now_us:
            yield f"{_name(commit)}: {subkey} of {key} has {records} new records, its tick is {tick}, it is {now_us}"


def accounts_add_up(evidence: Evidence) -> Iterator[str]:
    """Yield violations of I8: no record is lost or counted twice."""
    history = evidence.history
    for interval_id, source in evidence.sources.items():
        observed = history.by_interval[interval_id]
        counts = {
            what: observed.count(what, observed.computation)
            for what in ("injected", "accepted", "duplicate", "dead_lettered")
        }
        if counts["injected"] != counts["accepted"] + counts["duplicate"] + counts["dead_lettered"]:
            yield f"the source does not add up: {counts}"
        if counts["injected"] != source.injected or counts["dead_lettered"] != source.dead:
            yield f"the source counts {counts}, it was given {source.injected}, {source.dead} to dead-letter"
    parked: Counter[str] = Counter()
    for observed in history.by_interval.values():
        parked.update(namespace for kind, namespace, _, _ in observed.keyed if kind == "parked")
    for sub in history.deployed.subscriptions:
        name = str(sub.subscription_id)
        made = {
            what: sum(history.by_interval[i].count(what, name) for i in sub.producers) for what in ("produced", "added")
        }
        parts = {
            what: sum(history.by_interval[i].count(what, name) for i in (*sub.producers, *sub.consumers))
            for what in ("filtered", "consumed", "late", "dead_lettered")
        }
        parts["pending"], parts["parked"] = pending(history, sub), parked[name]
        if sum(made.values()) != sum(parts.values()):
            yield f"{sub.consumer} of {sub.stream}: {made}, {parts}"


def results_follow_input(evidence: Evidence, commit: CommittedBundle) -> Iterator[str]:
    """Yield violations of I9: behind the source, results are a function of the input up to the consumed position."""
    observed = commit.observed
    yield from evidence.branches.on_committed(commit)
    if observed.computation == "watcher":
        source_id = next(evidence.history.intervals_of("readings")).interval_id
        watch = evidence.watchers.setdefault(observed.interval_id, WatchOracle(evidence.source))
        watch.refused += evidence.refused(observed.interval_id, commit.bundle)
        watch.advance(observed.cursors[source_id][0])
        yield from _compare_watcher(evidence, commit, watch)


def times_are_credible(evidence: Evidence, commit: CommittedBundle) -> Iterator[str]:
    """Yield arrival times and dedupe clocks that no worker may believe, even if clocks step far."""
    if not evidence.clocked or commit.observed.interval_id not in evidence.clocks:
        return
    arrived, aged = evidence.clocks[commit.observed.interval_id]
    earliest, latest = evidence.earliest_us - COMMITTED_WITHIN_US, evidence.arrived_us + CLOCK_SLACK_US
    if not earliest <= arrived <= latest:
        yield f"{_name(commit)}: records arrive at {arrived}, that is not between {earliest} and {latest}"
    # A worker that believed an earlier time sees the correction as time that has passed.
    oldest = evidence.latest_us + CLOCK_SLACK_US + (evidence.latest_us - evidence.earliest_us)
    if evidence.shape.by_arrival and aged > oldest:
        yield f"{_name(commit)}: the dedupe clock is at {aged}, it can be at {oldest}"


def skew_is_bounded(evidence: Evidence, commit: CommittedBundle) -> Iterator[str]:
    """Yield violations of max_skew: a source waits while another source with input is further behind than that."""
    observed, history = commit.observed, evidence.history
    if not evidence.shape.skew or observed.computation != "readings":
        return
    if evidence.read_on.get(observed.interval_id) != commit.bundle:
        return  # it read no input; replayed records were read long ago
    if (
        observed.header.owner in evidence.frozen_at
        and evidence.now_s - evidence.frozen_at[observed.header.owner] < QUIET_S
    ):
        return
    for other in history.intervals_of("readings"):
        quiet_s = evidence.now_s - evidence.quiet_at.get(other.interval_id, 0.0)
        if other is not observed and quiet_s > QUIET_S and commit.low_before > other.low_watermark + MAX_SKEW_US:
            there = f"{other.interval_id} is at {other.low_watermark}"
            yield f"{_name(commit)}: read on from {commit.low_before}, {there}"


def _compare_watcher(evidence: Evidence, commit: CommittedBundle, oracle: WatchOracle) -> Iterator[str]:
    observed = commit.observed
    marks = evidence.marks.setdefault(observed.interval_id, Counter())
    for row in commit.rows.get("marks", ()):
        if row["kind"] != "ping":
            marks[row["device"], row["kind"], row["number"], row["total"], row["event_time"]] += 1
    for (kind, _, key, _), (value, _) in observed.keyed.items():
        if kind != "state":
            continue
        device = oracle.devices.get(key)
        found = (value["number"], value["total"], value["last_us"])
        expected = None if device is None else (device.number, device.total, device.last_us)
        if found != expected:
            yield f"{_name(commit)}: the state of {key} is {found} instead of {expected}"
        mine = {mark: times for mark, times in marks.items() if mark[0] == key}
        theirs = {mark: times for mark, times in oracle.marks.items() if mark[0] == key}
        if mine != theirs:
            wrong = sorted((Counter(mine) - Counter(theirs)) + (Counter(theirs) - Counter(mine)))
            yield f"{_name(commit)}: marks of {key} differ from the input's: {wrong[:3]}"


def acknowledged_after_commit(evidence: Evidence) -> Iterator[str]:
    """Yield acknowledgements of messages that were not committed, or that another generation received."""
    yield from evidence.foreign_batches
    for partition, broker in evidence.brokers.items():
        before = evidence.acknowledged[partition]
        if len(broker.acknowledged) == before:
            continue
        committed = evidence.committed.get(partition, set())
        for number in broker.acknowledged[before:]:
            if number not in committed:
                yield f"message {number} of {partition} was acknowledged and not committed"
        evidence.acknowledged[partition] = len(broker.acknowledged)


def _name(commit: CommittedBundle) -> str:
    return commit.name


COMMIT_CHECKS: dict[str, Callable[[Evidence, CommittedBundle], Iterator[str]]] = {
    "I1": submitted_by_owner,
    "I2": whole_or_not_at_all,
    "I3": cursors_without_gaps,
    "I4": ids_once,
    "I5": watermarks_within_work,
    "I6": timers_in_time,
    "I7": panes_in_order,
    "I9": results_follow_input,
    "skew": skew_is_bounded,
    "clocks": times_are_credible,
    "tables": rows_in_own_tables,
    "versions": name_is_current,
    "retention": dropped_rows_stay_away,
}
