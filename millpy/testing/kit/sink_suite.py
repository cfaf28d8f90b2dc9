"""Tests of the promises of a sink (docs/sinks.md, "Write your own sink"), for sinks that are not millpy's own, too."""

from __future__ import annotations

import asyncio
import json
import random
from collections import defaultdict
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from contextlib import suppress
from typing import Any
from unittest import SkipTest

from millpy.clock import SystemClock
from millpy.errors import MessagesRefusedError, SinkUnavailableError
from millpy.sinks.messages import SinkMessages
from millpy.sinks.protocol import Sink, SinkConnection, SinkSetup
from millpy.testing.kit.promises import CLOSE_S_MAX, call, check, check_equal, check_identity, close_in_time, run

MESSAGES = 40
SEND_MESSAGES = 7
KEYS = 3
REFUSED = 1
"""The number of the message that a place refuses; REFUSED + KEYS is the next one of its key."""
WAIT_S_MAX = 30.0
BLOCKED_S_MAX = 0.25
SEEDS = 4
KILLED = 0.35
"""The share of the calls of `send` in which the worker is killed."""
CLOCK = SystemClock()
_WATCH_S = 0.01
_AGAIN_S = 0.1


class SinkSuite:
    """Tests that a sink keeps its promises, run by pytest.

    Derive a class from it whose name begins with `Test`, and define `sink` and `delivered`; and `refuse`, `stop` and
    `start`, if the place can refuse a message or be away. A promise that a sink does not make is skipped. Each test has
    a place of its own. The functions may be coroutines.

    The messages have the keys `key-0` to `key-2`, and JSON as values: `{"number": 17}`, and `padding` in a large one.

    Attributes:
        seeds: the number of random histories in the test of kills.
        send_s: the most seconds after which a kill interrupts a `send`; about what one takes.
    """

    seeds = SEEDS
    send_s = 0.01

    def sink(self) -> Sink | Awaitable[Sink]:
        """Make a fresh place, and return a sink that sends there."""
        raise NotImplementedError("define sink()")

    def delivered(self) -> Sequence[int] | Awaitable[Sequence[int]]:
        """Return the numbers of the messages that the place made last has, in the order in which it took them.

        A place that drops what it has seen, by the ids of messages, returns what is left. What transactions have not
        committed does not count.
        """
        raise NotImplementedError("define delivered()")

    def headers_of(self, number: int) -> list[tuple[str, bytes]]:
        """Return the headers of a message, for a sink that needs some; `:topic` is the one with its topic."""
        del number
        return []

    def refuse(self, number: int) -> Any:
        """Make the place made last refuse the message with this number."""
        del number
        raise SkipTest("the place refuses no message: define refuse(number) if it can")

    def stop(self) -> Any:
        """Take the place made last away, so that nobody can reach it."""
        raise SkipTest("the place is always there: define stop() and start() if it can be away")

    def start(self) -> Any:
        """Bring the place back, with all that it had."""

    # -- the description ------------------------------------------------------------------------------------------

    def test_identity_is_json_and_always_the_same(self) -> None:
        """The identity is stored with the graph, so it fits into JSON and names the kind of sink."""

        async def checked() -> None:
            sink: Sink = await call(self.sink)
            check_identity(sink)

        run(checked())

    # -- sending --------------------------------------------------------------------------------------------------

    def test_messages_have_arrived_when_send_returns_in_order_of_their_key(self) -> None:
        """After that their rows are deleted, so what is only on its way is lost when the process ends."""

        async def checked() -> None:
            sender = await self._sender()
            await sender.open()
            for part in sender.parts(3 * SEND_MESSAGES):
                await sender.send(part)
                check_equal(_in_order_of_keys(await self._found()), sender.sent, "the messages, after `send`,")
            await sender.close()
            check_equal(_in_order_of_keys(await self._found()), sender.sent, "the messages, after `close`,")

        run(checked())

    def test_positions_may_have_gaps(self) -> None:
        """Numbers are missing where messages were refused and given up."""

        async def checked() -> None:
            sender = await self._sender()
            stores = await sender.open() is not None
            for lo, places in ((0, (0, 3, 4)), (5, (1, 2))):
                for part in sender.parts(5, lo):
                    left = part.select([at for at, number in enumerate(part.positions) if number - lo in places])
                    if len(left):
                        await sender.send(left)
            await sender.close()
            check_equal(_in_order_of_keys(await self._found()), sender.sent, "the messages")
            if stores:
                again = await self._reopened(sender)
                said = f"open returns {again.position}, after a send with end={sender.end}"
                check(again.position == sender.end, said)
                await again.close()

        run(checked())

    def test_the_largest_message_arrives_or_is_refused(self) -> None:
        """A message of `message_bytes_max` bytes must not keep those behind it for ever."""

        async def checked() -> None:
            sender = await self._sender()
            await sender.open()
            largest = _messages([0], self.headers_of)
            size = max(0, sender.sink.message_bytes_max - largest.size - len(', "padding": ""'))
            largest.values[0] = json.dumps({"number": 0, "padding": "x" * size}).encode()
            try:
                await sender.send(largest)
            except MessagesRefusedError as error:
                check(error.final == {0}, f"a message that is too large may be taken later: final={set(error.final)}")
            await sender.close()
            check_equal(await self._found(), sender.sent, "the messages")

        run(checked())

    def test_send_does_not_block_the_event_loop(self) -> None:
        """The worker's lease is renewed, and its sources are read, meanwhile."""

        async def checked() -> None:
            sender = await self._sender()
            await sender.open()
            blocked = []
            for part in sender.parts(3 * SEND_MESSAGES):
                watch = asyncio.create_task(_longest_gap())
                await asyncio.sleep(0)
                await sender.send(part)
                watch.cancel()
                blocked.append(await watch)
            await sender.close()
            blocked_s = min(blocked)  # a busy machine may delay one of them
            check(blocked_s <= BLOCKED_S_MAX, f"send blocks the event loop for {blocked_s:.2f} s: send in a thread")

        run(checked())

    def test_two_intervals_send_side_by_side(self) -> None:
        """Each interval of a step has a connection of its own, and positions of its own."""

        async def checked() -> None:
            first = await self._sender()
            second = _Sender(first.sink, self.headers_of, interval=1)
            positions = [await first.open(), await second.open()]
            for sender in (first, second):
                check(sender.position in (None, 0), f"open returns {sender.position} of a fresh interval")
            await asyncio.gather(first.send_all(first.parts(14)), second.send_all(second.parts(7)))
            await first.close()
            await second.close()
            found = await self._found()
            for sender in (first, second):
                own = [number for number in found if number in set(sender.sent)]
                check_equal(_in_order_of_keys(own), sender.sent, f"the messages of interval {sender.interval}")
            check(len(found) == 21, f"21 messages were sent by two intervals, and {len(found)} have arrived")
            if positions != [None, None]:
                again = [await self._reopened(sender) for sender in (first, second)]
                ends = [sender.position for sender in again]
                check(ends == [14, 7], f"open returns {ends} for intervals that have sent 14 and 7 messages")
                for sender in again:
                    await sender.close()

        run(checked())

    # -- errors ---------------------------------------------------------------------------------------------------

    def test_nothing_is_lost_or_doubled_beyond_the_bound_when_the_worker_is_killed(self) -> None:
        """Random histories of sends and kills; a frozen worker's connection stays open beside the next one."""
        for seed in range(self.seeds):
            run(self._survive(random.Random(seed), f"in the history of seed {seed}"))

    async def _survive(self, rng: random.Random, when: str) -> None:
        sender, frozen = await self._sender(), list[_Sender]()
        known, repeatable, again = 0, set[int](), 0
        while known < MESSAGES:
            if not sender.is_open:
                stored = await sender.open()
                check(stored is None or stored >= known, f"open returns {stored}, of {known} messages that it has")
                known = known if stored is None else stored
            stable = again if sender.sink.stable_sends else 0
            part = sender.part(known, stable or rng.randint(1, SEND_MESSAGES), MESSAGES)
            if not len(part):
                break
            if rng.random() >= KILLED:
                await sender.send(part)
                known, again = part.end, 0
                continue
            again = len(part)
            repeatable.update(part.positions)
            await sender.interrupt(part, rng.uniform(0, self.send_s))
            before, sender = sender, _Sender(sender.sink, self.headers_of)
            if rng.random() < 0.5:
                await before.close()
            else:
                frozen.append(before)
        await sender.close()
        for one in frozen:
            await one.close()
        found = await self._found()
        repeats = [number for at, number in enumerate(found) if number in found[:at]]
        if sender.position is None:
            undue = sorted(set(repeats) - repeatable)
            check(not undue, f"{undue} have arrived twice {when}, and their `send` was not cut short")
            found = list(dict.fromkeys(found))
        check_equal(_in_order_of_keys(found), range(MESSAGES), f"what has arrived {when}")

    def test_a_new_connection_shuts_out_the_one_before(self) -> None:
        """The owner before may only be frozen, and send when it wakes."""

        async def checked() -> None:
            before = await self._sender()
            if await before.open() is None:
                await before.close()
                raise SkipTest("the place stores no position, so the position in the database counts")
            await before.send_all(before.parts(2))
            after = await self._reopened(before, close=False)
            late = before.part(2, 2, MESSAGES)
            with suppress(SinkUnavailableError):
                await before.send(late)
            check_equal(_in_order_of_keys(await self._found()), range(2), "behind a new connection, the messages")
            await after.send_all(after.parts(3, 2))
            await before.close()
            await after.close()
            check_equal(_in_order_of_keys(await self._found()), range(5), "the messages")

        run(checked())

    def test_a_place_that_is_away_is_unavailable(self) -> None:
        """The runtime tries again after SinkUnavailableError, and reports any other error as a defect of the sink."""

        async def checked() -> None:
            sender = await self._sender()
            await sender.open()
            await sender.send_all(sender.parts(2))
            await call(self.stop)
            late, lost = _Sender(sender.sink, self.headers_of), sender.part(2, 2, MESSAGES)

            async def send_by_another() -> None:
                await late.open()
                await late.send(lost)

            await _is_unavailable(lambda: sender.send(lost))
            await _is_unavailable(send_by_another)
            await late.close()
            await sender.close()
            await call(self.start)
            again = await self._reopened(sender)
            first = 2 if again.position is None else again.position
            await again.send_all(again.parts(5 - first, first))
            await again.close()
            found = list(dict.fromkeys(await self._found()))
            check(set(range(5)) <= set(found), f"of the messages 0 to 4, only {sorted(found)} have arrived")

        run(checked())

    def test_refused_messages_are_named(self) -> None:
        """The others arrive; or none does, if the place stores a position."""

        async def checked() -> None:
            sender = await self._sender()
            stores = await sender.open() is not None
            await call(self.refuse, REFUSED)
            count = min(SEND_MESSAGES, sender.sink.bound.records)
            part = sender.part(REFUSED if count == 1 else 0, count, MESSAGES)
            reasons = await _refusals(sender, part)
            named = {part.positions[place] for place in reasons}
            check(REFUSED in named, f"message {REFUSED} is refused, and the error names {sorted(named)}")
            left = [place for place in range(len(part)) if place not in reasons]
            found = await self._found()
            if stores:
                check(not found, f"the place stores a position and refuses a message, but has {found}")
            if stores and left:
                await sender.send(part.select(left))
                found = await self._found()
            wanted = [part.positions[place] for place in left]
            check_equal(_in_order_of_keys(found), wanted, "the messages that the error does not name")
            behind = [n for n in wanted if n > REFUSED and n % KEYS == REFUSED % KEYS]
            check(stores or not behind, f"{behind} have arrived, and a message of their key before them is refused")
            other = part.end + 1  # the next one of another key: those of the same wait behind the refused one
            await sender.send(sender.part(other, 1, MESSAGES))
            await sender.close()
            check(other in await self._found(), f"after a refusal, message {other} of another key does not arrive")

        run(checked())

    # -- resources ------------------------------------------------------------------------------------------------

    def test_closing_ends_all_tasks(self) -> None:
        """A worker opens and closes connections for months; it closes one that it could not open, too."""

        async def checked() -> None:
            before = asyncio.all_tasks()
            sender = await self._sender()
            await sender.open()
            await sender.send_all(sender.parts(2))
            await sender.close()
            await _Sender(sender.sink, self.headers_of).close()
            left = [task.get_name() for task in asyncio.all_tasks() - before if not task.done()]
            check(not left, f"after close, tasks are running: {left}")

        run(checked())

    # -- helpers --------------------------------------------------------------------------------------------------

    async def _sender(self) -> _Sender:
        sink: Sink = await call(self.sink)
        return _Sender(sink, self.headers_of)

    async def _reopened(self, sender: _Sender, *, close: bool = True) -> _Sender:
        if close:
            await sender.close()
        again = _Sender(sender.sink, self.headers_of, sender.interval)
        async with asyncio.timeout(WAIT_S_MAX):
            while True:
                with suppress(SinkUnavailableError):
                    await again.open()
                    return again
                await CLOCK.sleep(_AGAIN_S)

    async def _found(self) -> list[int]:
        return list(await call(self.delivered))


