"""What a crash test publishes arrives whole and in order, though the broker is killed on the way."""

from __future__ import annotations

import asyncio
import json
import threading
from pathlib import Path

import msgspec
import pytest

from millpy import Count, Dedupe, EventTime, Files, FixedWindows, Graph, Mqtt, hours, minutes
from millpy.clock import SystemClock
from millpy.embedded import EmbeddedBroker
from millpy.errors import UsageError
from millpy.ingest.protocol import SourceBatch, SourceSetup
from millpy.limits import Limits
from millpy.testing.crash_test.broker import END, HELLO, EndingInjector, Publisher, source_at_broker
from millpy.testing.crash_test.inputs import prepare
from millpy.testing.crash_test.options import Options
from millpy.testing.crash_test.session import refuse_without_broker

RECORDS = 900


class Reading(msgspec.Struct):
    site: str
    id: int
    at: int


def graph(source: object, dedupe: Dedupe | None = None) -> Graph:
    made = Graph("brokered")
    time = EventTime("at", unit="s", sorted=True)
    readings = made.inject("readings", source, schema=Reading, event_time=time, dedupe=dedupe)  # type: ignore[arg-type]
    readings.key_by("site").window(FixedWindows(minutes(1))).aggregate(n=Count()).to_table("t")
    return made


async def read_to_the_end(injector: EndingInjector, ready: asyncio.Event) -> list[int]:
    """Ids in the order in which they first arrive."""
    seen: dict[int, None] = {}
    finished = False
    while not finished:
        ready.clear()
        taken = await injector.take()
        if taken is None:
            await ready.wait()
            continue
        seen |= dict.fromkeys(json.loads(payload)["id"] for payload in taken.payloads)
        finished = taken.finished
        await injector.acknowledge(taken.token)
    return list(seen)


async def test_everything_arrives_in_order_through_crashes_of_the_broker(
    tmp_path: Path, broker: EmbeddedBroker
) -> None:
    lines = [f'{{"site":"s{n % 3}","id":{n},"at":{n}}}' for n in range(RECORDS)]
    (tmp_path / "lines.ndjson").write_text("\n".join(lines))
    made = graph(Mqtt("plant/{site}/+"))
    (node,) = made.injectors()
    options = Options(graph="g.py", inputs=(str(tmp_path / "lines.ndjson"),))
    (prepared,) = await asyncio.to_thread(prepare, made, options, tmp_path / "input")
    publisher = Publisher(prepared, node, tmp_path / "feed", broker, threading.Event())
    assert isinstance(node.source, Mqtt)
    source = source_at_broker(node.source, tmp_path / "feed")
    assert source is not None
    setup = SourceSetup(
        graph="brokered", stream="readings", partition=source.partitions()[0], clock=SystemClock(),
        limits=Limits(lease_ttl_s=0.5, retry_s_max=0.2), ready=asyncio.Event(), record_type=node.record_type,
    )  # fmt: skip
    injector = source.connect(setup)
    await injector.open(None)
    reading = asyncio.create_task(read_to_the_end(injector, setup.ready))

    def publish() -> None:
        publisher.await_subscribers()
        for _ in range(3):
            publisher.write(RECORDS // 3)
            broker.kill()
            broker.start()
        publisher.close(ended=True)

    async with asyncio.timeout(100):
        await asyncio.to_thread(publish)
        arrived = await reading
    await injector.close()

    assert arrived == list(range(RECORDS))


class Scripted:
    """An injector that returns prepared batches."""

    def __init__(self, *batches: list[bytes]) -> None:
        self.batches = list(batches)
        self.acknowledged: list[object] = []

    async def open(self, position: bytes | None) -> None: ...

    async def take(self) -> SourceBatch | None:
        if not self.batches:
            return None
        return SourceBatch("json", SystemClock().now_us(), payloads=self.batches.pop(0), token=len(self.batches))

    async def acknowledge(self, token: object) -> None:
        self.acknowledged.append(token)

    def quiet(self) -> bool:
        return True

    async def close(self) -> None: ...


async def test_crash_tests_own_messages_are_removed(tmp_path: Path) -> None:
    completed = HELLO[:-1] + b',"site":"0"}'  # with a field of its topic
    inner = Scripted([completed], [HELLO, b"{}"], [b"{}", END])
    injector = EndingInjector(inner, tmp_path / "hello-0")

    assert await injector.take() is None
    assert inner.acknowledged == [2]
    assert (tmp_path / "hello-0").exists()
    first, last = await injector.take(), await injector.take()
    assert first is not None
    assert last is not None
    assert [(taken.payloads, taken.finished) for taken in (first, last)] == [([b"{}"], False), ([b"{}"], True)]
    assert not injector.quiet()


def test_broker_faults_need_a_source_that_deduplicates() -> None:
    with pytest.raises(UsageError, match="no source of the graph is MQTT"):
        refuse_without_broker(graph(Files("r.ndjson")))
    with pytest.raises(UsageError, match="'readings' has no Dedupe"):
        refuse_without_broker(graph(Mqtt("a/b")))


def test_broker_faults_need_a_broker_that_keeps_its_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("millpy.testing.crash_test.session.mosquitto_program", lambda: None)

    with pytest.raises(UsageError, match="need mosquitto"):
        refuse_without_broker(graph(Mqtt("a/b"), Dedupe("id", within=hours(1))))
