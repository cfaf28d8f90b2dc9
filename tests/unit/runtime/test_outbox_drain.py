"""The drain of an outbox where a sink misbehaves: it must stop neither its worker nor what comes after it."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Sequence
from typing import Any

import pytest

from millpy.clock import SystemClock
from millpy.errors import ConfigError, SinkUnavailableError
from millpy.limits import Limits
from millpy.model.checkpoint import Grant, OutboxRows, OutboxState
from millpy.runtime import outbox_drain
from millpy.runtime.outbox_drain import DrainContext, OutboxDrain
from millpy.runtime.refused_messages import RETRY_AFTER_S_MAX
from millpy.sinks import SendBound, Sink, SinkMessages, SinkSetup


class SteppedClock(SystemClock):
    """Notes how long it is asked to sleep, and does not."""

    def __init__(self) -> None:
        self.slept: list[float] = []

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        await asyncio.sleep(0)


class Outbox:
    """The rows of one interval."""

    def __init__(self, rows: Sequence[OutboxRows] = ()) -> None:
        self.rows = list(rows)

    async def read_outbox(self, grant: Grant, position: int, bytes_max: int) -> Sequence[OutboxRows]:
        return [row for row in self.rows if row.end > position][:1]


class Place(Sink):
    """A place whose connections do what a test says."""

    bound = SendBound(records=1)

    def __init__(self, **acts: Any) -> None:
        self.acts = acts
        self.sent: list[int] = []
        self.connected = 0

    def identity(self) -> dict[str, Any]:
        return {"kind": "place"}

    def connect(self, setup: SinkSetup) -> Place:
        self.connected += 1
        if "connect" in self.acts:
            self.acts["connect"](self.connected)
        return self

    async def open(self) -> None:
        await self._act("open")

    async def send(self, messages: SinkMessages) -> None:
        await self._act("send")
        self.sent += messages.positions

    async def close(self) -> None:
        if "close" in self.acts:
            await self.acts["close"]()

    async def _act(self, what: str) -> None:
        await asyncio.sleep(0)
        if what in self.acts:
            await self.acts[what]()


def rows(number: int) -> list[OutboxRows]:
    return [SinkMessages(n, [b"k"], [b"%d" % n], [0]).encode() for n in range(number)]


def drain_of(
    place: Place,
    outbox: Outbox | None = None,
    limits: Limits | None = None,
    clock: SteppedClock | None = None,
    interval_id: int = 1,
) -> OutboxDrain:
    outbox = outbox or Outbox(rows(3))
    setup = SinkSetup("g", "s", 0, 1, 1, SystemClock())
    context = DrainContext(
        outbox,  # type: ignore[arg-type]
        limits or Limits(),
        clock or SteppedClock(),
        random.Random(1),
        lambda: None,
        lambda: None,
    )
    size = sum(len(row.payload) for row in outbox.rows)
    state = OutboxState(outbox.rows[-1].end, outbox.rows[0].position, size)
    return OutboxDrain(context, Grant(interval_id, 1), place, setup, state)


def is_connected(drain: OutboxDrain) -> bool | None:
    return drain.connection.is_connected


async def pass_turns(drain: OutboxDrain, turns: int = 60) -> list[bool | None]:
    """Let the drain run, and store its progress; return what it has said of the connection."""
    said = []
    for _ in range(turns):
        if (report := drain.due_report()) is not None:
            drain.recorded(report)
        said.append(drain.connection.is_connected)
        await asyncio.sleep(0)
    return said


async def test_an_interval_takes_no_input_until_the_first_attempt_to_connect_has_ended() -> None:
    answers = asyncio.Event()

    async def fail() -> None:
        await answers.wait()
        raise SinkUnavailableError("away")

    drain = drain_of(Place(open=fail))
    await pass_turns(drain)
    before = drain.is_full
    answers.set()
    await pass_turns(drain)
    await drain.close()

    assert (before, drain.is_full) == (True, False)


@pytest.mark.parametrize("what", ["open", "send"])
async def test_a_call_that_does_not_return_is_reported_and_left_alone(
    what: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    calls, answers = 0, asyncio.Event()

    async def hang() -> None:
        nonlocal calls
        calls += 1
        await answers.wait()

    place = Place(**{what: hang})
    drain = drain_of(place)
    await pass_turns(drain)
    before = drain.connection.is_connected
    monkeypatch.setattr(Limits, "edge_call_s_max", 0.0)
    await pass_turns(drain)
    silent = drain.connection.is_connected, drain.connection.why, drain.is_full
    monkeypatch.undo()
    answers.set()
    await pass_turns(drain)
    await drain.close()

    assert before is not False
    assert silent == (False, f"`{what}` has not returned for 0 s", False)
    assert [record.message for record in caplog.records if record.levelno >= logging.WARNING] == [
        f"sink s, interval 0: `{what}` has not returned for 0 s; waiting for it"
    ]
    assert (place.sent, drain.connection.is_connected) == ([0, 1, 2], True)
    assert calls == (1 if what == "open" else 3)


async def test_a_place_that_takes_connections_and_no_messages_is_disconnected_throughout() -> None:
    fails = True

    async def send() -> None:
        if fails:
            raise SinkUnavailableError("no space")

    drain = drain_of(Place(send=send))
    said = await pass_turns(drain)
    first = said.index(False)
    assert set(said[first:]) == {False}
    assert drain.connection.attempts > 3
    fails = False
    await pass_turns(drain)
    assert (drain.connection.is_connected, drain.waiting.delivered) == (True, 3)
    await drain.close()


async def test_a_place_without_messages_is_back_when_it_takes_a_connection() -> None:
    fails = True

    async def open_() -> None:
        if fails:
            raise SinkUnavailableError("away")

    drain = drain_of(Place(open=open_), Outbox(rows(3)))
    drain.waiting.deliver(3)
    await pass_turns(drain)
    assert is_connected(drain) is False
    fails = False
    await pass_turns(drain)
    assert is_connected(drain) is True
    await drain.close()


@pytest.mark.parametrize(("asks", "waits"), [(7.0, 7.0), (10_000.0, RETRY_AFTER_S_MAX)])
async def test_the_delay_that_the_other_side_asks_for_is_kept_up_to_a_bound(asks: float, waits: float) -> None:
    async def send() -> None:
        raise SinkUnavailableError("slow down", retry_after_s=asks)

    clock = SteppedClock()
    drain = drain_of(Place(send=send), clock=clock)
    await pass_turns(drain)
    await drain.close()
    assert set(clock.slept) == {waits}


async def test_a_sink_that_cannot_be_stopped_is_left_to_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outbox_drain, "CLOSE_S_MAX", 0.02)
    ends = asyncio.Event()

    async def send() -> None:
        while not ends.is_set():
            try:
                await ends.wait()
            except asyncio.CancelledError:
                continue

    drain = drain_of(Place(send=send))
    await pass_turns(drain)
    try:
        async with asyncio.timeout(5):
            await drain.close()
    finally:
        ends.set()
        await asyncio.wait([drain._task])


async def test_a_connection_that_cannot_be_made_now_is_made_later_but_not_one_that_never_can() -> None:
    def fails_twice(number: int) -> None:
        if number < 3:
            raise OSError("the file with the password is not there")

    place = Place(connect=fails_twice)
    drain = drain_of(place)
    await pass_turns(drain)
    assert place.sent == [0, 1, 2]
    await drain.close()

    def never(_: int) -> None:
        raise ConfigError("the package is missing")

    with pytest.raises(ConfigError):
        drain_of(Place(connect=never))


async def test_a_place_that_has_taken_messages_can_be_connected_to_though_a_setting_is_away() -> None:
    """A secret that was deleted ended each worker that took over an interval, and with it all other steps."""
    secret_is_there = False

    def needs_secret(_: int) -> None:
        if not secret_is_there:
            raise ConfigError("ALERTS_SECRET is not set", hint="set it")

    place = Place(connect=needs_secret)
    drain = drain_of(place, Outbox(rows(5)[2:]))
    await pass_turns(drain)
    assert (drain.connection.is_connected, drain.connection.why) == (False, "ALERTS_SECRET is not set (set it)")
    secret_is_there = True
    await pass_turns(drain)
    assert place.sent == [2, 3, 4]
    await drain.close()


class UnprintableError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")

    __repr__ = __str__


class UnprintableCancelledError(asyncio.CancelledError):
    __str__ = __repr__ = UnprintableError.__str__


@pytest.mark.parametrize("where", ["connect", "open", "send", "close"])
@pytest.mark.parametrize(
    "error",
    [
        UnprintableError(),
        UnprintableCancelledError(),
        BaseExceptionGroup("both", [asyncio.CancelledError()]),
        SystemExit(0),
        GeneratorExit(),
        SinkUnavailableError(5),  # type: ignore[arg-type]
        SinkUnavailableError("a", hint=5),  # type: ignore[arg-type]
        SinkUnavailableError("a\0b\ud800"),
    ],
    ids=["unprintable", "unprintable cancellation", "group", "exit", "no Exception", "number", "hint", "surrogate"],
)
async def test_no_exception_of_a_sink_ends_its_drain(
    error: BaseException, where: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL, outbox_drain.log.name)  # a report of pytest-xdist can have no surrogate
    fails = 3

    def act(*_: object) -> None:
        nonlocal fails
        fails -= 1
        if fails >= 0:
            raise error

    async def act_later() -> None:
        act()

    if where == "close":
        place = Place(close=act_later, send=act_later)  # what ends a connection
    else:
        place = Place(**{where: act if where == "connect" else act_later})
    drain = drain_of(place)
    await pass_turns(drain)
    assert place.sent == [0, 1, 2]
    await drain.close()


async def test_an_outbox_of_an_earlier_owner_is_no_longer_full_when_half_of_it_is_delivered() -> None:
    takes = asyncio.Semaphore(0)

    async def send() -> None:
        await takes.acquire()

    outbox = Outbox(rows(100))
    size = sum(len(row.payload) for row in outbox.rows)
    drain = drain_of(Place(send=send), outbox, Limits(outbox_bytes_max=size - 1))
    assert [drain.is_full] == [True]
    for _ in range(49):
        takes.release()
        await pass_turns(drain, 10)
    still_full = drain.is_full
    for _ in range(3):
        takes.release()
        await pass_turns(drain, 10)
    assert (still_full, drain.is_full) == (True, False)
    assert drain.waiting.size == sum(len(row.payload) for row in outbox.rows[drain.waiting.delivered :])
    for _ in range(48):
        takes.release()
    await pass_turns(drain, 500)
    assert (drain.waiting.delivered, drain.waiting.size) == (100, 0)
    await drain.close()
