"""What a report holds: the whole, its devices, judged windows and time bins. Values without Spark."""

from __future__ import annotations

import datetime as dt
from dataclasses import dataclass

from millpy.spark.scores import History


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One device, or another key of the windows. Shares are null where the table does not count records."""

    name: str
    windows: int
    records: int | None
    mean: float | None
    stddev: float | None
    low: float | None
    high: float | None
    late: int
    too_late: int
    late_share: float | None
    too_late_share: float | None
    outliers: int


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgedWindow:
    """One window; baseline, expected, scale and score are null where its device's history is too short.

    Attributes:
        baseline: what it is compared with: `weekday`, `hour` or `recent` (`millpy.spark.scores.judged`).
    """

    name: str
    start: dt.datetime
    records: int | None
    value: float
    baseline: str | None
    expected: float | None
    scale: float | None
    score: float | None
    outlier: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeBin:
    """A span of time: the windows that start in it, and the records that were too late for one."""

    start: dt.datetime
    windows: int
    records: int | None
    late: int
    too_late: int


@dataclass(frozen=True, slots=True, kw_only=True)
class OutlierReport:
    """The report; `devices`, `outliers` and `series` are cut to the most noteworthy, the counts cover all.

    Attributes:
        records: the records of all windows; None if no column counts them.
        late, too_late: the records that came after the watermark had passed a window's end, and those in no window.
        first_at, last_at: the starts of the first and the last window; None without windows.
        bin_width: the length of each of `time_bins`.
        series: the newest windows of the devices that the page draws.
    """

    table: str
    keys: tuple[str, ...]
    value: str
    count: str | None
    history: History
    device_count: int
    windows: int
    records: int | None
    late: int
    too_late: int
    outlier_count: int
    first_at: dt.datetime | None
    last_at: dt.datetime | None
    bin_width: dt.timedelta
    devices: tuple[Device, ...]
    outliers: tuple[JudgedWindow, ...]
    series: dict[str, tuple[JudgedWindow, ...]]
    time_bins: tuple[TimeBin, ...]

    @property
    def late_share(self) -> float | None:
        """Return the share of late records among all records, including those that are in no window."""
        return _share(self.late, self.records, self.too_late)

    @property
    def too_late_share(self) -> float | None:
        """Return the share of too-late records among all records."""
        return _share(self.too_late, self.records, self.too_late)


def _share(part: int, records: int | None, too_late: int) -> float | None:
    return None if records is None or records + too_late == 0 else part / (records + too_late)
