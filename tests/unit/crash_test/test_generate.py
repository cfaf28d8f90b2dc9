"""Records made up from a schema are valid, plausible, and the same for the same seed."""

from __future__ import annotations

import enum
from datetime import date, datetime
from decimal import Decimal
from typing import Annotated, Any, Literal
from uuid import UUID

import msgspec
import pytest

from millpy import Count, Dedupe, EventTime, File, FixedWindows, Graph, minutes, seconds
from millpy.errors import UsageError
from millpy.testing.crash_test.generate import KEYS, key_fields, payloads


class State(enum.Enum):
    ON = "on"
    OFF = "off"


class Place(msgspec.Struct):
    hall: str
    row: int


class Reading(msgspec.Struct, rename="camel"):
    device: str
    measured_at: datetime
    number: int
    value: Annotated[float, msgspec.Meta(ge=-5, le=5)]
    level: Annotated[int, msgspec.Meta(gt=10)]
    place: Place
    tags: list[str]
    trace: UUID
    price: Decimal
    day: date
    state: State
    mode: Literal["auto", "hand"]
    anything: Any
    either: int | str
    document: dict
    parts: list[int | str]
    note: str | None = None


def graph_of(struct: type[msgspec.Struct] = Reading, dedupe: Dedupe | None = None) -> Graph:
    graph = Graph("made_up")
    time = EventTime("measured_at", max_disorder=seconds(2))
    readings = graph.inject("readings", File("none"), schema=struct, event_time=time, dedupe=dedupe)
    readings.key_by("device").window(FixedWindows(minutes(1))).aggregate(n=Count()).to_table("t")
    return graph


def made(count: int, seed: int = 1, dedupe: Dedupe | None = None) -> list[Reading]:
    graph = graph_of(dedupe=dedupe)
    (node,) = graph.injectors()
    lines = list(payloads(node, key_fields(graph, node), count, seed))
    return [msgspec.json.decode(line, type=Reading) for line in lines]


def test_requested_number_of_records_is_generated_and_decodes() -> None:
    records = made(500)

    assert len(records) == 500
    assert all(-5 <= record.value <= 5 and record.level > 10 for record in records)


def test_same_seed_generates_the_same_records() -> None:
    assert made(300, seed=4) == made(300, seed=4)
    assert made(300, seed=4) != made(300, seed=5)


def test_keys_repeat_and_event_times_rise_with_disorder() -> None:
    records = made(3_000)
    moments = [record.measured_at for record in records]
    behind = [(max(moments[: place + 1]) - at).total_seconds() for place, at in enumerate(moments)]

    assert 2 < len({record.device for record in records}) <= KEYS
    assert sum(delay > 0 for delay in behind) > 300
    assert 1 < sum(delay > 2 for delay in behind) < 60  # a few are late
    assert (moments[-1] - moments[0]).total_seconds() > 100


def test_ids_are_unique_but_for_duplicates() -> None:
    records = made(2_000, dedupe=Dedupe("number", within=minutes(5)))
    numbers = [record.number for record in records]

    assert 10 < len(numbers) - len(set(numbers)) < 100
    first = {record.number: record for record in reversed(records)}
    assert all(first[record.number] == record for record in records)


def test_schema_that_rejects_generated_records_asks_for_an_input() -> None:
    class Strict(msgspec.Struct):
        device: Annotated[str, msgspec.Meta(pattern="^[0-9]{6}$")]
        measured_at: datetime

    graph = graph_of(Strict)
    (node,) = graph.injectors()

    with pytest.raises(UsageError, match="cannot generate records of Strict") as caught:
        next(payloads(node, key_fields(graph, node), 1, 1))
    assert "--input" in caught.value.hint
