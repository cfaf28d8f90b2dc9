"""The charts of a report as inline SVG; the page's style has the colors, so one drawing serves light and dark."""

from __future__ import annotations

import datetime as dt
import math
from collections.abc import Sequence
from html import escape

from millpy.spark.findings import Device, JudgedWindow, OutlierReport, TimeBin
from millpy.spark.words import number, share

PANEL_WIDTH, PANEL_HEIGHT = 270.0, 118.0
LEFT, RIGHT, TOP, BOTTOM = 40.0, 6.0, 6.0, 18.0
BARS_SHOWN = 15


def panel(points: Sequence[JudgedWindow], threshold: float, start: dt.datetime, end: dt.datetime) -> str:
    """Draw a device's values over time, the band that its history allows, and its outliers as dots."""
    bands = [(p.start, *_band(p, threshold)) for p in points]
    known = [(at, lower, upper) for at, lower, upper in bands if math.isfinite(lower) and math.isfinite(upper)]
    values = [p.value for p in points if math.isfinite(p.value)]
    low, high = _span([*values, *_near([bound for _, *bounds in known for bound in bounds], values)])
    seconds = max((end - start).total_seconds(), 1.0)

    def x(moment: dt.datetime) -> float:
        return LEFT + (PANEL_WIDTH - LEFT - RIGHT) * (moment - start).total_seconds() / seconds

    def y(value: float) -> float:
        share_above = (high - min(max(value, low), high)) / (high - low)
        return TOP + (PANEL_HEIGHT - TOP - BOTTOM) * share_above

    over = [f"{x(at):.1f},{y(upper):.1f}" for at, _, upper in known]
    under = [f"{x(at):.1f},{y(lower):.1f}" for at, lower, _ in reversed(known)]
    line = " ".join(f"{x(p.start):.1f},{y(p.value):.1f}" for p in points if math.isfinite(p.value))
    dots = "".join(
        f'<circle cx="{x(p.start):.1f}" cy="{y(p.value):.1f}" r="4" class="outlier"><title>'
        f"{p.start:%Y-%m-%d %H:%M:%S}Z: {number(p.value)}, expected {number(p.expected)}</title></circle>"
        for p in points
        if p.outlier
    )
    ticks = "".join(
        f'<path d="M{LEFT} {y(value):.1f}H{PANEL_WIDTH - RIGHT}" class="grid"/>'
        f'<text x="{LEFT - 5}" y="{y(value) + 4:.1f}" text-anchor="end">{number(value)}</text>'
        for value in _ticks(low, high)
    )
    return (
        f'<svg viewBox="0 0 {PANEL_WIDTH:g} {PANEL_HEIGHT:g}" role="img">{ticks}'
        f'<polygon points="{" ".join([*over, *under])}" class="band"/><polyline points="{line}" class="line"/>{dots}'
        f"{_moments(start, end, LEFT, PANEL_WIDTH - RIGHT, PANEL_HEIGHT - 4)}</svg>"
    )


def over_time(time_bins: Sequence[TimeBin], width: dt.timedelta) -> str:
    """Draw the share of late and of too-late records of each time bin as bars; counts where there are no shares."""
    shares = [_shares(one) for one in time_bins]
    top = max((late + lost for late, lost in shares), default=0.0) or 1.0
    counted = all(one.records is not None for one in time_bins)
    start, end = time_bins[0].start, time_bins[-1].start + width
    wide, high = 560.0, 190.0
    seconds = (end - start).total_seconds()
    scale = (wide - LEFT - RIGHT) / seconds
    bars = []
    for one, (late, lost) in zip(time_bins, shares, strict=True):
        left = LEFT + (one.start - start).total_seconds() * scale
        room, bottom = max(width.total_seconds() * scale - 1.5, 0.8), high - BOTTOM
        title = f"<title>{one.start:%Y-%m-%d %H:%M:%S}Z: {one.late:,} late, {one.too_late:,} too late</title>"
        for kind, part in (("late", late), ("lost", lost)):
            tall = (high - BOTTOM - TOP) * part / top
            bottom -= tall
            bars.append(
                f'<rect x="{left:.1f}" y="{bottom:.1f}" width="{room:.1f}" height="{tall:.1f}" class="{kind}">'
                f"{title}</rect>"
            )
    ticks = "".join(
        f'<path d="M{LEFT} {at:.1f}H{wide - RIGHT}" class="grid"/><text x="{LEFT - 5}" y="{at + 4:.1f}"'
        f' text-anchor="end">{_percent(value) if counted else number(value)}</text>'
        for value in _ticks(0.0, top)
        for at in [high - BOTTOM - (high - BOTTOM - TOP) * value / top]
    )
    return (
        f'<svg viewBox="0 0 {wide:g} {high:g}" role="img">{ticks}{"".join(bars)}'
        f"{_moments(start, end, LEFT, wide - RIGHT, high - 4)}</svg>"
    )


