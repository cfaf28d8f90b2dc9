"""The delivery of messages against a model: refusals, failures, kills, takeovers and lost answers, at random.

The store is a model, too, of one interval: its outbox, its refused messages and its dead letters. Whatever happens,
each message arrives or is a dead letter, and those of a key arrive in order.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from millpy import RefusalPolicy
from millpy.clock import SystemClock
from millpy.errors import MessagesRefusedError, SinkUnavailableError, StoreUnavailableError
from millpy.limits import Limits
from millpy.model.checkpoint import Grant, OutboxRows, OutboxState, RefusedMessage, Settlement
from millpy.model.keys import key_text
from millpy.model.stage import Release
from millpy.runtime.outbox_drain import DrainContext, OutboxDrain
from millpy.sinks import SendBound, Sink, SinkMessages, SinkSetup
from millpy.store.protocol import SinkReport

KEYS = (b"a", b"b", b"c")
MESSAGES = 120
POISON = 0.08
"""The share of messages that are refused for ever."""


class QuickClock(SystemClock):
    """Time passes by the count of its readings, so that runs repeat."""

    def __init__(self) -> None:
        self.now = 1.0

    def monotonic(self) -> float:
        self.now += 0.01
        return self.now

    def now_us(self) -> Any:
        return int(self.now * 1e6)

    async def sleep(self, seconds: float) -> None:
        self.now += seconds
        await asyncio.sleep(0)


class Stage:
    """Makes dead letters that say their position."""

    def key_text(self, messages: SinkMessages, place: int) -> bytes:
        return key_text(messages.keys[place].decode())

    def letter_of(self, message: SinkMessages, why: str) -> Any:
        return (message.positions[0], message.record_of(0), why)


class OtherSide(Sink):
    """A place that fails and refuses at random. Some messages it never takes; of them it may say so."""

    def __init__(self, rng: random.Random, policy: RefusalPolicy, *, remembers: bool) -> None:
        self.rng = rng
        self.refusals = policy
        self.remembers = remembers
        self.bound = SendBound(records=rng.choice([1, 3, 20]), bytes=rng.choice([30, 10_000]))
        self.poison = {n for n in range(MESSAGES) if rng.random() < POISON}
        self.trouble = True
        self.got: list[int] = []
        self.cuts = 0
        self.known = 0
        self.went_back = False

    def identity(self) -> dict[str, Any]:
        return {"kind": "other"}

    def connect(self, setup: SinkSetup) -> OtherConnection:
        return OtherConnection(self)


class OtherConnection:
    def __init__(self, side: OtherSide) -> None:
        self.side = side

    async def open(self) -> int | None:
        side = self.side
        await asyncio.sleep(0)
        if side.trouble and side.rng.random() < 0.1:
            raise SinkUnavailableError("away", retry_after_s=side.rng.choice([None, 5.0]))
        return side.known if side.remembers else None

    async def send(self, messages: SinkMessages) -> None:
        side, rng = self.side, self.side.rng
        assert len(messages) <= side.bound.records
        assert list(messages.positions) == sorted(set(messages.positions))
        await asyncio.sleep(0)
        reasons: dict[int, str] = {}
        keys: set[bytes] = set()
        for place, (key, value) in enumerate(zip(messages.keys, messages.values, strict=True)):
            number = int(value or b"")
            if key in keys or number in side.poison or (side.trouble and rng.random() < 0.05):
                reasons[place] = f"no {number}"
                keys.add(key)
        taken = [n for place, n in enumerate(messages.positions) if place not in reasons]
        if side.trouble and rng.random() < 0.08:
            if not side.remembers:
                side.got += taken[: rng.randrange(len(taken) + 1)] if taken else []
            side.cuts += 1
            raise SinkUnavailableError("cut")
        if reasons:
            if not side.remembers:
                side.got += taken
            await asyncio.sleep(0)
            final = [place for place in reasons if int(messages.values[place] or b"") in side.poison]
            raise MessagesRefusedError(reasons, final=final, retry_after_s=rng.choice([None, 0.5]))
        side.got += taken
        side.went_back |= messages.end < side.known
        side.known = messages.end
        await asyncio.sleep(0)

    async def close(self) -> None:
        await asyncio.sleep(0)


class ModelStore:
    """One interval in a store: the fence is the sequencer, and each method is one transaction."""

    def __init__(self) -> None:
        self.rows: list[OutboxRows] = []
        self.delivered = self.sequencer = self.head = 0
        self.refused: dict[int, RefusedMessage] = {}
        self.letters: list[int] = []

    def state(self) -> OutboxState:
        size = sum(len(row.payload) for row in self.rows)
        return OutboxState(self.head, self.delivered, size, [found for _, found in sorted(self.refused.items())])

    def append(self, rows: OutboxRows) -> None:
        assert rows.position == self.head
        self.rows.append(rows)
        self.head = rows.end

    async def read_outbox(self, grant: Grant, position: int, bytes_max: int) -> Sequence[OutboxRows]:
        await asyncio.sleep(0)
        return [row for row in self.rows if row.end > position][:3]

    def record(self, report: SinkReport) -> bool:
        if report.grant.sequencer != self.sequencer:
            return False
        self.delivered = max(self.delivered, report.delivered)
        self.rows = [row for row in self.rows if row.end > self.delivered]
        self.refused.update({found.position: found for found in report.refused})
        for position in report.accepted:
            self.refused.pop(position, None)
        return True

    def settle(self, settlement: Settlement) -> None:
        for position in settlement.letters:
            del self.refused[position]  # an error if it is gone
            self.letters.append(position)
        for position, found in self.refused.items():
            if found.parked and found.key in settlement.released:
                self.refused[position] = replace(found, parked=False, attempts=0, why="")


class Run:
    """One interval under workers that are killed."""

    def __init__(self, seed: int, *, remembers: bool) -> None:
        rng = self.rng = random.Random(seed)
        policies = [
            RefusalPolicy(),
            RefusalPolicy(attempts=2),
            RefusalPolicy(after=timedelta(seconds=1)),
            RefusalPolicy(attempts=3, then="park"),
        ]
        self.side = OtherSide(rng, rng.choice(policies), remembers=remembers)
        self.store = ModelStore()
        self.limits = Limits(refused_records_max=rng.choice([4, 50]), outbox_records_max=40)
        self.clock = QuickClock()
        self.number = self.kills = self.cuts = self.held_max = 0
        self.left = set[int]()
        self.drain = self.take_over()

    def take_over(self) -> OutboxDrain:
        self.store.sequencer += 1
        context = DrainContext(self.store, self.limits, self.clock, self.rng, lambda: None, lambda: None)  # type: ignore[arg-type]
        setup = SinkSetup("g", "s", 0, 1, 1, self.clock)
        grant = Grant(1, self.store.sequencer)
        return OutboxDrain(context, grant, self.side, setup, self.store.state(), Stage())  # type: ignore[arg-type]

    async def kill(self) -> None:
        """End the worker at whatever it awaits, and let another one read what is stored."""
        self.kills += 1
        await self.drain.close()
        if not self.side.remembers:  # of what has arrived, one `send` is not recorded, and those that were cut
            left = {n for n in self.side.got if n >= self.store.delivered or n in self.store.refused}
            sends = 1 + self.side.cuts - self.cuts
            since = left - self.left  # a refused one, which waits to be sent again, may be left from several workers
            assert len(since) <= sends * self.side.bound.records, (sorted(since), self.side.bound)
            self.left = left
        self.cuts = self.side.cuts
        self.drain = self.take_over()

    def commit(self, settlement: Settlement | None, rows: OutboxRows | None) -> None:
        """Commit a turn; its answer may be lost, and the worker reads everything again."""
        fails, unknown = self.rng.random() < 0.1, self.rng.random() < 0.15
        if not fails:
            if rows is not None:
                self.store.append(rows)
                self.number += rows.records
            if settlement is not None:
                self.store.settle(settlement)
        if fails or unknown:
            self.store.sequencer += 1
            self.drain.regrant(Grant(1, self.store.sequencer), self.store.state())
        else:
            self.drain.committed(rows, settlement)

    def made(self) -> OutboxRows | None:
        left = MESSAGES - self.number
        if not left or self.drain.is_full or self.rng.random() < 0.5:
            return None
        numbers = range(self.number, self.number + min(left, self.rng.randrange(1, 8)))
        keys = [random.Random(n).choice(KEYS) for n in numbers]
        values: list[bytes | None] = [b"%d" % n for n in numbers]
        return SinkMessages(self.number, keys, values, [0] * len(keys)).encode()

    async def report(self) -> None:
        report = self.drain.due_report()
        if report is None:
            return
        if self.rng.random() < 0.1:
            return  # the store is away
        await asyncio.sleep(0)
        stored = self.store.record(report)
        if self.rng.random() < 0.05:
            await self.kill()
        elif stored and self.rng.random() < 0.9:  # else the answer is lost
            self.drain.recorded(report)

    def releases(self) -> list[Release]:
        parked = [found for found in self.store.refused.values() if found.parked]
        return [
            Release(1, 1, found.key, found.position, self.rng.random() < 0.5 or not self.side.trouble)
            for found in parked
            if self.rng.random() < 0.2
        ]

    async def step(self, *, may_kill: bool) -> None:
        rows, settlement = self.made(), self.drain.settlement(self.releases())[0]
        if rows is not None or settlement is not None:
            if may_kill and self.rng.random() < 0.05:
                await self.kill()
            else:
                self.commit(settlement, rows)
        await self.report()
        if may_kill and self.rng.random() < 0.03:
            await self.kill()
        for _ in range(self.rng.randrange(6)):
            await asyncio.sleep(0)
        self.held_max = max(self.held_max, self.drain.refused.records)

    def is_over(self) -> bool:
        return self.number == MESSAGES and not self.store.rows and not self.store.refused


@pytest.mark.parametrize("remembers", [False, True])
@pytest.mark.parametrize("block", range(5))
async def test_each_message_arrives_or_is_a_dead_letter_whatever_is_killed(block: int, remembers: bool) -> None:
    for seed in range(block * 12, block * 12 + 12):
        run = Run(seed, remembers=remembers)
        for _ in range(300):
            await run.step(may_kill=True)
        run.side.trouble = False
        for _ in range(20_000):
            if run.is_over():
                break
            await run.step(may_kill=False)
        await run.drain.close()
        run.drain.raise_failed()
        assert run.is_over(), (seed, run.number, run.store.state(), run.drain.connection.why)
        _check(seed, run)


def _check(seed: int, run: Run) -> None:
    side, letters = run.side, run.store.letters
    arrived = Counter(side.got)
    assert run.held_max <= run.limits.refused_records_max + side.bound.records, (seed, "too many are held back")
    assert set(arrived) | set(letters) == set(range(MESSAGES)), (
        seed,
        "lost",
        sorted(set(range(MESSAGES)) - set(arrived) - set(letters)),
    )
    assert len(set(letters)) == len(letters), (seed, "two dead letters of a message")
    assert not side.poison & set(arrived), seed
    for key in KEYS:
        first = list(dict.fromkeys(n for n in side.got if random.Random(n).choice(KEYS) == key))
        assert first == sorted(first), (seed, key, first)
    if not side.remembers:
        assert len(side.got) - len(arrived) <= (run.kills + side.cuts) * side.bound.records, seed
        return
    assert not side.went_back, (seed, "the position of the other side has gone back: a successor would send again")
    if side.refusals.then == "dead_letter":
        assert max(arrived.values()) == 1, (seed, arrived.most_common(3))
        assert not set(letters) & set(arrived), seed


async def test_an_error_of_the_store_is_not_taken_for_one_of_the_sink() -> None:
    run = Run(1, remembers=False)
    run.side.trouble = False

    async def fail(*_: Any) -> Any:
        raise StoreUnavailableError("the database is away")

    run.store.read_outbox = fail  # type: ignore[method-assign]
    run.store.append(SinkMessages(0, [b"a"], [b"1"], [0]).encode())
    await run.kill()
    for _ in range(50):
        await asyncio.sleep(0)
    assert run.drain.connection.is_connected is True
    await run.drain.close()


async def test_messages_of_a_commit_without_an_answer_are_delivered_although_no_other_follows() -> None:
    run = Run(1, remembers=False)
    run.side.trouble, run.side.poison = False, set()
    await run.step(may_kill=False)
    run.store.append(SinkMessages(run.store.head, [b"a"], [b"999"], [0]).encode())
    run.store.sequencer += 1
    run.drain.regrant(Grant(1, run.store.sequencer), run.store.state())
    for _ in range(50):
        await asyncio.sleep(0)
    await run.drain.close()
    assert run.side.got[-1] == run.store.head - 1
