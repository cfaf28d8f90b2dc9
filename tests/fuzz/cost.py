"""What inputs cost a reader: `python -m tests.fuzz.cost FORMAT:FILE …` prints CPU seconds, peak kB, rows as JSON lines.

A process of its own, with bounds on its memory and time, so that what goes wrong here goes wrong nowhere else.
"""

from __future__ import annotations

import asyncio
import json
import resource
import struct
import sys
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

import msgspec

from millpy.clock import SystemClock
from millpy.ingest.decode import Decoder
from millpy.ingest.protocol import RejectedRow, SourceBatch, SourceSetup
from millpy.limits import Limits
from millpy.model.record import RecordType
from millpy.sources.files.source import Files
from tests.fuzz.reading import taken_from

MEMORY_BYTES_MAX = 3_000_000_000
CPU_S_MAX = 90


class Reading(msgspec.Struct):
    id: int
    device: str
    at: datetime
    value: float
    values: list[int] | None = None
    texts: list[str] | None = None
    note: str | None = None


TYPE = RecordType(Reading)


def from_file(path: Path) -> Iterator[SourceBatch]:
    setup = SourceSetup(
        graph="g", stream="s", partition="files", limits=Limits(), clock=SystemClock(), ready=asyncio.Event(),
        record_type=TYPE,
    )  # fmt: skip
    return taken_from(Files(path, broken="dead_letter"), setup)


def from_mqtt(path: Path) -> Iterator[SourceBatch]:
    """The first line is the topic, the rest a payload."""
    from millpy.sources.mqtt.inbox import MessageQueue
    from millpy.sources.mqtt.packets import Messages
    from millpy.sources.mqtt.topics import TopicFields, TopicPattern

    topic, _, payload = path.read_bytes().partition(b"\n")
    pattern, limits = TopicPattern.parse("plant/{device}"), Limits()
    inbox = MessageQueue(
        topics=pattern.matches(), retained=False, arrays=True,
        readings_max=getattr(limits, "message_records_max", 65_536), bytes_max=limits.bundle_bytes_max,
        complete=TopicFields(pattern, TYPE),
    )  # fmt: skip
    inbox.put(Messages([topic], [payload], [1]))
    while inbox:
        bundle = inbox.take(records_max=limits.bundle_records_max, bytes_max=limits.bundle_bytes_max)
        yield SourceBatch(
            "json",
            SystemClock().now_us(),
            payloads=bundle.payloads(),
            refused=[RejectedRow(row, "oversize", why) for row, why in bundle.refused],
        )


def from_kafka(path: Path) -> Iterator[SourceBatch]:
    """Yield the batches of a fetch, without a second fetch of what aiokafka cannot read."""
    from aiokafka import TopicPartition

    from millpy.sources.kafka.batches import Batches, FetchedRecords
    from millpy.sources.kafka.expansion import bound_legacy_expansion
    from millpy.sources.kafka.record_columns import RecordColumns
    from millpy.sources.kafka.records import FieldMapping, Payloads

    bound_legacy_expansion()
    payloads = Payloads(FieldMapping(), TYPE, "dead_letter")
    data, offset = path.read_bytes(), 0
    end = int.from_bytes(data[:8], "big")
    while offset < end:
        records = FetchedRecords(
            TopicPartition("t", 0),
            Batches(data[_place_of(data, offset) :]),
            [],
            offset,
            None,
            None,
            True,
            1,
        )
        found = RecordColumns.joined(list(records))
        offset = records.next_fetch_offset
        _, values, refused = payloads.encode(found)
        yield SourceBatch("json", SystemClock().now_us(), payloads=values, refused=refused)


def _place_of(data: bytes, offset: int) -> int:
    """Where the batch with that offset begins, from which a broker sends."""
    place = 8
    while True:
        base, length = struct.unpack_from(">qi", data, place)
        if offset <= base + struct.unpack_from(">i", data, place + 23)[0]:
            return place
        place += 12 + length


READERS = {"file": from_file, "mqtt": from_mqtt, "kafka": from_kafka}


def cost(kind: str, path: Path) -> dict[str, object]:
    Path("/proc/self/clear_refs").write_text("5")  # reset the peak
    before, begun = memory_kb("VmRSS"), time.process_time()
    rows = dead_letters = 0
    decoder = Decoder(TYPE, time_field="at")
    error = ""
    try:
        for taken in READERS[kind](path):
            rows += taken.records
            dead_letters += len(decoder.decode(taken).refused) if taken.has_records else len(taken.refused)
    except (MemoryError, Exception) as failed:
        error = repr(failed)[:300]
    return {
        "file": path.name, "cpu_s": time.process_time() - begun, "peak_kb": memory_kb("VmHWM") - before, "rows": rows,
        "letters": dead_letters, "error": error,
    }  # fmt: skip


def memory_kb(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(name)).split()[1])


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES_MAX, MEMORY_BYTES_MAX))
    for argument in sys.argv[1:]:
        kind, _, path = argument.partition(":")
        used = int(time.process_time())
        resource.setrlimit(resource.RLIMIT_CPU, (used + CPU_S_MAX, resource.RLIM_INFINITY))
        print(json.dumps(cost(kind, Path(path))), flush=True)
