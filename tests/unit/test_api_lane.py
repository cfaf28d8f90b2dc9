"""The lanes of the API: identical requests that wait share one answer, and many requests that of the last second."""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, cast

import pytest
from fastapi import Request

from millpy.admin.queries import Admin
from millpy.admin.tokens import Principal, Role
from millpy.api.answers import answer_shared
from millpy.api.authentication import Caller
from millpy.api.authentication import Gate as AccessGate
from millpy.api.configuration import ApiConfiguration
from millpy.api.database import ConnectionLane, Databases
from millpy.api.kept_answers import ASKED_MAX, KEPT_BYTES_MAX, KEPT_S, KeptAnswer, KeptAnswers
from millpy.api.problems import ProblemError
from millpy.clock import SystemClock

WAITING_MAX = 3


class Database:
    """Stands for the database: it only counts what it is asked, and under which roles."""

    def __init__(self) -> None:
        self.role: str | None = None

    def acting_as(self, role: str | None) -> Database:
        other = Database()
        other.role = role
        return other

    @contextmanager
    def together(self) -> Iterator[Database]:
        yield self

    def close(self) -> None: ...


@pytest.fixture
async def lane() -> AsyncIterator[ConnectionLane]:
    made = ConnectionLane(cast("Admin", Database()), 1, "test", WAITING_MAX)
    yield made
    made.close()


@pytest.fixture
def crowded(lane: ConnectionLane) -> ConnectionLane:
    lane.is_crowded = True
    return lane


class Gate:
    """A call that holds the lane's only thread until it is opened."""

    def __init__(self) -> None:
        self.reached = asyncio.Event()
        self._opened = threading.Event()
        self._loop = asyncio.get_running_loop()

    def call(self, _: Admin) -> None:
        self._loop.call_soon_threadsafe(self.reached.set)
        assert self._opened.wait(30)

    def open(self) -> None:
        self._opened.set()


def counting(calls: list[str], word: str) -> Callable[[Any], str]:
    def call(_: Any) -> str:
        calls.append(word)
        return f"{word} {len(calls)}"

    return call


async def test_identical_requests_that_wait_share_one_answer(lane: ConnectionLane) -> None:
    gate, calls = Gate(), list[str]()
    held = asyncio.create_task(lane.run(gate.call, None))
    await gate.reached.wait()
    waiting = [asyncio.create_task(lane.share(key, counting(calls, key), None)) for key in "aabaa"]
    await asyncio.sleep(0)
    gate.open()

    assert await asyncio.gather(*waiting) == ["a 1", "a 1", "b 2", "a 1", "a 1"]
    assert await lane.share("a", counting(calls, "a"), None) == "a 3"
    await held


async def test_many_viewers_share_the_answer_of_the_last_second(crowded: ConnectionLane) -> None:
    calls = list[str]()

    async def ask(key: str) -> str:
        return await crowded.share(key, counting(calls, key), None, size=len)

    assert [await ask("a") for _ in range(6)] == ["a 1", "a 2", "a 3", "a 3", "a 3", "a 3"]
    assert await ask("b") == "b 4"  # another address
    assert await crowded.share("a", counting(calls, "a"), None) == "a 5"  # a fresh answer was asked for
    assert await ask("a") == "a 3"
    crowded.forget()
    assert await ask("a") == "a 6"
    assert await ask("a") == "a 6"


async def test_few_viewers_get_a_fresh_answer_each(lane: ConnectionLane) -> None:
    calls = list[str]()

    found = [await lane.share("a", counting(calls, "a"), None, size=len) for _ in range(6)]

    assert found == [f"a {number}" for number in range(1, 7)]


async def test_an_answer_that_began_before_something_changed_is_not_kept(crowded: ConnectionLane) -> None:
    gate, calls = Gate(), list[str]()

    def slow(admin: Admin) -> str:
        gate.call(admin)
        return "before"

    for _ in range(3):
        await crowded.share("a", counting([], "a"), None, size=len)
    crowded.forget()
    waiting = asyncio.create_task(crowded.share("a", slow, None, size=len))
    await gate.reached.wait()
    crowded.forget()
    gate.open()

    assert await waiting == "before"
    assert await crowded.share("a", counting(calls, "a"), None, size=len) == "a 1"


