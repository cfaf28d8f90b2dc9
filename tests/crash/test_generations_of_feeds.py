"""Two generations of one graph on one broker: killed, switched and dropped, each counts every record exactly once."""

from __future__ import annotations

import asyncio
import itertools
import json
import re
import threading
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import aiomqtt
from aiokafka import AIOKafkaProducer

from millpy.embedded import EmbeddedBroker
from millpy.hosting.failpoints import Failpoint
from tests.commands import millpy, millpy_json
from tests.crash.graph_files import one, rows
from tests.crash.harness import Worker, await_true
from tests.kafka_server import KafkaServer
from tests.kafka_topics import make_topic

HEAD = """
import msgspec
from millpy import *

class Reading(msgspec.Struct):
    line: str
    id: int
    at: int

graph = Graph("plant")
"""
KAFKA = """
readings = graph.inject(
    "readings", Kafka("{topic}", partitions=2, brokers=KafkaBrokers("{address}")), schema=Reading,
    event_time=EventTime("at", unit="s", sorted=True),
)
readings.key_by("line").window(FixedWindows(minutes(1))).aggregate(n=Count(), total=Sum("id")).to_table("sums")
"""
MQTT = """
class Same(Computation):
    def process_record(self, context, record):
        context.produce(record)

def of(line, **names):
    return graph.inject(
        line, Mqtt(line + "/{{line}}", host="127.0.0.1", port={port}, **names), schema=Reading,
        event_time=EventTime("at", unit="s", max_disorder=hours(1)), dedupe=Dedupe("id", within=hours(2)),
    )

both = of("a").union(of("b", session=MqttSession(client_id="ours")))
graph.process(Same(), name="same", inputs=[both.key_by("line")], output=Reading).to_table("seen")
"""
SECOND = ('Graph("plant")', 'Graph("plant", generation=2)')
LINES = ("a", "b")
WINDOWS = (60, 120)
"""In seconds: of the first generation, and of the second."""


def consumed(url: str, graph: str) -> int:
    by_steps = f"graph = '{graph}' AND consumer IS NOT NULL"
    return int(one(url, f"SELECT coalesce(sum(consumed), 0) FROM millpy.accounting WHERE {by_steps}"))


async def produce(address: str, topic: str, ids: Sequence[int]) -> None:
    """Yield a record of each line every second, each line in its own partition."""
    producer = AIOKafkaProducer(bootstrap_servers=address, linger_ms=5, enable_idempotence=True)
    await producer.start()
    try:
        for number in ids:
            for place, line in enumerate(LINES):
                value = json.dumps({"line": line, "id": number, "at": number})
                await producer.send(topic, value.encode(), partition=place)
    finally:
        await producer.stop()


def sums(end: int, size: int) -> list[tuple[str, int, int, int]]:
    """Return the expected (line, window start, count, sum of ids) of the records below `end`."""
    found: dict[tuple[str, int], list[int]] = defaultdict(list)
    for line, number in itertools.product(LINES, range(end)):
        found[line, number - number % size].append(number)
    return sorted((line, start, len(ids), sum(ids)) for (line, start), ids in found.items())


def test_two_generations_of_a_topic_are_exact_through_kills_and_a_switch(
    tmp_path: Path, database_url: str, kafka: KafkaServer
) -> None:
    topic, part = "two_generations", 3_000
    asyncio.run(make_topic(kafka.address, topic, 2))
    text = HEAD + KAFKA.format(topic=topic, address=kafka.address)
    (tmp_path / "old.py").write_text(text)
    (tmp_path / "new.py").write_text(text.replace(*SECOND).replace("minutes(1)", "minutes(2)"))

    def worker(file: str, failpoint: str = "") -> Worker:
        return Worker(tmp_path, database_url, tmp_path, graph=tmp_path / file, failpoint=failpoint)

    for file in ("old.py", "new.py"):
        millpy("deploy", str(tmp_path / file), "--database", database_url)
    asyncio.run(produce(kafka.address, topic, range(part)))
    with (
        worker("old.py", f"{Failpoint.AFTER_COMMIT}:15:kill") as old,
        worker("new.py", f"{Failpoint.BEFORE_COMMIT}:20:kill") as new,
    ):
        old.await_killed()
        new.await_killed()
    with worker("old.py") as old, worker("new.py", f"{Failpoint.AFTER_FENCE}:12:kill") as new:
        asyncio.run(produce(kafka.address, topic, range(part, 2 * part)))
        new.await_killed()
        old.await_while_running(lambda: consumed(database_url, "plant") > 2 * part, "the old one reads")
        millpy("switch", "plant", "2", "--anyway", "--database", database_url)
        old.await_while_running(lambda: "starting again" in old.log, "it knows")
        old.kill()
    with worker("old.py") as old, worker("new.py") as new:
        end = 3 * part
        asyncio.run(produce(kafka.address, topic, [*range(2 * part, end), 10 * end]))  # the last one ends all windows
        for graph, process in (("plant_1", old), ("plant", new)):
            process.await_while_running(lambda graph=graph: consumed(database_url, graph) == 2 * end + 2, "all of it")
        old.drain()
        old.await_finished()
        select = (
            "SELECT line, extract(epoch FROM window_start)::int, n, total::int8 FROM {}.sums_status WHERE is_final"
            " ORDER BY 1, 2"
        )
        final = "SELECT count(*) FROM {}.sums_status WHERE is_final"
        for graph, size in zip(("plant_1", "plant"), WINDOWS, strict=True):
            await_true(
                lambda graph=graph, size=size: one(database_url, final.format(graph)) == 2 * end // size, "closed"
            )
            assert rows(database_url, select.format(graph)) == sums(end, size)
        assert rows(database_url, "SELECT * FROM millpy.accounting WHERE NOT balanced") == []

        said = millpy("drop", "plant_1", "--yes", "--database", database_url)
        assert "MQTT" not in said
        asyncio.run(produce(kafka.address, topic, [10 * end + 1]))
        new.await_while_running(lambda: consumed(database_url, "plant") == 2 * end + 4, "the new one runs on")


