"""A graph of two stages with a sink of each kind, its input, and what must be true of what has left.

Each device has a running sum, so a record that is lost, doubled or out of order changes all that follows. A trap kills
or freezes the process inside a `send`: before it, when Kafka has all but the commit, or behind it.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from aiokafka import AIOKafkaConsumer, TopicPartition

from millpy import Computation, Context, EventTime, File, Graph, KafkaBrokers, RefusalPolicy, Value, seconds
from millpy.errors import MessagesRefusedError
from millpy.sinks.kafka.topic import KafkaTopic
from millpy.sinks.messages import SinkMessages
from millpy.sinks.protocol import SendBound, Sink, SinkConnection, SinkSetup
from tests.crash.checks import Fault, differences
from tests.crash.graph_files import rows

NUMBER = 1_500
DEVICES = 12
PARTITIONS = 3
POINTS = ("opened", "before", "produced", "committed")
BOUND = 20
TABLE = """
CREATE SCHEMA app;
CREATE TABLE app.totals (at bigint GENERATED ALWAYS AS IDENTITY, device text, number bigint, total bigint);
"""
INSERT = "INSERT INTO app.totals (device, number, total) VALUES (%(device)s, %(number)s, %(total)s)"


class Reading(msgspec.Struct):
    number: int
    device: str
    at: int


class Total(msgspec.Struct):
    device: str
    number: int
    total: int


class Totals(Computation):
    """The running sum of each device."""

    total = Value(int, default=0)

    def process_record(self, context: Context, record: Reading) -> None:
        total = context[Totals.total] + record.number
        context[Totals.total] = total
        context.produce(Total(record.device, record.number, total))


class Trap:
    """The n-th time at a point, it kills or freezes the process; once for each process."""

    def __init__(self, text: str) -> None:
        self.point, number, action = text.split(":") if text else ("", "0", "kill")
        self.left = int(number)
        self.signal = signal.SIGKILL if action == "kill" else signal.SIGSTOP

    def reach(self, point: str) -> None:
        if point == self.point and self.left:
            self.left -= 1
            if not self.left:
                os.kill(os.getpid(), self.signal)


TRAP = Trap(os.environ.get("SINK_TRAP", ""))


class TrappedTopic(KafkaTopic):
    """A topic with a trap in each connection."""

    __slots__ = ()

    def connect(self, setup: SinkSetup) -> SinkConnection:
        return TrappedConnection(super().connect(setup))


class TrappedConnection:
    def __init__(self, inner: Any) -> None:
        self.inner = inner

    async def open(self) -> int | None:
        position: int = await self.inner.open()
        TRAP.reach("opened")
        commit = self.inner._producer.commit_transaction

        async def trapped() -> None:
            TRAP.reach("produced")
            await commit()

        self.inner._producer.commit_transaction = trapped
        return position

    async def send(self, messages: SinkMessages) -> None:
        TRAP.reach("before")
        await self.inner.send(messages)
        TRAP.reach("committed")

    async def close(self) -> None:
        await self.inner.close()


class Lines(Sink):
    """A directory with a file for each interval: no memory of a position, so messages may come again."""

    bound = SendBound(records=BOUND)

    def __init__(self, directory: str) -> None:
        self.directory = Path(directory)

    def identity(self) -> dict[str, Any]:
        return {"kind": "lines"}

    def connect(self, setup: SinkSetup) -> LinesConnection:
        return LinesConnection(self.directory / f"{setup.interval}.ndjson")


class RefusingLines(Lines):
    """The same, but it refuses some messages: one in nine the first time, one in 25 for ever."""

    __slots__ = ()
    refusals = RefusalPolicy(attempts=3)

    def connect(self, setup: SinkSetup) -> LinesConnection:
        return RefusingConnection(self.directory / f"{setup.interval}.ndjson")


class LinesConnection:
    def __init__(self, path: Path) -> None:
        self.path = path

    async def open(self) -> None:
        return

    async def send(self, messages: SinkMessages) -> None:
        TRAP.reach("before")
        self.write(messages)
        TRAP.reach("committed")

    def write(self, messages: SinkMessages) -> None:
        with self.path.open("ab", buffering=0) as file:
            for position, value in zip(messages.positions, messages.values, strict=True):
                file.write(b'{"position":%d,"record":%s}\n' % (position, value or b"null"))

    async def close(self) -> None:
        return


class RefusingConnection(LinesConnection):
    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.met: set[int] = set()

    async def send(self, messages: SinkMessages) -> None:
        TRAP.reach("before")
        reasons, keys = {}, set()
        for place, (key, value) in enumerate(zip(messages.keys, messages.values, strict=True)):
            number = msgspec.json.decode(value or b"", type=Total).number
            if key in keys or is_refused_for_ever(number) or (number % 9 == 0 and number not in self.met):
                keys.add(key)
                self.met.add(number)
                reasons[place] = f"number {number}"
        self.write(messages.select([place for place in range(len(messages)) if place not in reasons]))
        TRAP.reach("committed")
        if reasons:
            raise MessagesRefusedError(reasons)


def is_refused_for_ever(number: int) -> bool:
    return number % 25 == 3


def graph_of(source: str, lines: str, kafka: str, *, refuses: bool = False) -> Graph:
    """Return the graph; `kafka` is "address,topic", or empty for a graph without Kafka."""
    graph = Graph("plant")
    event_time = EventTime("at", unit="s", max_disorder=seconds(5))
    readings = graph.inject("readings", File(source), schema=Reading, event_time=event_time)
    totals = readings.key_by("device").process(Totals(), name="totals", output=Total)
    totals.to_sql(INSERT, key="device", name="to_app", intervals=2)
    if kafka:
        address, topic = kafka.rsplit(",", 1)
        sink = TrappedTopic(topic, brokers=KafkaBrokers(address), bound=SendBound(records=BOUND))
        totals.to_sink(sink, key="device", name="to_topic", intervals=2)
    else:
        sink = RefusingLines(lines) if refuses else Lines(lines)
        totals.to_sink(sink, key="device", name="to_lines", intervals=2)
    return graph


def write(path: Path, seed: int, number: int = NUMBER) -> dict[str, list[tuple[int, int]]]:
    """Write the input; return what must leave, by device, in order."""
    rng = random.Random(seed)
    drawn = [Reading(number, f"d{rng.randrange(DEVICES)}", number // 10) for number in range(number)]
    path.write_bytes(b"".join(msgspec.json.encode(record) + b"\n" for record in drawn))
    expected: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for record in drawn:
        before = expected[record.device][-1][1] if expected[record.device] else 0
        expected[record.device].append((record.number, before + record.number))
    return dict(expected)


def sink_faults(url: str, expected: Mapping[str, Sequence[tuple[int, int]]], lines: Path, kafka: str) -> list[Fault]:
    """Compare what has left by each sink with what must have."""
    in_table: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for device, number, total in rows(url, "SELECT device, number, total FROM app.totals ORDER BY at"):
        in_table[device].append((number, total))
    wanted = _counted(expected)
    found = differences("totals", _counted(in_table), wanted)
    waiting = rows(url, "SELECT sum(messages) FROM millpy.sinks")[0][0]
    if waiting:
        found.append(Fault("lost", "messages wait in the outbox of a finished graph", int(waiting)))
    if kafka:
        in_topic = asyncio.run(read_topic(*kafka.rsplit(",", 1)))
        return [*found, *differences("topic", _counted(in_topic), wanted)]
    refused = rows(url, "SELECT payload_text FROM millpy.dead_letters WHERE computation = 'to_lines'")
    if refused:
        return [*found, *refusal_faults(url, expected, lines, [text for (text,) in refused])]
    in_lines: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for path in lines.glob("*.ndjson"):
        seen: dict[int, Total] = {}
        for line in path.read_bytes().splitlines():
            read = msgspec.json.decode(line)
            record = msgspec.convert(read["record"], Total)
            assert seen.setdefault(read["position"], record) == record, "a position has two messages"
        assert sorted(seen) == list(range(len(seen))), "positions have gaps"
        for _, record in sorted(seen.items()):
            in_lines[record.device].append((record.number, record.total))
    return [*found, *differences("lines", _counted(in_lines), wanted)]


def refusal_faults(
    url: str, expected: Mapping[str, Sequence[tuple[int, int]]], lines: Path, letters: Sequence[str]
) -> list[Fault]:
    """Compare the lines and the dead letters of a sink that refuses messages: each message is in one of the two."""
    found: list[Fault] = []
    dead = [msgspec.json.decode(text, type=Total) for text in letters]
    if len({total.number for total in dead}) != len(dead):
        found.append(Fault("doubled", "dead letters", len(dead)))
    if any(not is_refused_for_ever(total.number) for total in dead):
        found.append(Fault("lost", "messages that were only refused for a while are dead letters", len(dead)))
    waiting = rows(url, "SELECT sum(refused) FROM millpy.sinks")[0][0]
    if waiting:
        found.append(Fault("lost", "refused messages of a finished graph", int(waiting)))
    first: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for path in lines.glob("*.ndjson"):
        seen: set[int] = set()
        for line in path.read_bytes().splitlines():  # in the order of their first arrival, which is that of their key
            read = msgspec.json.decode(line)
            if read["position"] not in seen:
                seen.add(read["position"])
                record = msgspec.convert(read["record"], Total)
                first[record.device].append((record.number, record.total))
    numbers = {total.number for total in dead}
    wanted = {device: [total for total in totals if total[0] not in numbers] for device, totals in expected.items()}
    return [*found, *differences("lines", _counted(first), _counted(wanted))]


def _counted(found: Mapping[str, Sequence[tuple[int, int]]]) -> dict[str, tuple[Any, ...]]:
    return {device: (len(totals), *totals) for device, totals in found.items()}


def repeated(lines: Path) -> int:
    """Return how many messages came again."""
    count = 0
    for path in lines.glob("*.ndjson"):
        positions = [msgspec.json.decode(line)["position"] for line in path.read_bytes().splitlines()]
        count += len(positions) - len(set(positions))
    return count


async def read_topic(address: str, topic: str) -> dict[str, list[tuple[int, int]]]:
    """Read the committed messages of a topic, by key, in order."""
    consumer = AIOKafkaConsumer(
        bootstrap_servers=address, isolation_level="read_committed", auto_offset_reset="earliest"
    )
    await consumer.start()
    found: dict[str, list[tuple[int, int]]] = defaultdict(list)
    try:
        places = [TopicPartition(topic, partition) for partition in range(PARTITIONS)]
        consumer.assign(places)
        ends = await consumer.end_offsets(places)
        async with asyncio.timeout(60):
            for place in places:
                while await consumer.position(place) < ends[place]:
                    for message in (await consumer.getmany(place, timeout_ms=200)).get(place, ()):
                        total = msgspec.json.decode(message.value, type=Total)
                        assert message.key == total.device.encode()
                        found[total.device].append((total.number, total.total))
    finally:
        await consumer.stop()
    return found
