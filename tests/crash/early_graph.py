"""Windows with early panes in every mode, their histories, and totals over them; the readings are in a file beside."""

from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec

from millpy import (
    Accumulation,
    AfterAny,
    AfterCount,
    AfterWatermark,
    Count,
    EventTime,
    Every,
    File,
    FixedWindows,
    Graph,
    SessionWindows,
    SlidingWindows,
    Sum,
    TimestampCombiner,
    hours,
    seconds,
)

SIZE, EVERY, GAP, GROUP_SIZE = 20, 10, 3, 60
COMBINERS = {
    Accumulation.ACCUMULATING: TimestampCombiner.END_OF_WINDOW,
    Accumulation.DISCARDING: TimestampCombiner.EARLIEST,
    Accumulation.RETRACTING: TimestampCombiner.LATEST,
}


class Reading(msgspec.Struct):
    device: str
    group: int
    at: int
    value: int


class Part(msgspec.Struct):
    group: int
    n: int
    total: int


def part_of(pane: Any) -> Part:
    return Part(int(pane.device[1:]) % 3, pane.n, int(pane.total))


graph = Graph("early")
readings = graph.inject(
    "readings",
    File(str(Path(__file__).parent / "early.ndjson")),
    schema=Reading,
    event_time=EventTime("at", unit="s", max_disorder=seconds(3)),
)
tick = timedelta(milliseconds=40)
trigger = AfterWatermark(early=AfterAny(AfterCount(9), Every(tick)), late=AfterCount(2))
for mode in Accumulation:
    for kind, windows in (
        ("fixed", FixedWindows(seconds(SIZE))),
        ("sliding", SlidingWindows(seconds(SIZE), every=seconds(EVERY))),
        ("sessions", SessionWindows(seconds(GAP))),
    ):
        name = f"{kind}_{mode.value}"
        keyed = readings.key_by("device").window(
            windows,
            trigger=trigger,
            accumulation=mode,
            timestamp_combiner=COMBINERS[mode],
            allowed_lateness=hours(1),
            intervals=2,
            name=name,
        )
        panes = keyed.aggregate(n=Count(), total=Sum("value")).to_table(name, history=True)
        if kind == "fixed" and mode is not Accumulation.ACCUMULATING:
            parts = panes.map(part_of, Part).key_by("group")
            totals = parts.window(FixedWindows(seconds(GROUP_SIZE)), allowed_lateness=hours(1), intervals=2)
            totals.aggregate(n=Sum("n"), total=Sum("total")).to_table(f"totals_{mode.value}")
