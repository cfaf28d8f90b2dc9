"""Every accepted value is the one that was sent, and every invalid record is dead-lettered (I8).

Inputs go through the readers of files and of MQTT, decoding, dedupe and event times, and are compared with
`reference.py`, record by record. `make fuzz` runs longer, with other inputs each time.
"""

from __future__ import annotations

import asyncio
import gzip
import os
import random
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from uuid import UUID

import msgspec
import pytest

from millpy.clock import SystemClock
from millpy.ingest import decode
from millpy.ingest.intake import Intake, IntakeSettings
from millpy.ingest.protocol import FixedBound, RejectedRow, SourceBatch, SourceSetup
from millpy.ingest.settings import Dedupe, EventTime
from millpy.limits import Limits
from millpy.model.checkpoint import DeadLetter
from millpy.model.record import RecordType
from millpy.model.stage import StoredInterval
from millpy.model.time import ClockReading, Instant, hours, seconds
from millpy.sources.files.source import Files
from millpy.sources.mqtt.inbox import MessageQueue
from millpy.sources.mqtt.packets import Messages
from millpy.sources.mqtt.topics import TopicPattern
from tests.fuzz import reference, texts
from tests.fuzz.reading import taken_from
from tests.fuzz.reference import Field, Outcome, Shape

MINUTES = float(os.environ.get("FUZZ_MINUTES", "0"))
INPUTS = 15
"""Of a format and class, in the short form."""
ARRIVED = datetime(2026, 6, 2, tzinfo=UTC)
LATEST = datetime(2026, 6, 2, 0, 10, tzinfo=UTC)
NOW = Instant(int(ARRIVED.timestamp()) * 1_000_000)
RECORD_BYTES = 600
KEPT = RECORD_BYTES + 1
"""Bytes of a payload that is too long."""
READINGS = 100
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class Flat(msgspec.Struct):
    id: int
    device: str
    at: datetime
    value: float
    flag: bool
    other: float | None = None
    note: str | None = None
    count: int | None = None
    on: bool | None = None
    until: datetime | None = None
    unit: UUID | None = None


class Defaults(msgspec.Struct, forbid_unknown_fields=True):
    id: int
    device: str
    ms: int
    value: float = 1.5
    limit: int | None = 5
    name: str = "x"
    on: bool = True


class Inner(msgspec.Struct):
    name: str
    values: list[float]


class Nested(msgspec.Struct):
    id: int
    device: str
    at: datetime
    inner: Inner | None = None
    values: list[int] = []
    notes: dict[str, float] | None = None


IDENTITY = {"id": Field("int"), "device": Field("text")}


@dataclass(frozen=True)
class Case:
    """A record class, once for millpy and once for the reference."""

    struct: type[msgspec.Struct]
    shape: Shape
    event_time: EventTime

    def moment_us(self, values: dict[str, Any]) -> int:
        """The event time in µs since the epoch."""
        if "ms" in values:
            return int(values["ms"]) * 1_000
        return us_of(values["at"])


AT = EventTime("at", max_disorder=seconds(10))
CASES = {
    "flat": Case(
        Flat,
        Shape(
            IDENTITY
            | {"at": Field("time"), "value": Field("float"), "flag": Field("bool")}
            | {
                name: Field(kind, nullable=True, default=None)
                for name, kind in {
                    "other": "float", "note": "text", "count": "int", "on": "bool", "until": "time", "unit": "uuid"
                }.items()
            }
        ),
        AT,
    ),
    "defaults": Case(
        Defaults,
        Shape(
            IDENTITY
            | {
                "ms": Field("int"), "value": Field("float", default=1.5), "limit": Field("int", nullable=True,
                default=5),
                "name": Field("text", default="x"), "on": Field("bool", default=True),
            },
            strict=True,
        ),
        EventTime("ms", unit="ms", max_disorder=seconds(10)),
    ),
    "nested": Case(
        Nested,
        Shape(
            IDENTITY
            | {
                "at": Field("time"),
                "inner": Field(
                    "record", nullable=True, default=None,
                    fields={"name": Field("text"), "values": Field("list", inner=Field("float"))},
                ),
                "values": Field("list", default=[], inner=Field("int")),
                "notes": Field("object", nullable=True, default=None, inner=Field("float")),
            }
        ),
        AT,
    ),
}  # fmt: skip


