"""A report as text for a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from millpy.config.escape import visible
from millpy.spark.findings import JudgedWindow, OutlierReport

DEVICES_SHOWN = 15
OUTLIERS_SHOWN = 10


def as_text(report: OutlierReport) -> str:
    """Return some forty lines: the whole, devices, outliers, lateness."""
    if report.windows == 0:
        return f"{report.table} has no windows in that time."
    return "\n".join(
        [
            headline(report),
            "",
            *_table(
                ["device", "windows", "records", "mean", "sd", "low", "high", "late", "too late", "outliers"],
                [
                    [
                        one.name, f"{one.windows:,}", number(one.records), number(one.mean), number(one.stddev),
                        number(one.low), number(one.high), share(one.late_share, one.late),
                        share(one.too_late_share, one.too_late), f"{one.outliers:,}" if one.outliers else "-",
                    ]
                    for one in report.devices[:DEVICES_SHOWN]
                ],
            ),
            *_more(report.device_count - DEVICES_SHOWN, "devices"),
            "",
            f"{outlier_line(report)}.",
            *(
                _table(
                    ["device", "window", "records", report.value, "expected", "score", "compared with"],
                    [
                        [
                            o.name, f"{o.start:%Y-%m-%d %H:%M:%S}Z", number(o.records), number(o.value),
                            number(o.expected), number(o.score), baseline(o),
                        ]
                        for o in report.outliers[:OUTLIERS_SHOWN]
                    ],
                )
                if report.outliers
                else []
            ),
            *_more(report.outlier_count - OUTLIERS_SHOWN, "outliers"),
            "",
            f"{lateness_line(report)}.",
        ]
    )  # fmt: skip


def headline(report: OutlierReport) -> str:
    """Say how many devices, windows and records there are, and from when."""
    records = f", {report.records:,} records" if report.records is not None else ""
    assert report.first_at is not None
    assert report.last_at is not None
    return (
        f"{report.table}: {_many(report.device_count, 'device')}, {_many(report.windows, 'window')}{records}, starting"
        f" {report.first_at:%Y-%m-%d %H:%M:%S} to {report.last_at:%Y-%m-%d %H:%M:%S} UTC"
    )


def outlier_line(report: OutlierReport) -> str:
    """Say how many outliers there are, and what an outlier is."""
    rule = report.history
    return (
        f"{_many(report.outlier_count, 'window')} of {report.windows:,} unlike their own device's history (score"
        f" {rule.threshold:g} or more, against the same hour ({rule.zone}) of up to {rule.days} days, or where they are"
        f" too few, against the latest {rule.windows_min} to {rule.windows} windows)"
    )


def baseline(window: JudgedWindow) -> str:
    """Say what a window is compared with."""
    return {"weekday": "weekday and hour", "hour": "hour of day", "recent": "latest windows"}.get(
        window.baseline or "", "-"
    )


def lateness_line(report: OutlierReport) -> str:
    """Say how many records were late, and too late."""
    if report.records is None:
        return (
            f"Late but in time: {report.late:,} records; too late: {report.too_late:,}"
            " (no shares: no column counts the records of a window)"
        )
    return (
        f"Late but in time: {share(report.late_share, report.late)} of {report.records + report.too_late:,} records"
        f" ({report.late:,}); too late: {share(report.too_late_share, report.too_late)} ({report.too_late:,})"
    )


def number(value: float | None) -> str:
    """Format whole numbers with commas, others to four digits."""
    if value is None:
        return "-"
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:,.0f}" if 1e4 <= abs(value) < 1e15 else f"{value:.4g}"


def share(value: float | None, count: int) -> str:
    """Format a share in per cent, or the count where there is no share."""
    if count == 0:
        return "-"
    return f"{count:,}" if value is None else f"{value * 100:.2g} %"


def _many(count: int, what: str) -> str:
    return f"{count:,} {what}{'' if count == 1 else 's'}"


def _more(count: int, what: str) -> list[str]:
    return [f"  and {count:,} more {what}"] if count > 0 else []


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Align the first column to the left, the others to the right."""
    lines = [[visible(cell) for cell in line] for line in (head, *rows)]
    widths = [max(len(line[place]) for line in lines) for place in range(len(head))]
    return [
        "  " + "  ".join(
            cell.ljust(width) if place == 0 else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    ]  # fmt: skip
