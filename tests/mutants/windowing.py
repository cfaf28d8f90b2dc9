"""Mutants of `millpy/windowing`: windows, sessions, aggregates."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

MUTANTS = [
    Mutant(
        "millpy/windowing/session_assign.py",
        "        ends = np.maximum.reduceat(last[order], begin)",
        "        ends = last[order][np.append(begin[1:], len(order)) - 1]",
        killers=("tests/property/test_session_gaps.py::test_columns_agree_with_one_record_at_a_time",),
    ),
    Mutant(
        "millpy/windowing/session_assign.py",
        "        reached = np.maximum.accumulate(place[order] + row_gaps[order])",
        "        reached = place[order] + row_gaps[order]",
        killers=("tests/property/test_session_gaps.py::test_columns_agree_with_one_record_at_a_time",),
    ),
    Mutant(
        "millpy/windowing/session_gaps.py",
        "            fits: Mask = (us >= 1) & (us <= self._max_us)",
        "            fits: Mask = (us >= 0) & (us <= self._max_us)",
        killers=(
            "tests/unit/windowing/test_session_gaps.py::test_gaps_that_are_none_are_dead_letters_and_the_others_count",
        ),
    ),
    Mutant(
        "millpy/windowing/session_gaps.py",
        "        longest = max([self._gap_us, *self._by_key.values(), self._max_us if self.by_field else 0])",
        "        longest = max([self._gap_us, *self._by_key.values()])",
        killers=(
            "tests/unit/windowing/test_session_gaps.py::test_the_last_event_time_leaves_room_for_the_longest_gap",
        ),
    ),
    Mutant(
        "millpy/graph/refusals.py",
        "                found[producer.name] = producer.source.ends()",
        "                found[producer.name] = True",
        killers=("tests/unit/windowing/test_global_window.py::test_it_is_refused_behind_any_source_that_does_not_end",),
    ),
    Mutant(
        "millpy/graph/refusals.py",
        "                waiting += [taken.stream for taken in producer.inputs]",
        "                pass",
        killers=("tests/unit/windowing/test_global_window.py::test_it_is_refused_behind_any_source_that_does_not_end",),
    ),
    Mutant(
        "millpy/graph/refusals.py",
        "    if not isinstance(windows, GlobalWindow) or not waits:",
        "    if not isinstance(windows, GlobalWindow):",
        killers=(
            "tests/unit/windowing/test_global_window.py::test_a_trigger_that_does_not_wait_for_the_end_is_accepted",
        ),
    ),
    Mutant(
        "millpy/windowing/global_window.py",
        "        return GLOBAL_END_US - GLOBAL_START_US",
        "        return GLOBAL_END_US",
        killers=("tests/property/test_windowed.py::test_columns_agree_with_a_plain_loop",),
    ),
    Mutant(
        "millpy/windowing/calendar_windows.py",
        "            return (one, other) if self._repeats else (one,)",
        "            return (one,)",
        killers=("tests/property/test_calendar_windows.py::test_windows_begin_where_a_walk_along_the_clock_says",),
    ),
    Mutant(
        "millpy/windowing/calendar_windows.py",
        "            return (one, other) if self._repeats else (one,)",
        "            return (one, other)",
        killers=("tests/unit/windowing/test_calendar_windows.py::test_starts_of_a_day_that_was_lived_twice_are_found",),
    ),
    Mutant(
        "millpy/windowing/calendar_windows.py",
        "        return (hi,)",
        "        return (lo,)",
        killers=("tests/unit/windowing/test_calendar_windows.py::test_a_start_in_a_gap_is_the_moment_of_the_change",),
    ),
    Mutant(
        "millpy/windowing/calendar_windows.py",
        "        slack = -(-_SHIFT_US // self._unit.shortest_us) + 1",
        "        slack = 0",
        killers=("tests/unit/windowing/test_calendar_windows.py::test_starts_of_a_day_that_was_lived_twice_are_found",),
    ),
    Mutant(
        "millpy/windowing/calendar_windows.py",
        "            self._pinned[start] = end\n",
        "            pass\n",
        killers=(
            "tests/unit/windowing/test_calendar_windows.py::test_an_open_window_keeps_its_bounds_when_the_tz_database_changes",
        ),
    ),
    Mutant(
        "millpy/windowing/fixed_state.py",
        "                self.panes[int(start)] = {}\n                self._assigner.pin(int(start), int(end))",
        "                self.panes[int(start)] = {}",
        killers=(
            "tests/unit/windowing/test_calendar_windows.py::test_an_open_window_keeps_its_bounds_when_the_tz_database_changes",
        ),
    ),
    Mutant(
        "millpy/windowing/calendar_windows.py",
        "            if len(self._chunks) >= CHUNKS_MAX:",
        "            if len(self._chunks) < 0:",
        killers=(
            "tests/unit/windowing/test_calendar_windows.py::test_the_starts_in_memory_are_bounded_however_far_apart_the_records_are",
        ),
    ),
    Mutant(
        "millpy/windowing/group_by.py",
        "    group_starts, group_ends = distinct[group_windows], ends_of(distinct)[group_windows]",
        "    group_starts, group_ends = distinct[group_windows], ends_of(distinct)[0]",
        killers=(
            "tests/property/test_calendar_windows.py::test_panes_around_a_change_of_the_clock_are_those_of_a_plain_loop",
        ),
    ),
    Mutant(
        "millpy/windowing/firing.py",
        "            if times and times[-1] == at:",
        "            if times and times[-1] > at:",
        killers=("tests/unit/windowing/test_alarms.py::test_an_item_that_is_set_again_is_due_once",),
    ),
    Mutant(
        "millpy/windowing/firing.py",
        "        joined.since = sum(firing.since for firing in known)",
        "        joined.since = 0 * len(known)",
        killers=(
            "tests/property/test_session_triggers.py::test_a_session_holds_the_low_watermark_for_records_on_time_that_no_pane_has",
        ),
    ),
    Mutant(
        "millpy/windowing/triggers.py",
        "        return [0, min((state[1] for state in states if state[1]), default=0)]",
        "        return [0, max((state[1] for state in states if state[1]), default=0)]",
        killers=("tests/property/test_session_triggers.py::test_what_triggers_know_survives_a_merge_of_sessions",),
    ),
    Mutant(
        "millpy/windowing/firing.py",
        "                self._items[at] = dict.fromkeys(sorted(self._items[at]))",
        "                self._items[at] = dict.fromkeys(self._items[at])",
        killers=(
            "tests/property/test_pane_triggers.py::"
            "test_panes_of_one_tick_that_exceed_a_turn_leave_in_the_next_turns_by_key",
        ),
    ),
    Mutant(
        "millpy/windowing/operator.py",
        "        result.unfinished = (due <= reached and due < INSTANT_MAX) or alarm <= work.now_us",
        "        result.unfinished = due <= reached and due < INSTANT_MAX",
        killers=(
            "tests/property/test_pane_triggers.py::"
            "test_panes_of_one_tick_that_exceed_a_turn_leave_in_the_next_turns_by_key",
        ),
    ),
    Mutant(
        "millpy/windowing/firing.py",
        "        emits = fires and (firing.since > 0 or (not firing.closed and self._gives_empty(firing, timing, last)))",
        "        emits = bool(fires)",
        killers=("tests/property/test_pane_triggers.py::test_when_triggers_fire",),
    ),
    Mutant(
        "millpy/windowing/firing.py",
        "        firing.closed = firing.closed or last",
        "        firing.closed = False",
        killers=("tests/conformance/test_transcripts.py::test_transcript",),
    ),
    Mutant(
        "millpy/windowing/firing.py",
        '            firing.on_time_index = -1 if timing == "early" else firing.on_time_index + 1',
        "            firing.on_time_index += 1",
        killers=("tests/property/test_pane_triggers.py::test_panes_add_up_to_the_batch_in_every_mode",),
    ),
    Mutant(
        "millpy/windowing/panes.py",
        "        return content_of(pane, self._mode) or PaneContent(self._accumulators.empty())",
        "        return content_of(pane, self._mode) or pane",
        killers=("tests/property/test_pane_triggers.py::test_panes_add_up_to_the_batch_in_every_mode",),
    ),
    Mutant(
        "millpy/windowing/percentile_trigger.py",
        "        times = np.minimum(event_times, now_us)",
        "        times = event_times",
        killers=("tests/unit/windowing/test_percentile_trigger.py::test_records_from_the_future_count_as_now",),
    ),
    Mutant(
        "millpy/windowing/operator.py",
        "            self._triggers.expected_end = self._expected.reached\n        progress",
        "            pass\n        progress",
        killers=(
            "tests/unit/windowing/test_percentile_trigger.py::test_panes_that_exceed_a_turn_leave_in_the_next_turns",
        ),
    ),
    Mutant(
        "millpy/windowing/predicate_trigger.py",
        "        state[1] = _UNKNOWN",
        "        pass",
        killers=(
            "tests/unit/windowing/test_predicate_trigger.py::"
            "test_it_is_asked_once_for_each_bundle_and_window_that_changes",
        ),
    ),
    Mutant(
        "millpy/windowing/composite_triggers.py",
        "        return all([part.ready(own, moment) for part, own in self._unfinished(state)])",
        "        return all(part.ready(own, moment) for part, own in self._unfinished(state))",
        killers=(
            "tests/unit/windowing/test_predicate_trigger.py::test_an_answer_waits_for_the_clock_through_a_restart",
        ),
    ),
    Mutant(
        "millpy/windowing/session.py",
        "        return self._triggered is not None and (key, start, end) in self._triggered.closed",
        "        return False",
        killers=(
            "tests/property/test_session_triggers.py::"
            "test_a_record_that_would_make_a_closed_session_again_is_late_and_any_other_is_not",
        ),
    ),
    Mutant(
        "millpy/windowing/session_state.py",
        "            gone = [one for one in gone if (one.key, one.start, one.end) not in written]\n",
        "            pass\n",
        killers=(
            "tests/property/test_user_windows.py::test_windows_that_merge_with_some_others_lose_no_record_in_any_mode",
        ),
    ),
    Mutant(
        "millpy/windowing/interval_by_site.py",
        "                entries.namespace = place\n",
        "                pass\n",
        killers=("tests/property/test_sites.py::test_each_site_has_the_windows_of_a_graph_of_its_own",),
    ),
    Mutant(
        "millpy/windowing/panes.py",
        "            pane.at = pane.newest_at = NO_TIME",
        "            pane.at = NO_TIME",
        killers=("tests/property/test_pane_times.py::test_a_pane_that_is_taken_back_for_good_holds_nothing",),
    ),
    Mutant(
        "millpy/windowing/triggered_sessions.py",
        "        if not firing.trigger[0]:\n            self._set_alarm",
        "        if True:\n            self._set_alarm",
        equivalent="an alarm has the name of one session, with its end, and a closed session has no alarm",
    ),
    Mutant(
        "millpy/windowing/triggered_state.py",
        "            self.closed.setdefault(start, set()).add(key)",
        "            pass",
        killers=("tests/property/test_pane_triggers.py::test_when_triggers_fire",),
    ),
    Mutant(
        "millpy/windowing/triggers.py",
        "        return bool(0 < state[1] <= moment.now_us)",
        "        return bool(0 < state[1] < moment.now_us)",
        killers=("tests/property/test_pane_triggers.py::test_when_triggers_fire",),
    ),
    Mutant(
        "millpy/windowing/operator.py",
        "        self._latest_end = self._trigger.latest_end(work.watermark)",
        "        self._latest_end = work.watermark",
        killers=("tests/property/test_triggers.py::test_a_window_is_due_when_its_trigger_fires",),
    ),
    Mutant(
        "millpy/windowing/fixed.py",
        "            kept[place] = keys[int(groups.codes[place])] in panes",
        "            kept[place] = keys[int(groups.codes[place])] not in panes",
        killers=("tests/unit/windowing/test_logic.py::test_integer_sum_beyond_64_bits_is_exact",),
    ),
    Mutant(
        "millpy/windowing/fixed.py",
        "            try_merges(self._accumulators, groups, partials, lambda group: self._values(groups, group, rows.keys))",
        "            pass",
        killers=(
            "tests/unit/windowing/test_combiner.py::test_merge_or_result_that_raises_rejects_the_new_records_and_keeps_the_window",
        ),
    ),
    Mutant(
        "millpy/windowing/fixed.py",
        "        bounds = np.append(np.flatnonzero(np.diff(starts, prepend=starts[0] - 1)), len(picks))",
        "        bounds = np.append(np.flatnonzero(np.diff(starts, prepend=starts[1] - 1)), len(picks))",
        killers=("tests/unit/windowing/test_logic.py::test_window_is_emitted_once_the_watermark_reaches_its_end",),
    ),
    Mutant(
        "millpy/windowing/operator.py",
        "        late = self._late_rows(rows.take(missed), starts[entries], ends[entries], whole)",
        "        late = self._late_rows(rows.take(missed[:0]), starts[entries], ends[entries], whole)",
        killers=("tests/unit/windowing/test_logic.py::test_late_record_is_stored_with_its_window",),
        line="No record is lost because it is bad",
    ),
    Mutant(
        "millpy/windowing/operator.py",
        "            nowhere = missed[whole]",
        "            nowhere = np.unique(missed)",
        killers=("tests/unit/windowing/test_combiner.py::test_record_too_late_for_one_of_its_windows_counts_as_taken",),
    ),
    Mutant(
        "millpy/windowing/fixed.py",
        "        self._recover(recovered)",
        "        pass",
        killers=("tests/unit/windowing/test_logic.py::test_late_record_within_allowed_lateness_makes_the_next_pane",),
    ),
    Mutant(
        "millpy/windowing/accumulator.py",
        "                self.members.append(member)",
        "                pass",
        killers=("tests/unit/windowing/test_logic.py::test_window_is_emitted_once_the_watermark_reaches_its_end",),
    ),
    Mutant(
        "millpy/windowing/accumulator.py",
        '        return {"kind": self.kind, "field": self.field}',
        '        return {"kind": self.kind, "field": None}',
        killers=("tests/unit/windowing/test_logic.py::test_windows_and_aggregates_are_values",),
    ),
    Mutant(
        "millpy/windowing/group_by.py",
        "            offsets = np.concatenate(([0], np.cumsum(self.counts)[:-1]))",
        "            offsets = np.concatenate(([1], np.cumsum(self.counts)[:-1]))",
        killers=("tests/unit/windowing/test_logic.py::test_every_aggregate_leaves_nulls_out",),
    ),
    Mutant(
        "millpy/windowing/group_by.py",
        "        counts[found.groups] = found.ends() - found.offsets",
        "        counts[found.groups] = found.ends() + found.offsets",
        killers=("tests/property/test_windowed.py::test_columns_agree_with_a_plain_loop",),
    ),
    Mutant(
        "millpy/windowing/group_by.py",
        '    if values.dtype.kind != "i" or not len(values):',
        '    if values.dtype.kind == "i" or not len(values):',
        killers=("tests/unit/windowing/test_logic.py::test_integer_sum_beyond_64_bits_is_exact",),
    ),
    Mutant(
        "millpy/windowing/group_by.py",
        "    span = int(windows.max()) + 1",
        "    span = int(windows.max()) - 1",
        killers=("tests/unit/windowing/test_logic.py::test_window_is_emitted_once_the_watermark_reaches_its_end",),
    ),
    Mutant(
        "millpy/windowing/session_state.py",
        "                self._absorbed.append(old.due())",
        "                pass",
        killers=("tests/unit/windowing/test_session.py::test_emitted_session_deletes_its_row_when_it_grows",),
    ),
    Mutant(
        "millpy/windowing/accumulation.py",
        "        values = reduce(self._accumulators.merge, [old.values for old in olds])",
        "        values = reduce(self._accumulators.merge, [old.values for old in olds[:1]])",
        killers=("tests/unit/windowing/test_session.py::test_record_out_of_order_joins_two_open_sessions",),
    ),
    Mutant(
        "millpy/windowing/session_state.py",
        "        if not sessions and not gone and (",
        "        if not sessions and gone and (",
        killers=("tests/property/test_pane_times.py::test_so_it_is_with_sessions_that_merge",),
    ),
    Mutant(
        "millpy/windowing/sliding_state.py",
        "        self.advance(self.position)",
        "        pass",
        killers=("tests/unit/windowing/test_sliding.py::test_windows_that_have_fired_hold_nothing_after_a_restart",),
    ),
    Mutant(
        "millpy/windowing/sliding_state.py",
        "        while self._unfired.first(position) is not None:",
        "        while self._unfired.first() is not None:",
        killers=("tests/unit/windowing/test_sliding.py::test_record_in_many_windows_is_stored_once",),
    ),
    Mutant(
        "millpy/windowing/fixed_state.py",
        "        self._unexpired.add(end + self._allowed_us, None, start)",
        "        self._unexpired.add(end, None, start)",
        killers=(
            "tests/unit/windowing/test_calendar_windows.py::test_an_open_window_keeps_its_bounds_when_the_tz_database_changes",
        ),
    ),
    Mutant(
        "millpy/windowing/fixed_state.py",
        "        if not emitted:",
        "        if emitted:",
        killers=("tests/unit/windowing/test_logic.py::test_window_is_emitted_once_the_watermark_reaches_its_end",),
    ),
    Mutant(
        "millpy/windowing/aggregates/positional.py",
        "        at = found.ends() - 1 if self._last else found.offsets",
        "        at = found.ends() - 2 if self._last else found.offsets",
        killers=(
            "tests/unit/windowing/test_bounded_aggregates.py::test_first_and_last_are_ordered_by_event_time_then_by_arrival",
        ),
    ),
    Mutant(
        "millpy/windowing/group_by.py",
        "        values[:] = [None if value is None else int(value) for value in values]",
        "        pass",
        killers=("tests/unit/test_windows_over_windows.py::test_sums_of_sums_of_whole_numbers_are_whole_numbers",),
    ),
    Mutant(
        "millpy/windowing/panes.py",
        "            pane.kept = pane.kept if id(pane) in self.withheld else None",
        "            pane.kept = None",
        killers=(
            "tests/unit/test_windows_over_windows.py::test_what_is_new_waits_until_a_combiner_has_a_result_for_it",
        ),
    ),
    Mutant(
        "millpy/windowing/aggregates/positional.py",
        "        return self.kind(stored) if self.kind in (int, float) and stored is not None else stored",
        "        return self.kind(stored) if self.kind in (int, float) and stored is None else stored",
        killers=(
            "tests/unit/windowing/test_bounded_aggregates.py::test_lists_show_values_without_a_json_form_as_null",
        ),
    ),
    Mutant(
        "millpy/windowing/aggregates/positional.py",
        "        return one if one[0] <= other[0] else other",
        "        return one if one[0] <= other[1] else other",
        killers=("tests/property/test_windowed.py::test_columns_agree_with_a_plain_loop",),
    ),
    Mutant(
        "millpy/windowing/aggregates/positional.py",
        "        return one if one[0] <= other[0] else other",
        "        return one if one[1] <= other[0] else other",
        killers=(
            "tests/unit/windowing/test_bounded_aggregates.py::test_first_and_last_are_ordered_by_event_time_then_by_arrival",
        ),
    ),
    Mutant(
        "millpy/windowing/session_assign.py",
        "        if first == behind:",
        "        if first != behind:",
        killers=("tests/unit/windowing/test_session.py::test_session_ends_a_gap_after_its_last_record",),
    ),
    Mutant(
        "millpy/windowing/session_assign.py",
        "bisect_right(live, at, key=END), bisect_left(live, at + gap_us, key=START)",
        "bisect_left(live, at, key=END), bisect_left(live, at + gap_us, key=START)",
        killers=("tests/unit/windowing/test_session.py::test_session_ends_a_gap_after_its_last_record",),
    ),
    Mutant(
        "millpy/windowing/session_assign.py",
        "    ends = sorted_times[np.append(begin[1:], len(order)) - 1] + gaps[cluster_codes]",
        "    ends = sorted_times[np.append(begin[1:], len(order)) + 1] + gaps[cluster_codes]",
        killers=("tests/unit/windowing/test_combiner.py::test_combiner_sees_every_record_once_in_any_bundles",),
    ),
    Mutant(
        "millpy/windowing/session_assign.py",
        "    ends = sorted_times[np.append(begin[1:], len(order)) - 1] + gaps[cluster_codes]",
        "    ends = sorted_times[np.append(begin[1:], len(order)) - 1] - gaps[cluster_codes]",
        killers=("tests/unit/windowing/test_combiner.py::test_combiner_sees_every_record_once_in_any_bundles",),
    ),
    Mutant(
        "millpy/windowing/session.py",
        "                self._open.join(olds, start, end, pane)",
        "                pass",
        killers=("tests/unit/windowing/test_combiner.py::test_combiner_sees_every_record_once_in_any_bundles",),
    ),
    Mutant(
        "millpy/windowing/session.py",
        "            by_key.setdefault(code, []).append(row)",
        "            pass",
        killers=("tests/unit/windowing/test_session.py::test_session_ends_a_gap_after_its_last_record",),
    ),
    Mutant(
        "millpy/windowing/session.py",
        "            try_merges(self._accumulators, groups, partials, lambda n: [old.pane.values for old in joined.get(n, ())])",
        "            pass",
        killers=(
            "tests/unit/windowing/test_combiner.py::test_merge_or_result_that_raises_rejects_the_new_records_and_keeps_the_window",
        ),
    ),
    Mutant(
        "millpy/windowing/session.py",
        "        inside = np.flatnonzero(sessions.of_row >= 0) if len(too_late) else None",
        "        inside = np.flatnonzero(sessions.of_row >= 1) if len(too_late) else None",
        killers=("tests/unit/windowing/test_union.py::test_late_and_refused_records_are_those_of_their_input",),
    ),
    Mutant(
        "millpy/windowing/aggregates/numeric.py",
        "            return super().column_of(arrays)  # Python divides integers without rounding them first",
        "            pass",
        killers=("tests/unit/windowing/test_logic.py::test_mean_of_integers_beyond_53_bits_is_rounded_once",),
    ),
    Mutant(
        "millpy/windowing/aggregates/numeric.py",
        "        return total / count if count else None",
        "        return float(total) / count if count else None",
        killers=("tests/unit/windowing/test_logic.py::test_mean_of_integers_beyond_53_bits_is_rounded_once",),
    ),
    Mutant(
        "millpy/windowing/accumulation.py",
        "    pane.kept = PaneContent([]) if pane.pane_index else None",
        "    pane.kept = None",
        killers=(
            "tests/property/test_retractions.py::test_a_window_whose_every_record_is_retracted_loses_its_row_and_gets_it_back",
        ),
    ),
    Mutant(
        "millpy/windowing/accumulation.py",
        "            since = reduce(self._sum, [*parts, pane], PaneContent(self._accumulators.empty()))",
        "            since = reduce(self._sum, [*parts], PaneContent(self._accumulators.empty()))",
        killers=("tests/property/test_accumulation.py::test_discarded_panes_add_up",),
    ),
    Mutant(
        "millpy/windowing/accumulation.py",
        "        for old in olds if self._mode is Accumulation.RETRACTING else ():",
        "        for old in olds if self._mode is Accumulation.DISCARDING else ():",
        equivalent="merge changes no accumulator in place; an aggregate that did would need it",
    ),
    Mutant(
        "millpy/windowing/aggregates/balance.py",
        "        return [one - other for one, other in zip(accumulator, self.one(value), strict=True)]",
        "        return [accumulator[0] - 1, *(one - other for one, other in zip(accumulator[1:3], self.one(value)[1:3])), *accumulator[3:]]",
        killers=("tests/property/test_balances.py::test_what_is_added_and_subtracted_leaves_no_trace",),
    ),
    Mutant(
        "millpy/windowing/window_spec.py",
        "        if not isinstance(windows, SlidingWindows) or not self.simple:",
        "        if not isinstance(windows, SlidingWindows):",
        killers=("tests/property/test_accumulation.py::test_discarded_panes_add_up",),
    ),
    Mutant(
        "millpy/operators/kept_records.py",
        "                self._set(id_, at, mark, found[1] + 1)",
        "                pass",
        killers=("tests/property/test_deduplicate.py::test_a_retraction_takes_the_way_of_its_record",),
    ),
    Mutant(
        "millpy/hosting/replay.py",
        "        retracts = np.array([request.retracts for request in asked], np.bool_)",
        "        retracts = np.array([False for request in asked], np.bool_)",
        killers=("tests/crash/test_retractions.py::test_a_retraction_that_fails_is_replayed_as_a_retraction",),
    ),
    Mutant(
        "millpy/model/graph_changes.py",
        """            if _may_retract(stream, stored) and wanted["computations"][consumer]["kind"] != "archive":""",
        """            if not _may_retract(stream, stored) and wanted["computations"][consumer]["kind"] != "archive":""",
        killers=("tests/unit/model/test_versions.py::test_step_cannot_begin_to_read_records_that_may_be_retracted",),
    ),
    Mutant(
        "millpy/windowing/firing.py",
        "            or (self.by_percentile and not firing.expected)\n",
        "",
        killers=(
            "tests/unit/windowing/test_empty_panes.py::test_a_pane_whose_end_has_passed_waits_for_the_percentile",
        ),
    ),
    Mutant(
        "millpy/windowing/firing.py",
        "        return (last and self._always_final) or (first_since_end and self._always_on_time)",
        "        return (last and self._always_final) or self._always_on_time",
        killers=(
            "tests/unit/windowing/test_empty_panes.py::test_an_empty_pane_is_the_last_one_or_the_first_since_the_end",
        ),
    ),
    Mutant(
        "millpy/windowing/firing.py",
        '        first_since_end = timing != "early" and firing.on_time_index < 0',
        '        first_since_end = timing != "early" and firing.on_time_index <= 0',
        killers=(
            "tests/unit/windowing/test_empty_panes.py::test_an_empty_pane_is_the_last_one_or_the_first_since_the_end",
        ),
    ),
    Mutant(
        "millpy/windowing/sliding_state.py",
        "            self._queue(start, emitted=False)  # for other keys it may not have fired",
        "            self._queue(start, emitted=True)",
        equivalent="a key whose window has not fired has records in a later slice, which is queued",
    ),
    Mutant(
        "millpy/hosting/replay.py",
        "        requests[:] = [request for request in requests if id(request) not in late_again]",
        "        pass",
        killers=(
            "tests/unit/hosting/test_request_outcomes.py"
            "::test_a_record_that_is_late_again_has_one_outcome_however_many_windows_it_missed",
        ),
    ),
]
