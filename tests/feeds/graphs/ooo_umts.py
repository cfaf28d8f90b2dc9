"""Real phones over a real mobile network: each session has injectors of its own, for the two bounds of disorder."""

from __future__ import annotations

import msgspec

from millpy.graph import Graph, KeyedStream
from millpy.ingest.settings import Dedupe, EventTime
from millpy.model.time import hours, milliseconds, minutes, seconds
from millpy.windowing.aggregates.numeric import Count
from millpy.windowing.window import FixedWindows, SessionWindows, SlidingWindows
from tests.feeds.sources import all_of, kept, mode, source


class Message(msgspec.Struct):
    device: str
    seq: int
    event_ms: int
    rtt_ms: float


graph = Graph("ooo_umts")


def by_device(session: str, bound_ms: int) -> KeyedStream:
    messages = graph.inject(
        f"{session}_within_{bound_ms}ms",
        source(f"ooo/{session}", f"{session}.csv"),
        schema=Message,
        event_time=EventTime("event_ms", unit="ms", max_disorder=milliseconds(bound_ms)),
        dedupe=Dedupe("device", "seq", within=hours(1)),
    )
    return kept(messages.key_by("device"))


for session in ("d_1", "d_2", "d_3", "d_4", "d_5"):
    strict, patient = by_device(session, 250), by_device(session, 2000)
    for keyed, bound_ms, lateness_ms in ((strict, 250, 0), (strict, 250, 1000), (patient, 2000, 0)):
        (
            keyed.window(
                FixedWindows(seconds(1)), allowed_lateness=milliseconds(lateness_ms), accumulation=mode(), intervals=1
            )
            .aggregate(n=Count())
            .to_table(f"{session}_late_w1s_bound{bound_ms}ms_lateness{lateness_ms}ms")
        )
    for name, windows in {
        "tumbling_10s": FixedWindows(seconds(10)),
        "tumbling_10min": FixedWindows(minutes(10)),
        "sliding_10s_every_2s": SlidingWindows(seconds(10), every=seconds(2)),
        "sessions_gap_1000ms": SessionWindows(milliseconds(1000)),
    }.items():
        (
            patient.window(windows, allowed_lateness=hours(1), accumulation=mode(), intervals=1)
            .aggregate(**all_of("rtt_ms"))
            .to_table(f"{session}_{name}")
        )
