"""The worker's own books and its waiting, on the in-memory store."""

import asyncio
import json
import threading
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any, ClassVar
from unittest.mock import AsyncMock

import msgspec
import pytest

from millpy.admin.events import describe
from millpy.clock import SystemClock
from millpy.computation import Computation, Context
from millpy.errors import ConfigError, LeaseExpiredError, TransientError
from millpy.graph import Graph
from millpy.ingest.protocol import Source, SourceSetup
from millpy.ingest.settings import EventTime
from millpy.limits import Limits
from millpy.model.identity import Identity
from millpy.model.time import Instant, milliseconds
from millpy.runtime.lease import Lease
from millpy.runtime.worker import Worker
from millpy.sources.files.source import Directory, File, FileInjector
from millpy.store.memory.store import MemoryDatabase, MemoryStore
from tests.crash import memory_world
from tests.crash.memory_world import Reading, Total, Totals, readings, two_stages


async def started(graph: Graph, database: MemoryDatabase, limits: Limits, **more: Any) -> Worker:
    return await memory_world.started(MemoryStore(database), graph, limits, SystemClock(), **more)


class CountingWorker:
    """Runs a worker and counts its steps."""

    def __init__(self, worker: Worker) -> None:
        self.steps = 0
        self._step = worker.step
        worker.step = self.step  # type: ignore[method-assign]

    async def step(self) -> bool:
        self.steps += 1
        return await self._step()


async def test_a_worker_without_intervals_sleeps_even_after_a_hint(tmp_path: Path) -> None:
    graph = two_stages(tmp_path / "in", readings(10))
    worker = await started(graph, MemoryDatabase(), Limits(), only=("nothing of this graph",))
    counting, stop = CountingWorker(worker), asyncio.Event()
    running = asyncio.create_task(worker.run(stop))

    await asyncio.wait([running], timeout=0.1)
    worker.context.wake.set()
    await asyncio.wait([running], timeout=0.1)
    stop.set()
    await running

    assert counting.steps < 10


async def test_a_worker_that_is_cancelled_at_the_moment_it_is_woken_ends(tmp_path: Path) -> None:
    graph = two_stages(tmp_path / "in", readings(10))
    worker = await started(graph, MemoryDatabase(), Limits(), only=("nothing of this graph",))
    running = asyncio.create_task(worker.run(asyncio.Event()))
    await asyncio.wait([running], timeout=0.1)

    worker.context.wake.set()
    running.cancel()

    _, still = await asyncio.wait([running], timeout=60)
    assert not still


async def test_a_bundle_that_was_in_flight_during_a_fold_is_folded_later(tmp_path: Path) -> None:
    database = MemoryDatabase()
    worker = await started(two_stages(tmp_path / "in", readings(100)), database, Limits(lease_ttl_s=60))
    while worker.cycle._committing is None:
        await worker.step()
    (source,) = [i for i in worker.owned.intervals.values() if i.intake is not None]

    await worker.maintenance.fold_one(source)
    await worker.cycle.await_in_flight()
    worker.maintenance.apply_folds()

    header = database.headers[source.interval_id]
    assert header.folded_bundle < header.bundle
    assert source.unfolded_bytes > 0, "nobody would fold it once the stream is quiet, and its slot is never freed"

    await worker.maintenance.fold_one(source)
    worker.maintenance.apply_folds()

    assert header.folded_bundle == header.bundle
    assert source.unfolded_bytes == 0
    await worker.abandon()