class Publisher(threading.Thread):
    """Publishes readings of both lines, QoS 1, from number `count` on, until it is stopped."""

    def __init__(self, port: int, count: int) -> None:
        super().__init__(daemon=True)
        self.port, self.count = port, count
        self.ending = threading.Event()

    def run(self) -> None:
        asyncio.run(self._publish())

    async def _publish(self) -> None:
        async with aiomqtt.Client("127.0.0.1", self.port) as client:
            while not self.ending.is_set():
                for place, line in enumerate(LINES):
                    reading = {"id": 2 * self.count + place, "at": self.count}
                    await client.publish(f"{line}/{line}", json.dumps(reading), qos=1)
                self.count += 1
                await asyncio.sleep(0.002)


@contextmanager
def publishing(port: int, count: int = 0) -> Iterator[Publisher]:
    publisher = Publisher(port, count)
    publisher.start()
    try:
        yield publisher
    finally:
        publisher.ending.set()
        publisher.join(30)


def seen(url: str, graph: str, line: str) -> list[int]:
    """Ids of a line, in order; each row one."""
    return [row[0] // 2 for row in rows(url, f"SELECT id FROM {graph}.seen WHERE line = '{line}' ORDER BY id")]


def newest(url: str, graph: str, line: str) -> int:
    return max(seen(url, graph, line), default=-1)


def sessions(broker: EmbeddedBroker) -> set[str]:
    """Client ids that were ever connected as readers."""
    found = re.findall(r"client connected from \S+ as (\S+)", (broker.directory / "broker.log").read_text())
    return {name for name in found if not name.startswith("auto-")}


def test_two_generations_on_a_broker_lose_nothing_through_kills_a_switch_and_a_drop(
    tmp_path: Path, database_url: str, quick_broker: EmbeddedBroker
) -> None:
    text = HEAD + MQTT.format(port=quick_broker.port)
    (tmp_path / "old.py").write_text(text)
    (tmp_path / "new.py").write_text(text.replace(*SECOND))

    def worker(file: str, failpoint: str = "") -> Worker:
        return Worker(tmp_path, database_url, tmp_path, graph=tmp_path / file, failpoint=failpoint)

    for file in ("old.py", "new.py"):
        millpy("deploy", str(tmp_path / file), "--database", database_url)
    with publishing(quick_broker.port) as publisher:
        with worker("old.py") as old:
            old.await_while_running(lambda: all(seen(database_url, "plant", line) for line in LINES), "it reads both")
            first = {line: seen(database_url, "plant", line)[0] for line in LINES}
            of_the_first = sessions(quick_broker)
            old.kill()
        with (
            worker("old.py", f"{Failpoint.AFTER_COMMIT}:15:kill") as old,
            worker("new.py", f"{Failpoint.BEFORE_COMMIT}:20:kill") as new,
        ):
            old.await_killed()
            new.await_killed()
        with worker("old.py") as old, worker("new.py", f"{Failpoint.AFTER_COMMIT}:30:kill") as new:
            new.await_killed()
            with worker("new.py") as new:
                new.await_while_running(lambda: consumed(database_url, "plant_2") > 500, "it runs on")
                millpy("switch", "plant", "2", "--anyway", "--database", database_url)
                before = publisher.count
                old.await_while_running(lambda: newest(database_url, "plant_1", "b") > before + 50, "after the switch")
                new.await_while_running(lambda: newest(database_url, "plant", "b") > before + 50, "after the switch")
                old.kill()
        with worker("old.py") as old, worker("new.py") as new:
            publisher.ending.set()
            publisher.join(30)
            for graph, process in (("plant_1", old), ("plant", new)):
                for line in LINES:
                    process.await_while_running(
                        lambda graph=graph, line=line: newest(database_url, graph, line) == publisher.count - 1, "all"
                    )
            old.drain()
            old.await_finished()
            for line in LINES:
                assert seen(database_url, "plant_1", line) == list(range(first[line], publisher.count))
                later = seen(database_url, "plant", line)
                assert later == list(range(later[0], publisher.count))
                assert later[0] > first[line], "it began while the other one ran"
            assert rows(database_url, "SELECT * FROM millpy.accounting WHERE NOT balanced") == []

            left = millpy_json("drop", "plant_1", "--yes", "--database", database_url)["mqtt_sessions"]
            end = publisher.count
            with publishing(quick_broker.port, end):
                new.await_while_running(lambda: newest(database_url, "plant", "b") > end, "the new one runs on")
    assert {left[0], "ours"} == of_the_first  # the database does not store a name that the user gave
    of_the_second = sessions(quick_broker) - of_the_first
    assert "ours_2" in of_the_second
    assert len(of_the_second) == 2
    assert any(re.fullmatch(r"millpy-plant_2-a-[0-9a-f]{32}", name) for name in of_the_second)
