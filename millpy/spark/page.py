"""A report as one self-contained HTML file: inline style and SVG, light and dark, no script."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from importlib.resources import files
from string import Template

from millpy.spark.drawing import BARS_SHOWN, by_device, over_time, panel, spread
from millpy.spark.findings import Device, JudgedWindow, OutlierReport
from millpy.spark.words import baseline, headline, lateness_line, number, outlier_line, share


def page(report: OutlierReport) -> str:
    """Return the whole file."""
    template = Template(files("millpy.spark").joinpath("page.html").read_text(encoding="utf-8"))
    return template.substitute(
        title=escape(f"{report.table}: {report.value}"),
        table=escape(report.table),
        value=escape(report.value),
        headline=escape(headline(report).partition(": ")[2] if report.windows else "no windows in that time"),
        tiles=_tiles(report),
        body=_body(report) if report.windows else "",
    )


def _body(report: OutlierReport) -> str:
    return (
        f'<section class="card"><h2>{escape(report.value)} of each device</h2>'
        f'<p class="note">{escape(outlier_line(report))}.'
        " The shaded band is the range that the device's history allows; it begins once there is enough of it."
        f"{_cut(len(report.series), report.device_count, ' devices')}{_newest(report)}</p>"
        f'<div class="panels">{_panels(report)}</div></section>'
        '<div class="pair"><section class="card"><h2>Late records over time</h2>'
        f'<p class="note">{escape(lateness_line(report))}.</p>'
        f"{over_time(report.time_bins, report.bin_width)}{_LEGEND}</section>"
        f'<section class="card"><h2>Late records by device</h2><p class="note">{_latest(report)}</p>'
        f"{by_device(report)}</section></div>"
        f"{_outliers(report)}"
        f'<section class="card"><h2>Profiles</h2><p class="note">Over the values of the windows; the line goes from the'
        " lowest to the highest, thick within a standard deviation of the mean, on one scale."
        f"{_cut(len(report.devices), report.device_count, ' devices')}</p>"
        f'<div class="scroll">{_profiles(report)}</div></section>'
    )


_LEGEND = (
    '<div class="legend"><span><i class="late"></i>late but in time: after the watermark had passed its window</span>'
    '<span><i class="lost"></i>too late: in no window</span></div>'
)


def _tiles(report: OutlierReport) -> str:
    tiles = [
        (f"{report.device_count:,}", "devices", False),
        (f"{report.windows:,}", "windows", False),
        *([(f"{report.records:,}", "records in them", False)] if report.records is not None else []),
        (f"{report.outlier_count:,}", "outliers", report.outlier_count > 0),
        (share(report.late_share, report.late).replace("-", "0"), "late, but in time", False),
        (share(report.too_late_share, report.too_late).replace("-", "0"), "too late", report.too_late > 0),
    ]
    return "".join(
        f'<div class="tile{" alarm" if alarm else ""}"><div class="figure">{figure}</div>'
        f'<div class="label">{label}</div></div>'
        for figure, label, alarm in tiles
    )


def _panels(report: OutlierReport) -> str:
    devices = {one.name: one for one in report.devices}
    assert report.first_at is not None
    assert report.last_at is not None
    start = min((points[0].start for points in report.series.values() if points), default=report.first_at)
    return "".join(
        f'<figure><figcaption><b>{escape(name)}</b>{_marked(devices[name], points)}</figcaption>'
        f"{panel(points, report.history.threshold, start, report.last_at)}</figure>"
        for name, points in report.series.items()
        if points
    )  # fmt: skip


def _marked(device: Device, points: Sequence[JudgedWindow]) -> str:
    """Say how many outliers the device has, and how many of them and of its windows the panel shows if not all."""
    drawn = sum(point.outlier for point in points)
    part = f" ({drawn:,} drawn)" if drawn < device.outliers else ""
    mark = f"{device.outliers:,} outlier{'' if device.outliers == 1 else 's'}{part}" if device.outliers else ""
    cut = f"{len(points):,} of {device.windows:,} windows" if len(points) < device.windows else ""
    return f'<span>{cut}{", " if cut and mark else ""}<span class="mark">{mark}</span></span>' if cut or mark else ""


def _newest(report: OutlierReport) -> str:
    """Say that a panel leaves windows out, if one does."""
    windows = {one.name: one.windows for one in report.devices}
    cut = any(len(points) < windows[name] for name, points in report.series.items())
    return " A panel shows the newest windows that have a value; its title says how many of all." if cut else ""


def _latest(report: OutlierReport) -> str:
    """Say which devices the chart of late records shows."""
    late = sum(1 for one in report.devices if one.late or one.too_late)
    among = (
        f" Chosen among the {len(report.devices):,} devices listed below, of {report.device_count:,}."
        if len(report.devices) < report.device_count
        else ""
    )
    return (
        f"The devices with the largest share.{_cut(min(late, BARS_SHOWN), late, ' devices with late records')}{among}"
    )


def _outliers(report: OutlierReport) -> str:
    if not report.outliers:
        return ""
    rows = [
        [
            escape(o.name),
            f"{o.start:%Y-%m-%d %H:%M:%S}Z",
            number(o.records),
            number(o.value),
            number(o.expected),
            number(o.score),
            baseline(o),
        ]
        for o in report.outliers
    ]
    head = ["Device", "Window", "Records", report.value, "Expected", "Score", "Compared with"]
    return (
        '<section class="card"><h2>Outliers</h2><p class="note">The score is the distance from the expected value'
        " in robust standard deviations of the history. These are wider where it is short, and never below the smallest"
        f" scale of the device. Times are in UTC.{_cut(len(rows), report.outlier_count, ' outliers')}</p>"
        f'<div class="scroll">{_table(head, rows, left=2)}</div></section>'
    )


def _profiles(report: OutlierReport) -> str:
    lows = [one.low for one in report.devices if one.low is not None and math.isfinite(one.low)]
    highs = [one.high for one in report.devices if one.high is not None and math.isfinite(one.high)]
    low, high = min(lows, default=0.0), max(highs, default=0.0)
    rows = [
        [
            escape(one.name), spread(one, low, high), f"{one.windows:,}", number(one.records), number(one.mean),
            number(one.stddev), number(one.low), number(one.high), share(one.late_share, one.late),
            share(one.too_late_share, one.too_late), f"{one.outliers:,}" if one.outliers else "-",
        ]
        for one in report.devices
    ]  # fmt: skip
    head = ["Device", "", "Windows", "Records", "Mean", "SD", "Low", "High", "Late", "Too late", "Outliers"]
    return _table(head, rows, left=2)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], *, left: int) -> str:
    def line(cells: Sequence[str], tag: str) -> str:
        marks = ["" if place < left else ' class="number"' for place in range(len(cells))]
        return f"<tr>{''.join(f'<{tag}{m}>{cell}</{tag}>' for m, cell in zip(marks, cells, strict=True))}</tr>"

    body = "".join(line(row, "td") for row in rows)
    return f"<table><thead>{line([escape(word) for word in head], 'th')}</thead><tbody>{body}</tbody></table>"


def _cut(shown: int, there: int, what: str) -> str:
    return f" Showing {shown:,} of {there:,}{what}." if shown < there else ""