async def test_kept_answers_have_a_bound_in_bytes(crowded: ConnectionLane) -> None:
    calls, size = list[str](), {"a": 1, "b": KEPT_BYTES_MAX, "c": KEPT_BYTES_MAX + 1}

    async def ask(key: str) -> str:
        found = ""
        for _ in range(4):
            found = await crowded.share(key, counting(calls, key), None, size=lambda answer: size[answer[0]])
        return found

    assert await ask("a") == "a 3"
    assert await ask("b") == "b 6"  # is kept alone
    assert await ask("a") == "a 7"
    assert await ask("c") == "c 11"  # is not kept
    assert await ask("a") == "a 7"


def test_an_answer_that_is_too_old_is_not_used_and_takes_no_memory_nor_does_its_key() -> None:
    now = [0.0]
    kept = KeptAnswers(lambda: now[0])

    class Address:
        """Stands for a path with its query, which a client may make as long as a request may be."""

    def ask(address: Address) -> weakref.ref[Address]:
        for _ in range(ASKED_MAX + 1):
            kept.find(address)
        kept.keep(address, KeptAnswer(now[0], b""), 0)
        assert kept.find(address) is not None
        return weakref.ref(address)

    first = ask(Address())
    now[0] = KEPT_S / 2
    second = ask(Address())
    now[0] = KEPT_S
    assert [kept.find(one()) is None for one in (first, second)] == [True, False]
    third = ask(Address())

    assert [one() is None for one in (first, second, third)] == [True, False, False]
    now[0] = KEPT_S * 1.6  # requests are not counted anew yet
    assert [kept.find(one()) is None for one in (second, third)] == [True, False]


async def test_users_with_different_roles_of_the_database_share_nothing(lane: ConnectionLane) -> None:
    gate = Gate()
    held = asyncio.create_task(lane.run(gate.call, None))
    await gate.reached.wait()
    request = requesting(lane)
    callers = [Caller(Principal(1, "a", Role.VIEWER, role)) for role in ("tenant_a", "tenant_b", None, "tenant_a")]
    waiting = [asyncio.create_task(answer_shared(request, one, role_of)) for one in callers]
    await asyncio.sleep(0)
    gate.open()
    found = [bytes((await one).body).decode() for one in waiting]

    assert found == ['"tenant_a"', '"tenant_b"', "null", '"tenant_a"']
    await held


def requesting(lane: ConnectionLane, *headers: tuple[bytes, bytes]) -> Request:
    app = SimpleNamespace(state=SimpleNamespace(databases=SimpleNamespace(reading=lane)))
    return Request({"type": "http", "path": "/rows", "query_string": b"", "headers": list(headers), "app": app})


@pytest.mark.parametrize(
    ("header", "fresh"),
    [
        (b"no-cache", True),
        (b"private,  No-Cache", True),
        (b"max-age=0", True),
        (b"no-store", True),
        (b"max-age=5", False),
    ],
)
async def test_a_request_may_ask_for_a_fresh_answer(crowded: ConnectionLane, header: bytes, fresh: bool) -> None:
    calls, caller = list[str](), Caller(Principal(1, "a", Role.VIEWER, None))

    async def ask(*headers: tuple[bytes, bytes]) -> str:
        answer = await answer_shared(requesting(crowded, *headers), caller, counting(calls, "a"))
        return bytes(answer.body).decode()

    for _ in range(4):
        assert await ask() == f"a {len(calls)}"
    assert len(calls) == 3
    assert await ask((b"cache-control", header)) == ("a 4" if fresh else "a 3")


def role_of(admin: Any) -> str:
    return f'"{admin.role}"' if admin.role else "null"


async def test_a_request_that_comes_while_another_is_answered_asks_again(lane: ConnectionLane) -> None:
    gate, calls = Gate(), list[str]()
    first = asyncio.create_task(lane.share("a", gate.call, None))
    await gate.reached.wait()
    second = asyncio.create_task(lane.share("a", counting(calls, "a"), None))
    await asyncio.sleep(0)
    gate.open()

    assert await first is None
    assert await second == "a 1"


