"""The suite for sinks passes good ones, and finds the fault of each bad one."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar
from unittest import SkipTest

import pytest

from millpy.clock import SystemClock
from millpy.errors import MessagesRefusedError, SinkUnavailableError
from millpy.sinks import SendBound, Sink, SinkMessages, SinkSetup
from millpy.testing import SinkSuite

ANY_SIZE = SendBound()


@dataclass
class Shelf:
    """What a place has: numbers, and for each interval the position and the connection that may send."""

    numbers: list[int] = field(default_factory=list)
    positions: dict[int, int] = field(default_factory=dict)
    owners: dict[int, object] = field(default_factory=dict)
    refused: set[int] = field(default_factory=set)
    is_away: bool = False


@dataclass(frozen=True)
class Memory(Sink):
    """A shelf in memory; the connections of one class, which may be faulty."""

    connection: type[ShelfConnection]
    shelf: Shelf
    bound: SendBound = ANY_SIZE
    message_bytes_max: int = 10_000

    def identity(self) -> dict[str, Any]:
        return {"kind": "memory"}

    def connect(self, setup: SinkSetup) -> ShelfConnection:
        return self.connection(self.shelf, setup)


class ShelfConnection:
    """A faultless connection to a place that knows no position: it puts one message after the other."""

    def __init__(self, shelf: Shelf, setup: SinkSetup) -> None:
        self.shelf, self.setup = shelf, setup

    async def open(self) -> int | None:
        self.check()
        return None

    async def send(self, messages: SinkMessages) -> None:
        reasons: dict[int, str] = {}
        for place, (key, value) in enumerate(zip(messages.keys, messages.values, strict=True)):
            await asyncio.sleep(0)
            self.check()
            is_behind = key in {messages.keys[refused] for refused in reasons}
            if is_behind or json.loads(value or b"")["number"] in self.shelf.refused:
                reasons[place] = "no"
            else:
                self.put(value)
        if reasons:
            raise MessagesRefusedError(reasons)

    def put(self, value: bytes | None) -> None:
        self.shelf.numbers.append(json.loads(value or b"")["number"])

    def check(self) -> None:
        if self.shelf.is_away:
            raise SinkUnavailableError("the shelf is away")

    async def close(self) -> None:
        pass


class StoringConnection(ShelfConnection):
    """A faultless connection to a place that stores a position, in transactions."""

    async def open(self) -> int | None:
        self.check()
        self.shelf.owners[self.setup.number] = self
        return self.shelf.positions.get(self.setup.number, 0)

    async def send(self, messages: SinkMessages) -> None:
        await asyncio.sleep(0)
        self.check()
        self.fence()
        numbers = [json.loads(value or b"")["number"] for value in messages.values]
        if refused := {place: "no" for place, number in enumerate(numbers) if number in self.shelf.refused}:
            raise MessagesRefusedError(refused)
        self.shelf.numbers += numbers
        self.shelf.positions[self.setup.number] = messages.end

    def fence(self) -> None:
        if self.shelf.owners[self.setup.number] is not self:
            raise SinkUnavailableError("another connection has taken over")


class MemorySuite(SinkSuite):
    connection: ClassVar[type[ShelfConnection]] = ShelfConnection
    bound = ANY_SIZE
    send_s = 0.0005

    def sink(self) -> Memory:
        self.shelf = Shelf()
        return Memory(self.connection, self.shelf, self.bound)

    def delivered(self) -> list[int]:
        return self.shelf.numbers

    def refuse(self, number: int) -> None:
        self.shelf.refused.add(number)

    def stop(self) -> None:
        self.shelf.is_away = True

    def start(self) -> None:
        self.shelf.is_away = False


class TestMemory(MemorySuite):
    test_a_new_connection_shuts_out_the_one_before = None  # type: ignore[assignment]


class TestOneByOne(TestMemory):
    bound = SendBound(records=1)


class TestStoring(MemorySuite):
    connection = StoringConnection


class TestStoringOneByOne(TestStoring):
    bound = SendBound(records=1)


def test_a_promise_that_is_not_made_is_skipped() -> None:
    class Bare(SinkSuite):
        def sink(self) -> Memory:
            return Memory(ShelfConnection, Shelf())

        def delivered(self) -> Sequence[int]:
            return []

    for test in ("refused_messages_are_named", "a_place_that_is_away_is_unavailable"):
        with pytest.raises(SkipTest):
            getattr(Bare(), f"test_{test}")()
    with pytest.raises(SkipTest, match="stores no position"):
        MemorySuite().test_a_new_connection_shuts_out_the_one_before()


# -- sinks with a fault -----------------------------------------------------------------------------------------------


class Queues(ShelfConnection):
    """It returns before the messages have arrived."""

    def __init__(self, shelf: Shelf, setup: SinkSetup) -> None:
        super().__init__(shelf, setup)
        self.waiting: list[bytes | None] = []

    def put(self, value: bytes | None) -> None:
        self.waiting.append(value)

    async def close(self) -> None:
        for value in self.waiting:
            super().put(value)


class Shuffles(ShelfConnection):
    async def send(self, messages: SinkMessages) -> None:
        await super().send(messages.take(range(len(messages))[::-1]))


class CountsItself(StoringConnection):
    """It stores how many messages it has had, not the position behind them."""

    async def send(self, messages: SinkMessages) -> None:
        before = self.shelf.positions.get(self.setup.number, 0)
        await super().send(messages)
        self.shelf.positions[self.setup.number] = before + len(messages)


class StoresBefore(StoringConnection):
    """It stores the position, then the messages."""

    async def send(self, messages: SinkMessages) -> None:
        self.check()
        self.fence()
        self.shelf.positions[self.setup.number] = messages.end
        for value in messages.values:
            await SystemClock().sleep(0.0001)
            self.put(value)


class StoresAfter(StoringConnection):
    async def send(self, messages: SinkMessages) -> None:
        self.check()
        self.fence()
        for value in messages.values:
            await SystemClock().sleep(0.0001)
            self.put(value)
        self.shelf.positions[self.setup.number] = messages.end


class SharesOnePosition(StoringConnection):
    def __init__(self, shelf: Shelf, setup: SinkSetup) -> None:
        super().__init__(shelf, SinkSetup("g", "s", 0, 1, 1, setup.clock))

    def fence(self) -> None:
        pass


class NotFenced(StoringConnection):
    def fence(self) -> None:
        pass


class SwallowsCancellation(ShelfConnection):
    """It counts a `send` that was cut short as sent when it is repeated."""

    seen: ClassVar[set[int]] = set()

    async def send(self, messages: SinkMessages) -> None:
        new = [place for place, position in enumerate(messages.positions) if position not in self.seen]
        self.seen.update(messages.positions)
        await super().send(messages.select(new))


class SendsTwice(ShelfConnection):
    async def send(self, messages: SinkMessages) -> None:
        await super().send(messages)
        await super().send(messages)


class Blocks(ShelfConnection):
    async def send(self, messages: SinkMessages) -> None:
        threading.Event().wait(0.4)
        await super().send(messages)


class FailsOtherwise(ShelfConnection):
    def check(self) -> None:
        if self.shelf.is_away:
            raise ConnectionResetError("by peer")


class IgnoresThatItIsAway(ShelfConnection):
    def check(self) -> None:
        pass


class NamesPositions(ShelfConnection):
    async def send(self, messages: SinkMessages) -> None:
        try:
            await super().send(messages)
        except MessagesRefusedError as error:
            raise MessagesRefusedError({place + 100: why for place, why in error.reasons.items()}) from None


class NamesOnlyTheFirst(ShelfConnection):
    async def send(self, messages: SinkMessages) -> None:
        try:
            await super().send(messages)
        except MessagesRefusedError as error:
            raise MessagesRefusedError({min(error.reasons): "no"}) from None


class PassesTheRefused(ShelfConnection):
    """It sends messages behind a refused one of their key."""

    async def send(self, messages: SinkMessages) -> None:
        refused = [place for place, position in enumerate(messages.positions) if position in self.shelf.refused]
        await super().send(messages.select([place for place in range(len(messages)) if place not in refused]))
        if refused:
            raise MessagesRefusedError(dict.fromkeys(refused, "no"))


class TakesSomeAndRefuses(StoringConnection):
    async def send(self, messages: SinkMessages) -> None:
        try:
            await super().send(messages)
        except MessagesRefusedError:
            self.put(messages.values[0])
            raise


class DropsTheRefused(ShelfConnection):
    async def send(self, messages: SinkMessages) -> None:
        try:
            await super().send(messages)
        except MessagesRefusedError:
            return


class LeavesATask(ShelfConnection):
    async def open(self) -> int | None:
        self.task = asyncio.create_task(asyncio.Event().wait(), name="left")
        return await super().open()


class NeverReturns(ShelfConnection):
    async def send(self, messages: SinkMessages) -> None:
        await asyncio.Event().wait()


class ReturnsABool(ShelfConnection):
    async def open(self) -> int | None:
        return True


class CannotTakeLargeOnes(ShelfConnection):
    async def send(self, messages: SinkMessages) -> None:
        if messages.size > 5_000:
            raise MessagesRefusedError({0: "too large"})
        await super().send(messages)


ARRIVE = "test_messages_have_arrived_when_send_returns_in_order_of_their_key"
KILLED = "test_nothing_is_lost_or_doubled_beyond_the_bound_when_the_worker_is_killed"
GAPS = "test_positions_may_have_gaps"
SIDE_BY_SIDE = "test_two_intervals_send_side_by_side"
AWAY = "test_a_place_that_is_away_is_unavailable"
REFUSALS = "test_refused_messages_are_named"
FAULTS = [
    (Queues, ARRIVE, "after `send`, are not as promised: missing"),
    (Shuffles, ARRIVE, "another order"),
    (SendsTwice, ARRIVE, "doubled"),
    (NeverReturns, ARRIVE, "send takes more than"),
    (ReturnsABool, ARRIVE, "open returns True, which is no position"),
    (CountsItself, GAPS, "open returns 5, after a send with end=10"),
    (StoresBefore, KILLED, "missing"),
    (StoresAfter, KILLED, "doubled"),
    (SwallowsCancellation, KILLED, "missing"),
    (SharesOnePosition, SIDE_BY_SIDE, "open returns"),
    (NotFenced, "test_a_new_connection_shuts_out_the_one_before", r"behind a new connection.*others \[2, 3\]"),
    (Blocks, "test_send_does_not_block_the_event_loop", "send blocks the event loop"),
    (IgnoresThatItIsAway, AWAY, "no error is raised"),
    (NamesPositions, REFUSALS, "a place is not a position"),
    (NamesOnlyTheFirst, REFUSALS, r"the messages that the error does not name.*missing \[4\]"),
    (PassesTheRefused, REFUSALS, r"\[4\] have arrived"),
    (TakesSomeAndRefuses, REFUSALS, r"but has \[0\]"),
    (DropsTheRefused, REFUSALS, "raises no MessagesRefusedError"),
    (LeavesATask, "test_closing_ends_all_tasks", "left"),
    (CannotTakeLargeOnes, "test_the_largest_message_arrives_or_is_refused", "may be taken later"),
]


@pytest.mark.parametrize(("connection", "test", "text"), FAULTS, ids=lambda value: getattr(value, "__name__", None))
def test_fault_of_a_sink_is_found(
    connection: type[ShelfConnection], test: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if connection is NeverReturns:
        monkeypatch.setattr("millpy.testing.kit.sink_suite.WAIT_S_MAX", 0.1)

    class Suite(MemorySuite):
        send_s = 0.001

    Suite.connection = connection
    SwallowsCancellation.seen.clear()

    with pytest.raises(AssertionError, match=text):
        getattr(Suite(), test)()


def test_an_error_that_is_not_of_millpy_is_shown_as_it_is() -> None:
    suite = MemorySuite()
    suite.connection = FailsOtherwise  # type: ignore[misc]
    with pytest.raises(ConnectionResetError):
        getattr(suite, AWAY)()