async def test_a_worker_with_too_much_state_to_fold_takes_no_input(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = await started(two_stages(tmp_path / "in", readings(100)), MemoryDatabase(), Limits(lease_ttl_s=60))
    await worker.balance()  # which claims and opens all
    (source,) = [i for i in worker.owned.intervals.values() if i.intake is not None]
    assert source.injector is not None
    take = AsyncMock(side_effect=source.injector.take)
    monkeypatch.setattr(source.injector, "take", take)
    monkeypatch.setattr(worker.maintenance, "unfolded_bytes", lambda: worker.context.limits.unfolded_bytes_max + 1)

    for _ in range(3):
        await worker.step()
    take.assert_not_called()

    monkeypatch.setattr(worker.maintenance, "unfolded_bytes", lambda: worker.context.limits.unfolded_bytes_max)
    await worker.step()
    take.assert_called()
    await worker.abandon()


async def test_refused_fence_is_reported_even_if_another_statement_fails_first(tmp_path: Path) -> None:
    database = MemoryDatabase()
    worker = await started(two_stages(tmp_path / "in", readings(100)), database, Limits(lease_ttl_s=60))
    while worker.cycle._committing is None:
        await worker.step()
    taken = next(iter(worker.owned.intervals))
    sources = set(worker.context.sources.parts)
    database.headers[taken].sequencer += 1

    await worker.recover()  # as after a poll that has failed
    told = set(worker.context.sources.parts)
    assert told == sources & set(worker.owned.intervals), "the new owner tells of the others"
    await worker.abandon()

    assert [event.kind for _, event in database.events].count("fence_refused") == 1


async def test_expired_lease_is_an_event_and_no_refused_fence(tmp_path: Path) -> None:
    database = MemoryDatabase()
    worker = await started(two_stages(tmp_path / "in", readings(100)), database, Limits(lease_ttl_s=60))
    worker.context.lease.lost()

    with pytest.raises(LeaseExpiredError) as expired:
        await worker.context.lease.await_trust()
    worker.cycle.note_loss(expired.value)
    await worker.cycle.record_losses()
    await worker.abandon()

    ((kind, detail),) = [(event.kind, event.detail) for _, event in database.events if event.kind != "claimed"]
    assert kind == "lease_expired"
    assert describe(kind, detail, {}) == f"worker {str(worker.context.worker_id)[:8]}: the lease has expired"


class SlowInjector:
    """Opens slowly, like a broker behind a dead network."""

    async def open(self, position: bytes | None) -> None:
        with suppress(TimeoutError):
            await asyncio.wait_for(asyncio.Event().wait(), 0.2)

    async def take(self) -> None:
        return None

    async def acknowledge(self, token: object) -> None:
        pass

    def quiet(self) -> bool:
        return False

    async def close(self) -> None:
        pass


class SlowSource(Source):
    def identity(self) -> Identity:
        return {"kind": "slow"}

    def partitions(self) -> tuple[str, ...]:
        return tuple(f"p{n}" for n in range(40))

    def connect(self, setup: SourceSetup) -> SlowInjector:
        return SlowInjector()


class WatchedLease(Lease):
    """Remembers the longest time without a sign of progress."""

    longest_s = 0.0

    def progressed(self) -> None:
        now = self._clock.monotonic()
        self.longest_s = max(self.longest_s, now - self._progress_at)
        super().progressed()


async def test_opening_many_slow_sources_does_not_count_as_being_stuck() -> None:
    graph = Graph("slow")
    source = graph.inject(
        "readings", SlowSource(), schema=Reading, event_time=EventTime("at", unit="us", max_disorder=milliseconds(5))
    )
    source.key_by("device").process(Totals(), name="totals", output=Total)
    lease = WatchedLease(Limits(), SystemClock())
    worker = await started(graph, MemoryDatabase(), Limits(), lease=lease)

    await worker.step()
    lease.progressed()

    assert len([i for i in worker.owned.intervals.values() if i.injector is not None]) == 40
    assert lease.longest_s < 4  # one after the other they take eight seconds
    await worker.abandon()


class Meeting(Source):
    """Sources that open once all have begun to; those named in `refused` fail then."""

    def __init__(self, refused: str = "") -> None:
        self.refused = refused
        self.opening: set[str] = set()
        self.open: set[str] = set()
        self.all_there = asyncio.Event()

    def identity(self) -> Identity:
        return {"kind": "meeting"}

    def partitions(self) -> tuple[str, ...]:
        return ("a", "b", "c")

    def connect(self, setup: SourceSetup) -> SlowInjector:
        return MeetingInjector(self, setup.partition)


class MeetingInjector(SlowInjector):
    def __init__(self, meeting: Meeting, name: str) -> None:
        self.meeting = meeting
        self.name = name

    async def open(self, position: bytes | None) -> None:
        self.meeting.opening.add(self.name)
        if len(self.meeting.opening) == len(self.meeting.partitions()):
            self.meeting.all_there.set()
        async with asyncio.timeout(60):
            await self.meeting.all_there.wait()
        if self.name in self.meeting.refused:
            raise ConfigError(f"{self.name} refuses us")
        self.meeting.open.add(self.name)

    async def close(self) -> None:
        self.meeting.open.discard(self.name)


@pytest.mark.parametrize("refused", ["", "b"])
async def test_sources_open_concurrently_and_a_failing_one_leaves_none_open(refused: str) -> None:
    meeting, graph = Meeting(refused), Graph("meeting")
    source = graph.inject(
        "readings", meeting, schema=Reading, event_time=EventTime("at", unit="us", max_disorder=milliseconds(5))
    )
    source.key_by("device").process(Totals(), name="totals", output=Total)
    worker = await started(graph, MemoryDatabase(), Limits())

    with pytest.raises(ConfigError, match="b refuses us") if refused else nullcontext():
        await worker.step()

    assert meeting.open == {"a", "b", "c"} - {*refused}
    await worker.abandon()
    assert not meeting.open


async def test_finding_many_refused_records_does_not_count_as_being_stuck(tmp_path: Path) -> None:
    database = MemoryDatabase()
    limits = Limits(lease_ttl_s=60)
    lease = WatchedLease(limits, SystemClock())
    worker = await started(two_stages(tmp_path / "in", readings(100)), database, limits, lease=lease)
    database.constrain("largest", "small", lambda row: row["value"] < 50)
    progressed = 0
    trials = 0
    commit = worker.context.store.commit

    async def counted(*args: object, trial: bool = False, **how: object) -> None:
        nonlocal progressed, trials
        if trial:
            trials += 1
            progressed += lease._progress_at > marks[-1]
            marks.append(lease._progress_at)
        await commit(*args, trial=trial, **how)  # type: ignore[arg-type]

    marks = [0.0]
    worker.context.store.commit = counted  # type: ignore[method-assign]
    while trials == 0:
        await worker.step()

    assert trials > 10
    assert progressed == trials
    await worker.abandon()


class Threads(Computation):
    """Remembers its thread, and calls a function that must not be called where an event loop runs."""

    seen: ClassVar[set[int]] = set()

    def process_record(self, context: Context, record: Reading) -> None:
        self.seen.add(threading.get_ident())
        asyncio.run(asyncio.sleep(0))
        context.produce(Total(record.device, 1, 1, record.value))


def one_stage(path: Path, computation: Computation, count: int) -> Graph:
    path.write_text("".join(json.dumps(msgspec.to_builtins(r)) + "\n" for r in readings(count)))
    graph = Graph("one_stage")
    source = graph.inject(
        "readings", File(path), schema=Reading, event_time=EventTime("at", unit="us", max_disorder=milliseconds(5))
    )
    source.key_by("device").process(computation, name="stage", output=Total).to_table("out")
    return graph


async def test_callbacks_run_in_one_thread_for_bundles_of_any_size(tmp_path: Path) -> None:
    graph = one_stage(tmp_path / "in", Threads(), 300)
    database = MemoryDatabase()
    worker = await started(graph, database, Limits(bundle_records_max=70, lease_ttl_s=60))
    Threads.seen.clear()  # another test may have run before

    await worker.run(asyncio.Event())

    assert not database.dead_letters
    assert len(database.rows("out")) == 300
    assert len(Threads.seen) == 1
    assert threading.get_ident() not in Threads.seen


@pytest.mark.parametrize("immediate", [False, True], ids=["a function", "one that only computes"])
async def test_functions_of_operators_run_where_callbacks_do(tmp_path: Path, immediate: bool) -> None:
    seen = set()

    def noted(record: Reading) -> bool:
        seen.add(threading.get_ident())
        return True

    (tmp_path / "in").write_text("".join(json.dumps(msgspec.to_builtins(r)) + "\n" for r in readings(60)))
    graph = Graph("one_stage")
    event_time = EventTime("at", unit="us", max_disorder=milliseconds(5))
    source = graph.inject("readings", File(tmp_path / "in"), schema=Reading, event_time=event_time)
    noted_only = source.filter(noted, immediate=immediate)
    noted_only.key_by("device").process(Quick(), name="stage", output=Total).to_table("out")
    database = MemoryDatabase()
    worker = await started(graph, database, Limits(bundle_records_max=20))

    await worker.run(asyncio.Event())

    assert len(database.rows("out")) == 60
    assert (threading.get_ident() in seen) == immediate


class Quick(Threads):
    immediate = True
    seen: ClassVar[set[int]] = set()

    def process_record(self, context: Context, record: Reading) -> None:
        Quick.seen.add(threading.get_ident())
        context.produce(Total(record.device, 1, 1, record.value))


async def test_immediate_callbacks_run_without_a_thread_hop_when_few_records_wait(tmp_path: Path) -> None:
    graph = one_stage(tmp_path / "in", Quick(), 60)
    database = MemoryDatabase()
    worker = await started(graph, database, Limits(bundle_records_max=20))

    await worker.run(asyncio.Event())

    assert len(database.rows("out")) == 60
    assert threading.get_ident() in Quick.seen


@pytest.mark.parametrize(("computation", "gathered"), [(Quick(), 0), (Threads(), 1)], ids=["quick", "in the thread"])
async def test_only_a_step_in_the_thread_overlaps_with_the_commit_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, computation: Computation, gathered: int
) -> None:
    monkeypatch.setattr("millpy.runtime.turn.STEP_HERE_S_MAX", 60.0)  # however slow this machine is
    worker = await started(one_stage(tmp_path / "in", computation, 60), MemoryDatabase(), Limits(bundle_records_max=20))
    commit, answered = worker.context.store.commit, asyncio.Event()

    async def held(*args: object, **how: object) -> None:
        await answered.wait()
        await commit(*args, **how)  # type: ignore[arg-type]

    worker.context.store.commit = held  # type: ignore[method-assign]
    while worker.cycle._committing is None:
        await worker.step()
    (injector,) = [i.injector for i in worker.owned.intervals.values() if i.injector is not None]
    take, taken = injector.take, 0

    async def counted() -> object:
        nonlocal taken
        taken += 1
        return await take()

    injector.take = counted  # type: ignore[method-assign, assignment]
    stepping = asyncio.create_task(worker.step())
    await asyncio.wait([stepping], timeout=0.2)

    assert taken == gathered

    answered.set()
    await stepping

    assert taken == 1
    await worker.abandon()


