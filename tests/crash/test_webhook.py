"""A worker that posts is killed and frozen around its requests: nothing is lost, and repeats are known and bounded."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import msgspec
import pytest

from millpy import Dedupe, EventTime, Graph, Http, Webhook, hours, seconds
from millpy.clock import SystemClock
from millpy.embedded import free_port
from millpy.errors import SinkUnavailableError
from millpy.process.assembly import run_worker
from millpy.sinks import SinkConnection, SinkMessages, SinkSetup
from tests.crash.cases.webhooks import POINTS, around_request
from tests.crash.conftest import Survives
from tests.crash.graph_files import rows
from tests.crash.harness import await_true
from tests.crash.posts import listens
from tests.crash.test_lookups import execute, until
from tests.crash.test_sinks import LIMITS, Copies, until_true
from tests.crash.world import Case
from tests.feed import Feed
from tests.webhook_receiver import WebhookReceiver


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize(
    ("point", "batch"), [*((point, "") for point in POINTS), ("arrived", "json"), ("sent", "json")]
)
def test_a_kill_around_a_request_loses_nothing_and_repeats_only_known_ids(
    survives: Survives, point: str, batch: str
) -> None:
    verdict = survives(
        Case("SIGKILL around a request", point, partial(around_request, point=point, batch=batch, number=400))
    )
    assert verdict.kills + verdict.idle_kills == 1  # all may be in the outbox already


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("point", ["arrived", "answered"])
def test_a_frozen_worker_that_wakes_up_repeats_only_known_ids(survives: Survives, point: str) -> None:
    survives(Case("SIGSTOP", point, partial(around_request, point=point, batch="", frozen=True, number=400)))


class Reading(msgspec.Struct):
    device: str
    at: int
    value: float
    request: str = ""


@asynccontextmanager
async def working(url: str, graph: Graph) -> AsyncIterator[None]:
    stop = asyncio.Event()
    worker = asyncio.create_task(run_worker(graph, url, limits=LIMITS, stop=stop))
    try:
        yield
    finally:
        stop.set()
        await worker


def reading(device: str, value: float) -> bytes:
    return msgspec.json.encode(Reading(device, 1_000, value))


async def test_a_refused_record_is_a_dead_letter_and_its_replay_is_posted(database_url: str, tmp_path: Path) -> None:
    feed = Feed()
    with WebhookReceiver(tmp_path) as receiver:
        graph = Graph("plant")
        event_time = EventTime("at", unit="s", max_disorder=seconds(0))
        stream = graph.inject("readings", feed, schema=Reading, event_time=event_time)
        stream.to_webhook(receiver.url, key="device", name="to_hook", intervals=1)
        receiver.plan(match={'"value":-1.0': {"status": 422, "body": "below zero"}, '"value":5.0': {"status": 500}})
        async with working(database_url, graph):
            feed.push(*[reading("a", float(value)) for value in (0, -1, 1)], reading("b", 5.0), reading("c", 6.0))
            letters = "SELECT computation, reason, payload FROM millpy.dead_letters WHERE state = 'open'"
            await until(database_url, letters, [("to_hook", "refused", reading("a", -1.0))])
            values = "SELECT messages + refused FROM millpy.sinks"
            await until(database_url, values, [(1,)])  # the one that the receiver cannot digest waits alone
            assert {stored.body for stored in receiver.stored()} == {
                reading("a", 0.0), reading("a", 1.0), reading("c", 6.0)
            }  # fmt: skip
            receiver.plan()
            execute(
                database_url, "SELECT millpy.replay_dead_letters(ARRAY(SELECT dead_letter_id FROM millpy.dead_letters))"
            )
            await until(database_url, values, [(0,)])
            await until(database_url, letters, [])
            await until_true(lambda: len(receiver.stored()) == 5, receiver.stored)
            await until(database_url, values, [(0,)])
    assert len({stored.id for stored in receiver.stored()}) == 5
    assert rows(database_url, "SELECT DISTINCT balanced FROM millpy.accounting") == [(True,)]


async def send_at_last(connection: SinkConnection, messages: SinkMessages) -> None:
    """Send messages, again while the other side is not there yet, as the runtime does."""
    while True:
        try:
            return await connection.send(messages)
        except SinkUnavailableError as away:
            await asyncio.sleep(min(away.retry_after_s or 0.1, 1))


async def test_the_source_of_another_graph_counts_repeated_requests_once(database_url: str) -> None:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    graph = Graph("receiver")
    graph.inject(
        "posted",
        Http("/posted", key_field="request", url=url),
        schema=Reading,
        event_time=EventTime("at", unit="s", max_disorder=seconds(0)),
        dedupe=Dedupe("request", within=hours(1)),
    ).key_by("device").process(Copies(), name="copies", output=Reading).to_table("copies")
    bodies: list[bytes | None] = [reading("a", 1.0), reading("b", 2.0), reading("c", 3.0)]
    messages = SinkMessages(7, [b"a", b"b", b"c"], bodies, [0] * 3)
    async with working(database_url, graph):
        await asyncio.to_thread(await_true, lambda: listens(port), "it listens")
        for batch in (None, "json", None, "json"):
            setup = SinkSetup("plant", "out" if batch else "single", 0, 1, 1, SystemClock())
            connection = Webhook(url + "/posted", batch=batch).connect(setup)
            await connection.open()
            await send_at_last(connection, messages)
            await connection.close()
        await until(database_url, "SELECT device, count(*) FROM receiver.copies GROUP BY 1 ORDER BY 1",
                    [("a", 2), ("b", 2), ("c", 2)])  # fmt: skip
