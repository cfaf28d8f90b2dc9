"""The graphs of the deploy matrix: every kind of window in one graph, changes to it, and a recount by plain loops.

The recount shares no code with the engine: windows are tuples of seconds, and every record is judged by the watermark
before it, `largest event time so far - DISORDER`, of the one source partition.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

import msgspec

from millpy import (
    Accumulation,
    AfterAny,
    AfterCount,
    AfterWatermark,
    Collect,
    Combiner,
    Computation,
    Context,
    Count,
    EventTime,
    Every,
    First,
    FixedWindows,
    Graph,
    Last,
    Max,
    Mean,
    Median,
    Min,
    Quantile,
    SessionWindows,
    SlidingWindows,
    StandardDeviation,
    Sum,
    Top,
    Value,
    Variance,
    WindowFunction,
    seconds,
)
from millpy.windowing.accumulator import Aggregate
from millpy.windowing.composite_triggers import AFTER_WATERMARK
from millpy.windowing.triggers import Trigger

EARLY = AfterWatermark(early=AfterAny(AfterCount(7), Every(timedelta(seconds=0.1))))
DISORDER = 5
END = 240
Rows = Mapping[tuple[str, int, int], tuple[Any, ...]]


class Reading(msgspec.Struct):
    device: str
    at: int
    value: int


class ReadingMore(msgspec.Struct):
    device: str
    at: int
    value: int
    unit: str = "mm"


class ReadingMaybe(msgspec.Struct):
    device: str
    at: int
    value: int | None


class Spread(Combiner[list[int]]):
    accumulator = list[int]
    result_type = int

    def __init__(self, factor: int = 1) -> None:
        self.factor = factor

    def create(self) -> list[int]:
        return []

    def add(self, accumulator: list[int], record: Reading) -> list[int]:
        return [min([*accumulator[:1], record.value]), max([*accumulator[1:], record.value])]

    def merge(self, one: list[int], other: list[int]) -> list[int]:
        return [min(one[0], other[0]), max(one[1], other[1])] if one and other else one or other

    def result(self, accumulator: list[int]) -> int:
        return self.factor * (accumulator[1] - accumulator[0])


class SpreadOfTexts(Spread):
    accumulator = list[str]  # type: ignore[assignment]


SpreadOfTexts.__name__ = "Spread"


@dataclass(frozen=True)
class OwnSliding(WindowFunction):
    size: int
    every: int

    def assign(self, record: Reading, at: datetime, key: Any) -> Iterator[tuple[datetime, datetime]]:
        last = record.at // self.every * self.every
        for start in range(last, record.at - self.size, -self.every):
            begin = at - timedelta(seconds=record.at - start)
            yield begin, begin + timedelta(seconds=self.size)


@dataclass(frozen=True)
class OwnSessions(WindowFunction):
    gap: int
    merges = True

    def assign(self, record: Reading, at: datetime, key: Any) -> Sequence[tuple[datetime, datetime]]:
        return [(at, at + timedelta(seconds=self.gap))]


@dataclass(frozen=True)
class Kind:
    """A window: `size` seconds each `every`, or a session with a gap of `size` (every = 0); `own`: by a function."""

    size: int
    every: int
    lateness: int
    mode: Accumulation = Accumulation.ACCUMULATING
    trigger: Trigger = AFTER_WATERMARK
    own: bool = False
    history: bool = False

    def windows(self) -> Any:
        if self.own:
            return OwnSliding(self.size, self.every) if self.every else OwnSessions(self.size)
        if not self.every:
            return SessionWindows(seconds(self.size))
        if self.every == self.size:
            return FixedWindows(seconds(self.size))
        return SlidingWindows(seconds(self.size), every=seconds(self.every))

    @property
    def sliced(self) -> bool:
        aligned = self.every not in (0, self.size) and self.size % self.every == 0 and not self.own
        return aligned and self.mode is Accumulation.ACCUMULATING and self.trigger == AFTER_WATERMARK


KINDS = {
    f"{name}_{'late' if lateness else 'sharp'}": Kind(size, every, lateness)
    for name, size, every in (("fixed", 30, 30), ("slices", 40, 10), ("sliding", 40, 15), ("sessions", 4, 0))
    for lateness in (0, 20)
} | {
    "fixed_retracting": Kind(30, 30, 20, Accumulation.RETRACTING),
    "slides_discarding": Kind(40, 10, 20, Accumulation.DISCARDING),
    "sessions_retracting": Kind(4, 0, 20, Accumulation.RETRACTING),
    "fixed_early": Kind(30, 30, 20, Accumulation.RETRACTING, EARLY),
    "slides_early": Kind(40, 10, 20, trigger=EARLY),
    "sessions_early": Kind(4, 0, 20, Accumulation.DISCARDING, EARLY, history=True),
    "own_early": Kind(40, 15, 20, Accumulation.RETRACTING, EARLY, own=True, history=True),
    "own_sessions": Kind(4, 0, 20, own=True),
}


@dataclass
class Added:
    """An aggregate to add, and its recount over a window's records in order of event time."""

    aggregate: Aggregate
    of: Callable[[Sequence[Reading]], Any]


