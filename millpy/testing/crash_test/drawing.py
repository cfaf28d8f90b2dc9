"""Draws the charts of a report's page as inline SVG. Pure text; colors are classes of the page's style."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

from millpy.testing.crash_test.report import CrashReport, FaultReport

WIDTH = 1120.0
LEFT, RIGHT = 84.0, 18.0
LANE, BAR = 30.0, 13.0
CHART, RATE, BETWEEN = 120.0, 56.0, 26.0
TOP = 22.0
RATE_BIN_S = 0.5
NUMBERED_MAX = 40
STRIP, STRIP_WIDTH = 30.0, 620.0


@dataclass(frozen=True, slots=True)
class Scale:
    """A linear scale from values to coordinates."""

    largest: float
    start: float
    length: float

    def __call__(self, value: float) -> float:
        """Return the coordinate of a value."""
        return self.start + self.length * min(max(value, 0.0), self.largest) / self.largest

    def ticks(self, about: int) -> list[float]:
        """Return round values from 0 up."""
        step = 10 ** math.floor(math.log10(self.largest / about))
        step *= next((m for m in (1, 2, 5, 10) if self.largest / (step * m) <= about), 10)
        return [step * n for n in range(int(self.largest / step) + 1)]


def timeline(report: CrashReport) -> str:
    """Draw lanes of workers, database and broker, and below them the fed and committed records."""
    length_s = max([report.seconds, 1.0, *(process.to_s for process in report.processes)])
    x = Scale(length_s, LEFT, WIDTH - LEFT - RIGHT)
    outer = [kind for kind in ("db", "broker") if any(fault.kind == kind for fault in report.faults)]
    lanes = {f"worker {number}": TOP + LANE * (number - 1) for number in range(1, report.workers + 1)}
    lanes |= {kind: TOP + LANE * (report.workers + place) for place, kind in enumerate(outer)}
    charts = TOP + LANE * len(lanes) + 14
    bottom = charts + CHART + BETWEEN + RATE
    body = [
        *_bands(report, x, bottom),
        *_seconds(x, bottom),
        *_fault_lines(report, x, bottom),
        *_lanes(report, x, lanes),
        *_progress(report, x, charts),
        *_rates(report, x, charts + CHART + BETWEEN),
        *_marks(report, x, lanes),
    ]
    return _svg(WIDTH, bottom + 24, body, "Timeline of faults, takeovers and throughput")


def recovery(report: CrashReport) -> str:
    """Draw the recovery times: a dot for each fault, by kind, and the medians. Return "" if there are none."""
    times = [fault.recovery_s for fault in report.faults if fault.recovery_s is not None]
    if not times:
        return ""
    x = Scale(max(*times, report.lease_s) * 1.05, LEFT, STRIP_WIDTH - LEFT - RIGHT)
    height = STRIP * len(report.recovery_by_kind)
    body = []
    for tick in x.ticks(6):
        body.append(_line(x(tick), 0, x(tick), height, "grid"))
        body.append(_text(x(tick), height + 16, f"{tick:g}", "small", anchor="middle"))
    for row, (kind, spread) in enumerate(report.recovery_by_kind.items()):
        y = STRIP * (row + 0.5)
        body.append(_text(LEFT - 12, y + 4, kind, "lane", anchor="end"))
        for fault in report.faults:
            if fault.kind == kind and fault.recovery_s is not None:
                dot = f'<circle cx="{x(fault.recovery_s):.1f}" cy="{y:.1f}" r="4.5" class="{kind}" opacity=".62">'
                body.append(dot + _title(fault_title(fault)) + "</circle>")
        body.append(_line(x(spread.median_s), y - 10, x(spread.median_s), y + 10, "median"))
    return _svg(STRIP_WIDTH, height + 22, body, "Recovery times by kind of fault", kind="chart narrow")


def glyph(kind: str, x: float, y: float, title: str = "") -> str:
    """Draw the mark of a kind of fault; marks differ by shape as well as by color."""
    inside = _title(title) if title else ""
    if kind == "kill":
        path = f"M{x - 5:.1f} {y - 5:.1f}l10 10m0 -10l-10 10"
        return f'<path d="{path}" class="kill cross">{inside}</path>'
    if kind == "freeze":
        return f'<rect x="{x - 5:.1f}" y="{y - 5:.1f}" width="10" height="10" class="freeze mark">{inside}</rect>'
    if kind == "network":
        path = f"M{x:.1f} {y - 7:.1f}l6 7l-6 7l-6 -7z"
        return f'<path d="{path}" class="network mark">{inside}</path>'
    if kind == "db":
        return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5.5" class="db mark">{inside}</circle>'
    return f'<path d="M{x:.1f} {y - 6:.1f}l6.5 11h-13z" class="broker mark">{inside}</path>'


def fault_title(fault: FaultReport) -> str:
    """Return the tooltip of a fault."""
    outcome = "not recovered from" if fault.recovery_s is None else f"recovered after {fault.recovery_s:.2f} s"
    return f"{fault.number}. {fault.what}, at {fault.at_s:.1f} s: {outcome}"


def _bands(report: CrashReport, x: Scale, bottom: float) -> Iterator[str]:
    for fault in report.faults:
        end = report.seconds if fault.recovered_s is None else fault.recovered_s
        yield _rect(x(fault.at_s), TOP - 8, max(x(end) - x(fault.at_s), 1), bottom - TOP + 8, "band")


def _seconds(x: Scale, bottom: float) -> Iterator[str]:
    for tick in x.ticks(10):
        yield _line(x(tick), TOP - 8, x(tick), bottom, "grid")
        yield _text(x(tick), bottom + 16, f"{tick:g} s", "small", anchor="middle")


def _fault_lines(report: CrashReport, x: Scale, bottom: float) -> Iterator[str]:
    for fault in report.faults:
        yield _line(x(fault.at_s), TOP - 8, x(fault.at_s), bottom, f"{fault.kind} thin")
    if len(report.faults) <= NUMBERED_MAX:
        free = 0.0
        for fault in report.faults:
            place = max(x(fault.at_s), free)
            free = place + 7 * len(str(fault.number)) + 3
            yield _text(place, TOP - 12, str(fault.number), "small", anchor="middle")


def _lanes(report: CrashReport, x: Scale, lanes: dict[str, float]) -> Iterator[str]:
    names = {"db": "database", "broker": "broker"}
    for name, y in lanes.items():
        yield _text(LEFT - 12, y + BAR, names.get(name, name), "lane", anchor="end")
        if name in names:
            yield _line(LEFT, y + 2 + BAR / 2, WIDTH - RIGHT, y + 2 + BAR / 2, "grid")
    for process in report.processes:
        y = lanes[f"worker {process.worker}"] + 2
        start, end = max(process.from_s, 0.0), process.to_s
        title = f"worker {process.worker}: {start:.1f} s to {end:.1f} s, {process.how}"
        ready = end if process.ready_s is None else min(max(process.ready_s, start), end)
        yield _rect(x(start), y, max(x(end) - x(start), 1), BAR, "alive starting", f"{title}; starting", radius=3)
        yield _rect(x(ready), y, max(x(end) - x(ready), 0), BAR, "alive", title, radius=3)
        for begin, until in process.frozen:
            title = f"frozen for {until - begin:.1f} s"
            yield _rect(x(begin), y, max(x(until) - x(begin), 1), BAR, "freeze mark", title)
    for fault in report.faults:
        if fault.kind in lanes:
            over = report.seconds if fault.over_s is None else fault.over_s
            y = lanes[fault.kind] + 2
            yield _rect(
                x(fault.at_s), y, max(x(over) - x(fault.at_s), 3), BAR, f"{fault.kind} mark", fault_title(fault)
            )


def _marks(report: CrashReport, x: Scale, lanes: dict[str, float]) -> Iterator[str]:
    """Draw takeovers and faults, on top of everything else."""
    for takeover in report.takeovers:
        if takeover.to_worker is not None and takeover.at_s >= 0:
            y = lanes[f"worker {takeover.to_worker}"] + 2 + BAR
            title = (
                f"worker {takeover.to_worker} takes {takeover.intervals} intervals of {takeover.computation}"
                f" from worker {takeover.from_worker}, {takeover.at_s:.1f} s"
            )
            place = x(takeover.at_s)
            path = f"M{place:.1f} {y + 1:.1f}l4 7h-8z"
            yield f'<path d="{path}" class="take">{_title(title)}</path>'
    for fault in report.faults:
        if fault.worker is not None:
            yield glyph(fault.kind, x(fault.at_s), lanes[f"worker {fault.worker}"] + 2 + BAR / 2, fault_title(fault))


def _progress(report: CrashReport, x: Scale, top: float) -> Iterator[str]:
    y = Scale(max(report.records, 1), top + CHART, -CHART)
    for tick in y.ticks(3):
        yield _line(LEFT, y(tick), WIDTH - RIGHT, y(tick), "grid")
        yield _text(LEFT - 12, y(tick) + 4, f"{tick:,.0f}", "small", anchor="end")
    points = [point for point in report.progress if point.at_s >= 0]
    if len(points) < 2:
        return
    done = " ".join(f"{x(point.at_s):.1f},{y(point.committed):.1f}" for point in points)
    fed = " ".join(f"{x(point.at_s):.1f},{y(point.fed):.1f}" for point in points)
    base = f"{x(points[-1].at_s):.1f},{y(0):.1f} {x(points[0].at_s):.1f},{y(0):.1f}"
    yield f'<polygon points="{done} {base}" class="done-fill"/>'
    yield f'<polyline points="{fed}" class="fed"/>'
    yield f'<polyline points="{done}" class="done"/>'
    yield _text(LEFT + 6, top + 4, "records fed and committed", "lane")


def _rates(report: CrashReport, x: Scale, top: float) -> Iterator[str]:
    rates = rates_of([(point.at_s, point.committed) for point in report.progress if point.at_s >= 0])
    y = Scale(max([1.0, *(rate for _, rate in rates)]), top + RATE, -RATE)
    for tick in y.ticks(2):
        yield _line(LEFT, y(tick), WIDTH - RIGHT, y(tick), "grid")
        yield _text(LEFT - 12, y(tick) + 4, f"{tick:,.0f}", "small", anchor="end")
    for at_s, rate in rates:
        width = max(x(at_s + RATE_BIN_S) - x(at_s) - 1, 1)
        yield _rect(x(at_s), y(rate), width, max(y(0) - y(rate), 0), "rate", f"{rate:,.0f} records/s at {at_s:.1f} s")
    yield _text(LEFT + 6, top - 8, "committed per second", "lane")


def rates_of(points: Sequence[tuple[float, int]]) -> list[tuple[float, float]]:
    """Return (start of bin, records committed per second in it), from (seconds, records committed so far)."""
    newest: dict[int, int] = {}
    for at_s, committed in points:
        newest[int(at_s / RATE_BIN_S)] = committed
    if not newest:
        return []
    rates, before = [], 0
    for place in range(max(newest) + 1):
        now = newest.get(place, before)
        rates.append((place * RATE_BIN_S, max(now - before, 0) / RATE_BIN_S))
        before = max(now, before)
    return rates


def _svg(width: float, height: float, body: Sequence[str], label: str, kind: str = "chart") -> str:
    return (
        f'<svg class="{kind}" viewBox="0 0 {width:.0f} {height:.0f}" role="img" aria-label="{escape(label)}">'
        + "".join(body)
        + "</svg>"
    )


def _line(x1: float, y1: float, x2: float, y2: float, kind: str) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" class="{kind}"/>'


def _rect(x: float, y: float, width: float, height: float, kind: str, title: str = "", radius: float = 0) -> str:
    inside = _title(title) if title else ""
    place = f'x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" rx="{radius:g}"'
    return f'<rect {place} class="{kind}">{inside}</rect>'


def _text(x: float, y: float, text: str, kind: str, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{kind}" text-anchor="{anchor}">{escape(text)}</text>'


def _title(text: str) -> str:
    return f"<title>{escape(text)}</title>"