def by_device(report: OutlierReport) -> str:
    """Draw the devices with the largest share of late records as bars."""
    ordered = sorted(report.devices, key=lambda one: (-_of_device(one), one.name))
    shown = [one for one in ordered[:BARS_SHOWN] if one.late or one.too_late]
    if not shown:
        return "<p>Nothing came late.</p>"
    top = max(map(_of_device, shown)) or 1.0
    row, names, wide = 19.0, 150.0, 560.0
    lines = []
    for place, one in enumerate(shown):
        y = place * row
        late = (wide - names - 130) * _part(one, one.late, one.late_share) / top
        lost = (wide - names - 130) * _part(one, one.too_late, one.too_late_share) / top
        words = share(one.late_share, one.late)
        words += f", too late {share(one.too_late_share, one.too_late)}" if one.too_late else ""
        lines.append(
            f'<text x="{names - 8:g}" y="{y + 13:g}" text-anchor="end" class="name">{escape(_short(one.name))}</text>'
            f'<rect x="{names:g}" y="{y + 3:g}" width="{late:.1f}" height="{row - 6:g}" class="late"/>'
            f'<rect x="{names + late:.1f}" y="{y + 3:g}" width="{lost:.1f}" height="{row - 6:g}" class="lost"/>'
            f'<text x="{names + late + lost + 6:.1f}" y="{y + 13:g}">{words}</text>'
        )
    return f'<svg viewBox="0 0 {wide:g} {row * len(shown):g}" role="img">{"".join(lines)}</svg>'


def spread(one: Device, low: float, high: float) -> str:
    """Draw the range of a device's values, thick within a standard deviation of the mean; one scale for all devices."""
    if one.low is None or one.high is None or one.mean is None or not math.isfinite(one.mean) or high <= low:
        return ""

    def x(value: float) -> float:
        return 4 + 152 * (min(max(value, low), high) - low) / (high - low)

    deviation = one.stddev or 0.0
    left, right = x(one.mean - deviation), x(one.mean + deviation)
    return (
        f'<svg class="spread" viewBox="0 0 160 14"><path d="M{x(one.low):.1f} 7H{x(one.high):.1f}" class="thin"/>'
        f'<path d="M{left:.1f} 7H{right:.1f}" class="thick"/>'
        f'<circle cx="{x(one.mean):.1f}" cy="7" r="3" class="mean"/></svg>'
    )


def _of_device(one: Device) -> float:
    return _part(one, one.late, one.late_share) + _part(one, one.too_late, one.too_late_share)


def _part(one: Device, count: int, share_of_all: float | None) -> float:
    return share_of_all or 0.0 if one.records is not None else float(count)


def _shares(one: TimeBin) -> tuple[float, float]:
    if one.records is None:
        return float(one.late), float(one.too_late)
    everything = max(one.records + one.too_late, 1)
    return one.late / everything, one.too_late / everything


def _band(point: JudgedWindow, threshold: float) -> tuple[float, float]:
    """Return the range that the history allows; NaN where the history is too short, or has infinities."""
    if point.expected is None or point.scale is None:
        return math.nan, math.nan
    return point.expected - threshold * point.scale, point.expected + threshold * point.scale


def _near(bounds: Sequence[float], values: Sequence[float]) -> list[float]:
    """Clip the band's bounds, so that they stretch the scale no more than the values do, and the line is not flat."""
    if not values or not bounds:
        return []
    low, high = min(values), max(values)
    room = (high - low) / 2
    return [min(max(bound, low - room), high + room) for bound in bounds]


def _span(values: Sequence[float]) -> tuple[float, float]:
    low, high = (min(values), max(values)) if values else (0.0, 1.0)
    room = 1e-9 * max(abs(low), abs(high))
    return (low, high) if high - low > room else (low - max(room, 1.0), high + max(room, 1.0))


def _ticks(low: float, high: float) -> list[float]:
    """Return two to four round numbers within the range."""
    step = 10.0 ** math.floor(math.log10((high - low) / 2))
    step = next(s for s in (step * 5, step * 2, step) if (high - low) / s >= 2)
    first = math.ceil(low / step)
    return [place * step for place in range(first, math.floor(high / step) + 1)][:6]


def _moments(start: dt.datetime, end: dt.datetime, left: float, right: float, y: float) -> str:
    span = end - start
    form = "%H:%M:%S" if span < dt.timedelta(minutes=20) else "%H:%M" if span < dt.timedelta(days=1) else "%m-%d %H:%M"
    return (
        f'<text x="{left:g}" y="{y:g}">{start:{form}}</text>'
        f'<text x="{right:g}" y="{y:g}" text-anchor="end">{end:{form}}</text>'
    )


def _percent(value: float) -> str:
    return f"{value * 100:g} %" if value < 0.1 else f"{value * 100:.0f} %"


def _short(name: str) -> str:
    return name if len(name) <= 22 else name[:21] + "…"
