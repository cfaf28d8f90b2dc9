"""LoRaWAN frames of two networks: redelivered within minutes, held back for hours, with gateway clocks years off.

Frames without an event time become dead letters. Nothing is dropped as late where every frame is to be counted: some
clocks are more than two years behind.
"""

from __future__ import annotations

import msgspec

from millpy.computation import Computation, Context, MapCell
from millpy.graph import Graph, Stream
from millpy.ingest.settings import Dedupe, EventTime
from millpy.model.time import days, minutes, seconds
from millpy.windowing.aggregates.numeric import Count
from millpy.windowing.window import FixedWindows, SessionWindows
from tests.feeds.sources import all_of, kept, mode, source

EVER = days(1500)
WITHIN_MS = 600_000


class Frame(msgspec.Struct):
    arrival_seq: int
    arrival_ms: int
    device: str
    fcnt: int | None = None
    event_ms: int | None = None
    temperature_c: float | None = None


class Again(msgspec.Struct):
    arrival_seq: int
    device: str
    fcnt: int
    arrival_ms: int


class Duplicates(Computation):
    """Names the frames that a device has sent already, at most ten minutes after the last time."""

    last_ms = MapCell(int, int)

    def process_record(self, context: Context, record: Frame) -> None:
        if record.fcnt is None:
            return
        seen = context[Duplicates.last_ms]
        last = seen.get(record.fcnt)
        if last is not None and record.arrival_ms - last <= WITHIN_MS:
            context.produce(Again(record.arrival_seq, record.device, record.fcnt, record.arrival_ms))
        seen[record.fcnt] = record.arrival_ms


graph = Graph("campusiot_lorawan")


def frames(name: str, event_time: EventTime, dedupe: Dedupe, network: str = "") -> Stream:
    topic, file = (f"campus/{network}", f"{network}.csv") if network else ("campus/+", "frames.csv.gz")
    found = graph.inject(name, source(topic, file), schema=Frame, event_time=event_time, dedupe=dedupe)
    kept(found.key_by("device"))
    return found


once = Dedupe("arrival_seq", within=days(1))
by_event = EventTime("event_ms", unit="ms", max_disorder=minutes(1))

raw = frames("raw", by_event, once)
first = frames("first", by_event, Dedupe("device", "fcnt", within=minutes(10), time="arrival_ms", unit="ms"))
for stream, windows, name in (
    (raw, FixedWindows(minutes(10)), "tumbling_10min_raw"),
    (first, FixedWindows(minutes(10)), "tumbling_10min_dedup"),
    (first, SessionWindows(minutes(30)), "sessions_gap_30min_dedup"),
):
    (
        stream.key_by("device")
        .window(windows, allowed_lateness=EVER, accumulation=mode(), intervals=1)
        .aggregate(**all_of("temperature_c"))
        .to_table(name)
    )

helium = frames("helium", EventTime("event_ms", unit="ms", max_disorder=seconds(2)), once, network="helium")
for lateness_s in (0, 600):
    (
        helium.key_by("device")
        .window(FixedWindows(minutes(1)), allowed_lateness=seconds(lateness_s), accumulation=mode(), intervals=1)
        .aggregate(n=Count())
        .to_table(f"late_w1min_bound2s_lateness{lateness_s}s")
    )

(
    frames("by_arrival", EventTime("arrival_ms", unit="ms", max_disorder=minutes(1)), once)
    .key_by("device")
    .process(Duplicates(), name="duplicates", output=Again, intervals=1)
    .to_table("duplicates_ttl600s")
)
