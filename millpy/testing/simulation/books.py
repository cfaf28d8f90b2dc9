"""The books of a simulation: what workers submitted and were given, and what became of it, noted beside the store.

`Recording` is the outermost layer of a worker's store: it notes what goes in and out and changes nothing. `Books.look`
compares the headers with what it saw last; whatever changed becomes `Landing`s, with a model of the interval's keyed
state kept from the stored documents by plain JSON. The checkers judge by these.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID

from millpy.errors import CommitUnknownError
from millpy.model.checkpoint import Checkpoint, DeadLetter, DedupeRun, Grant, LateRows, Segment
from millpy.model.deployment import Deployment, GraphSpec
from millpy.store.memory import MemoryDatabase, MemoryStore
from millpy.store.memory_tables import DeployedSubscription, Header, Row, Table
from millpy.store.protocol import CommitProbe, Polled, Want
from millpy.testing.simulation.names import Names, named

Name = tuple[str, str, Any, str]
"""(kind, namespace, key, subkey)."""


@dataclass(slots=True)
class Attempt:
    """One call of `commit`: everything that has to land together, and by whom.

    Attributes:
        switches: how often generations had been switched when the worker looked its graph up.
    """

    worker: UUID
    checkpoints: tuple[Checkpoint, ...]
    switches: int = 0


@dataclass(slots=True)
class Kept:
    """A segment that some consumer has not read."""

    producer: int
    segment: Segment
    subscription: DeployedSubscription


@dataclass(slots=True)
class Book:
    """One interval as it was seen last.

    Attributes:
        keyed: newest value and fire time of every keyed thing, by the stored documents.
        changed: the bundle that last wrote it, tombstones too.
        lows: low watermark by bundle.
        rows: of this bundle, by table.
    """

    header: Header
    computation: str
    owner: UUID | None = None
    sequencer: int = 0
    bundle: int = 0
    folded: int = 0
    input_watermark: int = -(2**62)
    low_watermark: int = -(2**62)
    cursors: dict[int, tuple[int, int]] = field(default_factory=dict)
    keyed: dict[Name, tuple[Any, int]] = field(default_factory=dict)
    changed: dict[Name, int] = field(default_factory=dict)
    lows: dict[int, int] = field(default_factory=dict)

    @property
    def interval_id(self) -> int:
        """Its interval."""
        return self.header.interval.interval_id

    @property
    def moved(self) -> bool:
        """Whether the header is not what it was."""
        return state_of(self.header) != (
            self.bundle, self.sequencer, self.folded, self.owner, self.low_watermark, self.input_watermark
        )  # fmt: skip

    def count(self, what: str, of: str) -> int:
        """A counter of I8."""
        found = self.keyed.get(("counter", what, "", of))
        return 0 if found is None else int(found[0])


def state_of(header: Header) -> tuple[Any, ...]:
    """What changes in a header."""
    return (
        header.bundle, header.sequencer, header.folded_bundle, header.owner,
        header.low_watermark, header.input_watermark,
    )  # fmt: skip


@dataclass(slots=True)
class Landing:
    """A bundle that has become visible: header before and after, what was submitted, what is stored.

    Attributes:
        attempts: all that was ever submitted under this bundle number.
        changes: name -> (value, fire time), None for a tombstone, by the stored document.
        rows: table -> result rows of this bundle.
    """

    book: Book
    bundle: int
    bundle_before: int
    sequencer: int
    input_before: int
    low_before: int
    cursors_before: dict[int, tuple[int, int]]
    attempts: list[Attempt]
    changes: dict[Name, tuple[Any, int] | None]
    segments: list[Segment]
    runs: list[DedupeRun]
    rows: dict[str, list[Row]]

    @property
    def attempt(self) -> Attempt | None:
        """What was submitted under the sequencer that the interval had."""
        interval_id = self.book.interval_id
        for attempt in reversed(self.attempts):
            grants = [checkpoint.grant for checkpoint in attempt.checkpoints]
            if Grant(interval_id, self.sequencer) in grants:
                return attempt
        return None

    @property
    def checkpoint(self) -> Checkpoint | None:
        """This interval's part of it."""
        attempt = self.attempt
        if attempt is None:
            return None
        return next(c for c in attempt.checkpoints if c.grant.interval_id == self.book.interval_id)


