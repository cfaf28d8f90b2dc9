"""All tools per key over one ordered step, and a ranking; the events are in a file beside."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path

import msgspec

from millpy import (
    Accumulation,
    AfterCount,
    AfterWatermark,
    EventTime,
    File,
    FixedWindows,
    Graph,
    Pattern,
    Sum,
    hours,
    seconds,
)

DISORDER, SIZE, BEST = 5, 20, 3
WRAPS_AT, MAX_GAP, SILENCE = 10, 20, 12
GRIDS = {"previous": (3, 10, 1), "linear": (1, 45, 0), "null": (3, 10, 0)}
"""Method -> (every, limit, offset), in seconds. A gap of the fine grid has more points than are emitted at once."""


class Event(msgspec.Struct):
    device: str
    at: datetime
    number: int
    kind: str
    value: float | None
    counter: int


def is_a(event: Event) -> bool:
    return "a" in event.kind


def is_b(event: Event) -> bool:
    return "b" in event.kind


def is_c(event: Event) -> bool:
    return "c" in event.kind


PATTERNS = {
    "two": Pattern("a", is_a).then("b", is_b, within=seconds(6)).unless("c", is_c),
    "three": Pattern("a", is_a).then("b", is_b, within=seconds(4)).then("c", is_c, within=seconds(7)),
    "absent": Pattern("a", is_a).then_not("b", is_b, within=seconds(6)),
}
MODES = {"two": "past_last", "three": "past_last", "absent": "to_next"}

graph = Graph("tools")
events = graph.inject(
    "events",
    File(str(Path(__file__).parent / "events.ndjson")),
    schema=Event,
    event_time=EventTime("at", max_disorder=seconds(DISORDER)),
)
ordered = events.key_by("device").in_order(name="ordered", intervals=2)
for name, pattern in PATTERNS.items():
    ordered.match(pattern, name=name, after_match=MODES[name], intervals=2).to_table(name)  # type: ignore[arg-type]
ordered.changes("value", by=1, max_silence=seconds(SILENCE), name="changed", intervals=2).to_table("changed")
ordered.rates("counter", wraps_at=WRAPS_AT, max_gap=seconds(MAX_GAP), name="rates", intervals=2).to_table("rates")
for method, (every, limit, offset) in GRIDS.items():
    ordered.fill_gaps(
        "value",
        every=seconds(every),
        limit=seconds(limit),
        offset=seconds(offset),
        method=method,  # type: ignore[arg-type]
        name=f"grid_{method}",
        intervals=2,
    ).to_table(f"grid_{method}")
use = (
    events.key_by("device")
    .window(
        FixedWindows(seconds(SIZE)),
        allowed_lateness=hours(1),
        trigger=AfterWatermark(early=AfterCount(3)),
        accumulation=Accumulation.RETRACTING,
        name="use",
        intervals=2,
    )
    .aggregate(total=Sum("counter"))
)
use.top_n(BEST, by="total", name="top", parts=3, intervals=2).to_table("top", history=True)
