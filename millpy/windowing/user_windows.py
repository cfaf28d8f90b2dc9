"""Windows of a user's function, of one key interval: assigned record by record, aggregated as columns.

assign   the user's function is called for each record, before anything changes
group    by key and window. If windows merge, the rows of a key are replayed in order of arrival to find these
add      as columns, to the open windows; windows that open and expire within the turn are emitted at once
"""

from __future__ import annotations

from typing import cast

import numpy as np
import numpy.typing as npt

from millpy.model.record import Instants, Mask
from millpy.model.stage import StageBinding, StepResult, StoredInterval, Work
from millpy.model.time import INSTANT_MIN
from millpy.windowing.accumulator import RowsRefusedError
from millpy.windowing.group_by import Groups, Integers
from millpy.windowing.operator import DroppedLate, JoinedRows
from millpy.windowing.panes import Emission
from millpy.windowing.session import UnalignedInterval
from millpy.windowing.session_assign import SessionSpan
from millpy.windowing.session_state import OpenSession
from millpy.windowing.user_spans import AssignedRows, FunctionCalls, Span, group_spans, merge_spans
from millpy.windowing.window_function import WindowFunction
from millpy.windowing.window_memory import Openings
from millpy.windowing.window_spec import WindowSpec


class UserInterval(UnalignedInterval):
    """Soft state of one key interval: its open windows by key."""

    def __init__(
        self, windowing: WindowSpec, function: WindowFunction, binding: StageBinding, recovered: StoredInterval
    ) -> None:
        super().__init__(windowing, binding)
        self._merges = function.merges
        self._windows_per_record = 1 if function.merges else function.windows_max
        self._calls = FunctionCalls(function, self._input.record_type, binding.progress)
        self._recover(recovered)

    @property
    def immediate(self) -> bool:
        """Return False: the function is user code, which must not run on the event loop."""
        return False

    def _storable(self, result: StepResult, rows: JoinedRows) -> JoinedRows:
        """Dead-letter the rows that cannot be stored, and those for which the function fails. Return the others."""
        rows = super()._storable(result, rows)
        assigned, refused = self._calls.assign(rows)
        return self._without_refused(result, assigned, RowsRefusedError(refused)) if refused else assigned

    def _take_rows(self, emission: Emission, rows: JoinedRows, work: Work) -> DroppedLate | None:
        """Add each row to its windows. Return the rows that are too late for one."""
        assert isinstance(rows, AssignedRows), rows
        return self._take_merging(emission, rows, work) if self._merges else self._take(emission, rows, work)

    def _take(self, emission: Emission, rows: AssignedRows, work: Work) -> DroppedLate | None:
        """Add each row to all of its windows, except those that have expired or are closed."""
        at, starts, ends = rows.entries(), rows.starts, rows.ends
        over: Mask = ends <= self._over_by(rows.watermarks)[at]
        first, group_of, _ = group_spans(rows.codes[at], starts, ends, len(rows.keys))
        known = self._known(rows, at[first], first)
        over |= self._are_closed(rows.keys, rows.codes[at[first]], starts[first], ends[first])[group_of]
        late = self._missed(rows, starts, ends, at, over) if over.any() else None
        if late is not None:
            inside = np.flatnonzero(~over)
            at, starts, ends = at[inside], starts[inside], ends[inside]
        missed_all = np.zeros(len(rows), np.bool_)
        missed_all[np.setdiff1d(rows.entries()[over], at)] = True
        self._expect(rows, np.flatnonzero(~missed_all), len(at))  # a row without windows is consumed, too
        if not len(at):
            return late
        if late is not None:
            first, group_of, _ = group_spans(rows.codes[at], starts, ends, len(rows.keys))
            known = self._known(rows, at[first], inside[first])
        is_late = rows.watermarks[at] >= ends
        groups = _groups(rows, rows.codes[at[first]], starts[first], ends[first], group_of, at)
        late_counts = np.bincount(group_of[is_late], minlength=len(groups))
        self._add_groups(emission, rows, groups, known, late_counts, work.watermark)
        return late

    def _known(self, rows: AssignedRows, at: Integers, entries: Integers) -> dict[int, list[OpenSession]]:
        """Return group -> its open window, given the row and the entry of one record of each group."""
        found: dict[int, list[OpenSession]] = {}
        of_key: dict[int, dict[Span, OpenSession]] = {}
        columns = (rows.codes[at].tolist(), rows.starts[entries].tolist(), rows.ends[entries].tolist())
        for number, (code, start, end) in enumerate(zip(*columns, strict=True)):
            windows = of_key.get(code)
            if windows is None:
                windows = {(old.start, old.end): old for old in self._open.by_key.get(rows.keys[code], ())}
                of_key[code] = windows
            if (old := windows.get((start, end))) is not None:
                found[number] = [old]
        return found

    def _take_merging(self, emission: Emission, rows: AssignedRows, work: Work) -> DroppedLate | None:
        """Add each row to its window, after windows have merged."""
        plan = _MergePlan(self, rows, rows.watermarks)
        if plan.errors:
            raise RowsRefusedError(plan.errors)
        at = rows.entries()
        inside = np.flatnonzero(plan.of_row >= 0)
        too_late = np.flatnonzero((plan.of_row < 0) & (rows.counts > 0))
        late = None
        if len(too_late):
            over: Mask = np.isin(at, too_late)
            late = self._missed(rows, rows.starts, rows.ends, at, over)
        self._expect(rows, np.setdiff1d(np.arange(len(rows)), too_late), len(inside))
        if len(inside):
            group_of = plan.of_row[inside]
            groups = _groups(rows, plan.codes, plan.starts, plan.ends, group_of, inside)
            late_counts = np.bincount(plan.of_row[plan.late], minlength=len(groups))
            joined = {number: sorted(olds) for number, olds in plan.joined.items()}
            self._add_groups(emission, rows, groups, joined, late_counts, work.watermark)
        emission.absorb(self._open.take_absorbed())
        return late

    def _openings(self, rows: JoinedRows, work: Work) -> Openings:
        """Return the windows that the rows would have if none were late."""
        assert isinstance(rows, AssignedRows), rows
        weights = self._open.weights
        codes: Integers
        if self._merges:
            plan = _MergePlan(self, rows, np.full(len(rows), INSTANT_MIN, np.int64))
            at = np.flatnonzero(plan.of_row >= 0)
            windows, codes, starts, ends, joined = plan.of_row[at], plan.codes, plan.starts, plan.ends, plan.joined
        else:
            at = rows.entries()
            first, windows, _ = group_spans(rows.codes[at], rows.starts, rows.ends, len(rows.keys))
            codes, starts, ends = rows.codes[at[first]], rows.starts[first], rows.ends[first]
            joined = self._known(rows, at[first], first)
        opens: Mask = ends + self._allowed_us > work.watermark
        opens[list(joined)] = False
        opens &= ~self._are_closed(rows.keys, codes, starts, ends)
        extends = np.array([rows.keys[code] in self._open.by_key for code in codes.tolist()], np.bool_)
        large = np.zeros(len(opens), np.bool_)
        for number, olds in joined.items() if weights.large else ():
            large[number] = any(id(old.pane) in weights.large for old in olds)
        return Openings(at, windows, opens, extends, large)

    def merge_key(
        self, rows: AssignedRows, at: npt.NDArray[np.int64], watermarks: npt.NDArray[np.int64]
    ) -> tuple[list[tuple[Span, list[int], list[OpenSession]]], list[int], dict[int, BaseException]]:
        """Find the windows of the rows `at`, which are those of one key; see `merge_spans`."""
        entries = (np.cumsum(rows.counts) - rows.counts)[at]
        spans = zip(rows.starts[entries].tolist(), rows.ends[entries].tolist(), strict=True)
        objects = rows.records.objects()
        found, late, errors = merge_spans(
            zip(at.tolist(), spans, watermarks[at].tolist(), strict=True),
            self._allowed_us,
            self._calls.length_us,
            cast("list[SessionSpan]", self._open.by_key.get(rows.keys[int(rows.codes[at[0]])], [])),
            lambda row, span, others: self._calls.merge(objects[row], span, others),
            self._over_floor,
        )
        return (
            [((one.start, one.end), one.rows, cast("list[OpenSession]", one.open)) for one in found],
            late,
            errors,
        )