class Books:
    """Everything that was noted of one graph in a run.

    Attributes:
        names: which generation has which name.
        given: (worker, consumer, producer, subscription, seq) of every slice that a poll handed out.
        granted: (interval, sequencer) -> worker.
        kept: segments above some cursor, or passed by what landed last.
        trace: one line for whatever happened.
    """

    def __init__(self, database: MemoryDatabase, graph_id: int, names: Names, trace: list[str]) -> None:
        self.database = database
        self.graph_id = graph_id
        self.names = names
        self.deployed = database.graphs[graph_id]
        self.by_interval = {
            interval_id: Book(header, header.interval.computation)
            for interval_id, header in database.headers.items()
            if header.graph_id == graph_id
        }
        for book in self.by_interval.values():
            book.cursors = dict(book.header.cursors)
        self.submitted: dict[tuple[int, int], list[Attempt]] = {}
        self.given: set[tuple[UUID, int, int, int, int]] = set()
        self.granted: dict[tuple[int, int], UUID] = {}
        self.granted_twice: list[tuple[int, int, UUID, UUID]] = []
        self.kept: list[Kept] = []
        self.freed = False
        self.trace = trace
        self._headers = [book.header for book in self.by_interval.values()]
        self._states: list[tuple[Any, ...]] = []

    def of(self, computation: str) -> Iterator[Book]:
        """The books of a computation."""
        return (book for book in self.by_interval.values() if book.computation == computation)

    def tables(self) -> Iterator[Table]:
        """The result tables of this graph."""
        return (table for table in self.database.tables.values() if table.graph_id == self.graph_id)

    def rows(self, name: str) -> list[Row]:
        """The rows of a result table of this graph."""
        return [row for table in self.tables() if table.spec.name == name for row in table.rows.values()]

    def dead_letters(self) -> Iterator[tuple[int, int, int, DeadLetter]]:
        """(number, interval, bundle, dead letter) of all of this graph."""
        for number, (interval_id, bundle, letter) in enumerate(self.database.dead_letters, start=1):
            if interval_id in self.by_interval:
                yield number, interval_id, bundle, letter

    def late_records(self) -> Iterator[tuple[int, LateRows]]:
        """(interval, late records) of all of this graph."""
        return ((where, late) for where, _, late in self.database.late_records if where in self.by_interval)

    def note_submitted(self, worker: UUID, checkpoints: Sequence[Checkpoint], switches: int) -> None:
        """A worker asks to commit, which looked its graph up after so many switches."""
        attempt = Attempt(worker, tuple(checkpoints), switches)
        for checkpoint in checkpoints:
            self.submitted.setdefault((checkpoint.grant.interval_id, checkpoint.bundle), []).append(attempt)

    def note_given(self, worker: UUID, answers: Sequence[Polled]) -> None:
        """A worker has been given these segments."""
        for answer in answers:
            for segment in answer.segments:
                if segment.payload is not None:
                    want = answer.want
                    place = (worker, want.consumer, want.producer, segment.subscription_id, segment.seq)
                    self.given.add(place)

    def note_granted(self, worker: UUID, grants: Sequence[Grant]) -> None:
        """A worker has been given these intervals."""
        for grant in grants:
            name = (grant.interval_id, grant.sequencer)
            before = self.granted.setdefault(name, worker)
            if before != worker:
                self.granted_twice.append((*name, before, worker))

    def nothing_moved(self) -> bool:
        """Whether no header has changed since the last call."""
        states = [state_of(header) for header in self._headers]
        if states == self._states:
            return True
        self._states = states
        return False

    def look(self) -> list[Landing]:
        """What has landed since the last look, producers before consumers; the books are up to date afterwards."""
        moved = [book for book in self.by_interval.values() if book.moved]
        if moved:
            self.kept = [kept for kept in self.kept if not self.is_read(kept)]
        landings = [self._landing(book) for book in moved if book.header.bundle != book.bundle]
        for book in moved:
            self._tell(book)
            self._catch_up(book)
        for landing in landings:
            self._keep(landing)
        return landings

    def _landing(self, book: Book) -> Landing:
        interval_id, bundle = book.interval_id, book.header.bundle
        documents = [d for d in self.database.deltas if d.interval_id == interval_id and d.bundle > book.bundle]
        rows = {
            table.spec.name: found
            for table in self.tables()
            if table.spec.computation == book.computation
            and (found := [r for r in table.rows.values() if r["interval_id"] == interval_id and r["bundle"] == bundle])
        }
        changes: dict[Name, tuple[Any, int] | None] = {}
        for document in documents:
            changes.update(read_document(document.document))
        return Landing(
            book=book,
            bundle=bundle,
            bundle_before=book.bundle,
            sequencer=book.sequencer,
            input_before=book.input_watermark,
            low_before=book.low_watermark,
            cursors_before=dict(book.cursors),
            attempts=self.submitted.get((interval_id, bundle), []),
            changes=changes,
            segments=[
                s.segment
                for s in self.database.segments
                if s.interval_id == interval_id and s.segment.seq > book.bundle
            ],
            runs=[r.run for r in self.database.dedupe_runs if r.interval_id == interval_id][-1:],
            rows=rows,
        )

    def _tell(self, book: Book) -> None:
        """Write a line of the trace."""
        header, what = book.header, f"{book.computation} {book.interval_id}"
        if header.owner != book.owner or header.sequencer != book.sequencer:
            self.trace.append(f"{what} sequencer {header.sequencer} owner {header.owner}")
        if header.bundle != book.bundle:
            watermarks = f"watermarks {header.input_watermark} {header.low_watermark}"
            self.trace.append(f"{what} bundle {header.bundle} {watermarks} cursors {header.cursors}")
        elif header.folded_bundle != book.folded:
            self.trace.append(f"{what} folded {header.folded_bundle}")

    def _catch_up(self, book: Book) -> None:
        header = book.header
        book.owner, book.sequencer, book.bundle = header.owner, header.sequencer, header.bundle
        book.folded = header.folded_bundle
        book.input_watermark, book.low_watermark = header.input_watermark, header.low_watermark
        book.lows[header.bundle] = header.low_watermark
        book.cursors = dict(header.cursors)

    def _keep(self, landing: Landing) -> None:
        book = landing.book
        for name, change in landing.changes.items():
            book.changed[name] = landing.bundle
            if change is None:
                book.keyed.pop(name, None)
            else:
                book.keyed[name] = change
        for segment in landing.segments:
            sub = next(s for s in self.deployed.subscriptions if s.subscription_id == segment.subscription_id)
            self.kept.append(Kept(book.interval_id, segment, sub))

    def is_read(self, kept: Kept) -> bool:
        """Whether all its consumers are past it."""
        cursors = (self.by_interval[consumer].cursors[kept.producer][0] for consumer in kept.subscription.consumers)
        return all(seq >= kept.segment.seq for seq in cursors)