def numbers(records: Sequence[Reading]) -> list[int]:
    return [record.value for record in records]


ADDED = {
    "count": Added(Count("value"), len),
    "mean": Added(Mean("value"), lambda rs: statistics.fmean(numbers(rs))),
    "low": Added(Min("value"), lambda rs: min(numbers(rs))),
    "high": Added(Max("value"), lambda rs: max(numbers(rs))),
    "variance": Added(Variance("value"), lambda rs: statistics.variance(numbers(rs)) if len(rs) > 1 else None),
    "deviation": Added(StandardDeviation("at", population=True), lambda rs: statistics.pstdev([r.at for r in rs])),
    "earliest": Added(First("value"), lambda rs: rs[0].value),
    "latest": Added(Last("value"), lambda rs: rs[-1].value),
    "best": Added(Top("value", n=2), lambda rs: sorted(numbers(rs), reverse=True)[:2]),
    "everything": Added(Collect("value", limit=5), lambda rs: numbers(rs)[:5]),
    "median": Added(Median("value"), lambda rs: sorted(numbers(rs))[(len(rs) - 1) // 2]),
    "p90": Added(Quantile("at", 0.9), lambda rs: sorted(r.at for r in rs)[9 * (len(rs) - 1) // 10]),
    "spread": Added(Spread(), lambda rs: max(numbers(rs)) - min(numbers(rs))),
}


class Told(msgspec.Struct):
    device: str
    n: int
    total: int


class Sums(Computation):
    n = Value(int, default=0)
    total = Value(int, default=0)

    def process_record(self, context: Context, record: Reading) -> None:
        context[Sums.n] += 1
        context[Sums.total] += record.value
        context.produce(Told(record.device, context[Sums.n], context[Sums.total]))


class SumsMore(Computation):
    last = Value(int, default=-1)
    n = Value(int, default=0)
    total = Value(int, default=0)

    def process_record(self, context: Context, record: Reading) -> None:
        context[SumsMore.n] += 1
        context[SumsMore.total] += record.value
        context[SumsMore.last] = record.at
        context.produce(Told(record.device, context[SumsMore.n], context[SumsMore.total]))


class SumsFrom(Sums):
    n = Value(int, default=100)


@dataclass
class Shape:
    """A version of the graph: the base with changes."""

    added: Sequence[str] = ()
    schema: type[msgspec.Struct] = Reading
    sums: type[Computation] = Sums
    base: Mapping[str, Aggregate] = field(default_factory=lambda: {"n": Count(), "total": Sum("value")})
    kinds: Mapping[str, Kind] = field(default_factory=lambda: KINDS)
    key: str = "device"
    intervals: int = 2
    own: Spread = field(default_factory=Spread)
    more: bool = False
    totals: bool = False

    def graph(self, feed: Any) -> Graph:
        graph = Graph("factory")
        event_time = EventTime("at", unit="s", max_disorder=seconds(DISORDER))
        source = graph.inject("readings", feed, schema=self.schema, event_time=event_time)
        keyed = source.key_by(self.key)
        for name, kind in self.kinds.items():
            own = {} if kind.sliced else {"own": self.own}
            added = {a: ADDED[a].aggregate for a in self.added if not (kind.sliced and a == "spread")}
            windows = keyed.window(
                kind.windows(),
                allowed_lateness=timedelta(seconds=kind.lateness),
                accumulation=kind.mode,
                trigger=kind.trigger,
                intervals=self.intervals,
            )
            panes = windows.aggregate(**self.base, **own, **added).to_table(name, history=kind.history)
            if self.totals and name == "fixed_retracting":
                panes.key_by("device").window(FixedWindows(seconds(60))).aggregate(n=Sum("n")).to_table("totals")
        sums = source.key_by("device").process(self.sums(), name="sums", output=Told, intervals=self.intervals)
        sums.to_table("sums")
        if self.more:
            keyed.window(FixedWindows(seconds(60))).aggregate(n=Count()).to_table("more")
            sums.key_by("device").window(FixedWindows(seconds(60))).aggregate(n=Count()).to_table("of_sums")
        return graph


def records_of(seed: int) -> list[Reading]:
    """Out of order: most within DISORDER, some late, a few too late for any window; pauses that end sessions."""
    chosen = random.Random(seed)
    found = []
    for at in range(END):
        for device in range(3):
            if chosen.random() < (0.2 if at // 12 % 3 == device else 0.9):
                back = chosen.choices([0, chosen.randrange(DISORDER), chosen.randrange(30)], [6, 3, 1])[0]
                found.append(Reading(f"d{device}", max(at - back, 0), chosen.randrange(-50, 1000)))
    return found


@dataclass(eq=False)
class Window:
    start: int
    end: int
    records: list[tuple[int, Reading]] = field(default_factory=list)


def recount(records: Sequence[Reading], changed_at: int, kind: Kind, added: Sequence[str]) -> Rows:
    """(device, start, end) -> n, total, spread (not of slices), additions; None if an older record is in the window."""
    windows: dict[str, list[Window]] = {}
    largest: int | None = None
    for place, record in enumerate(records):
        watermark = -(10**9) if largest is None else largest - DISORDER
        largest = record.at if largest is None else max(largest, record.at)
        into = _session if not kind.every else _aligned
        into(windows.setdefault(record.device, []), kind, place, record, watermark)
    return {
        (device, window.start, window.end): tuple(_columns(window, changed_at, kind, added))
        for device, of_device in windows.items()
        for window in of_device
    }


def _aligned(windows: list[Window], kind: Kind, place: int, record: Reading, watermark: int) -> None:
    start = record.at // kind.every * kind.every
    while start + kind.size > record.at:
        if watermark < start + kind.size + kind.lateness:
            known = [window for window in windows if window.start == start]
            if not known:
                windows.append(Window(start, start + kind.size))
            (known or windows[-1:])[0].records.append((place, record))
        start -= kind.every


def _session(windows: list[Window], kind: Kind, place: int, record: Reading, watermark: int) -> None:
    grown = Window(record.at, record.at + kind.size)
    met = [
        window
        for window in windows
        if window.start < grown.end and record.at < window.end and watermark < window.end + kind.lateness
    ]
    for window in met:
        grown.start, grown.end = min(grown.start, window.start), max(grown.end, window.end)
        grown.records += window.records
    if watermark < grown.end + kind.lateness:
        grown.records.append((place, record))
        windows[:] = [window for window in windows if window not in met] + [grown]


def _columns(window: Window, changed_at: int, kind: Kind, added: Sequence[str]) -> Iterator[Any]:
    window.records.sort(key=lambda row: row[0])
    records = sorted((record for _, record in window.records), key=lambda record: record.at)
    values = numbers(records)
    yield len(values)
    yield sum(values)
    if not kind.sliced:
        yield max(values) - min(values)
    older = window.records[0][0] < changed_at
    for name in added:
        if not (kind.sliced and name == "spread"):
            yield None if older else ADDED[name].of(records)
