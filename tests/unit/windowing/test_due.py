"""When a window fires and expires, and its hold until then, to the microsecond."""

from __future__ import annotations

from datetime import timedelta

import msgspec
import pytest

from millpy.model.record import RecordType
from millpy.model.time import INSTANT_MAX
from millpy.windowing.aggregates.numeric import Count
from millpy.windowing.logic import WindowedLogic
from millpy.windowing.window import FixedWindows, SessionWindows, SlidingWindows, Windows
from tests.stage_driver import StageDriver

us = timedelta(microseconds=1)
LATENESS = 50


class Reading(msgspec.Struct):
    key: str


WINDOWS = pytest.mark.parametrize(
    ("windows", "end", "expires"),
    [
        (FixedWindows(100 * us), 200, 250),
        (SessionWindows(100 * us), 250, 300),
        # In slices a record of 150 lies in windows that end at 200, and last in [150, 250).
        (SlidingWindows(100 * us, every=50 * us), 200, 300),
    ],
    ids=["fixed", "session", "sliding"],
)


def driver(windows: Windows) -> StageDriver:
    """A stage with one record, at 150."""
    logic = WindowedLogic(windows, LATENESS * us, {"n": Count()})
    outputs = {"windows": logic.output_type(RecordType(Reading), ("key",))}
    subject = StageDriver(logic, Reading, outputs=outputs, tables={"windows": 1}, max_disorder=1_000)
    subject.feed([(Reading("a"), 150)])
    return subject


def panes(subject: StageDriver) -> int:
    return sum(rows.count for rows in subject.results[-1].results)


@WINDOWS
def test_open_window_is_due_at_its_end_and_holds_until_then(windows: Windows, end: int, expires: int) -> None:
    subject = driver(windows)

    assert subject.interval.next_due() == (end, INSTANT_MAX)
    assert subject.interval.oldest_work() == end - 1


@WINDOWS
def test_window_fires_when_the_watermark_has_reached_its_end(windows: Windows, end: int, expires: int) -> None:
    subject = driver(windows)

    subject.feed([], watermark=end - 1)
    before = panes(subject)
    subject.feed([], watermark=end)

    assert (before, panes(subject)) == (0, 1)


@WINDOWS
def test_window_is_kept_until_its_lateness_is_over(windows: Windows, end: int, expires: int) -> None:
    subject = driver(windows)

    subject.feed([], watermark=expires - 1)
    kept, due = len(subject.stored), subject.interval.next_due()[0]
    subject.feed([], watermark=expires)

    assert (kept, due, len(subject.stored)) == (1, expires, 0)
    assert subject.interval.next_due()[0] == INSTANT_MAX
    assert subject.interval.oldest_work() == INSTANT_MAX
