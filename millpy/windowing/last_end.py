"""The end of the last window that a record of some event time, or an earlier one, can be in."""

from __future__ import annotations

import numpy as np

from millpy.model.time import INSTANT_MAX, Instant, microseconds
from millpy.windowing.calendar_windows import CalendarAssigner, CalendarWindows
from millpy.windowing.window import Assigner, SessionWindows, Windows
from millpy.windowing.window_function import WindowFunction


def last_end(windows: Windows, at: Instant) -> Instant | None:
    """Return the end of the last window of records up to an event time; None if a user's function makes the windows."""
    if isinstance(windows, WindowFunction):
        return None
    if isinstance(windows, SessionWindows):
        gaps = [windows.gap, *(gap for _, gap in windows.by_key), *([windows.max_gap] if windows.by_field else [])]
        return Instant(min(at + microseconds(max(gaps)), INSTANT_MAX))
    assigner = CalendarAssigner(windows) if isinstance(windows, CalendarWindows) else Assigner(windows)
    (start,) = assigner.newest_starts(np.array([at], np.int64)).tolist()
    return Instant(min(assigner.end_of(start), INSTANT_MAX))
