"""Spans of windows that a user's function assigns: its calls, and the merges that follow from them.

Nothing changes here: if a call raises for some records, the turn is planned again without these.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt

from millpy.errors import CallTimeoutError, RefusedValueError
from millpy.model.dead_letter import payload_of
from millpy.model.keys import Key
from millpy.model.record import Instants, RecordType
from millpy.model.step_progress import UNRETURNED_MAX, Call, StepProgress, is_user_error
from millpy.model.time import (
    INSTANT_MIN,
    YEARS_HI,
    YEARS_LO,
    Instant,
    duration_text,
    instant,
    microseconds,
    to_datetime,
)
from millpy.windowing.group_by import Integers
from millpy.windowing.operator import JoinedRows
from millpy.windowing.session_assign import ReplayedSession, SessionSpan
from millpy.windowing.window_function import Window, WindowFunction

Span = tuple[int, int]
"""(start, end) in µs."""


@dataclass(slots=True)
class AssignedRows(JoinedRows):
    """Rows with their windows.

    Attributes:
        counts: per row, the number of its windows.
        starts, ends: the windows of all rows, row after row.
    """

    counts: npt.NDArray[np.int64] = None  # type: ignore[assignment]
    starts: Instants = None  # type: ignore[assignment]
    ends: Instants = None  # type: ignore[assignment]

    def take(self, rows: npt.NDArray[np.int64]) -> AssignedRows:
        """Return the given rows, in the given order."""
        plain = JoinedRows.take(self, rows)
        counts = self.counts[rows]
        first = (np.cumsum(self.counts) - self.counts)[rows]
        entries = np.repeat(first - (np.cumsum(counts) - counts), counts) + np.arange(int(counts.sum()))
        columns = (plain.records, plain.codes, plain.keys, plain.hashes, plain.watermarks, plain.inputs)
        return AssignedRows(*columns, counts, self.starts[entries], self.ends[entries])

    def entries(self) -> npt.NDArray[np.int64]:
        """Return the row of each window."""
        return np.repeat(np.arange(len(self.counts)), self.counts)


class FunctionCalls:
    """Calls the methods of a user's window function, and checks what they return.

    Args:
        function: the function.
        record_type: type of the records.
        progress: where calls are counted.
    """

    def __init__(self, function: WindowFunction, record_type: RecordType, progress: StepProgress) -> None:
        self._function = function
        self._name = type(function).__name__
        self._clone = record_type.cloner() or _itself
        self._progress = progress
        self._count_max = 1 if function.merges else function.windows_max
        self.length_us = microseconds(function.length_max)

    def assign(self, rows: JoinedRows) -> tuple[AssignedRows, dict[int, BaseException]]:
        """Call `assign` for each row. Return the rows with their windows, and the errors by row."""
        starts, ends, counts = array("q"), array("q"), array("q")
        refused: dict[int, BaseException] = {}
        columns = (rows.records.objects(), rows.records.event_times.tolist(), rows.codes.tolist())
        for row, (record, at, code) in enumerate(zip(*columns, strict=True)):
            try:
                spans = self._call("assign", record, partial(self._assigned, record, at, rows.keys[code]))
            except BaseException as error:
                if not is_user_error(error):
                    raise
                refused[row] = error
                spans = []
            counts.append(len(spans))
            for start, end in spans:
                starts.append(start)
                ends.append(end)
        found = (np.array(column, np.int64) for column in (counts, starts, ends))
        of_rows = (rows.records, rows.codes, rows.keys, rows.hashes, rows.watermarks, rows.inputs)
        return AssignedRows(*of_rows, *found), refused

    def merge(self, record: Any, span: Span, others: Sequence[Span]) -> list[Span]:
        """Return with which of the other spans, by start, a record's span becomes one: the first ones that fit.

        Raises:
            RefusedValueError: the method names another window.
        """
        return self._call("merge", record, partial(self._merged, span, others))

    def _call(self, method: str, record: Any, call: Callable[[], list[Span]]) -> list[Span]:
        run, name = self._progress.run, f"{self._name}.{method}"
        identified: Callable[[], Call] = lambda: (name, (payload_of(record),))  # noqa: E731
        if self._progress.unreturned and self._progress.is_hopeless(identified()):
            raise CallTimeoutError(f"{name} did not return, {UNRETURNED_MAX} times")
        self._progress.current_call = identified
        try:
            return call()
        finally:
            self._progress.count_unit(run)

    def _assigned(self, record: Any, at: int, key: Key) -> list[Span]:
        given = self._function.assign(self._clone(record), to_datetime(Instant(at)), key)
        windows = list(islice(given, self._count_max + 1))
        if len(windows) > self._count_max:
            limit = "windows that merge allow one" if self._function.merges else f"windows_max is {self._count_max:,}"
            raise RefusedValueError(f"{self._name} puts the record into more than {self._count_max:,} windows: {limit}")
        spans = {_span(window, self._name): None for window in windows}
        for start, end in spans:
            if not start <= at < end:
                raise RefusedValueError(
                    f"{self._name} puts the record into {_text((start, end))}, which does not contain its event time"
                    f" {_iso(at)}"
                )
            if end - start > self.length_us:
                raise RefusedValueError(
                    f"the window {_text((start, end))} of {self._name} is longer than"
                    f" length_max={duration_text(self.length_us)}"
                )
        return list(spans)

    def _merged(self, span: Span, others: Sequence[Span]) -> list[Span]:
        given = self._function.merge(_window(span), [_window(other) for other in others])
        named = {_span(window, self._name) for window in islice(given, len(others) + 1)}
        if unknown := named.difference(others):
            raise RefusedValueError(f"{self._name}.merge returns {_text(min(unknown))}, which is no other window")
        start, end = span
        found = []
        for other in others:
            if other in named and max(end, other[1]) - min(start, other[0]) <= self.length_us:
                start, end = min(start, other[0]), max(end, other[1])
                found.append(other)
        return found


def merge_spans(
    rows: Iterable[tuple[int, Span, int]],
    allowed_us: int,
    length_us: int,
    open_spans: Sequence[SessionSpan],
    merge: Callable[[int, Span, Sequence[Span]], Sequence[Span]],
    floor: Instant = INSTANT_MIN,
) -> tuple[list[ReplayedSession], list[int], dict[int, BaseException]]:
    """Assign the rows of one key, (row, span, judging watermark), to windows that merge. Watermarks do not regress.

    A window is live while the watermark before the row is below its end + allowed lateness; a row whose merged window
    is not live is too late, as in `session_assign.replay`.

    Args:
        rows: the rows in order of arrival.
        allowed_us: the allowed lateness.
        length_us: the longest window.
        open_spans: the open windows of the key.
        merge: takes a row, its span, and the live spans that it could merge with; returns those that it merges with.
        floor: the windows that end by it are over, whatever the watermark.

    Returns:
        (windows that have rows; rows that arrived after the watermark had reached their window's end; row -> the error
        that `merge` raised). Any other row that is in no window is too late.
    """
    live = {(span.start, span.end): ReplayedSession(span.start, span.end, [span]) for span in open_spans}
    order = sorted(live)
    first_end = min((end for _, end in order), default=0)
    over: list[ReplayedSession] = []
    late: list[int] = []
    errors: dict[int, BaseException] = {}
    for row, span, watermark in rows:
        over_by = max(watermark - allowed_us, floor)
        if order and first_end <= over_by:
            over += [live.pop(other) for other in order if other[1] <= over_by]
            order = sorted(live)
            first_end = min((end for _, end in order), default=0)
        found = live.get(span)
        if found is None:
            near = _near(order, span, length_us)
            try:
                joined = merge(row, span, near) if near else ()
            except BaseException as error:
                if not is_user_error(error):
                    raise
                errors[row] = error
                continue
            if not joined and span[1] <= over_by:
                continue
            found = _join(live, order, span, joined)
            first_end = min(first_end, found.end) if len(order) > 1 else found.end
        found.rows.append(row)
        if found.end <= watermark:
            late.append(row)
    return [window for window in (*over, *live.values()) if window.rows], late, errors


def _near(order: Sequence[Span], span: Span, length_us: int) -> list[Span]:
    """Return the sorted spans that would make one of at most `length_us` with a span."""
    low = bisect_left(order, (span[1] - length_us,))
    high = bisect_left(order, (span[0] + length_us,))
    return [other for other in order[low:high] if other[1] <= span[0] + length_us]


def _join(live: dict[Span, ReplayedSession], order: list[Span], span: Span, joined: Sequence[Span]) -> ReplayedSession:
    """Make one live window of a span and the live windows that it merges with."""
    found = ReplayedSession(*span)
    for other in joined:
        part = live.pop(other)
        order.remove(other)
        found.start, found.end = min(found.start, part.start), max(found.end, part.end)
        found.open += part.open
        found.rows += part.rows
    hull = found.start, found.end
    if hull in live:  # it is as long as a window that it did not merge with, and the same from now on
        part = live[hull]
        found.open += part.open
        found.rows += part.rows
    else:
        insort(order, hull)
    live[hull] = found
    return found


def group_spans(
    codes: Integers, starts: Instants, ends: Instants, keys: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Group entries, of which each has a key code and a span, by both.

    Returns:
        (per group, its first entry; per entry, its group; per group, its number of entries).
    """
    _, by_start = np.unique(starts, return_inverse=True)
    distinct_ends, by_end = np.unique(ends, return_inverse=True)
    _, spans = np.unique(by_start * len(distinct_ends) + by_end, return_inverse=True)
    _, first, group_of, counts = np.unique(
        spans * keys + codes, return_index=True, return_inverse=True, return_counts=True
    )
    return first, group_of, counts


def _span(window: Any, name: str) -> Span:
    """Return a window of a user as (start, end) in µs."""
    if not isinstance(window, tuple | list) or len(window) != 2:
        raise RefusedValueError(f"{name} returns {window!r} as a window, which is not a (start, end) pair of datetimes")
    try:
        start, end = map(instant, window)
    except (AttributeError, TypeError, ValueError, OverflowError) as error:
        raise RefusedValueError(
            f"{name} returns {window!r} as a window: its bounds are not datetimes with a time zone"
        ) from error
    return start, end


def _window(span: Span) -> Window:
    return to_datetime(Instant(span[0])), to_datetime(Instant(span[1]))


def _iso(at: int) -> str:
    return to_datetime(Instant(at)).isoformat()


def _text(span: Span) -> str:
    return " to ".join(_iso(min(max(at, YEARS_LO), YEARS_HI)) for at in span)


def _itself(record: Any) -> Any:
    return record