class _Sender:
    """A connection, and the numbers that were sent by it. Those of interval 1 begin at 1,000."""

    def __init__(self, sink: Sink, headers_of: Callable[[int], list[tuple[str, bytes]]], interval: int = 0) -> None:
        self.sink, self.interval = sink, interval
        self.sent: list[int] = []
        self.end = 0
        self.position: int | None = None
        self.is_open = False
        self._headers_of = headers_of
        self._is_closed = False
        setup = SinkSetup("suite", "suite", interval, interval + 1, 2, CLOCK, secret="suite")
        self._connection: SinkConnection = sink.connect(setup)

    async def open(self) -> int | None:
        """Open the connection; return the position."""
        async with asyncio.timeout(WAIT_S_MAX):
            self.position = await self._connection.open()
        is_position = self.position is None or (type(self.position) is int and self.position >= 0)
        check(is_position, f"open returns {self.position!r}, which is no position")
        self.is_open = True
        return self.position

    def parts(self, count: int, first: int = 0) -> Iterable[SinkMessages]:
        """Return messages of `count` positions from `first`, in sends as the runtime makes them."""
        at = first
        while at < first + count:
            part = self.part(at, SEND_MESSAGES, first + count)
            yield part
            at = part.end

    def part(self, first: int, count: int, end: int) -> SinkMessages:
        """Return messages from a position, at most as many as one `send` may have."""
        last = min(first + min(count, self.sink.bound.records), end)
        return _messages(range(first, last), self._headers_of, 1_000 * self.interval)

    async def send_all(self, parts: Iterable[SinkMessages]) -> None:
        """Send one after the other."""
        for part in parts:
            await self.send(part)

    async def send(self, messages: SinkMessages) -> None:
        """Send, and note the numbers. Raises AssertionError if that takes too long."""
        try:
            async with asyncio.timeout(WAIT_S_MAX) as limit:
                await self._connection.send(messages)
        except TimeoutError:
            if not limit.expired():
                raise
            raise AssertionError(f"send takes more than {WAIT_S_MAX} s") from None
        self.sent += [1_000 * self.interval + position for position in messages.positions]
        self.end = messages.end

    async def interrupt(self, messages: SinkMessages, after_s: float) -> None:
        """Cut a `send` short after some seconds, or behind its end, as a kill does."""
        sending = asyncio.create_task(self._connection.send(messages))
        await asyncio.wait([sending], timeout=after_s)
        sending.cancel()
        await asyncio.wait([sending], timeout=CLOSE_S_MAX)
        check(sending.done(), f"a send that is cancelled does not end within {CLOSE_S_MAX} s")
        if not sending.cancelled() and (error := sending.exception()) is not None:
            check(isinstance(error, SinkUnavailableError), f"send raises {error!r}")

    async def close(self) -> None:
        """Close the connection, once. Raises AssertionError if that takes too long."""
        if self._is_closed:
            return
        self._is_closed = True
        await close_in_time(self._connection.close())


