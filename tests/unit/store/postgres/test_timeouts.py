"""The watch over a connection's waits: each is measured from its own begin, by one timer for all."""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from millpy.store.postgres.timeouts import LOOKS, _SilenceWatch

ANSWER_S = 4.0
LOOK_S = ANSWER_S / LOOKS


class Loop:
    """An event loop whose time the test moves."""

    def __init__(self) -> None:
        self.now = 0.0
        self.timers: list[tuple[float, int, Callable[[], None]]] = []

    def time(self) -> float:
        return self.now

    def call_later(self, delay: float, callback: Callable[[], None]) -> object:
        heapq.heappush(self.timers, (self.now + delay, len(self.timers), callback))
        return callback

    def create_task(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        return asyncio.get_running_loop().create_task(coroutine)

    async def move_to(self, now: float) -> None:
        while self.timers and self.timers[0][0] <= now:
            self.now, _, callback = heapq.heappop(self.timers)
            callback()
            await asyncio.sleep(0)
        self.now = now


class Connection:
    """What a watch needs of a connection: no byte waits, and nobody knows whether the server works."""

    works = on_progress = None

    def __init__(self) -> None:
        self.silent_at: list[float] = []
        self.loop = Loop()

    def fileno(self) -> int:
        raise OSError("no socket")

    def report_silence(self) -> None:
        self.silent_at.append(self.loop.now)


@pytest.fixture
async def connection() -> Connection:
    return Connection()


@pytest.fixture
async def watch(connection: Connection) -> _SilenceWatch:
    found = _SilenceWatch(connection)  # type: ignore[arg-type]
    found._loop = connection.loop  # type: ignore[assignment]
    return found


def waiting(watch: _SilenceWatch) -> Any:
    """Begin a wait; `send(1)` is what psycopg does when the socket is ready."""

    def statement() -> Any:
        while True:
            yield 1

    wait = watch.observe(statement(), ANSWER_S)
    next(wait)
    return wait


async def test_a_silent_wait_ends(connection: Connection, watch: _SilenceWatch) -> None:
    waiting(watch)

    await connection.loop.move_to(ANSWER_S - LOOK_S)
    assert connection.silent_at == []
    await connection.loop.move_to(ANSWER_S)
    assert connection.silent_at == [ANSWER_S]


async def test_a_wait_is_not_measured_from_the_begin_of_the_one_before(
    connection: Connection, watch: _SilenceWatch
) -> None:
    waiting(watch)
    await connection.loop.move_to(0.5)
    watch.end()
    await connection.loop.move_to(0.9)
    waiting(watch)

    await connection.loop.move_to(ANSWER_S)
    assert connection.silent_at == []
    await connection.loop.move_to(0.9 + ANSWER_S + LOOK_S)
    assert len(connection.silent_at) == 1


async def test_a_wait_in_which_bytes_move_goes_on(connection: Connection, watch: _SilenceWatch) -> None:
    wait = waiting(watch)
    for second in range(1, 20):
        await connection.loop.move_to(float(second))
        wait.send(1)

    assert connection.silent_at == []


async def test_a_connection_that_waits_for_nothing_is_never_silent(
    connection: Connection, watch: _SilenceWatch
) -> None:
    waiting(watch)
    watch.end()

    await connection.loop.move_to(100 * ANSWER_S)

    assert connection.silent_at == []
    assert connection.loop.timers == []


async def test_many_waits_have_one_timer(connection: Connection, watch: _SilenceWatch) -> None:
    for _ in range(50):
        waiting(watch)
        watch.end()

    assert len(connection.loop.timers) == 1


async def test_a_question_to_the_server_ends_with_its_wait(connection: Connection, watch: _SilenceWatch) -> None:
    asked = asyncio.Event()

    async def works() -> bool:
        asked.set()
        await asyncio.Event().wait()
        return True

    connection.works = works  # type: ignore[assignment]
    waiting(watch)
    await connection.loop.move_to(ANSWER_S)
    await asked.wait()

    asking = watch.end()
    assert asking is not None
    await asyncio.gather(asking, return_exceptions=True)

    assert asking.cancelled()
    assert connection.silent_at == []
    waiting(watch)
    await connection.loop.move_to(connection.loop.now + ANSWER_S - LOOK_S)
    assert connection.silent_at == []
