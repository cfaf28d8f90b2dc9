"""Millions of stored windows are taken in piece by piece: each is let go, and each is a sign of life."""

from __future__ import annotations

from datetime import timedelta

import msgspec
import pytest

from millpy.model.checkpoint import Kind
from millpy.model.record import RecordType
from millpy.model.stage import StoredInterval
from millpy.windowing.aggregates.numeric import Count
from millpy.windowing.logic import WindowedLogic
from millpy.windowing.window import FixedWindows, SessionWindows, SlidingWindows, Windows
from tests.stage_driver import StageDriver

us = timedelta(microseconds=1)


class Reading(msgspec.Struct):
    key: str


@pytest.mark.parametrize(
    "windows", [FixedWindows(10 * us), SlidingWindows(10 * us, every=5 * us), SessionWindows(10 * us)], ids=repr
)
def test_every_piece_of_stored_windows_is_released_and_reported(windows: Windows) -> None:
    logic = WindowedLogic(windows, 0 * us, {"n": Count()})
    driver = StageDriver(logic, Reading, outputs={"windows": logic.output_type(RecordType(Reading), ("key",))})
    driver.feed([(Reading(f"k{n}"), 1) for n in range(30)])
    (stored,) = driver.entries({Kind.WINDOW})
    pieces = [stored.part(lo, lo + 10) for lo in range(0, 30, 10)]
    reported = driver.binding.progress.units

    opened = driver.stage.open(StoredInterval(1, 2, bundle=1, entries=pieces))

    assert driver.binding.progress.units == reported + len(pieces)
    assert [len(piece) for piece in pieces] == [0, 0, 0]
    assert opened.next_due() == driver.interval.next_due()
    assert opened.oldest_work() == driver.interval.oldest_work()
