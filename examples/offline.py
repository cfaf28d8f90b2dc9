"""Devices that have fallen silent, and when they are back; also on a feed that is quiet as a whole.

Each reading sets its device's timer ten minutes ahead, in event time. When no reading arrives at all, the clock moves
the watermark of the source, once its broker has proven that nothing is on the way, so the timers fire all the same.

    MILLPY_MQTT_URL=mqtt://localhost:1883 millpy run examples/offline.py
    millpy sql "SELECT device, state, since FROM offline.changes ORDER BY since DESC LIMIT 10"
"""

from datetime import datetime

import msgspec

from millpy import AdvanceWithClock, Computation, Context, EventTime, Graph, Mqtt, Value, minutes, seconds
from millpy.model.timer import Timer


class Reading(msgspec.Struct):
    device: str
    at: datetime


class Change(msgspec.Struct):
    device: str
    state: str
    since: datetime


class Device(msgspec.Struct):
    name: str = ""
    last: datetime | None = None
    is_silent: bool = False


class Silence(Computation):
    """Says when a device falls silent, and when it is back."""

    device = Value(Device)

    def process_record(self, context: Context, reading: Reading) -> None:
        device = context[Silence.device]
        if device.last is not None and reading.at <= device.last:
            return  # an older reading says nothing new
        if device.is_silent:
            context.produce(Change(reading.device, "back", reading.at))
        device.name, device.last, device.is_silent = reading.device, reading.at, False
        context.set_timer("silent", at=reading.at + minutes(10))

    def process_timer(self, context: Context, timer: Timer) -> None:
        device = context[Silence.device]
        assert device.last is not None
        device.is_silent = True
        context.produce(Change(device.name, "silent", device.last))


graph = Graph("offline")
(
    graph.inject(
        "readings",
        Mqtt("devices/+/reading"),
        schema=Reading,
        event_time=EventTime("at", max_disorder=seconds(30)),
        idle=AdvanceWithClock(after=minutes(1)),
    )
    .key_by("device")
    .process(Silence(), name="silence", output=Change)
    .to_table("changes")
)
