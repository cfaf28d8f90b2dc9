"""Sinks of a real worker: statements inside the commit, and messages that leave after it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import msgspec
import pytest

from millpy import Computation, Context, EventTime, Graph, seconds
from millpy.errors import ConfigError, GraphError, SegmentChecksumError, SinkUnavailableError
from millpy.limits import Limits
from millpy.process.assembly import deploy, run_worker
from millpy.sinks.messages import SinkMessages
from millpy.sinks.protocol import SendBound, Sink, SinkSetup
from millpy.store.postgres.store import PostgresStore
from tests.crash.cases.sinks import in_send
from tests.crash.conftest import Survives
from tests.crash.graph_files import rows
from tests.crash.test_lookups import execute, until
from tests.crash.world import Case
from tests.feed import Feed
from tests.kafka_server import KafkaServer

LIMITS = Limits(progress_every_s=0.02, fold_every_s=0.05, lease_ttl_s=2)
TABLE = """
CREATE SCHEMA app;
CREATE TABLE app.newest (device text PRIMARY KEY, value double precision CHECK (value < 100), changes bigint NOT NULL);
CREATE TABLE app.log (number bigint GENERATED ALWAYS AS IDENTITY, device text, value double precision);
"""
UPSERT = """
WITH logged AS (INSERT INTO app.log (device, value) VALUES (%(device)s, %(value)s))
INSERT INTO app.newest AS n VALUES (%(device)s, %(value)s, 1)
ON CONFLICT (device) DO UPDATE SET value = excluded.value, changes = n.changes + 1 -- 100 %%
"""


class Reading(msgspec.Struct):
    device: str
    at: int
    value: float


class Copies(Computation):
    def process_record(self, context: Context, record: Any) -> None:
        context.produce(record)


def readings(graph: Graph, feed: Feed) -> Any:
    return graph.inject("readings", feed, schema=Reading, event_time=EventTime("at", unit="s", max_disorder=seconds(0)))


def statement_graph(feed: Feed, statement: str = UPSERT) -> Graph:
    graph = Graph("plant")
    readings(graph, feed).to_sql(statement, key="device", name="to_app")
    return graph


def reading(device: str, value: float, at: int = 1_000) -> bytes:
    return msgspec.json.encode(Reading(device, at, value))


@asynccontextmanager
async def working(url: str, build: Callable[[], Graph], limits: Limits = LIMITS) -> AsyncIterator[None]:
    stop = asyncio.Event()
    worker = asyncio.create_task(run_worker(build(), url, limits=limits, stop=stop))
    try:
        yield
    finally:
        stop.set()
        await worker


async def test_a_statement_runs_once_for_each_record_and_a_refused_one_is_a_dead_letter(database_url: str) -> None:
    execute(database_url, TABLE)
    feed = Feed()
    async with working(database_url, lambda: statement_graph(feed)):
        feed.push(*[reading("a", float(value)) for value in range(5)], reading("b", 100.0), reading("b", 7.5))
        newest = "SELECT device, value, changes FROM app.newest ORDER BY device"
        await until(database_url, newest, [("a", 4.0, 5), ("b", 7.5, 1)])
        assert rows(database_url, "SELECT value FROM app.log WHERE device = 'a' ORDER BY number") == [
            (float(value),) for value in range(5)
        ]
        letters = "SELECT computation, stream, reason, payload FROM millpy.dead_letters"
        assert rows(database_url, letters) == [("to_app", "readings", "refused", reading("b", 100.0))]
        execute(database_url, "ALTER TABLE app.newest DROP CONSTRAINT newest_value_check")
        execute(
            database_url, "SELECT millpy.replay_dead_letters(ARRAY(SELECT dead_letter_id FROM millpy.dead_letters))"
        )
        await until(database_url, newest, [("a", 4.0, 5), ("b", 100.0, 2)])
        assert rows(database_url, "SELECT DISTINCT balanced FROM millpy.accounting") == [(True,)]
        execute(database_url, "DROP TABLE app.log")
        feed.push(reading("c", 1.0))
        await asyncio.sleep(0.3)
        execute(database_url, "CREATE TABLE app.log (device text, value double precision)")
        await until(database_url, newest, [("a", 4.0, 5), ("b", 100.0, 2), ("c", 1.0, 1)])
        assert rows(database_url, "SELECT sink, kind, state, messages FROM millpy.sinks GROUP BY 1, 2, 3, 4") == [
            ("to_app", "sql", "running", 0)
        ]


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("(SELECT n.value FROM app.names AS n WHERE n.name = %(device)s)", "more than one row"),
        ("length(CAST(to_tsquery(%(device)s) AS text))", "syntax error in tsquery"),
        ("length(CAST(CAST(NULLIF(%(device)s, 'a') AS regconfig) AS text))", "invalid name syntax"),
        ("length(CAST(CAST(replace(NULLIF(%(device)s, 'a'), ' ', '') AS regclass) AS text))", "does not exist"),
        ("CAST(CAST(replace(NULLIF(%(device)s, 'a'), 'b c', 'NaN') AS numeric) AS bigint)", "cannot convert NaN"),
    ],
)
async def test_a_record_for_which_a_statement_fails_in_an_unusual_way_is_a_dead_letter(
    database_url: str, value: str, said: str
) -> None:
    execute(database_url, TABLE)
    execute(database_url, "CREATE TABLE app.names AS VALUES ('a', 1.0), ('b c', 2.0), ('b c', 3.0)")
    execute(database_url, "ALTER TABLE app.names RENAME column1 TO name")
    execute(database_url, "ALTER TABLE app.names RENAME column2 TO value")
    feed = Feed()
    statement = f"INSERT INTO app.log (device, value) VALUES (%(device)s, {value})"
    async with working(database_url, lambda: statement_graph(feed, statement)):
        feed.push(reading("a", 1.0), reading("b c", 2.0), reading("a", 3.0))
        await until(database_url, "SELECT device FROM app.log", [("a",), ("a",)])
        ((payload, detail),) = rows(database_url, "SELECT payload, detail FROM millpy.dead_letters")
        assert (payload, said in detail) == (reading("b c", 2.0), True)


async def test_a_statement_without_its_index_waits_and_makes_no_dead_letter(database_url: str) -> None:
    execute(database_url, TABLE)
    feed = Feed()
    async with working(database_url, lambda: statement_graph(feed)):
        feed.push(reading("a", 1.0))
        await until(database_url, "SELECT changes FROM app.newest", [(1,)])
        execute(database_url, "ALTER TABLE app.newest DROP CONSTRAINT newest_pkey")
        feed.push(reading("a", 2.0), reading("a", 3.0))
        refusals = "SELECT DISTINCT kind FROM millpy.events WHERE kind = 'results_refused'"
        await until(database_url, refusals, [("results_refused",)])
        execute(database_url, "ALTER TABLE app.newest ADD PRIMARY KEY (device)")
        await until(database_url, "SELECT changes FROM app.newest", [(3,)])
        assert rows(database_url, "SELECT count(*) FROM millpy.dead_letters") == [(0,)]


@pytest.mark.parametrize(
    ("statement", "said"),
    [
        ("INSERT INTO app.nothing VALUES (%(device)s)", "does not exist"),
        ("UPDATE app.newest SET value = %(device)s", "double precision"),
        ("CALL app.nothing(%(device)s)", "does not exist"),
        ("SELECT 1; COMMIT", "multiple commands"),
        ("INSERT INTO newest VALUES (%(device)s)", "does not exist"),
        ("INSERT INTO app.log (value, device) VALUES (%(value)s, '%(device)s')", "is in quotes or in a comment"),
        ("INSERT INTO app.log (device, value) VALUES ('%(device)s', %(value)s)", "data type of parameter"),
    ],
)
async def test_the_database_reads_a_statement_when_it_is_deployed(database_url: str, statement: str, said: str) -> None:
    execute(database_url, TABLE)
    with pytest.raises(GraphError, match=said):
        async with asyncio.timeout(30):
            await run_worker(statement_graph(Feed(), statement), database_url, limits=LIMITS, stop=asyncio.Event())


class Recorder(Sink):
    """A place that keeps what it gets, and may fail, be slow or remember a position."""

    bound = SendBound(records=7)

    def __init__(self, *, remembers: bool = False) -> None:
        self.remembers = remembers
        self.taken: list[SinkMessages] = []
        self.fails = 0
        self.open = asyncio.Event()
        self.open.set()

    def identity(self) -> dict[str, Any]:
        return {"kind": "recorder"}

    def connect(self, setup: SinkSetup) -> RecorderConnection:
        return RecorderConnection(self, setup)

    def values(self, device: str | None = None) -> list[float]:
        """What it got, of all devices or one, without repeated positions."""
        found = {
            (str(messages.headers_of(place)), messages.positions[place]): messages.values[place]
            for messages in self.taken
            for place in range(len(messages))
            if device in (None, (messages.keys[place] or b"").decode())
        }
        return [msgspec.json.decode(value or b"")["value"] for value in found.values()]


class RecorderConnection:
    def __init__(self, sink: Recorder, setup: SinkSetup) -> None:
        self.sink, self.setup = sink, setup

    async def open(self) -> int | None:
        if not self.sink.remembers:
            return None
        return max((messages.end for messages in self.sink.taken), default=0)

    async def send(self, messages: SinkMessages) -> None:
        await self.sink.open.wait()
        if self.sink.fails:
            self.sink.fails -= 1
            if self.sink.fails % 2:
                self.sink.taken.append(messages)
            raise SinkUnavailableError("the place is away")
        self.sink.taken.append(messages)

    async def close(self) -> None:
        return


def outbox_graph(feed: Feed, sink: Recorder, generation: int = 1) -> Graph:
    graph = Graph("plant", generation=generation)
    readings(graph, feed).to_sink(sink, key="device", name="out", intervals=1)
    return graph


async def until_true(holds: Callable[[], bool], what: Callable[[], Any]) -> None:
    try:
        async with asyncio.timeout(30):
            while True:
                if holds():
                    return
                await asyncio.sleep(0.01)
    except TimeoutError:
        raise AssertionError(what()) from None


@pytest.mark.parametrize("remembers", [False, True])
async def test_messages_come_in_order_and_repeat_only_within_one_send(database_url: str, remembers: bool) -> None:
    feed, sink = Feed(), Recorder(remembers=remembers)
    sink.fails = 5
    expected: list[float] = []
    for start in (0, 50):  # the second worker continues behind the first
        async with working(database_url, lambda: outbox_graph(feed, sink)):
            for value in range(start, start + 50):
                feed.push(reading("a", float(value)))
                expected.append(float(value))
                if value % 10 == 0:
                    await asyncio.sleep(0.02)
            await until_true(lambda: sink.values() == expected, lambda: (sink.values(), expected))
            await until(database_url, "SELECT sum(messages), sum(delivered) FROM millpy.sinks", [(0, start + 50)])
            await until(database_url, "SELECT count(*) FROM mill.outbox", [(0,)])
    repeated = sum(map(len, sink.taken)) - len(expected)
    assert repeated <= (0 if remembers else 2 * sink.bound.records)  # two sends have failed after they had arrived
    assert rows(database_url, "SELECT DISTINCT balanced FROM millpy.accounting") == [(True,)]


async def test_a_full_outbox_makes_its_input_wait_and_nothing_else(database_url: str) -> None:
    feed, sink = Feed(batch_max=20), Recorder()
    sink.open.clear()
    limits = replace(LIMITS, outbox_records_max=100, bundle_records_max=20)

    def build() -> Graph:
        graph = Graph("plant")
        source = readings(graph, feed)
        source.to_sink(sink, key="device", name="out", intervals=1)
        source.key_by("device").process(Copies(), name="copies", output=Reading).to_table("copies")
        return graph

    async with working(database_url, build, limits):
        feed.push(*[reading("a", float(value)) for value in range(1_000)])
        await until(database_url, "SELECT count(*) FROM plant.copies", [(1_000,)])
        ((waiting, backlog),) = rows(
            database_url,
            "SELECT messages, (SELECT sum(records) FROM millpy.backlog WHERE consumer = 'out') FROM millpy.sinks",
        )
        assert 100 < waiting <= 160, (waiting, backlog)
        assert waiting + backlog == 1_000
        sink.open.set()
        expected = [float(value) for value in range(1_000)]
        await until_true(lambda: sink.values() == expected, lambda: len(sink.values()))


@pytest.mark.parametrize("point", ["produced", "committed"])
def test_a_kill_around_the_commit_of_a_transaction_loses_and_doubles_nothing(
    survives: Survives, kafka: KafkaServer, point: str
) -> None:
    verdict = survives(
        Case("SIGKILL in a send to Kafka", point, partial(in_send, point=point, server=kafka, number=400))
    )
    assert verdict.kills + verdict.idle_kills == 1  # all may be in the outbox already


async def test_a_damaged_outbox_ends_its_worker_with_the_reason(database_url: str) -> None:
    """A drain that ends alone would leave the messages where they are, and the worker would look well."""
    feed, sink = Feed(), Recorder()
    sink.open.clear()
    async with working(database_url, lambda: outbox_graph(feed, sink)):
        feed.push(reading("a", 1.0))
        await until(database_url, "SELECT count(*) FROM mill.outbox", [(1,)])
    execute(database_url, "UPDATE mill.outbox SET payload = overlay(payload PLACING '\\x00'::bytea FROM 3)")
    sink.open.set()
    with pytest.raises(SegmentChecksumError, match="the messages at position 0 of an outbox are damaged"):
        async with asyncio.timeout(30):
            await run_worker(outbox_graph(feed, sink), database_url, limits=LIMITS, stop=asyncio.Event())


class Unprepared(Recorder):
    """A place whose `prepare` fails: a defect, not an outage."""

    def __init__(self, failures: list[BaseException]) -> None:
        super().__init__()
        self.failures = failures

    async def prepare(self, record_types: Sequence[Any]) -> None:
        if self.failures:
            raise self.failures.pop()


async def test_a_sink_whose_prepare_has_a_defect_is_not_deployed_and_ends_no_worker_of_a_deployed_graph(
    database_url: str,
) -> None:
    feed = Feed()
    with pytest.raises(ConfigError, match="sink out fails in `prepare`: SystemExit: 0"):
        await deploy(outbox_graph(feed, Unprepared([SystemExit(0)])), database_url)
    await deploy(outbox_graph(feed, Unprepared([])), database_url)
    sink = Unprepared([SystemExit(0), ValueError("a"), SystemExit(1)])
    async with working(database_url, lambda: outbox_graph(feed, sink)):
        feed.push(reading("a", 1.0))
        await until_true(lambda: sink.values() == [1.0], lambda: sink.failures)


async def test_messages_that_wait_at_a_switch_are_the_old_generations_and_a_drop_says_how_many_it_deletes(
    database_url: str,
) -> None:
    feed, sink = Feed(), Recorder()
    sink.open.clear()
    async with working(database_url, lambda: outbox_graph(feed, sink)):
        feed.push(*[reading("a", float(value)) for value in range(20)])
        await until(database_url, "SELECT sum(messages) FROM millpy.sinks", [(20,)])
    async with PostgresStore(database_url) as store:
        await store.deploy(outbox_graph(feed, sink, generation=2).spec())
        result = await store.switch("plant", 2)
        assert result is not None
        assert result.left == ("20 messages of its sinks are not delivered: its workers deliver them",)
        would = await store.drop("plant_1", dry_run=True)
        assert (would.undelivered, would.dead_letters, would.late_records) == (20, 0, 0)

        sink.open.set()
        async with working(database_url, lambda: outbox_graph(feed, sink)):
            await until(database_url, "SELECT messages FROM millpy.sinks WHERE graph = 'plant_1'", [(0,)])
        assert sink.values() == [float(value) for value in range(20)]
        assert (await store.drop("plant_1")).undelivered == 0
