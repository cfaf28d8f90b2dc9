"""Canary: after a worker was killed, the source begins at its beginning, as if it stored no position."""

import atexit
import os
from datetime import datetime
from pathlib import Path

import msgspec

from millpy import Computation, Context, EventTime, File, Graph, Value, seconds
from millpy.testing.crash_test.feed_source import FeedInjector, FeedPosition

PIDS = Path(os.environ["CANARY_PIDS"])
own = PIDS / str(os.getpid())
own.touch()
atexit.register(own.unlink, missing_ok=True)


class Reading(msgspec.Struct):
    device: str
    at: datetime
    value: float


class Echo(Computation):
    seen = Value(int)

    def process_record(self, context: Context, record: Reading) -> None:
        context.produce(record)


graph = Graph("rereads")
time = EventTime("at", max_disorder=seconds(2))
readings = graph.inject("readings", File("none.ndjson"), schema=Reading, event_time=time)
readings.key_by("device").process(Echo(), name="echo", output=Reading).to_table("echoes")

opened = FeedInjector.open


async def open_again(self: FeedInjector, position: bytes | None) -> None:
    await opened(self, position)
    if any(not Path("/proc", left.name).exists() for left in PIDS.iterdir()):  # only SIGKILL leaves one behind
        self._at = FeedPosition()


FeedInjector.open = open_again  # type: ignore[method-assign]