async def test_a_worker_that_stops_with_an_error_frees_its_intervals_at_once(tmp_path: Path) -> None:
    path = tmp_path / "in"
    graph = two_stages(path, readings(100))
    path.unlink()
    database, limits = MemoryDatabase(), Limits(lease_ttl_s=60)

    with pytest.raises(ConfigError):
        await (await started(graph, database, limits)).run(asyncio.Event())
    two_stages(path, readings(100))
    async with asyncio.timeout(60):
        await (await started(graph, database, limits)).run(asyncio.Event())

    assert len(database.rows("largest")) == 100


class Telling(Directory):
    """Reports its start and notes as an event."""

    def connect(self, setup: SourceSetup) -> FileInjector:
        accepted = setup.connection.accepted
        setup.tell("told", {"start": setup.start, "notes": sorted(setup.notes), "accepted": accepted})
        return super().connect(setup)


def one_file(place: Path) -> Graph:
    """Return a graph of a source that tells what it receives, with one record."""
    (place / "a").write_text(json.dumps(msgspec.to_builtins(next(iter(readings(1))))) + "\n")
    graph = Graph("one_stage")
    source = graph.inject(
        "readings",
        Telling(place, settle=milliseconds(0), every=milliseconds(5)),
        schema=Reading,
        event_time=EventTime("at", unit="us", max_disorder=milliseconds(5)),
    )
    source.key_by("device").process(Quick(), name="stage", output=Total).to_table("out")
    return graph


