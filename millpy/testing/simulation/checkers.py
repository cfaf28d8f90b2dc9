"""The checkers: I1 to I9 (ARCHITECTURE.md), after every step, from what is stored and what was noted beside it.

There is one `Evidence` for each generation of the graph; `ending.py` judges what must hold when it has finished.

Each takes what has just landed and says in words what is wrong. None of them shares code with what it judges: states
come from the stored documents by plain JSON, inputs and results from the oracle.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from uuid import UUID

from millpy.model.checkpoint import Checkpoint
from millpy.testing.simulation.books import Book, Books, Landing, Name, hashable, pending
from millpy.testing.simulation.branches import Branches
from millpy.testing.simulation.broker import Broker
from millpy.testing.simulation.graphs import (
    DISORDER_US,
    EVERY_US,
    IDLE_US,
    MAX_SKEW_US,
    SLIDING_US,
    Shape,
)
from millpy.testing.simulation.names import at_home, looked_up
from millpy.testing.simulation.oracle import BEGINNING, END, SourceOracle, WatchOracle

CLOCK_SLACK_US = 400_000
"""How far a worker's reading of the server's clock may be ahead of it: it drifts for a minute at most."""
COMMITTED_WITHIN_US = 30_000_000
"""So long after they were taken records are committed, at most."""
QUIET_S = 1.2
"""A source that has not been quiet for so long is known not to be."""


class Violation(NamedTuple):
    """What was found, by which checker."""

    checker: str
    what: str


@dataclass(slots=True)
class Evidence:
    """All that the checkers go by, of one generation of the graph.

    Attributes:
        brokers: by source partition.
        file: the lines of the file, when that is the source.
        sources: the oracle of each source partition, by interval.
        clocked: whether clocks step far.
        ahead: whether some readings are ahead of their arrival: what waited while the broker was away is late then.
        latest_us: the latest time that is sure to a worker: what the server's clock showed, had it never been set back,
            but for steps that have to be refused, and for what a worker doubts that has begun with them.
        arrived_us, earliest_us: the latest and the earliest that a worker may take for the time.
        batches, lines: of each partition's topic; of its log or the file: in committed positions.
        committed: numbers of the messages that are.
        marks: by watcher interval, every mark that has landed.
        now_s: seconds of the world.
        clocks: of each source partition, when its newest records arrived, and what the dedupe clock was then.
        quiet_at: when a source partition was last known, or said, to have nothing to say.
        read_on: the newest bundle of each source partition that brought anything of its topic, log or file.
        strange: what was committed and never handed over here.
        frozen_at: when a worker was last frozen: what it commits soon after it has read long before.
    """

    books: Books
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
    marks: dict[int, Counter[tuple[str, str, int, int, int]]] = field(default_factory=dict)
    now_s: float = 0.0
    quiet_at: dict[int, float] = field(default_factory=dict)
    read_on: dict[int, int] = field(default_factory=dict)
    frozen_at: dict[UUID, float] = field(default_factory=dict)
    clocks: dict[int, tuple[int, int]] = field(default_factory=dict)
    strange: list[str] = field(default_factory=list)

    @property
    def source(self) -> SourceOracle:
        """The only source partition."""
        (source,) = self.sources.values()
        return source

    def look(self) -> list[Violation]:
        """Judge the present state against the last one."""
        books = self.books
        if self.shape.skew:
            self._note_quiet()
        if books.nothing_moved() and not books.freed:
            return [Violation("acknowledgement", what) for what in acknowledgements(self)]
        found = [Violation("I1", what) for what in owners(books)]
        found.extend(Violation("I5", what) for what in fallen(books))
        folds = [book for book in books.by_interval.values() if book.header.folded_bundle != book.folded]
        landings = books.look()
        for landing in landings:
            if landing.book.computation == "readings":
                self._take_input(landing)
        for landing in landings:
            for name, check in LANDED.items():
                found.extend(Violation(name, what) for what in check(self, landing))
        if landings:
            found.extend(Violation("I8", what) for what in accounts(self))
        for book in folds:
            found.extend(Violation("I2", what) for what in folded_rows(book))
        if books.freed or landings:
            found.extend(Violation("I3", what) for what in kept_segments(books))
            books.freed = False
        found.extend(Violation("acknowledgement", what) for what in acknowledgements(self))
        return found

    def _note_quiet(self) -> None:
        for book in self.books.of("readings"):
            broker = self.brokers[book.header.interval.partition]
            if broker.is_drained() or self.books.database.quiet.get(book.interval_id, False):
                self.quiet_at[book.interval_id] = self.now_s

    def _take_input(self, landing: Landing) -> None:
        """Tell the oracle what this bundle of the source has committed, by its position."""
        interval_id = landing.book.interval_id
        source = self.sources[interval_id]
        change = landing.changes.get(("position", "source", "", ""))
        stored: Any = change[0] if change is not None else {}
        finished = bool(stored.get("finished"))
        payloads = self._payloads(landing, stored.get("position"))
        if payloads:
            self.read_on[interval_id] = landing.bundle
            self.clocks[interval_id] = (stored["arrived_at"], stored["arrived_at"] + stored["dedupe_shift_us"])
        settled = () if landing.checkpoint is None else landing.checkpoint.settled
        again = [s.request.payload for s in settled if s.letter is None]
        if payloads or finished or again:
            refused = self.refused(interval_id, landing.bundle)
            clocks = (stored["arrived_at"], stored["unsure_us"], stored["dedupe_shift_us"])
            source.take(landing.bundle, payloads, *clocks, finished=finished, refused=refused, again=again)
        else:
            idle = self.shape.idle
            allowed = self.latest_us + CLOCK_SLACK_US - IDLE_US - DISORDER_US if idle else BEGINNING
            source.advance(landing.bundle, min(landing.book.low_watermark, allowed))

    def _payloads(self, landing: Landing, position: Any) -> Sequence[bytes]:
        """What this bundle has taken of its source, by the position that it has committed."""
        interval_id, partition = landing.book.interval_id, landing.book.header.interval.partition
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
                self.strange.append(f"{_name(landing)} has batch {position}, of another session than its own")
                return ()
            messages = () if position in batches else broker.batches[position - 1].messages
            batches.add(position)
        self.committed.setdefault(partition, set()).update(message.number for message in messages)
        return [message.payload for message in messages]

    def refused(self, interval_id: int, bundle: int | None = None) -> Counter[int]:
        """Ids of readings that the database has refused, in one bundle of an interval or in all."""
        return Counter(
            json.loads(letter.payload)["seq"]
            for _, where, when, letter in self.books.dead_letters()
            if letter.reason == "refused" and where == interval_id and bundle in (None, when)
        )


def owners(books: Books) -> Iterator[str]:
    """I1: at most one live sequencer per interval."""
    for book in books.by_interval.values():
        header = book.header
        if header.sequencer < book.sequencer:
            yield f"the sequencer of {book.interval_id} fell from {book.sequencer} to {header.sequencer}"
        if header.owner != book.owner and header.sequencer == book.sequencer:
            yield f"interval {book.interval_id} changed hands under sequencer {header.sequencer}"
    for interval_id, sequencer, one, other in books.granted_twice:
        yield f"sequencer {sequencer} of interval {interval_id} was granted to {one} and to {other}"


def fallen(books: Books) -> Iterator[str]:
    """I5: a published watermark never regresses, whatever was written and by whom."""
    for book in books.by_interval.values():
        header = book.header
        for name, before, now in (
            ("low", book.low_watermark, header.low_watermark),
            ("input", book.input_watermark, header.input_watermark),
        ):
            if now < before:
                yield f"the {name} watermark of interval {book.interval_id} went back from {before} to {now}"


def under_its_grant(evidence: Evidence, landing: Landing) -> Iterator[str]:
    """I1: what lands was submitted by the owner, under the sequencer that stands."""
    if landing.attempts and landing.attempt is None:
        used = [c.grant.sequencer for a in landing.attempts for c in a.checkpoints if c.bundle == landing.bundle]
        yield f"{_name(landing)} landed under sequencer {landing.sequencer}, submitted under {sorted(set(used))}"


def whole_and_once(evidence: Evidence, landing: Landing) -> Iterator[str]:
    """I2: whole or not at all, once, with the next number, and as submitted."""
    if landing.bundle != landing.bundle_before + 1:
        yield f"{_name(landing)} follows bundle {landing.bundle_before}"
    if not landing.attempts:
        yield f"{_name(landing)} landed and was never submitted"
    attempt, checkpoint = landing.attempt, landing.checkpoint
    if attempt is None or checkpoint is None:
        return
    for other in attempt.checkpoints:
        reached = evidence.books.by_interval[other.grant.interval_id].bundle
        if reached < other.bundle:
            yield f"{_name(landing)} landed without bundle {other.bundle} of interval {other.grant.interval_id}"
    if submitted(checkpoint) != landing.changes:
        yield f"{_name(landing)}: the stored delta is not the submitted one"
    stored = sum(len(rows) for rows in landing.rows.values())
    if stored != sum(rows.count for rows in checkpoint.results):
        yield f"{_name(landing)}: {stored} result rows are stored, {sum(r.count for r in checkpoint.results)} submitted"
    if list(landing.segments) != list(checkpoint.segments):
        yield f"{_name(landing)}: the stored segments are not the submitted ones"
    if checkpoint.dedupe_run is not None and landing.runs != [checkpoint.dedupe_run]:
        yield f"{_name(landing)}: the stored dedupe run is not the submitted one"


def submitted(checkpoint: Checkpoint) -> dict[Name, tuple[Any, int] | None]:
    """The delta of a checkpoint in the form of the stored one."""
    found: dict[Name, tuple[Any, int] | None] = {}
    for part in checkpoint.delta:
        for place, value in enumerate(part.values):
            name = (part.kind.value, part.namespace, hashable(json.loads(part.keys[place])), part.subkeys[place])
            found[name] = None if value is None else (json.loads(value), part.fire_ats[place])
    return found


def folded_rows(book: Book) -> Iterator[str]:
    """I2: what was committed stays: folded rows are the newest values of their bundle."""
    rows: dict[Name, Any] = {
        (kind.value, namespace, hashable(json.loads(key)), subkey): (json.loads(row.value), row.fire_at)
        for (kind, namespace, key, subkey), row in book.header.keyed.items()
        if row.value is not None
    }
    for name in rows.keys() | book.keyed.keys():
        if book.changed[name] <= book.header.folded_bundle and rows.get(name) != book.keyed.get(name):
            yield f"folding {book.interval_id} made {name} {rows.get(name)} of {book.keyed.get(name)}"


def without_gaps(evidence: Evidence, landing: Landing) -> Iterator[str]:
    """I3: cursors move forward, to bundles that exist, over nothing that their owner was not given."""
    books, book, attempt = evidence.books, landing.book, landing.attempt
    for producer, (seq, _) in book.cursors.items():
        before = landing.cursors_before[producer][0]
        if seq < before:
            yield f"{_name(landing)}: the cursor on {producer} went back from {before} to {seq}"
        if seq > books.by_interval[producer].bundle:
            yield f"{_name(landing)}: the cursor on {producer} is at {seq}, ahead of its producer"
        if seq == before or attempt is None:
            continue
        for kept in books.kept:
            if kept.producer != producer or not before < kept.segment.seq <= seq:
                continue
            subscription = kept.subscription
            if book.interval_id not in subscription.consumers:
                continue
            part = kept.segment.slices[subscription.consumers.index(book.interval_id)]
            place = (attempt.worker, book.interval_id, producer, subscription.subscription_id, kept.segment.seq)
            if part is not None and place not in books.given:
                yield f"{_name(landing)}: the cursor passed segment {kept.segment.seq} of {producer}, which nobody read"


def kept_segments(books: Books) -> Iterator[str]:
    """I3: a segment that some cursor has not passed is still there."""
    stored = {(s.interval_id, s.segment.subscription_id, s.segment.seq) for s in books.database.segments}
    for kept in books.kept:
        if books.is_read(kept):
            continue
        name = (kept.producer, kept.segment.subscription_id, kept.segment.seq)
        if name not in stored:
            yield f"segment {kept.segment.seq} of {kept.producer} was freed before all had read it"


def ids_once(evidence: Evidence, landing: Landing) -> Iterator[str]:
    """I4: a dedupe id takes effect at most once within its horizon."""
    if landing.book.computation != "readings":
        return
    source = evidence.sources[landing.book.interval_id]
    for what, expected in (("duplicate", source.duplicate), ("accepted", source.accepted)):
        count = landing.book.count(what, "readings")
        if count != expected:
            yield f"{_name(landing)}: {count} records are counted {what}, {expected} were"


def watermarks(evidence: Evidence, landing: Landing) -> Iterator[str]:
    """I5: never above the oldest work, the input, or a producer at the position consumed."""
    book, books = landing.book, evidence.books
    if book.computation == "readings":
        source = evidence.sources[book.interval_id]
        if book.low_watermark > source.watermark:
            yield f"{_name(landing)}: the source publishes {book.low_watermark}, its records say {source.watermark}"
        # Where a step that is longer than the horizon had to be believed, a duplicate may be a reading of its own.
        believed = evidence.latest_us - evidence.earliest_us < source.within_us
        if evidence.shape.idle and not evidence.ahead and believed and source.overtaken:
            yield f"{_name(landing)}: the clock has overtaken readings {source.overtaken} that waited"
        return
    if book.cursors and book.input_watermark != min(mark for _, mark in book.cursors.values()):
        yield f"{_name(landing)}: the input watermark {book.input_watermark} is not the least of {book.cursors}"
    for producer, (seq, watermark) in book.cursors.items():
        there = books.by_interval[producer].lows.get(seq, BEGINNING)
        if watermark != there:
            yield f"{_name(landing)}: takes {watermark} for the watermark of {producer} at {seq}, which was {there}"
        if book.input_watermark > there:
            yield f"{_name(landing)}: the input watermark {book.input_watermark} is above {producer}'s {there} at {seq}"
    allowed = max(landing.low_before, min(oldest_work(book), book.input_watermark))
    if book.low_watermark > allowed:
        yield f"{_name(landing)}: publishes {book.low_watermark}, its oldest work and input allow {allowed}"


def oldest_work(book: Book) -> int:
    """What holds an interval back, from its stored windows and timers."""
    held = END
    for (kind, namespace, _, subkey), (value, fire_at) in book.keyed.items():
        if kind == "window" and book.computation == "per_slide":
            # What is stored is a slice, which several windows share; those up to the watermark have fired.
            start = int(subkey.partition("/")[0])
            ends = range(start + EVERY_US, start + SLIDING_US + 1, EVERY_US)
            held = min([held, *(end - 1 for end in ends if end > book.input_watermark)])
        elif kind == "window" and not value.get("emitted"):
            held = min(held, int(subkey.partition("/")[2]) - 1)
        elif kind == "timer" and value.get("holds", True):
            named = value.get("event_time")
            held = min(held, fire_at if named is None else named)
        elif kind == "parked" and namespace != "key" and value["event_time"] >= value["watermark"]:
            held = min(held, value["event_time"])
    return held


def timers(evidence: Evidence, landing: Landing) -> Iterator[str]:
    """I6: a timer or window fires once its time has come and not before; a deleted timer never."""
    reached = landing.book.input_watermark
    for table, rows in landing.rows.items():
        for row in rows:
            if table == "marks" and row["kind"] == "ghost":
                yield f"{_name(landing)}: a deleted timer of {row['device']} has fired"
            windowed = "window_end" in row
            due = row["window_end"] if windowed else row["event_time"]
            if (windowed or table == "totals" or (table == "marks" and row["kind"] == "quiet")) and due > reached:
                yield f"{_name(landing)}: {table} has fired for {due}, the watermark is at {reached}"
    for (kind, domain, key, name), (_, fire_at) in landing.book.keyed.items():
        if kind == "timer" and domain == "event" and fire_at <= reached:
            yield f"{_name(landing)}: timer {name} of {key} for {fire_at} has not fired, the watermark is at {reached}"


def panes(evidence: Evidence, landing: Landing) -> Iterator[str]:
    """I7: pane indexes rise by one per (key, window); an expired window emits nothing."""
    for table, rows in landing.rows.items():
        for row in rows:
            if "pane_index" not in row:
                continue
            name = (table, row.get("device", row.get("group")), row["window_start"], row["window_end"])
            before = evidence.panes.get(name, -1)
            evidence.panes[name] = row["pane_index"]
            if row["pane_index"] != before + 1:
                yield f"{_name(landing)}: pane {row['pane_index']} of {name} follows pane {before}"
            over = row["window_end"] + (0 if table == "per_op" else evidence.shape.lateness_us)
            if table != "per_group" and landing.input_before >= over:
                yield f"{_name(landing)}: {name} was over at {over}, the watermark at {landing.input_before}"


def accounts(evidence: Evidence) -> Iterator[str]:
    """I8: nothing is lost, nothing is counted twice."""
    books = evidence.books
    for book in books.of("readings"):
        source = evidence.sources[book.interval_id]
        counts = {what: book.count(what, "readings") for what in ("injected", "accepted", "duplicate", "dead_lettered")}
        if counts["injected"] != counts["accepted"] + counts["duplicate"] + counts["dead_lettered"]:
            yield f"the source does not add up: {counts}"
        if counts["injected"] != source.injected or counts["dead_lettered"] != source.dead:
            yield f"the source counts {counts}, it was given {source.injected}, {source.dead} to set aside"
    parked: Counter[str] = Counter()
    for book in books.by_interval.values():
        parked.update(namespace for kind, namespace, _, _ in book.keyed if kind == "parked")
    for sub in books.deployed.subscriptions:
        name = str(sub.subscription_id)
        made = {
            what: sum(books.by_interval[i].count(what, name) for i in sub.producers) for what in ("produced", "added")
        }
        parts = {
            what: sum(books.by_interval[i].count(what, name) for i in (*sub.producers, *sub.consumers))
            for what in ("filtered", "consumed", "late", "quarantined")
        }
        parts["pending"], parts["parked"] = pending(books, sub), parked[name]
        if sum(made.values()) != sum(parts.values()):
            yield f"{sub.consumer} of {sub.stream}: {made}, {parts}"


def as_the_input_says(evidence: Evidence, landing: Landing) -> Iterator[str]:
    """I9: at the stages behind the source, results are a function of the input up to the position consumed."""
    book = landing.book
    yield from evidence.branches.landed(landing)
    if book.computation == "watcher":
        source_id = next(evidence.books.of("readings")).interval_id
        watch = evidence.watchers.setdefault(book.interval_id, WatchOracle(evidence.source))
        watch.refused += evidence.refused(book.interval_id, landing.bundle)
        watch.advance(book.cursors[source_id][0])
        yield from _watched(evidence, landing, watch)


def in_time(evidence: Evidence, landing: Landing) -> Iterator[str]:
    """Clocks: records arrive, and ids age, by what may be believed of the clocks, whatever steps far."""
    if not evidence.clocked or landing.book.interval_id not in evidence.clocks:
        return
    arrived, aged = evidence.clocks[landing.book.interval_id]
    earliest, latest = evidence.earliest_us - COMMITTED_WITHIN_US, evidence.arrived_us + CLOCK_SLACK_US
    if not earliest <= arrived <= latest:
        yield f"{_name(landing)}: records arrive at {arrived}, that is not between {earliest} and {latest}"
    # Where time was believed to be earlier, what is right again looks like time that has passed.
    oldest = evidence.latest_us + CLOCK_SLACK_US + (evidence.latest_us - evidence.earliest_us)
    if evidence.shape.by_arrival and aged > oldest:
        yield f"{_name(landing)}: the dedupe clock is at {aged}, it can be at {oldest}"


def skewed(evidence: Evidence, landing: Landing) -> Iterator[str]:
    """max_skew: a source is read on only while no other that has something to say is further behind than that."""
    book, books = landing.book, evidence.books
    if not evidence.shape.skew or book.computation != "readings":
        return
    if evidence.read_on.get(book.interval_id) != landing.bundle:
        return  # it was not; what people have it take again it has read long ago
    if book.header.owner in evidence.frozen_at and evidence.now_s - evidence.frozen_at[book.header.owner] < QUIET_S:
        return
    for other in books.of("readings"):
        quiet_s = evidence.now_s - evidence.quiet_at.get(other.interval_id, 0.0)
        if other is not book and quiet_s > QUIET_S and landing.low_before > other.low_watermark + MAX_SKEW_US:
            there = f"{other.interval_id} is at {other.low_watermark}"
            yield f"{_name(landing)}: read on from {landing.low_before}, {there}"


def _watched(evidence: Evidence, landing: Landing, oracle: WatchOracle) -> Iterator[str]:
    book = landing.book
    marks = evidence.marks.setdefault(book.interval_id, Counter())
    for row in landing.rows.get("marks", ()):
        if row["kind"] != "ping":
            marks[row["device"], row["kind"], row["number"], row["total"], row["event_time"]] += 1
    for (kind, _, key, _), (value, _) in book.keyed.items():
        if kind != "state":
            continue
        device = oracle.devices.get(key)
        found = (value["number"], value["total"], value["last_us"])
        expected = None if device is None else (device.number, device.total, device.last_us)
        if found != expected:
            yield f"{_name(landing)}: the state of {key} is {found} instead of {expected}"
        mine = {mark: times for mark, times in marks.items() if mark[0] == key}
        theirs = {mark: times for mark, times in oracle.marks.items() if mark[0] == key}
        if mine != theirs:
            wrong = sorted((Counter(mine) - Counter(theirs)) + (Counter(theirs) - Counter(mine)))
            yield f"{_name(landing)}: marks of {key} differ from the input's: {wrong[:3]}"


def acknowledgements(evidence: Evidence) -> Iterator[str]:
    """Nothing is acknowledged before its commit is known, and by its own generation's."""
    yield from evidence.strange
    for partition, broker in evidence.brokers.items():
        before = evidence.acknowledged[partition]
        if len(broker.acknowledged) == before:
            continue
        committed = evidence.committed.get(partition, set())
        for number in broker.acknowledged[before:]:
            if number not in committed:
                yield f"message {number} of {partition} was acknowledged and not committed"
        evidence.acknowledged[partition] = len(broker.acknowledged)


def _name(landing: Landing) -> str:
    return f"bundle {landing.bundle} of {landing.book.computation} {landing.book.interval_id}"


LANDED: dict[str, Callable[[Evidence, Landing], Iterator[str]]] = {
    "I1": under_its_grant,
    "I2": whole_and_once,
    "I3": without_gaps,
    "I4": ids_once,
    "I5": watermarks,
    "I6": timers,
    "I7": panes,
    "I9": as_the_input_says,
    "skew": skewed,
    "clocks": in_time,
    "tables": at_home,
    "versions": looked_up,
}
