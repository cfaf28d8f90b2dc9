"""Requests that wait for the same answer share a query, and never one that began before they came."""

from __future__ import annotations

import asyncio

import pytest

from millpy.ui.shared_reads import SharedReads


class Database:
    """Answers a query with the state that it had when the query began, once it is let."""

    def __init__(self) -> None:
        self.state = 0
        self.begun = 0
        self.let = asyncio.Semaphore(0)

    async def query(self) -> int:
        self.begun += 1
        seen = self.state
        await self.let.acquire()
        if seen < 0:
            raise ValueError(seen)
        return seen


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def test_those_who_come_meanwhile_share_the_next_query() -> None:
    reads, database = SharedReads(), Database()
    first = asyncio.create_task(reads.run("key", database.query))
    await settle()
    database.state = 1
    later = [asyncio.create_task(reads.run("key", database.query)) for _ in range(200)]
    await settle()
    assert database.begun == 1

    database.let.release()
    assert await first == 0
    await settle()
    database.state = 2
    last = asyncio.create_task(reads.run("key", database.query))
    await settle()
    assert database.begun == 2
    database.let.release()
    assert set(await asyncio.gather(*later)) == {1}
    database.let.release()
    assert (await last, database.begun) == (2, 3)
    assert reads._flights == {}


async def test_other_keys_do_not_wait() -> None:
    reads, database = SharedReads(), Database()
    both = [asyncio.create_task(reads.run(key, database.query)) for key in "ab"]
    await settle()

    assert database.begun == 2
    for _ in both:
        database.let.release()
    assert await asyncio.gather(*both) == [0, 0]


async def test_a_client_that_goes_does_not_end_the_query_of_others() -> None:
    reads, database = SharedReads(), Database()
    gone = asyncio.create_task(reads.run("key", database.query))
    await settle()
    waiting = [asyncio.create_task(reads.run("key", database.query)) for _ in range(2)]
    await settle()
    gone.cancel()
    waiting[0].cancel()
    await settle()
    database.state = 1
    database.let.release()
    await settle()
    database.let.release()

    assert await waiting[1] == 1
    assert reads._flights == {}


async def test_an_error_is_that_of_its_query_only() -> None:
    reads, database = SharedReads(), Database()
    database.state = -1
    first = asyncio.create_task(reads.run("key", database.query))
    await settle()
    database.state = 5
    second = asyncio.create_task(reads.run("key", database.query))
    await settle()
    for _ in range(2):
        database.let.release()

    with pytest.raises(ValueError):
        await first
    assert await second == 5
    assert reads._flights == {}