class _MergePlan:
    """The windows of a turn's rows, after they have merged. Nothing changes.

    Attributes:
        codes, starts, ends: per window, its key code and span.
        joined: window -> the open ones that it continues.
        of_row: per row, its window; -1 for a row that is too late, has none, or failed.
        late: rows that arrived after the watermark had reached the end of their window.
        errors: row -> the error that the user's function raised.
    """

    def __init__(self, interval: UserInterval, rows: AssignedRows, watermarks: npt.NDArray[np.int64]) -> None:
        self.of_row = np.full(len(rows), -1, np.int64)
        self.late: list[int] = []
        self.errors: dict[int, BaseException] = {}
        self.joined: dict[int, list[OpenSession]] = {}
        found: list[tuple[int, Span]] = []
        inside = np.flatnonzero(rows.counts)
        order = inside[np.argsort(rows.codes[inside], kind="stable")]
        bounds = np.flatnonzero(np.diff(rows.codes[order]))
        for at in np.split(order, bounds + 1) if len(order) else ():
            windows, late, errors = interval.merge_key(rows, at, watermarks)
            self.late += late
            self.errors |= errors
            for span, mine, olds in windows:
                self.of_row[mine] = len(found)
                if olds:
                    self.joined[len(found)] = olds
                found.append((int(rows.codes[at[0]]), span))
        self.codes, self.starts, self.ends = (
            np.array(column, np.int64)
            for column in (
                [code for code, _ in found],
                [start for _, (start, _) in found],
                [end for _, (_, end) in found],
            )
        )


def _groups(
    rows: AssignedRows, codes: Integers, starts: Instants, ends: Instants, group_of: Integers, at: Integers
) -> Groups:
    """Return groups with the given key codes and spans; `group_of` and `at` have the group and row of each entry."""
    return Groups(starts, ends, codes, group_of, np.bincount(group_of, minlength=len(codes)), rows.records, at)
