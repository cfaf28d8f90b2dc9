"""Code that takes its time: every call is noted in a file, as an outside service would note it."""

from __future__ import annotations

import asyncio
import os
import time

import msgspec

from millpy.computation import Computation, Context
from millpy.graph import Graph
from millpy.ingest.settings import EventTime
from millpy.sources.files.source import File

CALL_S = float(os.environ["SLOW_CALL_S"])
CALLS = os.open(os.environ["SLOW_CALLS"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)


class Reading(msgspec.Struct):
    device: str
    at: int
    value: int


class Seen(msgspec.Struct):
    device: str
    value: int


def note(value: int) -> None:
    os.write(CALLS, b"%d\n" % value)


class Slow(Computation):
    def process_record(self, context: Context, record: Reading) -> None:
        note(record.value)
        time.sleep(CALL_S)
        context.produce(Seen(record.device, record.value))


class Waits(Computation):
    async def process_record(self, context: Context, record: Reading) -> None:  # type: ignore[override]
        note(record.value)
        await asyncio.sleep(CALL_S)
        context.produce(Seen(record.device, record.value))


class Passes(Computation):
    def process_record(self, context: Context, record: Reading) -> None:
        context.produce(Seen(record.device, record.value))


def slow(record: Reading) -> bool:
    note(record.value)
    time.sleep(CALL_S)
    return True


graph = Graph("slow")
readings = graph.inject(
    "readings", File(os.environ["CRASH_INPUT"]), schema=Reading, event_time=EventTime("at", unit="us", sorted=True)
)
kind = os.environ["SLOW_KIND"]
stream = readings.filter(slow) if kind == "filter" else readings
computation: Computation = {"callback": Slow(), "async": Waits(), "filter": Passes()}[kind]
stream.key_by("device").process(computation, name="seen", output=Seen).to_table("seen")
