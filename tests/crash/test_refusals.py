"""A sink whose other side refuses single messages: retries, dead letters, parked keys, and their replays."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import msgspec
import pytest

from millpy import Graph, RefusalPolicy
from millpy.admin.queries import Admin
from millpy.errors import MessagesRefusedError
from millpy.hosting.failpoints import Failpoint
from millpy.sinks import SendBound, Sink, SinkMessages, SinkSetup
from millpy.store.postgres.store import PostgresStore
from tests.crash.cases.sinks import with_refusals
from tests.crash.conftest import Survives
from tests.crash.graph_files import rows
from tests.crash.test_lookups import execute, until
from tests.crash.test_sinks import LIMITS, reading, readings, until_true, working
from tests.crash.world import Case
from tests.feed import Feed

QUICK = replace(LIMITS, retry_s_min=0.01)
REFUSED = "SELECT key, number, state FROM millpy.refused_messages ORDER BY number"
SINK = "SELECT messages, refused, parked_keys, delivered FROM millpy.sinks"
LETTERS = "SELECT computation, stream, reason, key, state FROM millpy.dead_letters ORDER BY dead_letter_id"
BALANCED = "SELECT DISTINCT balanced FROM millpy.accounting"


class Choosy(Sink):
    """A place that refuses values for as long as it likes, and keeps what it has taken."""

    bound = SendBound(records=5)

    def __init__(
        self, policy: RefusalPolicy, *, refuses: Callable[[float], bool], final: bool = False, remembers: bool = False
    ) -> None:
        self.refusals = policy
        self.refuses = refuses
        self.final = final
        self.remembers = remembers
        self.known = 0
        self.taken: list[tuple[int, float]] = []
        self.tries: list[float] = []

    def identity(self) -> dict[str, Any]:
        return {"kind": "choosy"}

    def connect(self, setup: SinkSetup) -> ChoosyConnection:
        return ChoosyConnection(self)

    def values(self, device: str) -> list[float]:
        return [value for _, value in self.taken if device_of(value) == device]


def device_of(value: float) -> str:
    return "abc"[int(value) % 3]


class ChoosyConnection:
    def __init__(self, sink: Choosy) -> None:
        self.sink = sink

    async def open(self) -> int | None:
        return self.sink.known if self.sink.remembers else None

    async def send(self, messages: SinkMessages) -> None:
        sink, reasons, keys = self.sink, {}, set()
        taken = []
        for place, key in enumerate(messages.keys):
            value = msgspec.json.decode(messages.values[place] or b"")["value"]
            if key not in keys:
                sink.tries.append(value)
            if key in keys or sink.refuses(value):
                reasons[place] = f"no {value}\x00\ud800"
                keys.add(key)
            else:
                taken.append((messages.positions[place], value))
        if reasons:
            if not sink.remembers:
                sink.taken += taken
            raise MessagesRefusedError(reasons, final=reasons if sink.final else ())
        sink.taken += taken
        sink.known = messages.end

    async def close(self) -> None:
        return


def graph_of(feed: Feed, sink: Sink) -> Graph:
    graph = Graph("plant")
    readings(graph, feed).to_sink(sink, key="device", name="out", intervals=1)
    return graph


def push(feed: Feed, values: range) -> None:
    feed.push(*[reading(device_of(float(value)), float(value)) for value in values])


def of(device: str, values: range) -> list[float]:
    return [float(value) for value in values if device_of(value) == device]


async def test_a_refused_message_is_tried_again_and_only_its_key_waits(database_url: str) -> None:
    open_ = asyncio.Event()
    feed, sink = Feed(), Choosy(RefusalPolicy(), refuses=lambda value: value == 3.0 and not open_.is_set())
    async with working(database_url, lambda: graph_of(feed, sink), QUICK):
        push(feed, range(30))
        await until_true(lambda: len(sink.taken) == 21, lambda: sink.taken)
        assert sink.values("a") == [0.0]
        assert (sink.values("b"), sink.values("c")) == (of("b", range(30)), of("c", range(30)))
        await until(database_url, SINK, [(0, 9, 0, 30)])
        await until_true(lambda: sink.tries.count(3.0) >= 3, lambda: sink.tries)
    assert rows(database_url, REFUSED)[:2] == [
        ('"a"', 3, "refused"),
        ('"a"', 6, "waits behind a refused message"),
    ]
    assert rows(database_url, "SELECT count(*) FROM mill.outbox") == [(0,)]
    ((why, record),) = rows(
        database_url, "SELECT refused_because, record FROM millpy.refused_messages WHERE number = 3"
    )
    assert why.startswith("no 3.0")
    assert msgspec.json.decode(record)["value"] == 3.0
    async with working(database_url, lambda: graph_of(feed, sink), QUICK):  # another worker continues
        open_.set()
        await until(database_url, SINK, [(0, 0, 0, 30)])
        assert sink.values("a") == of("a", range(30))
        assert sorted(position for position, _ in sink.taken) == list(range(30))
        assert rows(database_url, BALANCED) == [(True,)]


@pytest.mark.parametrize(("final", "remembers"), [(False, False), (True, False), (True, True)])
async def test_a_message_that_is_given_up_becomes_a_dead_letter_and_a_replay_sends_it(
    database_url: str, final: bool, remembers: bool
) -> None:
    open_ = asyncio.Event()
    policy = RefusalPolicy() if final else RefusalPolicy(attempts=3)
    sink = Choosy(
        policy, refuses=lambda value: value in (3.0, 9.0) and not open_.is_set(), final=final, remembers=remembers
    )
    feed = Feed()
    async with working(database_url, lambda: graph_of(feed, sink), QUICK):
        push(feed, range(30))
        letter = ("out", "readings", "refused", '"a"', "open")
        await until(database_url, LETTERS, [letter, letter])
        await until(database_url, SINK, [(0, 0, 0, 30)])
        assert sink.values("a") == [value for value in of("a", range(30)) if value not in (3.0, 9.0)]
        assert sink.values("b") == of("b", range(30))
        assert sink.tries.count(3.0) == (1 if final else 3)
        account = "SELECT consumed, dead_lettered, balanced FROM millpy.accounting WHERE consumer = 'out'"
        await until(database_url, account, [(28, 2, True)])
        assert rows(database_url, "SELECT payload_text FROM millpy.dead_letters ORDER BY 1")[0] == (
            reading("a", 3.0).decode(),
        )
        open_.set()
        execute(
            database_url, "SELECT millpy.replay_dead_letters(ARRAY(SELECT dead_letter_id FROM millpy.dead_letters))"
        )
        await until_true(lambda: {3.0, 9.0} < set(sink.values("a")), lambda: sink.taken)
        await until(database_url, account, [(30, 0, True)])
        await until(database_url, SINK, [(0, 0, 0, 32)])
    assert len(sink.taken) == len({position for position, _ in sink.taken}) == 30


@pytest.mark.parametrize("discard", [False, True])
@pytest.mark.parametrize("remembers", [False, True])
async def test_a_parked_key_waits_until_it_is_released(database_url: str, discard: bool, remembers: bool) -> None:
    open_ = asyncio.Event()
    policy = RefusalPolicy(attempts=2, then="park")
    sink = Choosy(policy, refuses=lambda value: value == 3.0 and not open_.is_set(), remembers=remembers)
    feed = Feed()
    async with working(database_url, lambda: graph_of(feed, sink), QUICK):
        push(feed, range(30))
        await until(database_url, SINK, [(0, 9, 1, 30)])
    parked = (
        "SELECT computation, key, records, reason, failing_record ->> 'value', ticket, requested FROM millpy.parked"
    )
    assert rows(database_url, parked) == [("out", '"a"', 9, "refused", "3.0", 3, False)]
    (status,) = Admin(database_url).sinks("plant")
    assert (status["sink"], status["refused"], status["parked_keys"], status["messages"]) == ("out", 9, 1, 0)
    assert status["why"].startswith("no 3.0")
    tries = sink.tries.count(3.0)
    async with working(database_url, lambda: graph_of(feed, sink), replace(QUICK, outbox_records_max=3)):
        push(feed, range(30, 60))
        await until(database_url, SINK, [(0, 19, 1, 60)])
        assert sink.tries.count(3.0) == tries
        if not discard:
            assert rows(database_url, "SELECT millpy.release_parked('plant', 'out', 'a')") == [(1,)]
            await until(database_url, "SELECT count(*) FROM mill.releases", [(0,)])
            await until(database_url, SINK, [(0, 19, 1, 60)])  # it is refused again
            await until_true(lambda: sink.tries.count(3.0) > tries, lambda: sink.tries)
            await until(database_url, parked, [("out", '"a"', 19, "refused", "3.0", 3, False)])
            open_.set()
        verb = "discard" if discard else "release"
        assert rows(database_url, f"SELECT millpy.{verb}_parked('plant', 'out')") == [(1,)]
        await until(database_url, SINK, [(0, 0, 0, 60)])
        skipped = {3.0} if discard else set()
        assert sink.values("a") == [value for value in of("a", range(60)) if value not in skipped]
        assert rows(database_url, "SELECT count(*) FROM millpy.dead_letters") == [(len(skipped),)]
        assert rows(database_url, BALANCED) == [(True,)]
    assert len(sink.taken) == len({position for position, _ in sink.taken}) == 60 - len(skipped)


async def test_refused_messages_have_a_bound_and_then_the_others_wait(database_url: str) -> None:
    open_ = asyncio.Event()
    feed, sink = Feed(batch_max=10), Choosy(RefusalPolicy(), refuses=lambda _: not open_.is_set())
    limits = replace(QUICK, refused_records_max=8, outbox_records_max=20, bundle_records_max=10)
    async with working(database_url, lambda: graph_of(feed, sink), limits):
        push(feed, range(300))
        full = "SELECT refused BETWEEN 8 AND 13, messages BETWEEN 20 AND 40 FROM millpy.sinks"
        await until(database_url, full, [(True, True)])
        await asyncio.sleep(0.5)
        assert rows(database_url, full) == [(True, True)]
        open_.set()
        await until(database_url, SINK, [(0, 0, 0, 300)])
        for device in "abc":
            assert sink.values(device) == of(device, range(300))


async def test_what_is_given_up_leaves_a_full_outbox(database_url: str) -> None:
    feed, sink = Feed(batch_max=10), Choosy(RefusalPolicy(attempts=2), refuses=lambda _: True)
    limits = replace(QUICK, refused_records_max=8, outbox_records_max=20, bundle_records_max=10)
    async with working(database_url, lambda: graph_of(feed, sink), limits):
        push(feed, range(90))
        await until(database_url, "SELECT count(*) FROM millpy.dead_letters", [(90,)])
        await until(database_url, SINK, [(0, 0, 0, 90)])
        await until(database_url, BALANCED, [(True,)])


@pytest.mark.parametrize("point", [Failpoint.AFTER_STEP, Failpoint.AFTER_FENCE, Failpoint.AFTER_COMMIT])
def test_a_kill_at_a_point_of_a_turn_loses_no_refused_message(survives: Survives, point: Failpoint) -> None:
    survives(Case("SIGKILL with refused messages", str(point), partial(with_refusals, point=point)))


@pytest.mark.parametrize("trapped", ["before", "committed"])
def test_a_kill_in_a_send_loses_no_refused_message(survives: Survives, trapped: str) -> None:
    survives(Case("SIGKILL in a send of refused messages", trapped, partial(with_refusals, trapped=trapped)))


async def test_a_sink_that_is_reset_begins_anew_without_what_was_refused(database_url: str) -> None:
    feed, sink = Feed(), Choosy(RefusalPolicy(), refuses=lambda value: value == 3.0)
    async with working(database_url, lambda: graph_of(feed, sink), QUICK):
        push(feed, range(6))
        await until(database_url, SINK, [(0, 1, 0, 6)])
    number = rows(database_url, "SELECT interval_id FROM millpy.sinks")
    async with PostgresStore(database_url) as store:
        await store.reset(graph_of(Feed(), sink).spec(), ["out"])
    assert rows(database_url, "SELECT count(*) FROM mill.refused_messages") == [(0,)]
    sink.taken.clear()
    async with working(database_url, lambda: graph_of(feed, sink), QUICK):
        push(feed, range(7, 9))
        await until(database_url, SINK, [(0, 0, 0, 2)])
    assert [position for position, _ in sink.taken] == [0, 1]
    assert rows(database_url, "SELECT interval_id FROM millpy.sinks") != number
