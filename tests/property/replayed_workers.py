"""Workers that share a graph, crash and take over from each other; the archives of what they commit; and what the
tasks of an exact batch make of them.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pytest

from millpy.computation import Computation, Context, Value
from millpy.graph import Graph, StageNode
from millpy.hosting.plan import plan
from millpy.ingest.protocol import SourceSetup
from millpy.ingest.settings import Dedupe, EventTime
from millpy.limits import Limits
from millpy.model.bundle import Bundle
from millpy.model.checkpoint import Checkpoint, Grant, Kind
from millpy.model.keys import KeyHasher
from millpy.model.time import Instant
from millpy.runtime.worker import Worker
from millpy.spark import Archive
from millpy.spark.batch import account
from millpy.spark.hosted_task import PARTS, IntervalEnd
from millpy.spark.job import BatchJob, HostedPlan, make_job
from millpy.spark.replayed_task import REPLAY_ORDER, ReplayedTask, replay_source, replay_stage
from millpy.store.archive.parquet import encode
from millpy.store.codec import decode_slice
from millpy.store.memory.database import MemoryDatabase
from millpy.store.memory.store import MemoryStore
from millpy.store.protocol import OwnerSnapshot
from millpy.testing.clock import ManualClock
from millpy.windowing.accumulation import Accumulation
from millpy.windowing.aggregates.distinct import ApproxDistinct
from millpy.windowing.aggregates.numeric import Count, Mean, Sum, Variance
from millpy.windowing.aggregates.positional import Collect, Last, Top
from millpy.windowing.aggregates.quantile import Median
from millpy.windowing.composite_triggers import AfterAny, AfterWatermark, Repeatedly
from millpy.windowing.triggers import AfterCount, AfterProcessingTime, Every
from millpy.windowing.window import FixedWindows, SessionWindows, SlidingWindows
from tests.crash.memory_world import started
from tests.feed import Feed, FeedInjector
from tests.property.test_hosting import Note, Said, Silence, us

NOW_US = Instant(1_700_000_000_000_000)
LIMITS = Limits(
    lease_ttl_s=1_000_000, progress_every_s=0.001, turn_panes_max=2, turn_timers_max=1, bundle_records_max=5
)
TEXT = "from tests.property.replayed_workers import graph_of, grown\ngraph = {}({!r})\n"
FEEDS = 3
RECORDS = ("said", "once", "pairs", "latest")
"""Tables of records."""


class Joining(Feed):
    """A feed that may get another partition, which the first one begins."""

    def __init__(self, *, joined: Feed | None = None, **more: Any) -> None:
        super().__init__(**more)
        self.joined = joined

    def partitions(self) -> tuple[str, ...]:
        return super().partitions() if self.joined is None else (*super().partitions(), "joined")

    def connect(self, setup: SourceSetup) -> FeedInjector:
        return super().connect(setup) if setup.partition != "joined" else self.joined.connect(setup)  # type: ignore[union-attr]


def sources(graph: Graph, feeds: Sequence[Feed]) -> Any:
    found = []
    for place, feed in enumerate(feeds):
        at = EventTime("at", unit="us", max_disorder=us(5))
        stream = graph.inject(
            f"in_{place}", feed, schema=Note, event_time=at, dedupe=Dedupe("id", within=us(90), time="at", unit="us")
        )
        stream.key_by("device").archive()
        found.append(stream)
    return found[0].union(*found[1:])


def windows(graph: Graph, notes: Any) -> None:
    for name, kind in (("fixed", FixedWindows(us(20))), ("sliding", SlidingWindows(us(30), every=us(10)))):
        keyed = notes.key_by("device").window(kind, allowed_lateness=us(30), intervals=2, name=name)
        keyed.aggregate(n=Count(), total=Sum("value"), mean=Mean("value")).to_table(name)


def sessions(graph: Graph, notes: Any) -> None:
    positive = notes.filter(lambda note: note.value > 2).key_by("device")
    keyed = positive.window(SessionWindows(us(12)), allowed_lateness=us(20), intervals=2, name="panes")
    keyed.aggregate(n=Count(), total=Sum("value")).to_table("panes")


def timers(graph: Graph, notes: Any) -> None:
    said = notes.key_by("device").process(Silence(), name="silence", output=Said, intervals=3)
    said.to_table("said")
    said.key_by("number").window(FixedWindows(us(50)), name="per_number", intervals=2).aggregate(n=Count()).to_table(
        "numbers"
    )


def deduplicated(graph: Graph, notes: Any) -> None:
    once = notes.deduplicate(["id", "device"], us(40), name="once", intervals=2)
    once.to_table("once")
    once.key_by("device").window(FixedWindows(us(30)), name="counts", intervals=2).aggregate(n=Count()).to_table(
        "counts"
    )


def levels(graph: Graph, notes: Any) -> None:
    late = {"allowed_lateness": us(30), "intervals": 2}
    visits = notes.key_by("device").window(
        SessionWindows(us(12)), accumulation=Accumulation.RETRACTING, name="visits", **late
    )
    panes = visits.aggregate(n=Count(), total=Sum("value")).to_table("visits")
    keyed = panes.filter(lambda pane: pane.n < 4).key_by("device")
    keyed.window(FixedWindows(us(40)), name="days", **late).aggregate(n=Sum("n"), mean=Mean("total")).to_table("days")


def early(graph: Graph, notes: Any) -> None:
    """Panes by the clock, by records, and by both; one kind closes its windows."""
    ticks, several = Every(us(7)), Repeatedly(AfterAny(AfterCount(3), AfterProcessingTime(us(9))))
    late = {"allowed_lateness": us(30), "intervals": 2}
    for name, kind, trigger, mode in (
        ("ticking", FixedWindows(us(20)), AfterWatermark(early=ticks), Accumulation.DISCARDING),
        ("sliding", SlidingWindows(us(30), every=us(10)), several, Accumulation.ACCUMULATING),
        ("visits", SessionWindows(us(12)), AfterWatermark(early=ticks, late=AfterCount(2)), Accumulation.DISCARDING),
        ("closing", FixedWindows(us(40)), AfterAny(AfterCount(4), ticks), Accumulation.ACCUMULATING),
    ):
        keyed = notes.key_by("device").window(kind, trigger=trigger, accumulation=mode, name=name, **late)
        keyed.aggregate(n=Count(), total=Sum("value")).to_table(name)
    levels = notes.key_by("device").window(
        FixedWindows(us(20)),
        trigger=AfterWatermark(early=ticks),
        accumulation=Accumulation.RETRACTING,
        name="inner",
        **late,
    )
    panes = levels.aggregate(n=Count()).key_by("device")
    panes.window(FixedWindows(us(40)), name="outer", **late).aggregate(n=Sum("n")).to_table("outer")


def joined(graph: Graph, notes: Any) -> None:
    odd, even = notes.split(lambda note: ("even", "odd")[int(note.value) % 2], into=["odd", "even"]).values()
    within = us(10), us(25)
    pairs = odd.key_by("device").join(even.key_by("device"), within=within, how="left", intervals=2)
    pairs.to_table("pairs")
    pairs.key_by("device").process(Order(), name="order", output=Said, intervals=1)
    odd.key_by("device").join_as_of(even.key_by("device"), within=us(30), intervals=2).to_table("latest")


class Order(Computation):
    """Tells records that come in another order apart."""

    seen = Value(Said)

    def process_record(self, context: Context, record: Any) -> None:
        seen = context[Order.seen]
        seen.device, seen.number = record.device, (seen.number * 31 + sum(record.device.encode())) % 1_000_003
        context.produce(seen)


def orders(graph: Graph, notes: Any) -> None:
    """What comes in one bundle has an order, too: that of windows and timers which are due at the same time."""
    for name, kind in (
        ("fixed", FixedWindows(us(20))), ("sliding", SlidingWindows(us(30), every=us(10))),
        ("panes", SessionWindows(us(12))),
    ):  # fmt: skip
        keyed = notes.key_by("device").window(kind, allowed_lateness=us(30), intervals=1, name=name)
        panes = keyed.aggregate(
            n=Count(), spread=Variance("value"), middle=Median("value"), different=ApproxDistinct("value"),
            last=Last("id"), some=Collect("id", limit=4), top=Top("value", 2),
        )  # fmt: skip
        panes.key_by("pane_timing").process(Order(), name=f"order_of_{name}", output=Said, intervals=1)
    said = notes.key_by("device").process(Silence(), name="silence", output=Said, intervals=1)
    said.key_by("number").process(Order(), name="order", output=Said, intervals=1)


GRAPHS: dict[str, Callable[[Graph, Any], None]] = {
    "windows": windows, "sessions": sessions, "timers": timers, "deduplicated": deduplicated, "levels": levels,
    "orders": orders, "early": early, "joined": joined,
}  # fmt: skip


def feeds_of(*, joined: bool = False) -> list[Feed]:
    first = Joining(batch_max=8, joined=Feed(batch_max=8) if joined else None)
    return [first, *(Feed(batch_max=8) for _ in range(FEEDS - 1))]


def graph_of(kind: str, feeds: Sequence[Feed] | None = None) -> Graph:
    graph = Graph("replayed")
    GRAPHS[kind](graph, sources(graph, feeds or feeds_of()))
    graph.archive_takes()
    return graph


def grown(kind: str) -> Graph:
    return graph_of(kind, feeds_of(joined=True))


class RecordingStore(MemoryStore):
    """A memory store that keeps what is committed. A new owner gets entries in any order."""

    committed: list[Checkpoint]
    chance: random.Random

    async def read(self, grants: Sequence[Grant], **how: Any) -> Sequence[OwnerSnapshot]:
        snapshots = await super().read(grants, **how)
        for snapshot in snapshots:
            for entries in snapshot.recovered.entries:
                order = self.chance.sample(range(len(entries)), len(entries))
                for column in ("keys", "key_hashes", "subkeys", "values", "fire_ats"):
                    setattr(entries, column, [getattr(entries, column)[place] for place in order])
        return snapshots

    async def commit(self, checkpoints: Sequence[Checkpoint], **how: Any) -> None:
        await super().commit(checkpoints, **how)
        self.committed += checkpoints


class Workers:
    """Two workers that share a graph."""

    def __init__(self, kind: str, limits: Limits, chance: random.Random) -> None:
        self.limits = limits
        self.chance = chance
        self.clock = ManualClock(NOW_US)
        self.database = MemoryDatabase(self.clock)
        self.kind, self.feeds = kind, feeds_of()
        self.graph = graph_of(kind, self.feeds)
        self.committed: list[Checkpoint] = []
        self.running: dict[str, Worker] = {}
        self.taken_over = 0

    async def start(self, without: str) -> None:
        """Start a worker, which leaves one source to the other worker."""
        store = RecordingStore(self.database)
        store.committed, store.chance = self.committed, self.chance
        archives = [node.name for node in self.graph.nodes if isinstance(node, StageNode) and node.archives]
        only = [node.name for node in self.graph.nodes if node.name not in (*archives, without)]
        self.running[without] = await started(store, self.graph, self.limits, self.clock, only=only)
        await self.balance()

    async def grow(self) -> None:
        """Deploy the graph with another source partition, and start its workers anew."""
        self.feeds[0].joined = Feed(batch_max=8)  # type: ignore[attr-defined]
        self.feeds.append(self.feeds[0].joined)  # type: ignore[attr-defined]
        self.graph = graph_of(self.kind, self.feeds[:FEEDS])
        self.database.deploy(self.graph.spec())
        running = [*self.running]
        for without in running:
            await self.abandon(without)
        for without in running:
            await self.start(without)

    async def balance(self) -> None:
        for worker in [*self.running.values()] * 3:
            await worker.balance()
            await self.turn(worker)

    async def turn(self, worker: Worker) -> None:
        self.clock.advance(0.7)
        await worker.step()
        await worker.cycle.await_in_flight()

    async def abandon(self, without: str) -> None:
        worker = self.running.pop(without)
        await worker.abandon()
        self.database.workers[worker.context.worker_id].expires_at = Instant(0)  # its lease is over

    async def crash(self, without: str) -> None:
        await self.abandon(without)
        await self.start(without)
        self.taken_over += sum(header.sequencer > 1 for header in self.database.headers.values())


async def by_workers(kind: str, seed: int, *, ends: bool = True, grows: bool = False) -> Workers:
    """Run workers through random turns, crashes and records out of order; `grows` adds a source partition."""
    chance, at = random.Random(seed), 0
    every_s = chance.choice([0.001, 6.0])
    workers = Workers(kind, replace(LIMITS, progress_every_s=every_s), random.Random(seed))
    for without in ("in_2", "in_0"):
        await workers.start(without)
    turns = chance.randint(10, 50)
    grows_at = chance.randrange(turns) if grows else -1
    for number in range(turns):
        if number == grows_at:
            await workers.grow()
        for _ in range(chance.choice([0, 1, 4, 12])):
            at += chance.choice([0, 1, 2, 6])
            note = Note(
                number * 100 + at,
                chance.choice("abcd"),
                max(0, at - chance.choice([0, 2, 9, 35])),
                float(chance.randint(0, 12)),
            )
            chance.choice(workers.feeds).push(msgspec.json.encode(note))
        if chance.random() < 0.1:
            await workers.crash(chance.choice([*workers.running]))
        await workers.turn(chance.choice([*workers.running.values()]))
    if ends:
        for feed in workers.feeds:
            feed.end()
        for _ in range(60):
            for worker in workers.running.values():
                await workers.turn(worker)
    for worker in workers.running.values():
        await worker.abandon()
    return workers


def archived(workers: Workers, directory: Path, *, chosen: Callable[[str, list[Bundle]], list[Bundle]]) -> None:
    """Write the archives as an archiver would; `chosen` says which bundles of an archive."""
    deployed = plan(workers.graph, workers.database.deploy(workers.graph.spec()), LIMITS)
    places = {interval.interval_id: interval.place for interval in deployed.deployment.intervals}
    for of in deployed:
        if not of.archives:
            continue
        found = []
        for stored in workers.database.segments:
            segment, (part, *_) = stored.segment, stored.segment.slices
            subscription = of.incoming.get(segment.subscription_id)
            if subscription is None or part is None:
                continue
            records = decode_slice(subscription.record_type, part.payload, part.checksum)
            keys = records.keys(subscription.key_fields, KeyHasher())
            found.append(
                Bundle(0, stored.interval_id, segment.seq, segment.watermark, records, keys, segment.previous_seq)
            )
        kept = chosen(of.name, found)
        folder = directory / "archive/replayed" / of.name / "hour=2026-11-24T00"
        folder.mkdir(parents=True)
        for number, start in enumerate(range(0, len(kept), 40)):
            content = encode(kept[start : start + 40], places, of.node.logic.buckets)
            (folder / f"1-1-{number}-0.parquet").write_bytes(content)


def everything(_: str, found: list[Bundle]) -> list[Bundle]:
    return found


def parts_of(job: BatchJob) -> tuple[HostedPlan, list[dict[str, Any]]]:
    """What the tasks of an exact batch make, called as Spark calls them, over a shuffle of our own."""
    text, hosted, chance = job.encoded(), HostedPlan(job), random.Random(1)
    parts: list[dict[str, Any]] = []
    for of in hosted.plan:
        ids = [interval.interval_id for interval in of.intervals]
        if of.stage is None:
            made = replay_source(text, [pa.record_batch({"owner": pa.array(ids, pa.int32())})])
        else:
            mail = [row for row in parts if row["kind"] in ("segment", "position") and row["owner"] in ids]
            chance.shuffle(mail)
            mail.sort(key=lambda row: tuple(row[name] for name in REPLAY_ORDER))
            made = replay_stage(text, [pa.RecordBatch.from_pylist(mail, schema=PARTS)])
        parts += [row for batch in made for row in batch.to_pylist()]
    return hosted, parts


def ends_of(hosted: HostedPlan, parts: Sequence[dict[str, Any]]) -> dict[int, IntervalEnd]:
    """The ends of all intervals; the accounting over them must balance."""
    ends = {
        row["owner"]: msgspec.json.decode(row["payload"], type=IntervalEnd) for row in parts if row["kind"] == "end"
    }
    rows: dict[int, int] = {}
    for row in parts:
        if row["kind"] in ("rows", "later_rows"):
            rows[row["subject"]] = rows.get(row["subject"], 0) + row["records"]
    account(hosted, ends, rows)
    return ends


def made_again(
    job: BatchJob, monkeypatch: pytest.MonkeyPatch
) -> tuple[dict[tuple[str, int], Checkpoint], HostedPlan, dict[int, IntervalEnd]]:
    """The checkpoints of the tasks; the accounting of all must balance."""
    found: dict[tuple[str, int], Checkpoint] = {}
    keep = ReplayedTask.keep

    def kept(self: ReplayedTask, checkpoint: Checkpoint) -> Iterator[Any]:
        found[self.place, checkpoint.bundle] = checkpoint
        return keep(self, checkpoint)

    with monkeypatch.context() as patched:
        patched.setattr(ReplayedTask, "keep", kept)
        hosted, parts = parts_of(job)
    ends = ends_of(hosted, parts)
    return found, hosted, ends


def compared(checkpoint: Checkpoint, tables: dict[int, str]) -> dict[str, Any]:
    """All that a checkpoint of a stage changes. Ids and what goes to archives are different on Spark.

    Entries, and rows of windows, have no order; the rows of a table of records have.
    """
    columns = ("keys", "key_hashes", "subkeys", "values", "fire_ats")
    return {
        "watermarks": (checkpoint.input_watermark, checkpoint.low_watermark, checkpoint.oldest_work),
        "time": checkpoint.processing_floor,
        "entries": sorted(
            (part.kind, part.namespace, *sorted(zip(*(getattr(part, name) for name in columns), strict=True), key=repr))
            for part in checkpoint.delta
            if part.kind is not Kind.COUNTER and len(part)
        ),
        "rows": [
            (tables[part.table_id], part.first, _rows_of(part.columns, is_sorted=tables[part.table_id] in RECORDS))
            for part in checkpoint.results
        ],
        "deleted": [
            (tables[part.table_id], [pa.array(column).to_pylist() for column in part.columns])
            for part in checkpoint.deleted
        ],
        "late": list(checkpoint.late),
        "dead letters": [replace(letter, traceback="") for letter in checkpoint.dead_letters],
        "ids": checkpoint.dedupe_run,
    }


def _rows_of(columns: Sequence[Any], *, is_sorted: bool) -> list[tuple[Any, ...]]:
    rows = list(zip(*(pa.array(column).to_pylist() for column in columns), strict=True))
    return rows if is_sorted else sorted(rows, key=repr)


def by_place(workers: Workers) -> dict[tuple[str, int], dict[str, Any]]:
    deployed = workers.database.deploy(workers.graph.spec())
    places = {i.interval_id: i.place for i in deployed.intervals if i.keys is not None}
    tables = {table_id: name for name, table_id in deployed.table_ids.items()}
    return {
        (places[each.grant.interval_id], each.bundle): compared(each, tables)
        for each in workers.committed
        if each.grant.interval_id in places
    }


def graph_file(kind: str, directory: Path, *, grows: bool = False) -> Path:
    path = directory / "graph.py"
    path.write_text(TEXT.format("grown" if grows else "graph_of", kind))
    return path


def exact_job(kind: str, directory: Path, *, grows: bool = False) -> BatchJob:
    path = graph_file(kind, directory, grows=grows)
    return make_job(str(path), Archive(directory / "archive", exact=True), limits=Limits(), now_us=Instant(1))


def pending(workers: Workers) -> dict[tuple[str, str], int]:
    found = workers.database.accounting(1).subscriptions
    archives = {node.name for node in workers.graph.nodes if isinstance(node, StageNode) and node.archives}
    return {(sub.stream, sub.consumer): sub.pending for sub in found if sub.pending and sub.consumer not in archives}


def pending_on_spark(hosted: HostedPlan, ends: dict[int, IntervalEnd]) -> dict[tuple[str, str], int]:
    found: dict[tuple[str, str], int] = {}
    for end in ends.values():
        for of, records in end.pending.items():
            name = next((o.stream, o.consumer) for c in hosted.plan for o in c.outgoing if str(o.subscription_id) == of)
            found[name] = found.get(name, 0) + records
    return found