def hashable(key: Any) -> Any:
    """A key as JSON has it; one of several fields as a tuple."""
    return tuple(key) if isinstance(key, list) else key


def read_document(document: bytes) -> dict[Name, tuple[Any, int] | None]:
    """A delta document, by its description in `model/delta.py` and with plain JSON."""
    found: dict[Name, tuple[Any, int] | None] = {}
    for part in json.loads(document):
        names = zip(part["key"], part["subkey"], part["value"], part["fire_at"], strict=True)
        for key, subkey, value, fire_at in names:
            name = (part["kind"], part["namespace"], hashable(key), subkey)
            found[name] = None if value is None else (value[0], fire_at)
    return found


class Recording(MemoryStore):
    """A worker's connection that notes what passes through it.

    It finds result tables by name, as PostgreSQL does: by the name that its graph had when the worker looked it up.

    Attributes:
        worker: whose it is.
        dies: called when the outcome of a commit is not known, to die in doubt.
        known_as: what its graph was called when it was looked up.
        switches: how often generations had been switched then.
    """

    books: Books
    worker: UUID
    dies: Callable[[], None] | None = None
    known_as: str = ""
    switches: int = 0

    async def deploy(self, spec: GraphSpec, *, on_purpose: bool = False) -> Deployment:
        """Note what is told."""
        deployment = await super().deploy(spec, on_purpose=on_purpose)
        self.known_as, self.switches = deployment.name, self.books.names.switches
        return deployment

    async def claim(self, worker_id: UUID, interval_ids: Sequence[int]) -> Sequence[Grant]:
        """Note whom they were given to."""
        grants = await super().claim(worker_id, interval_ids)
        self.books.note_granted(worker_id, grants)
        return grants

    async def take_over_from_self(self, worker_id: UUID, grants: Sequence[Grant]) -> Sequence[Grant]:
        """Note whom they were given to."""
        fresh = await super().take_over_from_self(worker_id, grants)
        self.books.note_granted(worker_id, fresh)
        return fresh

    async def poll(self, wants: Sequence[Want], bytes_max: int) -> Sequence[Polled]:
        """Note what was handed out."""
        answers = await super().poll(wants, bytes_max)
        self.books.note_given(self.worker, answers)
        return answers

    async def commit(
        self,
        checkpoints: Sequence[Checkpoint],
        *,
        graph_version: int,
        inside: CommitProbe | None = None,
        trial: bool = False,
    ) -> None:
        """Note what was asked for."""
        if not trial:
            self.books.note_submitted(self.worker, checkpoints, self.switches)
        if len(self.database.graphs) > 1:
            checkpoints = [named(self.database, self.known_as, checkpoint) for checkpoint in checkpoints]
        try:
            await super().commit(checkpoints, graph_version=graph_version, inside=inside, trial=trial)
        except CommitUnknownError:
            if self.dies is not None:
                self.dies()
            raise

    async def turn_rings(self, *, epoch_s: float, epoch_bytes: int) -> int:
        """Note that something was freed."""
        freed = await super().turn_rings(epoch_s=epoch_s, epoch_bytes=epoch_bytes)
        self.books.freed |= freed > 0
        return freed


def pending(books: Books, subscription: DeployedSubscription) -> int:
    """Records in stored segments above the cursors of their consumers (I8)."""
    return sum(
        part.records
        for kept in books.kept
        if kept.subscription is subscription
        for consumer, part in zip(subscription.consumers, kept.segment.slices, strict=True)
        if part is not None and books.by_interval[consumer].cursors[kept.producer][0] < kept.segment.seq
    )
