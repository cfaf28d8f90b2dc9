"""Checks the tools per key: their rows are those of a loop over the readings of a device, sorted by event time.

A tool's step follows the step `TOOL_in_order`. `OrderJudge` keeps the readings that an interval of that step has
consumed in time; `ToolJudge` judges the rows of an interval of the tool by the readings of all of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

from millpy.store.memory.tables import Row
from millpy.testing.simulation.history import CommittedBundle
from millpy.testing.simulation.input import Truth
from millpy.testing.simulation.oracle import BEGINNING
from millpy.testing.simulation.per_key import (
    BY,
    ENDS,
    GRID_LIMIT_US,
    GRID_US,
    LARGE,
    RATE_GAP_US,
    SILENCE_US,
    SMALL,
    TOOLS,
    WITHIN_US,
    WRAPS_AT,
)
from millpy.testing.simulation.recount import Follower

Found = tuple[Any, ...]
"""What is compared of a row, without its device."""


@dataclass(slots=True)
class OrderJudge:
    """Follows one interval of the step that puts readings in order.

    Attributes:
        kept: device -> its readings that were in time, in the order of arrival.
        judged: device -> the number of each of its readings, and whether it was in time.
        unsure: devices with a reading whose lateness depends on the order of partitions.
    """

    follower: Follower
    kept: dict[str, list[Truth]] = field(default_factory=dict)
    judged: dict[str, list[tuple[int, bool]]] = field(default_factory=dict)
    late: Counter[str] = field(default_factory=Counter)
    unsure: set[str] = field(default_factory=set)

    def follow(self, commit: CommittedBundle) -> Iterator[str]:
        """Take a bundle in."""
        for truth, least, most in self.follower.advance(commit.observed.cursors):
            self.judged.setdefault(truth.device, []).append((truth.seq, truth.at >= least))
            if truth.at < least:
                self.late[truth.device] += 1
                continue
            if truth.at < most:
                self.unsure.add(truth.device)
            self.kept.setdefault(truth.device, []).append(truth)
        return iter(())

    def finished(self) -> Iterator[str]:
        """Yield nothing: the rows of the tool tell."""
        return iter(())


@dataclass(slots=True)
class ToolJudge:
    """Judges one interval of a tool.

    Attributes:
        orders: the judges of the step before it.
        found: device -> what its rows have.
    """

    tool: str
    orders: Sequence[OrderJudge]
    found: dict[str, Counter[Found]] = field(default_factory=dict)

    def follow(self, commit: CommittedBundle) -> Iterator[str]:
        """Compare the rows of a bundle with all that can be expected by then.

        Behind several partitions, only the end shows which readings were late in every interval.
        """
        touched = set()
        for row in commit.rows.get(self.tool, ()):
            self.found.setdefault(row["device"], Counter())[SHOWN[self.tool](row)] += 1
            touched.add(row["device"])
        if len(self.orders[0].follower.sources) > 1:
            return
        for device in touched - self.unsure():
            if wrong := self.found[device] - self.expected(device):
                yield f"{device} has the rows {sorted(wrong)[:3]}, which its readings do not make"

    def unsure(self) -> set[str]:
        """Return the devices that cannot be compared."""
        return unsure_of(self.orders)

    def expected(self, device: str) -> Counter[Found]:
        """Return what a device has when all that the watermark has passed has left."""
        watermark = max((order.follower.watermark for order in self.orders), default=BEGINNING)
        kept = max((order.kept.get(device, []) for order in self.orders), key=len, default=[])
        readings = sorted((truth for truth in kept if truth.at < watermark), key=lambda truth: truth.at)
        return Counter(COMPUTED[self.tool](readings, watermark))

    def finished(self) -> Iterator[str]:
        """Yield the rows that are missing of the devices of this interval."""
        for device in self.found.keys() - self.unsure():
            expected, found = self.expected(device), self.found[device]
            if expected != found:
                yield (
                    f"{self.tool}: {device} lacks the rows {sorted(expected - found)[:3]}, and has the rows "
                    f"{sorted(found - expected)[:3]}, which its readings do not make"
                )


def unsure_of(orders: Sequence[OrderJudge]) -> set[str]:
    """Return the devices with a reading whose lateness is not known, or not the same in every interval."""
    unsure: set[str] = set().union(*(order.unsure for order in orders))
    for device in set().union(*(order.judged for order in orders)):
        lists = sorted((order.judged.get(device, []) for order in orders), key=len)
        if any(judged != lists[-1][: len(judged)] for judged in lists):
            unsure.add(device)
    return unsure


def whole_tool(judges: Sequence[ToolJudge]) -> Iterator[str]:
    """Yield the devices that have no row in any interval, and should have some."""
    homes: set[str] = set().union(*(judge.found for judge in judges))
    for device in {device for order in judges[0].orders for device in order.kept} - homes - judges[0].unsure():
        if judges[0].expected(device):
            yield f"{judges[0].tool}: no reading of {device} had an effect"


def late_for_tool(orders: Sequence[OrderJudge], found: Counter[str]) -> Iterator[str]:
    """Yield the devices whose number of late records, over all intervals, differs."""
    for device in {*orders[0].late, *found} - unsure_of(orders):
        if found[device] != orders[0].late[device]:
            yield f"{device} has {found[device]} records that are late for their order, not {orders[0].late[device]}"


def _changes(readings: Sequence[Truth], watermark: int) -> Iterator[Found]:
    last: Truth | None = None
    for truth in readings:
        if last is None or abs(truth.value - last.value) > BY or truth.at >= last.at + SILENCE_US:
            yield (truth.seq,)
            last = truth


def _rates(readings: Sequence[Truth], watermark: int) -> Iterator[Found]:
    last: Truth | None = None
    for truth in readings:
        if last is not None and truth.at == last.at:
            continue
        if last is not None and truth.at - last.at <= RATE_GAP_US:
            rise = truth.value - last.value
            if rise >= 0:
                yield last.at, truth.at, rise, False
            elif rise + WRAPS_AT <= WRAPS_AT // 2:
                yield last.at, truth.at, rise + WRAPS_AT, False
            else:
                yield last.at, truth.at, truth.value, True
        last = truth


def _grid(readings: Sequence[Truth], watermark: int) -> Iterator[Found]:
    values = {truth.at: truth.value for truth in readings}  # the last one of each time
    times = list(values)
    for at, until in zip(times, [*times[1:], watermark], strict=True):
        point = -(-at // GRID_US) * GRID_US
        while point < until and point <= at + GRID_LIMIT_US:
            yield point, values[at], point - at >= GRID_US
            point += GRID_US


def _matches(readings: Sequence[Truth], watermark: int) -> Iterator[Found]:
    begun: list[Truth] = []
    for truth in readings:
        begun = [first for first in begun if truth.at <= first.at + WITHIN_US]
        if truth.value >= LARGE and begun:
            yield begun[0].seq, begun[0].at, truth.seq, truth.at
            begun = []
        elif ENDS[0] <= truth.value < ENDS[1]:
            begun = []
        elif truth.value < SMALL:
            begun.append(truth)


def _absences(readings: Sequence[Truth], watermark: int) -> Iterator[Found]:
    for place, truth in enumerate(readings):
        over = truth.at + WITHIN_US
        large = any(other.value >= LARGE and other.at <= over for other in readings[place + 1 :])
        if truth.value < SMALL and not large and over < watermark:
            yield truth.seq, truth.at, over


def _us(moment: datetime) -> int:
    return (moment - datetime(1970, 1, 1, tzinfo=UTC)) // timedelta(microseconds=1)


COMPUTED: Mapping[str, Callable[[Sequence[Truth], int], Iterator[Found]]] = {
    "changes": _changes,
    "rates": _rates,
    "grid": _grid,
    "matches": _matches,
    "absences": _absences,
}
SHOWN: Mapping[str, Callable[[Row], Found]] = {
    "changes": lambda row: (row["seq"],),
    "rates": lambda row: (_us(row["since"]), _us(row["at"]), row["increase"], row["reset"]),
    "grid": lambda row: (_us(row["at"]), row["value"], row["filled"]),
    "matches": lambda row: (row["small"].seq, _us(row["small_at"]), row["large"].seq, _us(row["large_at"])),
    "absences": lambda row: (row["small"].seq, _us(row["small_at"]), row["event_time"]),
}
ORDERS = {f"{tool}_in_order": tool for tool in TOOLS}
"""The step before each tool."""


def whole_ranking(tops: Sequence[Row], rows: Sequence[Row], n: int) -> Iterator[str]:
    """Yield a window whose ranking is not that of the rows of the ranked windows."""
    found = {row["window_end"]: [(entry["device"], entry["total"]) for entry in row["top"]] for row in tops}
    expected = ranked(rows, n)
    for end in sorted(found.keys() | expected.keys()):
        if found.get(end) != expected.get(end):
            yield f"tops: {end} has {found.get(end)} instead of {expected.get(end)}"
            return


def ranked(rows: Sequence[Row], n: int) -> dict[int, list[tuple[str, int]]]:
    """Return the first n devices of each window, by the rows of the windows: window end -> (device, total)."""
    found: dict[int, list[tuple[str, int]]] = {}
    for row in rows:
        found.setdefault(row["window_end"], []).append((row["device"], row["total"]))
    return {end: sorted(totals, key=lambda total: (-total[1], total[0]))[:n] for end, totals in found.items()}
