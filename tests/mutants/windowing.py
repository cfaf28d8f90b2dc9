"""Mutants of `millpy/windowing`: windows, sessions, aggregates."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

MUTANTS = [
    Mutant(
        "millpy/windowing/aligned.py",
        "            kept[place] = keys[int(groups.codes[place])] in panes",
        "            kept[place] = keys[int(groups.codes[place])] not in panes",
        killers=("tests/unit/windowing/test_columnar.py::test_whole_sum_beyond_64_bits_is_exact",),
    ),
    Mutant(
        "millpy/windowing/aligned.py",
        "            try_merges(self._folds, groups, partials, lambda group: self._values(groups, group, rows.keys))",
        "            pass",
        killers=(
            "tests/unit/windowing/test_combiner.py::test_merge_and_result_that_raise_cost_the_new_records_and_leave_the_window_as_it_was",
        ),
    ),
    Mutant(
        "millpy/windowing/aligned.py",
        "        bounds = np.append(np.flatnonzero(np.diff(starts, prepend=starts[0] - 1)), len(picks))",
        "        bounds = np.append(np.flatnonzero(np.diff(starts, prepend=starts[1] - 1)), len(picks))",
        killers=("tests/unit/windowing/test_columnar.py::test_window_is_emitted_once_the_watermark_reaches_its_end",),
    ),
    Mutant(
        "millpy/windowing/aligned.py",
        "        kept = np.flatnonzero(~over) if at is None else at[~over]",
        "        kept = np.flatnonzero(~over) if at is not None else at[~over]",
        killers=("tests/unit/windowing/test_columnar.py::test_record_too_late_is_kept_with_its_window",),
        line="No record is lost because it is bad",
    ),
    Mutant(
        "millpy/windowing/aligned.py",
        "        self._recover(recovered)",
        "        pass",
        killers=(
            "tests/unit/windowing/test_columnar.py::test_late_record_within_allowed_lateness_makes_the_next_pane",
        ),
    ),
    Mutant(
        "millpy/windowing/fold.py",
        "                self.folds.append(fold)",
        "                pass",
        killers=("tests/unit/windowing/test_columnar.py::test_window_is_emitted_once_the_watermark_reaches_its_end",),
    ),
    Mutant(
        "millpy/windowing/fold.py",
        "        return f\"{type(self).__name__}({'' if self.field is None else repr(self.field)})\"",
        "        return f\"{type(self).__name__}({'' if self.field is not None else repr(self.field)})\"",
        killers=("tests/unit/windowing/test_columnar.py::test_windows_and_aggregates_are_values",),
    ),
    Mutant(
        "millpy/windowing/grouping.py",
        "            offsets = np.concatenate(([0], np.cumsum(self.counts)[:-1]))",
        "            offsets = np.concatenate(([1], np.cumsum(self.counts)[:-1]))",
        killers=("tests/unit/windowing/test_columnar.py::test_every_aggregate_leaves_nulls_out",),
    ),
    Mutant(
        "millpy/windowing/grouping.py",
        "        counts[found.groups] = found.ends() - found.offsets",
        "        counts[found.groups] = found.ends() + found.offsets",
        killers=("tests/property/test_windowed.py::test_columns_agree_with_a_plain_loop",),
    ),
    Mutant(
        "millpy/windowing/grouping.py",
        '    if values.dtype.kind != "i" or not len(values):',
        '    if values.dtype.kind == "i" or not len(values):',
        killers=("tests/unit/windowing/test_columnar.py::test_whole_sum_beyond_64_bits_is_exact",),
    ),
    Mutant(
        "millpy/windowing/grouping.py",
        "    span = int(windows.max()) + 1",
        "    span = int(windows.max()) - 1",
        killers=("tests/unit/windowing/test_columnar.py::test_window_is_emitted_once_the_watermark_reaches_its_end",),
    ),
    Mutant(
        "millpy/windowing/open_sessions.py",
        "                self._retracted.append(old.due())",
        "                pass",
        killers=(
            "tests/unit/windowing/test_sessions.py::test_session_that_has_emitted_takes_its_row_back_when_it_grows",
        ),
    ),
    Mutant(
        "millpy/windowing/open_sessions.py",
        "        for old in olds[1:]:",
        "        for old in olds[2:]:",
        killers=("tests/unit/windowing/test_sessions.py::test_record_out_of_order_joins_two_open_sessions",),
    ),
    Mutant(
        "millpy/windowing/open_sessions.py",
        "        if not sessions and not gone:",
        "        if not sessions and gone:",
        killers=("tests/unit/windowing/test_sessions.py::test_record_out_of_order_joins_two_open_sessions",),
    ),
    Mutant(
        "millpy/windowing/open_slices.py",
        "        self.advance(self.watermark)",
        "        pass",
        killers=("tests/unit/windowing/test_slices.py::test_windows_that_have_fired_hold_nothing_after_a_restart",),
    ),
    Mutant(
        "millpy/windowing/open_slices.py",
        "        while self._unfired and self._unfired[0] + self._size_us <= watermark:",
        "        while self._unfired or self._unfired[0] + self._size_us <= watermark:",
        killers=(
            "tests/unit/windowing/test_sessions.py::test_record_is_in_every_sliding_window_that_has_its_time_and_may_miss_some",
        ),
    ),
    Mutant(
        "millpy/windowing/open_windows.py",
        "        expires = self._unexpired[0] + self._size_us + self._allowed_us if self._unexpired else INSTANT_MAX",
        "        expires = self._unexpired[1] + self._size_us + self._allowed_us if self._unexpired else INSTANT_MAX",
        killers=("tests/unit/windowing/test_columnar.py::test_window_is_emitted_once_the_watermark_reaches_its_end",),
    ),
    Mutant(
        "millpy/windowing/open_windows.py",
        "        if not emitted:",
        "        if emitted:",
        killers=("tests/unit/windowing/test_columnar.py::test_window_is_emitted_once_the_watermark_reaches_its_end",),
    ),
    Mutant(
        "millpy/windowing/positional.py",
        "        at = found.ends() - 1 if self._last else found.offsets",
        "        at = found.ends() - 2 if self._last else found.offsets",
        killers=("tests/unit/windowing/test_kept_values.py::test_first_and_last_go_by_event_time_then_by_arrival",),
    ),
    Mutant(
        "millpy/windowing/positional.py",
        "        return float(stored) if self.kind is float and stored is not None else stored",
        "        return float(stored) if self.kind is float and stored is None else stored",
        killers=("tests/unit/windowing/test_kept_values.py::test_lists_show_what_json_cannot_say_as_null",),
    ),
    Mutant(
        "millpy/windowing/positional.py",
        "        return one if one[0] <= other[0] else other",
        "        return one if one[0] <= other[1] else other",
        killers=("tests/property/test_windowed.py::test_columns_agree_with_a_plain_loop",),
    ),
    Mutant(
        "millpy/windowing/positional.py",
        "        return one if one[0] <= other[0] else other",
        "        return one if one[1] <= other[0] else other",
        killers=("tests/unit/windowing/test_kept_values.py::test_first_and_last_go_by_event_time_then_by_arrival",),
    ),
    Mutant(
        "millpy/windowing/session_merge.py",
        "        if not met:",
        "        if met:",
        killers=("tests/unit/windowing/test_sessions.py::test_session_ends_a_gap_after_its_last_record",),
    ),
    Mutant(
        "millpy/windowing/session_merge.py",
        "        met = [session for session in live if at < session.end and session.start < at + gap_us]",
        "        met = [session for session in live if at <= session.end and session.start < at + gap_us]",
        killers=("tests/unit/windowing/test_sessions.py::test_session_ends_a_gap_after_its_last_record",),
    ),
    Mutant(
        "millpy/windowing/session_merge.py",
        "    ends = sorted_times[np.append(begin[1:], len(order)) - 1] + gaps[cluster_codes]",
        "    ends = sorted_times[np.append(begin[1:], len(order)) + 1] + gaps[cluster_codes]",
        killers=("tests/unit/windowing/test_combiner.py::test_combiner_sees_every_record_once_in_any_bundles",),
    ),
    Mutant(
        "millpy/windowing/session_merge.py",
        "    ends = sorted_times[np.append(begin[1:], len(order)) - 1] + gaps[cluster_codes]",
        "    ends = sorted_times[np.append(begin[1:], len(order)) - 1] - gaps[cluster_codes]",
        killers=("tests/unit/windowing/test_combiner.py::test_combiner_sees_every_record_once_in_any_bundles",),
    ),
    Mutant(
        "millpy/windowing/sessions.py",
        "                self._open.join(olds, start, end, pane)",
        "                pass",
        killers=("tests/unit/windowing/test_combiner.py::test_combiner_sees_every_record_once_in_any_bundles",),
    ),
    Mutant(
        "millpy/windowing/sessions.py",
        "            by_key.setdefault(code, []).append(row)",
        "            pass",
        killers=("tests/unit/windowing/test_sessions.py::test_session_ends_a_gap_after_its_last_record",),
    ),
    Mutant(
        "millpy/windowing/sessions.py",
        "            try_merges(self._folds, groups, partials, lambda n: [old.pane.values for old in joined.get(n, ())])",
        "            pass",
        killers=(
            "tests/unit/windowing/test_combiner.py::test_merge_and_result_that_raise_cost_the_new_records_and_leave_the_window_as_it_was",
        ),
    ),
    Mutant(
        "millpy/windowing/sessions.py",
        "        inside = np.flatnonzero(sessions.of_row >= 0) if len(too_late) else None",
        "        inside = np.flatnonzero(sessions.of_row >= 1) if len(too_late) else None",
        killers=("tests/unit/windowing/test_union.py::test_late_and_refused_records_are_those_of_their_input",),
    ),
    Mutant(
        "millpy/windowing/aggregate.py",
        "            return super().column_of(arrays)  # Python divides whole numbers without rounding them first",
        "            pass",
        killers=("tests/unit/windowing/test_columnar.py::test_mean_of_whole_numbers_beyond_53_bits_is_rounded_once",),
    ),
    Mutant(
        "millpy/windowing/aggregate.py",
        "        return total / count if count else None",
        "        return float(total) / count if count else None",
        killers=("tests/unit/windowing/test_columnar.py::test_mean_of_whole_numbers_beyond_53_bits_is_rounded_once",),
    ),
]
