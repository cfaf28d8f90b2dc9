"""The suite for sources passes good ones, and finds the fault of each bad one."""

from __future__ import annotations

import asyncio
import itertools
import json
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import SkipTest

import msgspec
import pytest

from millpy import Files
from millpy.ingest.protocol import Source, SourceBatch, SourceSetup
from millpy.testing import SourceSuite


class Numbered(msgspec.Struct):
    number: int
    padding: str = ""


def payloads_of(numbers: Sequence[int]) -> list[bytes]:
    return [b'{"number":%d,"padding":"%s"}' % (number, b"x" * 80) for number in numbers]


@dataclass(frozen=True)
class MemoryLog(Source):
    """Numbers in memory, which stay; the readers of one class, which may be faulty."""

    reader: type[LogReader]
    numbers: list[int]
    waiting: list[asyncio.Event] = field(default_factory=list)

    def identity(self) -> dict[str, Any]:
        return {"kind": "memory_log"}

    def partitions(self) -> tuple[str, ...]:
        return ("only",)

    def connect(self, setup: SourceSetup) -> LogReader:
        self.waiting.append(setup.ready)
        return self.reader(self, setup)


class LogReader:
    """A faultless reader."""

    def __init__(self, source: MemoryLog, setup: SourceSetup) -> None:
        self.source, self.setup, self.next, self.total = source, setup, 0, 0

    async def open(self, position: bytes | None) -> None:
        self.next = 0 if position is None else json.loads(position)

    async def take(self) -> SourceBatch | None:
        numbers = self.source.numbers[self.next : self.next + self.setup.take_bound.records]
        return self.batch(numbers) if numbers else None

    def batch(self, numbers: Sequence[int]) -> SourceBatch:
        begin, self.next = self.next, self.next + len(numbers)
        self.total += len(numbers)
        return SourceBatch(
            "json", self.setup.clock.now_us(), payloads=payloads_of(numbers), position=b"%d" % self.next,
            total=self.total, describe=lambda row: f"number {begin + row}",
        )  # fmt: skip

    async def acknowledge(self, token: Any) -> None:
        pass

    def quiet(self) -> bool:
        return self.next >= len(self.source.numbers)

    async def close(self) -> None:
        pass


class LogSuite(SourceSuite):
    record = Numbered
    reader: type[LogReader] = LogReader
    flood = 2_000
    settle_s = 0.0

    def source(self, count: int) -> MemoryLog:
        self.feed = MemoryLog(self.reader, list(range(count)))
        return self.feed

    def add(self, first: int, count: int) -> None:
        self.feed.numbers.extend(range(first, first + count))
        for ready in self.feed.waiting:
            ready.set()

    def number_of(self, record: Any) -> int:
        return int(record.number)


class TestMemoryLog(LogSuite):
    test_an_end_comes_once_and_stays = test_a_batch_that_was_not_acknowledged_comes_again = None  # type: ignore[assignment]


class TestFiles(SourceSuite):
    record = Numbered
    test_new_records_wake_the_worker = test_a_batch_that_was_not_acknowledged_comes_again = None  # type: ignore[assignment]
    flood = 60_000
    settle_s = 0.05
    seeds = 2

    @pytest.fixture(autouse=True)
    def _in_directory(self, tmp_path: Any) -> None:
        self.paths = (tmp_path / f"{number}.ndjson" for number in itertools.count())

    def source(self, count: int) -> Files:
        path = next(self.paths)
        path.write_bytes(b"\n".join(payloads_of(range(count))) + b"\n")
        return Files(str(path))

    def number_of(self, record: Any) -> int:
        return int(record.number)


# -- sources with a fault -------------------------------------------------------------------------------------------


class SkipsOne(LogReader):
    async def open(self, position: bytes | None) -> None:
        await super().open(position)
        self.next += position is not None


class RepeatsOne(LogReader):
    async def open(self, position: bytes | None) -> None:
        await super().open(position)
        self.next -= position is not None


class TakesTooMuch(LogReader):
    async def take(self) -> SourceBatch | None:
        numbers = self.source.numbers[self.next :]
        return self.batch(numbers) if numbers else None


class GoesBackwards(LogReader):
    def batch(self, numbers: Sequence[int]) -> SourceBatch:
        return super().batch(numbers[::-1])


class Miscounts(LogReader):
    def batch(self, numbers: Sequence[int]) -> SourceBatch:
        self.total += 1
        return super().batch(numbers)


class ForgetsPlaces(LogReader):
    def batch(self, numbers: Sequence[int]) -> SourceBatch:
        return replace(super().batch(numbers), describe=lambda row: f"number {row} of its batch")


class CountsSeconds(LogReader):
    def batch(self, numbers: Sequence[int]) -> SourceBatch:
        return replace(super().batch(numbers), arrived_at=int(self.setup.clock.now_us() / 1e6))


class WritesPositionsAsText(LogReader):
    def batch(self, numbers: Sequence[int]) -> SourceBatch:
        return replace(super().batch(numbers), position=str(self.next))  # type: ignore[arg-type]