def us_of(moment: datetime) -> int:
    apart = moment - EPOCH
    return (apart.days * 86_400 + apart.seconds) * 1_000_000 + apart.microseconds


@dataclass
class Found:
    """What became of an input."""

    accepted: list[tuple[int, Any]]
    columns: list[Any]
    refused: list[bytes]
    counts: dict[str, int]


def what_millpy_makes(case: Case, taken: Iterable[SourceBatch]) -> Found:
    """All of it through one intake."""
    kind = RecordType(case.struct)
    limits = Limits(record_bytes_max=RECORD_BYTES)
    settings = IntakeSettings(
        stream="s", record_type=kind, event_time=case.event_time, dedupe=Dedupe("id", "device", within=hours(1)),
        limits=limits
    )  # fmt: skip
    intake = Intake(settings, StoredInterval(1, 1))
    accepted: list[tuple[int, Any]] = []
    columns: list[Any] = []
    dead_letters: list[DeadLetter] = []
    for one in taken:
        one.arrived_at = NOW
        result = intake.step(one, clock=ClockReading.certain(NOW), quiet=False)
        records = result.records
        times = records.event_times.tolist()
        accepted += zip(times, map(plain, records.objects()), strict=True)
        columns += map(plain, kind.objects_of(records.batch()))
        dead_letters += result.dead_letters
    return Found(accepted, columns, [dead_letter.payload[:KEPT] for dead_letter in dead_letters], intake.counts)


def what_is_right(case: Case, outcomes: Iterable[Outcome]) -> Found:
    """The rules of an intake: an id counts from its first record on, and times are not of the future."""
    accepted: list[tuple[int, Any]] = []
    refused: list[bytes] = []
    counts = dict.fromkeys(("injected", "accepted", "duplicate", "dead_lettered"), 0)
    seen = set()
    for outcome in outcomes:
        counts["injected"] += 1
        values = outcome.values
        if values is not None and (values["id"], values["device"]) in seen:
            counts["duplicate"] += 1
            continue
        if values is not None:
            seen.add((values["id"], values["device"]))
        moment = None if values is None else case.moment_us(values)
        if values is None or moment is None or not us_of(datetime.min.replace(tzinfo=UTC)) <= moment <= us_of(LATEST):
            counts["dead_lettered"] += 1
            refused.append(outcome.payload[:KEPT])
            continue
        counts["accepted"] += 1
        accepted.append((moment, plain(values)))
    return Found(accepted, [values for _, values in accepted], refused, counts)


