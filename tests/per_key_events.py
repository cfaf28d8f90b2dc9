"""Events of devices, and graphs of them, for the tests of per-key tools."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import msgspec

from millpy import EventTime, Graph, KeyedStream, Pattern, Stream, minutes, seconds
from millpy.testing import GraphDriver, ManualSource

NOON = datetime(2026, 11, 20, 12, tzinfo=UTC)


class Event(msgspec.Struct):
    device: str
    at: datetime
    kind: str = ""
    value: float | None = 0.0
    count: int = 0
    tags: list[str] = []


GRID: Any = {"every": minutes(1), "limit": minutes(5), "name": "g"}


def at(second: float) -> datetime:
    return NOON + seconds(second)


def event(second: float, **fields: Any) -> Event:
    return Event("pump", at(second), **fields)


def is_door(event: Event) -> bool:
    return event.kind == "door"


def is_alarm(event: Event) -> bool:
    return event.kind == "alarm"


DOOR = Pattern("door", is_door)
DOOR_ALARM = DOOR.then("alarm", is_alarm, within=minutes(5))


def events_of(graph: Graph, disorder: float = 0, schema: type = Event, **options: Any) -> Stream:
    event_time = EventTime("at", max_disorder=seconds(disorder), **options)
    return graph.inject("events", ManualSource(), schema=schema, event_time=event_time)


def driver_of(add: Callable[[KeyedStream], Stream], **options: Any) -> GraphDriver:
    graph = Graph("tools")
    add(events_of(graph).key_by("device"))
    return GraphDriver(graph, **options)


def grid(keyed: KeyedStream, *fields: str, **options: Any) -> Stream:
    return keyed.fill_gaps(*(fields or ("value",)), **{**GRID, **options})
