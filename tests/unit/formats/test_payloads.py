"""The payloads of docs/payloads.md become the records that the page shows, whatever the source and the bundle."""

from __future__ import annotations

import asyncio
import re
import struct
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import pytest

import millpy
from millpy import EventTime, Graph, Kafka, Mqtt, minutes
from millpy.formats import Message
from millpy.ingest.expansion import Expander
from millpy.ingest.intake import Intake, IntakeSettings
from millpy.ingest.protocol import FixedBound, Source, SourceBatch, SourceSetup
from millpy.limits import Limits
from millpy.model.record import RecordType
from millpy.model.stage import StoredInterval
from millpy.model.time import ClockReading, instant
from millpy.sources.mqtt.inbox import MessageQueue
from millpy.sources.mqtt.packets import Messages
from millpy.sources.mqtt.topics import TopicFields, TopicPattern
from millpy.testing.clock import ManualClock
from tests.docs.blocks import ROOT, Block, blocks_of

NOW = instant(datetime(2026, 11, 26, 12, tzinfo=UTC))
PAGE = ROOT / "docs" / "payloads.md"
NAMES = "payloads_page"
IN_MS = ("Kepware IoT Gateway", "Neuron, a Modbus gateway", "Kafka Connect, JSON with a schema")


def sections() -> Iterator[tuple[str, list[Block]]]:
    text = PAGE.read_text()
    heads = [(text.count("\n", 0, head.start()), head[1]) for head in re.finditer(r"^### (.*)$", text, re.MULTILINE)]
    blocks = blocks_of(PAGE)
    for (line, name), (end, _) in zip(heads, [*heads[1:], (10**9, "")], strict=True):
        yield name, [block for block in blocks if line < block.line < end]


SECTIONS = dict(sections())


def batches_of(source: Source, record_type: RecordType, title: str, payload: bytes, count: int) -> list[SourceBatch]:
    """The payload as its source hands it over, and three more of it."""
    format = source.payload_format()
    assert format is not None
    expander = Expander(format, record_type, Limits())
    if isinstance(source, Mqtt):
        pattern = TopicPattern.parse(source.filters[0])
        complete = TopicFields(pattern, record_type) if pattern.levels else None
        queue = MessageQueue(
            topics=pattern.matches(), retained=True, arrays=True, readings_max=10, bytes_max=10**6, complete=complete,
            expander=expander,
        )  # fmt: skip
        queue.put(Messages([title.encode()] * count, [payload] * count, list(range(count)), [], []))
        found = queue.take(records_max=10**6, bytes_max=10**7, arrived_at=NOW)
        assert found.bad == []
        return [SourceBatch("json", NOW, payloads=found.payloads(), describe=found.describe())]
    if isinstance(source, Kafka):
        made = expander.expand([Message(payload)] * count, records_max=10**6, bytes_max=10**7)
        assert made.refused == []
        return [SourceBatch("json", NOW, payloads=made.payloads)]
    Path(title).write_bytes(payload)
    return asyncio.run(read(source, record_type))


async def read(source: Source, record_type: RecordType) -> list[SourceBatch]:
    setup = SourceSetup(
        graph="g", stream="s", partition="files", limits=Limits(), clock=ManualClock(), ready=asyncio.Event(),
        record_type=record_type, bound=FixedBound(1, 10**6),
    )  # fmt: skip
    injector = source.connect(setup)
    await injector.open(None)
    found: list[SourceBatch] = []
    while not found or not found[-1].finished:
        await setup.ready.wait()
        setup.ready.clear()
        if (batch := await injector.take()) is not None:
            batch.arrived_at = NOW
            found.append(batch)
    await injector.close()
    return found


@pytest.mark.parametrize("name", SECTIONS)
@pytest.mark.parametrize("count", [1, 100])
def test_payload_becomes_the_records_of_the_page(
    name: str, count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hundred messages are decoded as columns, and one is decoded record by record."""
    monkeypatch.chdir(tmp_path)
    payload_block, code, records = SECTIONS[name]
    names: dict[str, Any] = {
        **vars(millpy),
        "msgspec": msgspec,
        "datetime": datetime,
        "struct": struct,
        "__name__": NAMES,
    }
    exec(compile(code.body, name, "exec", dont_inherit=True), names)
    source = names["source"]
    classes = (own for own in names.values() if isinstance(own, type))
    record_class = next(own for own in classes if own.__module__ == NAMES)
    numeric = record_class.__annotations__.get("at") in ("int", "float", int, float)
    at = "at" if "at" in record_class.__annotations__ else "time"
    unit: Any = ("ms" if name in IN_MS else "s") if numeric else None
    event_time = names.get("event_time", EventTime(at, unit=unit, max_disorder=minutes(10)))
    graph = Graph("payloads")
    graph.inject("readings", source, schema=record_class, event_time=event_time)
    title = payload_block.options["title"]
    encoding = getattr(source.payload_format(), "encoding", "utf-8")
    payload = bytes.fromhex(payload_block.body) if title == "hex" else payload_block.body.encode(encoding)
    if not isinstance(source, Mqtt | Kafka):
        count = 1
    record_type = RecordType(record_class)
    batches = batches_of(source, record_type, title, payload, count)
    settings = IntakeSettings(
        stream="readings", record_type=record_type, event_time=event_time, format=source.payload_format()
    )
    intake = Intake(settings, StoredInterval(1, 1), [])
    found: list[Any] = []
    for batch in batches:
        result = intake.step(batch, clock=ClockReading.certain(NOW), quiet=False)
        assert result.dead_letters == []
        found += result.records.objects()
    assert found == [msgspec.json.decode(line, type=record_class) for line in records.body.splitlines()] * count
