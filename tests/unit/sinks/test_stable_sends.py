"""Batches keep their borders: whatever is refused or killed, a repeat has the id and the messages of the first."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from millpy import RefusalPolicy, Webhook
from millpy.errors import SinkUnavailableError
from millpy.limits import Limits
from millpy.model.checkpoint import Grant, OutboxState, RefusedMessage
from millpy.runtime.outbox_drain import DrainContext, OutboxDrain
from millpy.sinks import SendBound, Sink, SinkMessages, SinkSetup
from millpy.sinks.webhook.answers import Meaning, WebhookAnswer
from millpy.sinks.webhook.delivery import WebhookDelivery
from millpy.sinks.webhook.requests import RequestBuilder, WebhookRequest
from tests.unit.test_sinks import Outbox, QuickClock

MESSAGES = 300


class Receiver:
    """Judges content always alike; refuses new requests now and then, and is away before or after it has stored one."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.bad = {position for position in range(MESSAGES) if rng.random() < 0.15}
        self.ids: dict[int, str] = {}
        self.order: list[int] = []
        self.others: set[tuple[str, str]] = set()
        self.repeats = 0
        self.is_calm = False

    def store(self, request: WebhookRequest) -> WebhookAnswer:
        numbers = request.id.split("-")[4:]
        positions = range(int(numbers[0]), int(numbers[-1]) + 1)
        if self.bad & set(positions):
            return WebhookAnswer(Meaning.FINAL, "bad")
        if request.id not in self.ids.values() and not self.is_calm and self.rng.random() < 0.1:
            return WebhookAnswer(Meaning.REFUSED, "not now")
        for position in positions:
            known = self.ids.setdefault(position, request.id)
            if known != request.id:
                self.others.add((known, request.id))
            self.repeats += position in self.order
            self.order.append(position)
        return WebhookAnswer(Meaning.DELIVERED)

    async def post(self, request: WebhookRequest) -> WebhookAnswer:
        draw = self.rng.random() if not self.is_calm else 1.0
        if draw < 0.2:
            return WebhookAnswer(Meaning.AGAIN, "away")
        await asyncio.sleep(0)
        answer = self.store(request)
        await asyncio.sleep(0)
        return WebhookAnswer(Meaning.AGAIN, "away") if draw < 0.6 and answer.meaning is Meaning.DELIVERED else answer


class Hook(Sink):
    stable_sends = True
    refusals = RefusalPolicy()

    def __init__(self, receiver: Receiver, bound: SendBound) -> None:
        self.receiver = receiver
        self.bound = bound  # type: ignore[misc]
        self.builder = RequestBuilder(
            Webhook("https://a.org", batch="json"), SinkSetup("g", "s", 0, 1, 1, QuickClock())
        )

    def identity(self) -> dict[str, Any]:
        return {"kind": "hook"}

    def connect(self, setup: SinkSetup) -> Any:
        return self

    async def open(self) -> None:
        if self.receiver.rng.random() < 0.1 and not self.receiver.is_calm:
            raise SinkUnavailableError("away")

    async def send(self, messages: SinkMessages) -> None:
        setup = SinkSetup("g", "s", 0, 1, 1, QuickClock())
        await WebhookDelivery(self.receiver.post, setup, 1).send_batch(self.builder, messages)

    async def close(self) -> None:
        return


class Stage:
    def key_text(self, messages: SinkMessages, place: int) -> bytes:
        return messages.keys[place]

    def letter_of(self, message: SinkMessages, why: str) -> Any:
        return message.position


class History:
    """A drain with its store; which records, settles and is killed on request."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        self.outbox = Outbox()
        self.receiver = Receiver(rng)
        records, size = rng.choice([3, 20, 20]), rng.choice([60, 10_000, 10_000])
        self.sink = Hook(self.receiver, SendBound(records=records, bytes=size))
        limits = Limits(retry_s_min=0.001, refused_records_max=rng.choice([3, 10_000]))
        self.context = DrainContext(self.outbox, limits, QuickClock(), rng, lambda: None, lambda: None)  # type: ignore[arg-type]
        self.refused: dict[int, RefusedMessage] = {}
        self.letters: list[int] = []
        self.keys: list[bytes] = []
        self.kills = 0
        self.drain = self.begin(0)

    def begin(self, delivered: int) -> OutboxDrain:
        state = OutboxState(len(self.keys), delivered, 1, tuple(self.refused.values()))
        setup = SinkSetup("g", "s", 0, 1, 1, QuickClock())
        return OutboxDrain(self.context, Grant(1, 1), self.sink, setup, state, Stage())  # type: ignore[arg-type]

    @property
    def is_done(self) -> bool:
        return self.drain.waiting.delivered == MESSAGES and not self.refused and not self.drain.refused.changes

    def commit(self) -> None:
        number = len(self.keys)
        count = min(self.rng.randrange(1, 9), MESSAGES - number)
        if count:
            self.keys += [self.rng.choice([b"a", b"b", b"c", b"d"]) for _ in range(count)]
            made = SinkMessages(number, self.keys[number:], [b"1"] * count, [0] * count)
            self.outbox.rows.append(made.encode())
            self.drain.committed(self.outbox.rows[-1])

    def record(self) -> None:
        if (report := self.drain.due_report()) is not None:
            self.refused.update({found.position: found for found in report.refused})
            for position in report.accepted:
                self.refused.pop(position, None)
            self.drain.recorded(report)

    def settle(self) -> None:
        if (settlement := self.drain.settlement([])[0]) is not None:
            self.letters.extend(settlement.letters)
            for position in settlement.letters:
                self.refused.pop(position)
            self.drain.committed(None, settlement)

    async def kill(self) -> None:
        """Another worker begins at what is stored."""
        self.kills += 1
        await self.drain.close()
        self.drain = self.begin(self.drain._recorded)


@pytest.mark.parametrize("seed", range(24))
async def test_a_batch_that_comes_again_has_the_same_messages(seed: int) -> None:
    history = History(seed)
    rng, receiver = history.rng, history.receiver
    for turn in range(20_000):
        if history.is_done:
            break
        receiver.is_calm = turn > 1_500
        for chance, happen in ((0.3, history.commit), (0.5, history.record), (0.1, history.settle)):
            if rng.random() < chance:
                happen()
        if rng.random() < 0.05 and not receiver.is_calm:
            await history.kill()
        for _ in range(rng.randrange(20)):
            await asyncio.sleep(0)
    assert history.is_done, history.drain.connection.why
    await history.drain.close()
    history.drain.raise_failed()
    assert receiver.others == set()
    assert set(history.letters) == receiver.bad
    assert set(receiver.order) == set(range(MESSAGES)) - receiver.bad
    for key in set(history.keys):
        first = [position for position in dict.fromkeys(receiver.order) if history.keys[position] == key]
        assert first == sorted(first)
    assert history.kills