def _messages(
    positions: Sequence[int], headers_of: Callable[[int], list[tuple[str, bytes]]], first: int = 0
) -> SinkMessages:
    numbers = [first + position for position in positions]
    headers = [headers_of(number) for number in numbers]
    return SinkMessages(
        positions[0] if positions else 0,
        [b"key-%d" % (number % KEYS) for number in numbers],
        [json.dumps({"number": number}).encode() for number in numbers],
        [1_767_225_600_000_000 + number for number in numbers],
        headers if any(headers) else [],
        positions=positions,
    )


def _in_order_of_keys(numbers: Sequence[int]) -> list[int]:
    """Return the numbers as if those of different keys had come in order, which is not promised."""
    of_key: dict[int, list[int]] = defaultdict(list)
    for number in numbers:
        of_key[number % KEYS].append(number)
    if all(of == sorted(of) for of in of_key.values()):
        return sorted(numbers)
    return list(numbers)


async def _longest_gap() -> float:
    """Return, when cancelled, the longest time for which the event loop did not run this."""
    now = CLOCK.monotonic
    longest, last = 0.0, now()
    try:
        while True:
            await CLOCK.sleep(_WATCH_S)
            longest, last = max(longest, now() - last - _WATCH_S), now()
    except asyncio.CancelledError:
        return max(longest, now() - last - _WATCH_S)


async def _is_unavailable(act: Callable[[], Coroutine[Any, Any, Any]]) -> None:
    try:
        async with asyncio.timeout(WAIT_S_MAX):
            await act()
    except SinkUnavailableError:
        return
    except TimeoutError:
        raise AssertionError(f"nothing is raised within {WAIT_S_MAX} s, though the place is away") from None
    raise AssertionError("no error is raised, though the place is away")


async def _refusals(sender: _Sender, part: SinkMessages) -> dict[int, str]:
    try:
        await sender.send(part)
    except MessagesRefusedError as error:
        wrong = [place for place in error.reasons if not 0 <= place < len(part)]
        check(not wrong, f"the error names the places {wrong} of {len(part)} messages: a place is not a position")
        return error.reasons
    raise AssertionError(f"a place refuses message {REFUSED}, and send raises no MessagesRefusedError")