async def test_calls_for_the_same_key_run_one_after_another(lane: ConnectionLane) -> None:
    wide = ConnectionLane(lane.admin, 3, "wide", WAITING_MAX)
    gate, other, calls = Gate(), Gate(), list[str]()
    try:
        first = asyncio.create_task(wide.share("a", gate.call, None))
        await gate.reached.wait()
        waiting = [asyncio.create_task(wide.share("a", counting(calls, "a"), None)) for _ in range(3)]
        held = asyncio.create_task(wide.share("b", other.call, None))
        await other.reached.wait()  # another key has a thread, and those of the first wait for its call to end
        assert calls == []
        gate.open()
        other.open()

        assert await asyncio.gather(*waiting) == ["a 1"] * 3
        await asyncio.gather(first, held)
        assert await wide.share("a", counting(calls, "a"), None) == "a 2"
    finally:
        wide.close()


async def test_a_slow_call_rests_before_the_next_with_its_key_and_delays_no_other(lane: ConnectionLane) -> None:
    clock, ends = asyncio.get_running_loop().time, dict[str, float]()

    def slow(_: Any) -> float:
        threading.Event().wait(0.3)
        return clock()

    first = await lane.share("a", slow, None)
    for key in ("b", "a"):
        began = await lane.share(key, lambda _: clock(), None)
        ends[key] = began - first

    assert ends["b"] < 0.25 <= ends["a"] < 5
    assert await lane.share("a", counting([], "a"), None) == "a 1"


async def test_a_call_that_fails_is_not_what_later_requests_get(lane: ConnectionLane) -> None:
    def fail(_: Any) -> str:
        raise ValueError("once")

    failed = asyncio.create_task(lane.share("a", fail, None))
    await asyncio.sleep(0)
    with pytest.raises(ValueError, match="once"):
        await failed

    assert await lane.share("a", counting([], "a"), None) == "a 1"


async def test_a_client_that_has_gone_takes_no_answer_from_the_others(lane: ConnectionLane) -> None:
    gate, calls = Gate(), list[str]()
    held = asyncio.create_task(lane.run(gate.call, None))
    await gate.reached.wait()
    gone, here = (asyncio.create_task(lane.share("a", counting(calls, "a"), None)) for _ in range(2))
    await asyncio.sleep(0)
    gone.cancel()
    gate.open()

    assert await here == "a 1"
    await held


async def test_too_many_different_requests_are_refused_and_later_ones_are_not(lane: ConnectionLane) -> None:
    gate, calls = Gate(), list[str]()
    held = asyncio.create_task(lane.run(gate.call, None))
    await gate.reached.wait()
    waiting = [asyncio.create_task(lane.share(number, counting(calls, "a"), None)) for number in range(WAITING_MAX + 2)]
    await asyncio.sleep(0)
    gate.open()
    ended = await asyncio.gather(*waiting, return_exceptions=True)

    assert sum(isinstance(one, ProblemError) for one in ended) == 2
    await held
    assert isinstance(await lane.share(WAITING_MAX + 1, counting(calls, "a"), None), str)


async def test_all_streams_of_a_token_may_look_it_up_at_the_same_time(lane: ConnectionLane) -> None:
    """With 600 of them, a hundred were told that too many requests wait, and ended every ten seconds."""
    databases, calls = cast("Databases", SimpleNamespace(authenticating=lane)), list[str]()
    gate, held = AccessGate(cast("ApiConfiguration", SimpleNamespace()), databases, SystemClock()), Gate()
    found = Principal(1, "a", Role.VIEWER, None)

    def find(_: Any) -> Principal:
        calls.append("asked")
        return found

    holding = asyncio.create_task(lane.run(held.call, None))
    await held.reached.wait()
    looking = [asyncio.create_task(gate._found("::1", ("token", b"hash"), find, "wrong")) for _ in range(600)]
    await asyncio.sleep(0)
    held.open()
    await holding

    assert await asyncio.gather(*looking) == [found] * 600
    assert len(calls) == 1
