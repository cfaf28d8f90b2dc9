"""Tests of the promises of a source (docs/own-source.md), for sources that are not millpy's own, too."""

from __future__ import annotations

import asyncio
import random
import tracemalloc
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, ClassVar
from unittest import SkipTest

import msgspec

from millpy.clock import SystemClock
from millpy.ingest.decode import Decoder
from millpy.ingest.protocol import FixedBound, Injector, Source, SourceBatch, SourceSetup
from millpy.limits import Limits
from millpy.model.record import RecordType
from millpy.testing.kit.promises import call, check, check_equal, check_identity, close_in_time, run

RECORDS = 40
BUNDLE_RECORDS = 7
WAIT_S_MAX = 30.0
TAKE_S_MAX = 1.0
BLOCKED_S_MAX = 0.25
ARRIVED_S_MAX = 3_600.0
SEEDS = 4
KILLED_BEFORE, KILLED_AFTER = 0.2, 0.4
"""The share of the takes in whose turn the worker is killed before the commit, and up to its acknowledgement."""
_POLL_S = 0.05
_SMALL = Limits(bundle_records_max=BUNDLE_RECORDS, bundle_bytes_max=1_000_000)


class SourceSuite:
    """Tests that a source keeps its promises, run by pytest.

    Derive a class from it whose name begins with `Test`, and define `record`, `source` and `number_of`, and `add` if
    the feed can grow. A promise that a source does not make is skipped. Each test has a feed of its own. The functions
    may be coroutines.

    Attributes:
        record: the class of the feed's records.
        partition: the name of the source partition that is tested; by default the first one.
        flood: the number of records in the test of memory; they must be more than twice what the client library holds.
        settle_s: how long the source may read ahead in that test.
        seeds: the number of random histories in the test of kills.
    """

    record: ClassVar[type[msgspec.Struct]]
    partition: str | None = None
    flood = 20_000
    settle_s = 0.5
    seeds = SEEDS

    def source(self, count: int) -> Source | Awaitable[Source]:
        """Make a fresh feed whose partition has `count` records with the numbers from 0, and return its source."""
        raise NotImplementedError("define source(count)")

    def number_of(self, record: Any) -> int:
        """Return the number of a record."""
        raise NotImplementedError("define number_of(record)")

    def add(self, first: int, count: int) -> Any:
        """Add `count` records with the numbers from `first` to the feed made last."""
        del first, count
        raise SkipTest("the feed does not grow: define add(first, count) if it can")

    # -- the description ------------------------------------------------------------------------------------------

    def test_identity_is_json_and_always_the_same(self) -> None:
        """The identity is stored with the graph, so it fits into JSON and names the kind of source."""

        async def checked() -> None:
            source = await self._source(1)
            check_identity(source)

        run(checked())

    def test_partitions_have_different_names_and_are_always_the_same(self) -> None:
        """The names of the source partitions are stored with the graph, too."""

        async def checked() -> None:
            source = await self._source(1)
            names = source.partitions()
            check(bool(names), "the source has no partition")
            check(names == source.partitions(), f"the partitions {names!r} differ from call to call")
            check(len(set(names)) == len(names), f"two partitions have the same name: {names!r}")
            check(all(isinstance(name, str) and name for name in names), f"a partition has no name: {names!r}")

        run(checked())

    # -- taking ---------------------------------------------------------------------------------------------------

    def test_records_come_once_in_order_and_at_most_a_bundle_at_a_time(self) -> None:
        """Each take returns at most `SourceSetup.take_bound` records, and says how many and from where."""

        async def checked() -> None:
            reader = await self._reader(RECORDS)
            batches = [taken async for taken in reader.take_until(RECORDS)]
            await reader.close()
            check_equal(reader.numbers, range(RECORDS), "the records")
            handed_over, places = 0, list[str]()
            for taken in batches:
                count = len(reader.numbers_of(taken))
                handed_over += count
                check(count <= BUNDLE_RECORDS, f"take returned {count} records, the bound was {BUNDLE_RECORDS}")
                check(taken.records == count, f"a batch of {count} records says records={taken.records}")
                total = taken.total
                check(total in (None, handed_over), f"after {handed_over} records, a batch says total={total}")
                places += [taken.describe(row) for row in range(count)]
                check(len(set(places)) == handed_over, f"two records are described by the same place: {places}")
                ago_s = (reader.setup.clock.now_us() - taken.arrived_at) / 1e6
                check(abs(ago_s) < ARRIVED_S_MAX, f"arrived_at={taken.arrived_at} is no time in µs of just now")

        run(checked())

    def test_take_does_not_wait(self) -> None:
        """Without a record, take returns at once: the worker has other things to do."""

        async def checked() -> None:
            reader = await self._reader(1)
            async for _ in reader.take_until(1):
                pass
            monotonic, took = reader.setup.clock.monotonic, list[float]()
            for _ in range(3):
                begun = monotonic()
                try:
                    taken = await asyncio.wait_for(reader.injector.take(), TAKE_S_MAX)
                except TimeoutError:
                    raise AssertionError(f"take waits for more than {TAKE_S_MAX} s") from None
                took.append(monotonic() - begun)
                count = 0 if taken is None else len(reader.numbers_of(taken))
                check(not count, f"{count} records come again")
            await reader.close()
            blocked_s = min(took)  # a busy machine may delay one of them
            check(blocked_s <= BLOCKED_S_MAX, f"take blocks the event loop for {blocked_s:.2f} s: read in a thread")

        run(checked())

    def test_new_records_wake_the_worker(self) -> None:
        """`SourceSetup.ready` is set when a record comes while the worker waits."""

        async def checked() -> None:
            reader = await self._reader(1)
            async for _ in reader.take_until(1):
                pass
            await call(self.add, 1, 1)
            async for _ in reader.take_until(2, wait=reader.await_ready):
                pass
            await reader.close()
            check_equal(reader.numbers, range(2), "the records")

        run(checked())

    def test_source_is_not_quiet_before_everything_was_taken(self) -> None:
        """A source that is quiet too early lets the clock make its records late."""

        async def checked() -> None:
            reader = await self._reader(RECORDS)
            while len(reader.numbers) < RECORDS:
                taken = await reader.injector.take()
                quiet = reader.injector.quiet()
                if taken is None:
                    check(not quiet, f"quiet, when {len(reader.numbers)} of {RECORDS} records were taken")
                    await reader.pause()
                else:
                    reader.note(taken)
                    left = RECORDS - len(reader.numbers)
                    check(not (quiet and left), f"quiet, while {left} records wait")
            await reader.close()

        run(checked())

    def test_an_end_comes_once_and_stays(self) -> None:
        """The batch that ends a partition is finished, and nothing comes after it."""

        async def checked() -> None:
            reader = await self._reader(RECORDS)
            if not reader.source.ends():
                raise SkipTest("the source does not end")
            ended = [taken.finished async for taken in reader.take_until(RECORDS, end=True)]
            check_equal(reader.numbers, range(RECORDS), "the records")
            check(ended.count(True) == 1 and ended[-1], f"finished of its batches is {ended}")
            check(await reader.injector.take() is None, "take returns a batch after the end")
            await reader.close()

        run(checked())

    # -- positions and acknowledgements ---------------------------------------------------------------------------

    def test_reading_continues_behind_every_position(self) -> None:
        """From each committed position, the same records come in the same order."""

        async def checked() -> None:
            reader = await self._reader(RECORDS)
            batches = [taken async for taken in reader.take_until(RECORDS)]
            await reader.close()
            if batches[0].position is None:
                raise SkipTest("the source keeps no position")
            read = 0
            for taken in batches:
                read += len(reader.numbers_of(taken))
                again = await self._reopened(reader, taken.position)
                async for _ in again.take_until(RECORDS - read):
                    pass
                await again.close()
                check_equal(again.numbers, range(read, RECORDS), f"the records behind {taken.position!r}")

        run(checked())

    def test_a_batch_that_was_not_acknowledged_comes_again(self) -> None:
        """A broker that keeps the position forgets a batch only after it is acknowledged, which follows the commit."""

        async def checked() -> None:
            reader = await self._reader(RECORDS)
            batches = [taken async for taken in reader.take_until(RECORDS)]
            if any(taken.position is not None for taken in batches):
                await reader.close()
                raise SkipTest("the source keeps a position")
            sizes = [len(reader.numbers_of(taken)) for taken in batches]
            for taken in batches[:2]:
                await reader.injector.acknowledge(taken.token)
            await reader.close()
            again = await self._reopened(reader, None)
            async for _ in again.take_until(RECORDS - sum(sizes[:2])):
                pass
            await again.close()
            check_equal(again.numbers, range(sum(sizes[:2]), RECORDS), "what comes again, unacknowledged,")

        run(checked())

    def test_nothing_is_lost_or_doubled_when_the_worker_is_killed(self) -> None:
        """Random histories of takes, commits, acknowledgements and kills; after a kill another reader opens."""
        for seed in range(self.seeds):
            run(self._survive(random.Random(seed), f"in the history of seed {seed}"))

    async def _survive(self, rng: random.Random, when: str) -> None:
        committed, killed = list[int](), list[_Reader]()
        reader, position = await self._reader(RECORDS), None
        clock = SystemClock()
        deadline = clock.monotonic() + WAIT_S_MAX
        while len(set(committed)) < RECORDS and clock.monotonic() < deadline:
            reader.bound = FixedBound(rng.randint(1, 2 * BUNDLE_RECORDS), 1_000_000)
            taken = await reader.injector.take()
            if taken is None:
                await reader.pause()
                continue
            fate = rng.random()
            if fate >= KILLED_BEFORE:
                committed += reader.numbers_of(taken)
                position = position if taken.position is None else taken.position
                reader.commit_notes(taken)
            if fate >= KILLED_AFTER:
                await reader.injector.acknowledge(taken.token)
                continue
            before, reader = reader, await self._reopened(reader, position, close=rng.random() < 0.5)
            killed += [] if before.is_closed else [before]
        for one in [*killed, reader]:
            await one.close()
        # What is acknowledged too late comes again, perhaps in another order, and is then known by its dedupe id.
        found = committed if position is not None else sorted(set(committed))
        check_equal(found, range(RECORDS), f"what is committed {when}")

    # -- resources ------------------------------------------------------------------------------------------------

    def test_closing_ends_all_tasks(self) -> None:
        """A worker opens and closes sources for months."""

        async def checked() -> None:
            before = asyncio.all_tasks()
            reader = await self._reader(RECORDS)
            async for _ in reader.take_until(1):
                pass
            await reader.close()
            left = [task.get_name() for task in asyncio.all_tasks() - before if not task.done()]
            check(not left, f"after close, tasks are running: {left}")

        run(checked())

    def test_memory_is_bounded_while_nothing_is_taken(self) -> None:
        """A source reads ahead only as far as `SourceSetup.limits` allows."""

        async def checked() -> None:
            reader = await self._reader(1)
            (first,) = [taken async for taken in reader.take_until(1)]
            await reader.close()
            size = sum(map(len, first.payloads)) + len(first.block)
            if not size or not self.flood:
                raise SkipTest("the size of the records is not known, or flood=0")
            reader = self._made(await self._source(self.flood))
            tracemalloc.start()
            try:
                await reader.injector.open(None)
                await reader.setup.clock.sleep(self.settle_s)
                held, _ = tracemalloc.get_traced_memory()
            finally:
                tracemalloc.stop()
            await reader.close()
            bound = self.flood * size // 2
            check(held <= bound, f"{held} bytes are held while nothing is taken, of a feed of {2 * bound} bytes")

        run(checked())

    # -- helpers --------------------------------------------------------------------------------------------------

    async def _source(self, count: int) -> Source:
        found: Source = await call(self.source, count)
        return found

    async def _reader(self, count: int) -> _Reader:
        reader = self._made(await self._source(count))
        await reader.injector.open(None)
        return reader

    async def _reopened(self, reader: _Reader, position: bytes | None, *, close: bool = True) -> _Reader:
        if close:
            await reader.close()
        again = self._made(reader.source, reader.notes)
        await again.injector.open(position)
        return again

    def _made(self, source: Source, notes: dict[str, bytes] | None = None) -> _Reader:
        return _Reader(source, self.partition or source.partitions()[0], RecordType(self.record), self.number_of, notes)


