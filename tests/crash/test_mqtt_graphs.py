"""Whole graphs on a real broker: kills, restarts, outages, silence and takeovers of a session."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import aiomqtt
import psycopg
import pytest

from millpy.clock import SystemClock
from millpy.embedded import EmbeddedBroker
from millpy.ingest.protocol import SourceSetup
from millpy.ingest.settings import AdvanceWithClock
from millpy.limits import Limits
from millpy.model.time import milliseconds
from tests.crash.harness import Worker, await_true, owned_by, owners
from tests.crash.memory_world import World
from tests.crash.mqtt_graph import TABLE, counts, source

GRAPH = Path(__file__).with_name("mqtt_graph.py")
LIMITS = Limits(
    lease_ttl_s=1.0, bundle_records_max=50, progress_every_s=0.02, fold_every_s=0.2, retry_s_min=0.01, retry_s_max=0.1
)
HOUR_US = 3_600_000_000
WINDOW_US = 10_000_000
Reading = dict[str, int]
Expected = dict[tuple[str, int, int], tuple[int, int]]


def readings(count: int, first: int = 0, *, from_us: int) -> list[Reading]:
    """One a second."""
    return [{"id": first + n, "at": from_us + n * 1_000_000, "value": n * n % 97} for n in range(count)]


async def publish(port: int, topic: str, records: list[Reading], *, at_once: int = 1) -> None:
    """Each reading a message, or several in an array."""
    async with aiomqtt.Client("127.0.0.1", port) as client:
        for start in range(0, len(records), at_once):
            part = records[start : start + at_once]
            await client.publish(topic, json.dumps(part[0] if at_once == 1 else part), qos=1)


def expected_rows(feeds: dict[str, list[Reading]]) -> Expected:
    """Return the expected windows, by a plain group-by."""
    found: dict[tuple[str, int, int], list[int]] = defaultdict(list)
    for topic, records in feeds.items():
        _, site, floor = topic.split("/")
        for reading in records:
            found[site, int(floor), reading["at"] // WINDOW_US * WINDOW_US].append(reading["value"])
    return {key: (len(values), sum(values)) for key, values in found.items()}


def rows(world: World) -> Expected:
    found = world.database.rows(TABLE) if world.deployed.is_set() else []
    return {(row["site"], row["floor"], row["window_start"]): (row["n"], row["total"]) for row in found}


async def until(claim: Callable[[], bool], world: World) -> None:
    try:
        async with asyncio.timeout(60):
            while not claim():
                for task in world.running:
                    if task.done():
                        task.result()
                await asyncio.sleep(0.02)
    except TimeoutError:
        raise AssertionError(f"{world.database.accounting(world.graph_id)}, {len(rows(world))} rows") from None


def injected(world: World) -> int:
    if not world.deployed.is_set():
        return 0
    return sum(source.injected for source in world.database.accounting(world.graph_id).sources)


async def subscribe(broker: EmbeddedBroker) -> None:
    """Create both sessions, and disconnect."""
    mqtt = source(broker.port)
    for partition in mqtt.partitions():
        setup = SourceSetup(
            graph="floors", stream="readings", partition=partition, limits=LIMITS, clock=SystemClock(),
            ready=asyncio.Event(),
        )  # fmt: skip
        injector = mqtt.connect(setup)
        await injector.open(None)
        await injector.close()


async def test_every_reading_counts_once_through_kills_duplicates_and_a_broker_that_restarts(
    quick_broker: EmbeddedBroker,
) -> None:
    await subscribe(quick_broker)
    port, now = quick_broker.port, int(time.time() * 1e6)
    feeds = {
        "north/oslo/1": readings(300, 1_000, from_us=now - 3 * HOUR_US),
        "north/oslo/2": readings(300, 2_000, from_us=now - 3 * HOUR_US),
        "south/rome/1": readings(300, 3_000, from_us=now - 3 * HOUR_US),
    }
    world = World(counts(port), LIMITS)
    workers = [world.start(), world.start()]

    for topic, records in feeds.items():
        await publish(port, topic, records[:150])
    await until(lambda: injected(world) > 100, world)
    await world.crash(workers[0])
    world.start()
    for topic, records in feeds.items():
        await publish(port, topic, records[100:200], at_once=7)
    quick_broker.stop()
    quick_broker.start()
    for topic, records in feeds.items():
        await publish(port, topic, records[150:], at_once=3)
    for number, side in enumerate(("north", "south")):
        # An hour of disorder is allowed: this closes what ended before.
        await publish(port, f"{side}/last/0", readings(1, number, from_us=now))
    await until(lambda: rows(world) == expected_rows(feeds), world)
    account = world.database.accounting(world.graph_id).sources
    world.stop.set()
    await world.finish()

    assert sum(partition.accepted for partition in account) == 902
    assert sum(partition.dead_lettered for partition in account) == 0
    assert world.adds_up()
    assert not world.database.late_records


async def test_messages_queued_during_an_outage_are_not_late_and_silence_closes_their_windows(
    quick_broker: EmbeddedBroker,
) -> None:
    await subscribe(quick_broker)
    feed = {"north/oslo/1": readings(600, from_us=int(time.time() * 1e6) - HOUR_US)}
    await publish(quick_broker.port, "north/oslo/1", feed["north/oslo/1"])
    # Many turns of 20 records, and a policy that would carry the watermark past them all between two of them.
    limits = dataclasses.replace(LIMITS, bundle_records_max=20)
    world = World(counts(quick_broker.port, AdvanceWithClock(milliseconds(1)), disorder_s=0), limits)
    world.start()

    await until(lambda: rows(world) == expected_rows(feed), world)
    world.stop.set()
    await world.finish()

    assert not world.database.late_records


async def test_invalid_element_of_an_array_is_dead_lettered_alone(quick_broker: EmbeddedBroker) -> None:
    await subscribe(quick_broker)
    now = int(time.time() * 1e6)
    good = readings(3, from_us=now - HOUR_US)
    payload = [good[0], {"id": "x"}, good[1], good[1], good[2]]
    async with aiomqtt.Client("127.0.0.1", quick_broker.port) as client:
        await client.publish("north/oslo/1", json.dumps(payload), qos=1)
        await client.publish("north/oslo/attic", json.dumps(good[0]), qos=1)
    world = World(counts(quick_broker.port), LIMITS)
    world.start()

    await until(lambda: injected(world) == 6, world)
    world.stop.set()
    await world.finish()

    counted = world.database.accounting(world.graph_id).sources
    assert sum(partition.accepted for partition in counted) == 3
    assert sum(partition.duplicate for partition in counted) == 1
    dead_letters = [dead_letter for _, _, dead_letter in world.database.dead_letters]
    assert [dead_letter.position.partition(" ")[0] for dead_letter in dead_letters] == [
        "north/oslo/1",
        "north/oslo/attic",
    ]
    assert dead_letters[0].position.endswith("[1]")
    assert json.loads(dead_letters[0].payload) == {"id": "x", "site": "oslo", "floor": 1}
    assert "floor" in dead_letters[1].detail


@pytest.mark.parametrize("protocol", [5, 311])
def test_frozen_worker_does_not_take_its_session_back(
    tmp_path: Path, database_url: str, quick_broker: EmbeddedBroker, protocol: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLOORS_PORT", str(quick_broker.port))
    monkeypatch.setenv("FLOORS_PROTOCOL", str(protocol))

    def worker() -> Worker:
        return Worker(tmp_path, database_url, Path("none"), graph=GRAPH)

    def kicks() -> int:
        return (quick_broker.directory / "broker.log").read_text().count("closing old connection")

    def connects() -> int:
        return (quick_broker.directory / "broker.log").read_text().count(" as floors")

    with worker() as frozen, worker() as heir:
        await_true(lambda: connects() >= 2 and {w for w, _ in owners(database_url).values()} != {None}, "connected")
        await_true(lambda: bool(owned_by(database_url, frozen)) and bool(owned_by(database_url, heir)), "shared", 20)
        before, lost = owners(database_url), owned_by(database_url, frozen)
        frozen.freeze()
        await_true(lambda: all(owners(database_url)[i][1] > before[i][1] for i in lost), "taken over", 20)
        frozen.thaw()
        await_true(lambda: bool(owned_by(database_url, frozen)), "the thawed one works again", 20)
        _publish_blocking(quick_broker.port, 50)
        await_true(lambda: _accepted(database_url) == 100, f"all read; {frozen.log[-2000:]} {heir.log[-2000:]}", 30)

        # At most one for each of the two sessions: when the heir connects while the frozen one still is.
        assert kicks() <= 2, (quick_broker.directory / "broker.log").read_text()


def _publish_blocking(port: int, count: int) -> None:
    records = readings(count, from_us=int(time.time() * 1e6))
    asyncio.run(publish(port, "north/oslo/1", records))
    asyncio.run(publish(port, "south/rome/1", [record | {"id": record["id"] + 1_000} for record in records]))


def _accepted(url: str) -> int:
    with psycopg.connect(url, autocommit=True) as connection:
        found = connection.execute("SELECT sum(accepted) FROM millpy.accounting").fetchone()
    return int(found[0] or 0) if found else 0
