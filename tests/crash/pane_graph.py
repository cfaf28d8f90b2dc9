"""Windows of users' functions, sessions with bounds, and triggers that close, ask and repeat, each with its history."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import msgspec

from millpy import (
    Accumulation,
    AfterAny,
    AfterCount,
    AfterPercentile,
    AfterWatermark,
    Count,
    EventTime,
    Every,
    File,
    FiringBehavior,
    FixedWindows,
    Graph,
    SessionWindows,
    Sum,
    When,
    WindowFunction,
    hours,
    milliseconds,
    seconds,
)

SHIFT, PART, CUT, SIZE, GROUP_SIZE = 20, 6, 30, 20, 60
GAP, LENGTH, RECORDS_MAX = 3, 15, 5
LARGE, ENOUGH = 150, 7
KEPT_S = 1.0
Window = tuple[datetime, datetime]


class Reading(msgspec.Struct):
    device: str
    at: int
    value: int
    gap: int


class Part(msgspec.Struct):
    group: int
    n: int
    total: int


def moment(at: int) -> datetime:
    return datetime.fromtimestamp(at, UTC)


class Shifts(WindowFunction):
    """A shift that begins at another time for each device, and a short window before each odd value."""

    def __init__(self, size: int) -> None:
        self.size = size

    def assign(self, record: Any, at: datetime, key: Any) -> Iterable[Window]:
        first = int(key[1:]) % self.size
        start = first + (record.at - first) // self.size * self.size
        yield moment(start), moment(start + self.size)
        if record.value % 2:
            yield at - timedelta(seconds=PART), at + timedelta(seconds=1)


class Visits(WindowFunction):
    """Windows as long as each record says, until the next cut, which merge where they intersect."""

    merges = True

    def assign(self, record: Any, at: datetime, key: Any) -> Iterable[Window]:
        return [(at, moment(min(record.at + record.gap, record.at // CUT * CUT + CUT)))]


def part_of(pane: Any) -> Part:
    return Part(int(pane.device[1:]) % 3, pane.n, int(pane.total or 0))


graph = Graph("panes")
readings = graph.inject(
    "readings",
    File(str(Path(__file__).parent / "panes.ndjson")),
    schema=Reading,
    event_time=EventTime("at", unit="s", max_disorder=seconds(8)),
)
often = AfterWatermark(early=AfterAny(AfterCount(4), Every(milliseconds(40))), late=AfterCount(2))
large = AfterWatermark(early=When(lambda pane: pane.total >= LARGE), late=AfterCount(2))
most = AfterWatermark(early=AfterPercentile(0.6), late=AfterCount(2))
always = {"on_time_pane": FiringBehavior.ALWAYS, "final_pane": FiringBehavior.ALWAYS, "pane_info": True}
closing = {"trigger": AfterCount(ENOUGH)}
discarding, retracting = Accumulation.DISCARDING, Accumulation.RETRACTING
steps: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "shifts": (Shifts(SHIFT), True, {"trigger": often, "accumulation": retracting}),
    "visits": (Visits(), True, {"trigger": often}),
    "cut": (
        SessionWindows(seconds(GAP), max_length=seconds(LENGTH)),
        timedelta(seconds=KEPT_S),
        {"trigger": often, "accumulation": discarding},
    ),
    "full": (
        SessionWindows(seconds(GAP), max_records=RECORDS_MAX),
        True,
        {"trigger": often, "allowed_lateness": seconds(1)},
    ),
    "large": (FixedWindows(seconds(SIZE)), True, {"trigger": large, **always}),
    # One interval: it learns from 1,024 records on.
    "most": (
        FixedWindows(seconds(SIZE)),
        True,
        {"trigger": most, "accumulation": discarding, **always, "intervals": 1},
    ),
    "closing": (FixedWindows(seconds(SIZE)), True, closing),
    "closing_sessions": (SessionWindows(seconds(GAP)), True, closing),
}
for name, (windows, history, more) in steps.items():
    keyed = readings.key_by("device").window(
        windows, **{"allowed_lateness": hours(1), "intervals": 2, **more}, name=name
    )
    panes = keyed.aggregate(n=Count(), total=Sum("value")).to_table(name, history=history)
    if name in ("shifts", "most"):
        totals = (
            panes.map(part_of, Part)
            .key_by("group")
            .window(FixedWindows(seconds(GROUP_SIZE)), allowed_lateness=hours(2), intervals=2, name=f"{name}_totals")
        )
        totals.aggregate(n=Sum("n"), total=Sum("total")).to_table(f"{name}_totals")
