"""Real phones over a real mobile network: each session has injectors of its own, for the two bounds of disorder."""

from __future__ import annotations

import os

import msgspec

from millpy.graph import Graph, KeyedStream
from millpy.injectors.mqtt import Mqtt
from millpy.injectors.settings import Dedupe, EventTime
from millpy.model.time import hours, milliseconds, minutes, seconds
from millpy.windowing.aggregate import Count, Max, Mean, Min, Sum
from millpy.windowing.window import FixedWindows


class Message(msgspec.Struct):
    device: str
    seq: int
    event_ms: int
    rtt_ms: float


graph = Graph("ooo")


def by_device(session: str, bound_ms: int) -> KeyedStream:
    return graph.inject(
        f"{session}_within_{bound_ms}ms",
        Mqtt(f"ooo/{session}", host=os.environ["OOO_HOST"], port=int(os.environ["OOO_PORT"])),
        schema=Message,
        event_time=EventTime("event_ms", unit="ms", max_disorder=milliseconds(bound_ms)),
        dedupe=Dedupe("device", "seq", within=hours(1)),
    ).key_by("device")


for session in os.environ["OOO_SESSIONS"].split(","):
    strict, patient = by_device(session, 250), by_device(session, 2000)
    for keyed, bound_ms, lateness_ms in ((strict, 250, 0), (strict, 250, 1000), (patient, 2000, 0)):
        (
            keyed.window(FixedWindows(seconds(1)), allowed_lateness=milliseconds(lateness_ms), intervals=1)
            .aggregate(n=Count())
            .to_table(f"{session}_late_{bound_ms}_{lateness_ms}")
        )
    for name, size in (("10s", seconds(10)), ("10min", minutes(10))):
        (
            patient.window(FixedWindows(size), allowed_lateness=hours(1), intervals=2)
            .aggregate(
                n=Count(),
                n_values=Count("rtt_ms"),
                total=Sum("rtt_ms"),
                mean=Mean("rtt_ms"),
                low=Min("rtt_ms"),
                high=Max("rtt_ms"),
            )
            .to_table(f"{session}_tumbling_{name}")
        )