def plain(value: Any) -> Any:
    """A value with its type, and every bit of it."""
    if isinstance(value, msgspec.Struct):
        value = msgspec.structs.asdict(value)
    if isinstance(value, dict):
        return {name: plain(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [plain(inner) for inner in value]
    if isinstance(value, float):
        return "float", value.hex()
    if isinstance(value, datetime):
        return "time", us_of(value)
    return type(value).__name__, value


def compare(found: Found, right: Found, seed: str) -> None:
    ours, theirs = Counter(found.refused), Counter(right.refused)
    assert ours == theirs, (
        f"{seed}: wrongly dead-lettered {list(ours - theirs)[:3]}, wrongly taken {list(theirs - ours)[:3]}"
    )
    assert found.refused == right.refused, f"{seed}: another order"
    for name in ("accepted", "columns"):
        for place, (one, other) in enumerate(zip(getattr(found, name), getattr(right, name), strict=False)):
            assert one == other, f"{seed}: {name}[{place}]: {one!r:.1500} instead of {other!r:.1500}"
    assert found.counts == right.counts, seed
    assert found.counts["accepted"] == len(found.accepted) == len(found.columns), seed


def read_file(path: Path, rng: random.Random) -> Iterator[SourceBatch]:
    """A file in bundles of any size."""
    limits = Limits(record_bytes_max=RECORD_BYTES, bundle_bytes_max=rng.choice([601, 5_000, 10**6, 10**6, 10**6]))
    setup = SourceSetup(
        graph="g", stream="s", partition="files", limits=limits, clock=SystemClock(), ready=asyncio.Event(),
        bound=FixedBound(rng.choice([7, 65, 150, 10**5, 10**5]), limits.bundle_bytes_max),
    )  # fmt: skip
    return taken_from(Files(path), setup)


def read_messages(payloads: list[bytes], rng: random.Random) -> Iterator[SourceBatch]:
    """Messages in bundles of any size."""
    inbox = MessageQueue(
        topics=TopicPattern.parse("plant/+").matches(),
        retained=False,
        arrays=True,
        readings_max=READINGS,
        bytes_max=10**7,
    )
    while payloads:
        count = rng.choice([1, 10, 1_000])
        some, payloads = payloads[:count], payloads[count:]
        inbox.put(Messages([b"plant/a"] * len(some), some, list(range(1, len(some) + 1))))
    total = inbox.received
    bound, given = rng.choice([1, 64, 1_000]), 0
    while inbox:
        bundle = inbox.take(records_max=bound, bytes_max=10**7)
        given += bundle.records
        yield SourceBatch(
            "json",
            NOW,
            payloads=bundle.payloads(),
            refused=[RejectedRow(row, "oversize", why) for row, why in bundle.refused],
        )
    assert given == total


Compared = tuple[Iterator[SourceBatch], Iterable[Outcome]]


def an_ndjson_file(case: Case, rng: random.Random, directory: Path) -> Compared:
    data = texts.lines(rng, texts.json_payloads(rng, case.shape))
    outcomes = reference.json_lines(data, case.shape, bytes_max=RECORD_BYTES)
    return read_file(written(directory, "a.ndjson", data, rng), rng), outcomes


def a_csv_file(case: Case, rng: random.Random, directory: Path) -> Compared:
    data = texts.csv_lines(rng, *texts.table(rng, flattened(case.shape)))
    outcomes = reference.csv_file(data, case.shape, bytes_max=RECORD_BYTES)
    return read_file(written(directory, "a.csv", data, rng), rng), outcomes


def csv_payloads(case: Case, rng: random.Random, _: Path) -> Compared:
    header, payloads = texts.table(rng, flattened(case.shape))
    outcomes = [reference.csv_record(payload, header, case.shape, bytes_max=RECORD_BYTES) for payload in payloads]
    return iter([SourceBatch("csv", NOW, payloads=payloads, header=header)]), outcomes


def mqtt_messages(case: Case, rng: random.Random, _: Path) -> Compared:
    payloads = texts.messages(rng, case.shape)
    read = (
        reference.json_message(payload, case.shape, bytes_max=RECORD_BYTES, elements_max=READINGS)
        for payload in payloads
    )
    return read_messages(payloads, rng), [outcome for message in read for outcome in message]


def flattened(shape: Shape) -> Shape:
    """What of it a cell can hold."""
    return Shape({name: field for name, field in shape.fields.items() if field.kind in texts.RIGHT}, shape.strict)


def written(directory: Path, name: str, data: bytes, rng: random.Random) -> Path:
    zipped = rng.random() < 0.2
    path = directory / (f"{name}.gz" if zipped else name)
    path.write_bytes(gzip.compress(data, compresslevel=1) if zipped else data)
    return path


FORMATS: dict[str, Callable[[Case, random.Random, Path], Compared]] = {
    "ndjson": an_ndjson_file,
    "csv": a_csv_file,
    "csv payloads": csv_payloads,
    "mqtt": mqtt_messages,
}


@pytest.mark.timeout(MINUTES * 60 + 300)
@pytest.mark.parametrize("kind", CASES)
@pytest.mark.parametrize("name", FORMATS)
def test_values_equal_those_of_the_reference(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, kind: str
) -> None:
    monkeypatch.setattr(decode, "PIECE_RECORDS", 40)  # so that few records are several pieces
    until = time.monotonic() + MINUTES * 60 / len(FORMATS) / len(CASES)
    number = random.randrange(10**9) if MINUTES else 0
    end = number + INPUTS
    while number < end or time.monotonic() < until:
        seed = f"{name} {kind} {number}"
        taken, outcomes = FORMATS[name](CASES[kind], random.Random(seed), tmp_path)
        compare(what_millpy_makes(CASES[kind], taken), what_is_right(CASES[kind], outcomes), seed)
        number += 1
