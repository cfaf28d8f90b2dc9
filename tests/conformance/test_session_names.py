"""Sessions at a broker have names that only a deployment's workers know: who knows one can end it, rights or not."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import aiomqtt
import msgspec
import psycopg
import pytest
import xxhash
from psycopg import sql

from millpy import Count, EventTime, FixedWindows, Graph, Mqtt, seconds
from millpy.config.access import Login
from millpy.process.assembly import deploy
from millpy.sources.mqtt.inbox import MARKER_PREFIX
from millpy.sources.mqtt.source import session_name
from millpy.store.memory.store import MemoryDatabase, MemoryStore
from millpy.store.postgres.deployment.migrate import migrate
from millpy.store.postgres.store import PostgresStore
from tests.conformance.guarded_broker import PASSWORD, GuardedBroker
from tests.conformance.mqtt_subject import an_injector, publish, take_payloads

FILTER, SECRET, COUNT = "sensors/#", "f2c1c8b4-7c1b-4c39-9a3e-0d6a6f7d9a11", 100
FLEET = {"username": "fleet", "password": PASSWORD}
READINGS = [b"%d" % n for n in range(COUNT)]


class Reading(msgspec.Struct):
    device: str
    at: float


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[GuardedBroker]:
    with GuardedBroker(tmp_path / "broker") as broker:
        yield broker


async def queue_up(broker: GuardedBroker) -> None:
    """A session with readings that the broker has acknowledged to a device, and whose reader is away."""
    reader = an_injector(broker.port, filter=FILTER, secret=SECRET, login=Login("millpy", PASSWORD))
    await reader.open(None)
    await reader.close()
    await publish(broker.port, READINGS, client=FLEET)


async def come_as(broker: GuardedBroker, name: str) -> None:
    """Take a session's name with a clean start, as a device."""
    async with aiomqtt.Client(
        "127.0.0.1", broker.port, identifier=name, protocol=aiomqtt.ProtocolVersion.V5, clean_start=True, **FLEET
    ):
        pass


def guesses() -> Iterator[str]:
    """What can be made of the graph's file and the source code."""
    ending = xxhash.xxh3_64_hexdigest(FILTER.encode())
    for name in ("g", "g_2", "s"):
        yield f"millpy-{name}-s-{ending[:8]}"
        yield f"millpy-{name}-s-{ending}"
        yield f"millpy-{name}-s"
        for secret in ("", "g", "s", FILTER, "0", "None"):
            yield session_name(name, "s", FILTER, secret)


async def test_a_device_cannot_guess_a_session_name_to_end_it(guarded: GuardedBroker) -> None:
    await queue_up(guarded)

    for name in guesses():
        await come_as(guarded, name)

    reader = an_injector(guarded.port, filter=FILTER, secret=SECRET, login=Login("millpy", PASSWORD))
    await reader.open(None)
    assert await take_payloads(reader, COUNT) == READINGS
    await reader.close()


async def test_client_with_the_session_name_does_end_it(guarded: GuardedBroker) -> None:
    # Else the test above shows nothing.
    await queue_up(guarded)

    await come_as(guarded, session_name("g", "s", FILTER, SECRET))

    await publish(guarded.port, [b"last"], client=FLEET)
    reader = an_injector(guarded.port, filter=FILTER, secret=SECRET, login=Login("millpy", PASSWORD))
    await reader.open(None)
    await publish(guarded.port, [b"new"], client=FLEET)
    assert await take_payloads(reader, 1) == [b"new"]
    await reader.close()


async def test_a_device_reads_no_message_or_marker_with_a_session_name(guarded: GuardedBroker) -> None:
    seen: list[str] = []

    async def listen(client: aiomqtt.Client) -> None:
        async for message in client.messages:
            seen.append(str(message.topic))

    name = session_name("g", "s", FILTER, SECRET)
    async with (
        aiomqtt.Client("127.0.0.1", guarded.port, **FLEET) as device,
        aiomqtt.Client("127.0.0.1", guarded.port, username="millpy", password=PASSWORD) as ours,
    ):
        listening = [asyncio.create_task(listen(device))]
        for topic in ("#", "sensors/#", "millpy/#", "$SYS/#", f"{MARKER_PREFIX}#"):
            await device.subscribe(topic, qos=1)
        markers: list[str] = []
        heard = asyncio.Event()

        async def hear() -> None:
            async for message in ours.messages:
                markers.append(str(message.topic))
                heard.set()

        await ours.subscribe(f"{MARKER_PREFIX}#")
        listening.append(asyncio.create_task(hear()))
        reader = an_injector(guarded.port, filter=FILTER, secret=SECRET, login=Login("millpy", PASSWORD))
        await reader.open(None)
        await publish(guarded.port, READINGS, client=FLEET)
        assert await take_payloads(reader, COUNT) == READINGS
        async with asyncio.timeout(60):
            await heard.wait()
        await reader.close()
        for task in listening:
            task.cancel()
        await asyncio.gather(*listening, return_exceptions=True)

    assert seen == []
    assert not any(name in topic or name[-32:] in topic for topic in markers)


def plant() -> Graph:
    graph = Graph("plant")
    event_time = EventTime("at", unit="s", max_disorder=seconds(1))
    readings = graph.inject("readings", Mqtt(FILTER), schema=Reading, event_time=event_time)
    readings.key_by("device").window(FixedWindows(seconds(10))).aggregate(n=Count()).to_table("counts")
    return graph


async def test_workers_of_one_deployment_share_a_secret_of_their_own(
    database_url: str, empty_database_url: str
) -> None:
    migrate(empty_database_url)
    secrets = []
    for url in (database_url, database_url, empty_database_url):
        async with PostgresStore(url) as store:
            deployment = await store.deploy(plant().spec())
            secrets.append(deployment.secret)
            assert deployment.secret not in repr(deployment)

    assert secrets[0] == secrets[1] != secrets[2]
    assert all(len(secret) == 36 for secret in secrets)


async def test_a_graph_that_is_dropped_and_deployed_again_has_another_secret(database_url: str) -> None:
    async with PostgresStore(database_url) as store:
        before = (await store.deploy(plant().spec())).secret
        result = await store.drop("plant")
        after = (await store.deploy(plant().spec())).secret

    assert result.secret == before != after


async def test_a_reader_cannot_see_the_secret(empty_database_url: str) -> None:
    migrate(empty_database_url, role_prefix="secretive")
    await deploy(plant(), empty_database_url)
    with psycopg.connect(empty_database_url, autocommit=True) as connection:
        ((secret,),) = connection.execute("SELECT secret::text FROM mill.graphs").fetchall()
        relations = connection.execute(
            "SELECT schemaname, viewname FROM pg_views WHERE schemaname IN ('millpy', 'plant')"
            " UNION ALL SELECT schemaname, tablename FROM pg_tables WHERE schemaname = 'mill'"
        ).fetchall()
        connection.execute("SET ROLE secretive_reader")
        refused = 0
        for schema, name in relations:
            try:
                found = connection.execute(
                    sql.SQL("SELECT t::text FROM {} AS t").format(sql.Identifier(schema, name))
                ).fetchall()
            except psycopg.errors.InsufficientPrivilege:
                refused += 1
                continue
            assert not any(secret in row[0] for row in found), name
        connection.execute("SET ROLE secretive_worker")
        assert connection.execute("SELECT secret::text FROM mill.graphs").fetchall() == [(secret,)]
    assert refused


async def test_memory_store_deploys_with_a_secret_too() -> None:
    store = MemoryStore(MemoryDatabase())
    await store.open()

    assert (await store.deploy(plant().spec())).secret