async def read_out(graph: Graph, database: MemoryDatabase, **more: Any) -> Worker:
    """Return a worker that has read the file."""
    worker = await started(graph, database, Limits(), **more)
    while not database.rows("out"):
        await worker.step()
    return worker


def told(database: MemoryDatabase) -> list[Any]:
    return [event.detail for _, event in database.events if event.kind == "told"]


async def test_source_receives_its_start_and_notes_and_its_events_are_stored(tmp_path: Path) -> None:
    database = MemoryDatabase()
    worker = await read_out(one_file(tmp_path), database, start=Instant(7))
    await worker.recover()
    await worker.maintenance.apply_backpressure()
    await worker.abandon()

    assert [(found["start"], found["notes"]) for found in told(database)] == [(7, []), (7, [str(tmp_path / "a")])]
    assert len(database.rows("out")) == 1


async def test_source_knows_that_a_worker_before_was_accepted(tmp_path: Path) -> None:
    # A plant that starts after a power cut: the broker knows its users a minute later, and no worker may end of that.
    graph, database = one_file(tmp_path), MemoryDatabase()
    stop = asyncio.Event()
    stop.set()
    await (await read_out(graph, database)).run(stop)
    worker = await started(graph, database, Limits())
    await worker.balance()
    await worker.maintenance.apply_backpressure()
    await worker.abandon()

    assert [found["accepted"] for found in told(database)] == [False, True]


async def test_a_graph_that_dead_letters_every_record_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    graph = two_stages(tmp_path / "in", [])
    (tmp_path / "in").write_text("no JSON\n" * 7)
    worker = await started(graph, MemoryDatabase(), Limits(bundle_records_max=2))

    await worker.run(asyncio.Event())

    said = [text for text in caplog.messages if "dead-lettered" in text]
    assert sum(int(text.split()[0]) for text in said) == 7
    assert len(said) <= 2 and all("of readings dead-lettered (undecodable)" in text for text in said), said


async def test_events_during_an_outage_are_stored_after_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    database = MemoryDatabase()
    worker = await started(two_stages(tmp_path / "in", readings(10)), database, Limits())
    store, events = worker.context.store, worker.context.events
    for kind in ("first", "second"):
        events.add(kind, {})

    with monkeypatch.context() as outage:
        outage.setattr(store, "record_events", AsyncMock(side_effect=TransientError("the database is away")))
        with pytest.raises(TransientError):
            await events.store_all()
    events.add("third", {})
    stored = AsyncMock()
    monkeypatch.setattr(store, "record_events", stored)
    await events.store_all()
    await events.store_all()

    assert [event.kind for call in stored.await_args_list for event in call.args[1]] == ["first", "second", "third"]
