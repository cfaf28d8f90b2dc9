"""The rows of an outbox that are not delivered: taken in order and without a gap, in memory or from the store."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from millpy.errors import SinkUnavailableError
from millpy.model.checkpoint import Grant, OutboxRows, OutboxState
from millpy.runtime.waiting_rows import WaitingRows
from millpy.sinks.messages import SinkMessages
from millpy.sinks.protocol import SendBound

GRANT = Grant(1, 1)
MANY = SendBound(records=100, bytes=1_000_000)


class Outbox:
    """The rows of one interval, of which one read returns one."""

    def __init__(self, *rows: OutboxRows) -> None:
        self.rows = list(rows)
        self.reads = 0

    async def read_outbox(self, grant: Grant, position: int, bytes_max: int) -> Sequence[OutboxRows]:
        self.reads += 1
        return [row for row in self.rows if row.end > position][:1]


def row(position: int, number: int) -> OutboxRows:
    values: list[bytes | None] = [b"%d" % at for at in range(position, position + number)]
    return SinkMessages(position, [b"k"] * number, values, [0] * number).encode()


def waiting_of(outbox: Outbox, delivered: int = 0) -> WaitingRows:
    waiting = [found for found in outbox.rows if found.end > delivered]
    head = waiting[-1].end if waiting else delivered
    return WaitingRows(outbox, OutboxState(head, delivered, sum(len(r.payload) for r in waiting)))  # type: ignore[arg-type]


async def taken(waiting: WaitingRows, bound: SendBound = MANY, *, stable: bool = False) -> list[int]:
    found = await waiting.take(GRANT, bound, stable=stable)
    return [] if found is None else list(found.positions)


async def test_a_new_owner_begins_behind_what_is_delivered() -> None:
    outbox = Outbox(row(0, 5), row(5, 3))
    waiting = waiting_of(outbox, delivered=3)

    assert await taken(waiting) == [3, 4, 5, 6, 7]
    assert await taken(waiting) == []
    assert waiting.is_empty


async def test_rows_of_commits_are_taken_from_memory_in_order_and_once() -> None:
    outbox = Outbox()
    waiting = waiting_of(outbox)
    for position, number in ((0, 2), (2, 3)):
        outbox.rows.append(row(position, number))
        waiting.commit(outbox.rows[-1])
    waiting.commit(outbox.rows[0])  # known already, by a read after the commit

    assert (waiting.head, waiting.size) == (5, sum(len(r.payload) for r in outbox.rows))
    assert await taken(waiting, SendBound(records=3, bytes=1_000)) == [0, 1, 2]
    assert await taken(waiting) == [3, 4]
    assert outbox.reads == 0


async def test_a_row_behind_one_that_is_only_in_the_store_is_not_taken_before_it() -> None:
    outbox = Outbox(row(0, 2))
    waiting = waiting_of(outbox)
    outbox.rows.append(row(2, 2))
    waiting.commit(outbox.rows[-1])

    assert await taken(waiting) == [0, 1, 2, 3]


async def test_what_was_taken_and_is_not_delivered_comes_again() -> None:
    outbox = Outbox(row(0, 5))
    waiting = waiting_of(outbox)
    assert await taken(waiting, SendBound(records=4, bytes=1_000)) == [0, 1, 2, 3]
    waiting.deliver(2)
    waiting.deliver(1)  # never back

    waiting.rewind()

    assert await taken(waiting) == [2, 3, 4]
    waiting.deliver(5)
    assert (waiting.delivered, waiting.size) == (5, 0)


async def test_a_send_that_must_be_repeated_alike_has_messages_of_one_commit() -> None:
    waiting = waiting_of(Outbox(row(0, 2), row(2, 2)))

    assert await taken(waiting, stable=True) == [0, 1]
    assert await taken(waiting, stable=True) == [2, 3]


async def test_messages_that_another_owner_has_delivered_are_not_passed_over() -> None:
    outbox = Outbox(row(0, 2), row(2, 2))
    waiting = waiting_of(outbox)
    del outbox.rows[0]

    with pytest.raises(SinkUnavailableError, match="have left the outbox"):
        await waiting.take(GRANT, MANY)


async def test_a_message_larger_than_the_bound_is_taken_alone() -> None:
    waiting = waiting_of(Outbox(row(0, 3)))

    assert [await taken(waiting, SendBound(records=10, bytes=1)) for _ in range(4)] == [[0], [1], [2], []]
