"""Sessions without early panes, which may leave memory before they fire; the readings are in a file beside."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from millpy import Accumulation, Count, EventTime, File, FixedWindows, Graph, SessionWindows, Sum, hours, seconds

GAP, LENGTH, RECORDS_MAX, LATENESS, GROUP_SIZE = 3, 15, 5, 30, 60


class Reading(msgspec.Struct):
    device: str
    at: int
    value: int
    gap: int


class Part(msgspec.Struct):
    group: int
    n: int
    total: int


def part_of(pane: Any) -> Part:
    return Part(int(pane.device[1:]) % 3, pane.n, int(pane.total))


graph = Graph("stays")
readings = graph.inject(
    "readings",
    File(str(Path(__file__).parent / "stays.ndjson")),
    schema=Reading,
    event_time=EventTime("at", unit="s", max_disorder=seconds(8)),
)
steps: dict[str, tuple[SessionWindows, int, Accumulation]] = {
    "plain": (SessionWindows(seconds(GAP)), LATENESS, Accumulation.RETRACTING),
    "cut": (SessionWindows(seconds(GAP), max_length=seconds(LENGTH)), LATENESS, Accumulation.DISCARDING),
    "full": (SessionWindows(seconds(GAP), max_records=RECORDS_MAX), 1, Accumulation.ACCUMULATING),
}
for name, (windows, lateness, mode) in steps.items():
    keyed = readings.key_by("device").window(
        windows, allowed_lateness=seconds(lateness), accumulation=mode, intervals=2, name=name
    )
    panes = keyed.aggregate(n=Count(), total=Sum("value")).to_table(name, history=True)
    if mode is Accumulation.RETRACTING:
        parts = panes.map(part_of, Part).key_by("group")
        totals = parts.window(FixedWindows(seconds(GROUP_SIZE)), allowed_lateness=hours(1), intervals=2)
        totals.aggregate(n=Sum("n"), total=Sum("total")).to_table(f"{name}_totals")