class Waits(LogReader):
    async def take(self) -> SourceBatch | None:
        taken = await super().take()
        if taken is None:
            await asyncio.Event().wait()
        return taken


class Blocks(LogReader):
    """It asks a client that blocks."""

    async def take(self) -> SourceBatch | None:
        taken = await super().take()
        if taken is None:
            threading.Event().wait(0.4)
        return taken


class QuietTooEarly(LogReader):
    def quiet(self) -> bool:
        return True


class LeavesATask(LogReader):
    async def open(self, position: bytes | None) -> None:
        await super().open(position)
        self.task = asyncio.create_task(asyncio.Event().wait(), name="left")


class ReadsEverything(LogReader):
    async def open(self, position: bytes | None) -> None:
        await super().open(position)
        self.read = payloads_of(self.source.numbers)


class Broker(LogReader):
    """The feed forgets what is acknowledged."""

    def batch(self, numbers: Sequence[int]) -> SourceBatch:
        taken = super().batch(numbers)
        taken.position, taken.token = None, len(numbers)
        return taken

    async def acknowledge(self, token: Any) -> None:
        del self.source.numbers[:token]
        self.next -= token


class AcknowledgesAtOnce(Broker):
    async def take(self) -> SourceBatch | None:
        taken = await super().take()
        if taken is not None:
            await super().acknowledge(taken.token)
        return taken

    async def acknowledge(self, token: Any) -> None:
        pass


class EndsTwice(LogReader):
    async def take(self) -> SourceBatch:
        taken = self.batch(self.source.numbers[self.next : self.next + 7])
        taken.finished = self.next >= len(self.source.numbers)
        return taken


class EndingLog(MemoryLog):
    def ends(self) -> bool:
        return True


FAULTS = [
    (SkipsOne, "test_reading_continues_behind_every_position", "only 32 of 33 records came"),
    (SkipsOne, "test_nothing_is_lost_or_doubled_when_the_worker_is_killed", "missing"),
    (RepeatsOne, "test_reading_continues_behind_every_position", "others"),
    (RepeatsOne, "test_nothing_is_lost_or_doubled_when_the_worker_is_killed", "doubled"),
    (TakesTooMuch, "test_records_come_once_in_order_and_at_most_a_bundle_at_a_time", "the bound was 7"),
    (GoesBackwards, "test_records_come_once_in_order_and_at_most_a_bundle_at_a_time", "another order"),
    (Miscounts, "test_records_come_once_in_order_and_at_most_a_bundle_at_a_time", "says total=8"),
    (ForgetsPlaces, "test_records_come_once_in_order_and_at_most_a_bundle_at_a_time", "described by the same place"),
    (CountsSeconds, "test_records_come_once_in_order_and_at_most_a_bundle_at_a_time", "is no time in µs of just now"),
    (Waits, "test_take_does_not_wait", "take waits"),
    (Blocks, "test_take_does_not_wait", "blocks the event loop"),
    (QuietTooEarly, "test_source_is_not_quiet_before_everything_was_taken", "quiet, while 33 records wait"),
    (LeavesATask, "test_closing_ends_all_tasks", "left"),
    (ReadsEverything, "test_memory_is_bounded_while_nothing_is_taken", "bytes are held"),
    (AcknowledgesAtOnce, "test_a_batch_that_was_not_acknowledged_comes_again", "only 0 of 26 records came"),
    (AcknowledgesAtOnce, "test_nothing_is_lost_or_doubled_when_the_worker_is_killed", "missing"),
    (EndsTwice, "test_an_end_comes_once_and_stays", "after the end"),
]


@pytest.mark.parametrize(("reader", "test", "text"), FAULTS, ids=lambda value: getattr(value, "__name__", None))
def test_fault_is_found(reader: type[LogReader], test: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("millpy.testing.kit.source_suite.TAKE_S_MAX", 0.01)
    monkeypatch.setattr("millpy.testing.kit.source_suite.WAIT_S_MAX", 0.3)
    suite = LogSuite()
    suite.reader = reader
    if reader is EndsTwice:
        suite.source = lambda count: EndingLog(reader, list(range(count)))  # type: ignore[method-assign]

    with pytest.raises(AssertionError, match=text):
        getattr(suite, test)()


def test_position_is_bytes() -> None:
    suite = LogSuite()
    suite.reader = WritesPositionsAsText
    with pytest.raises(ValueError, match=r"position='7' is not JSON text as bytes: it is str"):
        suite.test_records_come_once_in_order_and_at_most_a_bundle_at_a_time()


def test_source_whose_broker_keeps_the_position_passes() -> None:
    suite = LogSuite()
    suite.reader = Broker

    suite.test_a_batch_that_was_not_acknowledged_comes_again()
    suite.test_nothing_is_lost_or_doubled_when_the_worker_is_killed()
    with pytest.raises(SkipTest, match="keeps no position"):
        suite.test_reading_continues_behind_every_position()