@dataclass
class _Bound:
    """The bound of the next take, as the worker changes it."""

    records: int = BUNDLE_RECORDS
    bytes: int = 1_000_000


class _Reader:
    """An injector, and what was taken from it."""

    def __init__(
        self,
        source: Source,
        partition: str,
        record_type: RecordType,
        number_of: Callable[[Any], int],
        notes: dict[str, bytes] | None = None,
    ) -> None:
        self.source = source
        self.numbers: list[int] = []
        self.notes = notes or {}
        self.is_closed = False
        self._number_of = number_of
        self._decoder = Decoder(record_type)
        self._type = record_type
        self._bound = _Bound()
        self.setup = SourceSetup(
            graph="suite",
            stream="suite",
            partition=partition,
            limits=_SMALL,
            clock=SystemClock(),
            ready=asyncio.Event(),
            record_type=record_type,
            notes=self.notes,
            bound=self._bound,
            secret="suite",
        )
        self.injector: Injector = source.connect(self.setup)

    @property
    def bound(self) -> FixedBound:
        """The bound of the next take."""
        return FixedBound(self._bound.records, self._bound.bytes)

    @bound.setter
    def bound(self, bound: FixedBound) -> None:
        self._bound.records, self._bound.bytes = bound.records, bound.bytes

    async def take_until(
        self, count: int, *, end: bool = False, wait: Callable[[], Coroutine[Any, Any, None]] | None = None
    ) -> Any:
        """Take until there were `count` records, or until the end; yield the batches."""
        try:
            async with asyncio.timeout(WAIT_S_MAX):
                while end or len(self.numbers) < count:
                    taken = await self.injector.take()
                    if taken is None:
                        await (wait or self.pause)()
                        continue
                    self.note(taken)
                    yield taken
                    if taken.finished:
                        return
        except TimeoutError:
            text = f"only {len(self.numbers)} of {count} records came within {WAIT_S_MAX} s: {self.numbers}"
            raise AssertionError(text) from None

    def note(self, taken: SourceBatch) -> None:
        """Keep the numbers of a batch."""
        self.numbers += self.numbers_of(taken)

    def numbers_of(self, taken: SourceBatch) -> list[int]:
        """Decode a batch. Raises AssertionError if a record is refused."""
        if not taken.has_records:
            return []
        decoded = self._decoder.decode(taken)
        check(not decoded.refused, f"records are refused: {decoded.refused[:3]}")
        objects: Sequence[Any] = decoded.objects if decoded.objects is not None else ()
        if decoded.batch is not None:
            objects = self._type.objects_of(decoded.batch)
        return [self._number_of(record) for record in objects]

    def commit_notes(self, taken: SourceBatch) -> None:
        """Keep the notes of a committed batch for the next reader."""
        for name, note in taken.notes.items():
            if note is None:
                self.notes.pop(name, None)
            else:
                self.notes[name] = note

    async def pause(self) -> None:
        """Wait until the source wakes the worker, or a little, as a worker does that polls."""
        await asyncio.sleep(0)
        with suppress(TimeoutError):
            async with asyncio.timeout(_POLL_S):
                await self.await_ready()

    async def await_ready(self) -> None:
        """Wait until the source wakes the worker."""
        await self.setup.ready.wait()
        self.setup.ready.clear()

    async def close(self) -> None:
        """Close the injector, once. Raises AssertionError if that takes too long."""
        if self.is_closed:
            return
        self.is_closed = True
        await close_in_time(self.injector.close())
