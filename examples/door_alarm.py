"""Doors that are followed by an alarm within five minutes with no reset between, and doors that stay open.

MILLPY_MQTT_URL=mqtt://localhost:1883 millpy run examples/door_alarm.py
millpy sql "SELECT site, door_at, alarm_at FROM door_alarm.alarms ORDER BY alarm_at DESC LIMIT 10"
"""

from datetime import datetime

import msgspec

from millpy import AdvanceWithClock, EventTime, Graph, Mqtt, Pattern, minutes, seconds


class Event(msgspec.Struct):
    site: str
    at: datetime
    kind: str


def is_open(event: Event) -> bool:
    return event.kind == "open"


def is_closed(event: Event) -> bool:
    return event.kind == "closed"


def is_alarm(event: Event) -> bool:
    return event.kind == "alarm"


def is_reset(event: Event) -> bool:
    return event.kind == "reset"


graph = Graph("door_alarm")
events = graph.inject(
    "events",
    Mqtt("sites/+/event"),
    schema=Event,
    event_time=EventTime("at", max_disorder=seconds(10)),
    idle=AdvanceWithClock(after=minutes(1)),
)
sites = events.key_by("site").in_order(name="in_order")
door = Pattern("door", is_open)

alarm = door.then("alarm", is_alarm, within=minutes(5)).unless("reset", is_reset)
sites.match(alarm, name="alarms").to_table("alarms")

left_open = door.then_not("closed", is_closed, within=minutes(10))
sites.match(left_open, name="left_open").to_table("left_open")
