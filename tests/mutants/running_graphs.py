"""Mutants of what operators change while a graph runs, and of windows that leave memory.

Those with a line break a promise of docs/guarantees.md.
"""

from __future__ import annotations

from tests.mutants.mutant import Mutant

POSTGRES = "tests/conformance/test_postgres_store.py::TestPostgresStore::"
FUNCTIONS = "migrations/versions/0002_functions.sql"
DEPLOY = "millpy/store/sql/deploy.sql"
CLOSED, SESSIONS = "millpy/windowing/closed_windows.py", "millpy/windowing/closed_sessions.py"
UNFIRED_SESSIONS = "millpy/windowing/unfired_sessions.py"
HORIZONS = "A changed lateness or horizon loses nothing"
STORED = "Windows that leave memory give the same panes"
CORRECTED = "A correction is made once and is audited"
DROPPED = "A retention drops whole partitions, and nothing that may still change"
GROWN = "A file that grows after its end is read on"
COPIED = "Rows that a new generation gets from the one before are copied once"
SILENT = "A device that falls silent makes one row"
RESET = "A computation that is reset begins anew, and the others continue"
UNIT = "tests/unit/runtime/test_sources_that_ended.py::"
RETENTION = "tests/conformance/test_retention.py::"
COPIES = "tests/conformance/test_copied_results.py::"
SPILLED = "tests/property/test_spilled_windows.py::test_a_turn_does_not_depend_on_what_is_in_memory"
UNREAD_IN_ANY_WORLD = (
    "tests/property/test_unread_sessions.py::test_a_turn_does_not_depend_on_bounds_folds_and_takeovers"
)
UNREAD_SESSIONS = f"{POSTGRES}test_unfired_sessions_stay_in_the_store_until_records_touch_them_or_they_end"
CLOSED_PANES = f"{POSTGRES}test_closed_windows_stay_in_the_store_until_they_are_loaded"
IN_MEMORY = "tests/crash/test_corrections.py::"


def _of(line: str, killer: str, file: str, old: str, new: str) -> Mutant:
    return Mutant(file, old, new, (killer,), line=line)


def _unread(killer: str, old: str, new: str, file: str = UNFIRED_SESSIONS) -> Mutant:
    """Return a mutant of sessions that leave memory before they fire."""
    return Mutant(file, old, new, (f"tests/unit/windowing/test_unfired_sessions.py::test_{killer}",))


MUTANTS = [
    _of(HORIZONS, "tests/property/test_changed_lateness.py::test_lateness_changes_for_the_windows_that_are_not_over",
        "millpy/windowing/operator.py", "np.maximum(watermarks - self._allowed_us, self._over_floor)",
        "watermarks - self._allowed_us"),
    _of(HORIZONS, f"{POSTGRES}test_windows_that_are_over_stay_over_when_the_lateness_grows", DEPLOY,
        "SET horizon_floor = greatest(i.horizon_floor, i.input_watermark - %(before_us)s::bigint)",
        "SET horizon_floor = i.input_watermark - %(before_us)s::bigint"),
    _of(HORIZONS, f"{POSTGRES}test_ids_that_are_forgotten_stay_forgotten_when_the_horizon_grows", DEPLOY,
        "SET expires_at = r.expires_at + %(longer_us)s::bigint", "SET expires_at = r.expires_at"),
    _of(STORED, SPILLED, CLOSED, "if 0 < pane.bundle <= folded_bundle and self._has_left(pane)]",
        "if 0 < pane.bundle and self._has_left(pane)]"),
    _of(STORED, SPILLED, SESSIONS,
        "name not in self._deleted and not self._sessions", "not self._sessions"),
    _of(STORED, UNREAD_IN_ANY_WORLD, UNFIRED_SESSIONS, "and session.place > self._upto and", "and"),
    _unread("the_row_of_a_session_that_grows_in_the_turn_in_which_it_ends_is_no_session",
            "            self._deleted[name] = UNBOUNDED\n", "", SESSIONS),
    _unread("a_row_that_is_not_folded_away_is_no_session",
            "return key in self._fired or self._has_unfired(key)", "return self._has_unfired(key)"),
    _unread("the_row_of_a_session_that_grows_in_the_turn_in_which_it_ends_is_no_session",
            "super()._may_have_left(session) or (session.pane.bundle > 0 and session.key in self._many)",
            "super()._may_have_left(session)"),
    _unread("the_row_of_a_session_that_has_become_shorter_is_none_though_its_key_has_left",
            "            if self._has_unfired(key):\n                self._note_changed(key, bundle)\n            else:",
            "            if not self._has_unfired(key):"),
    _unread("a_key_of_which_a_stored_session_has_fired_may_have_others", "else self._next_end(self._upto)", "else INSTANT_MAX"),
    _unread("a_key_of_which_a_stored_session_has_fired_may_have_others", "                self._read.add(session.key)\n", ""),
    _unread("a_new_owner_knows_that_a_key_with_changes_may_have_other_sessions",
            "            self._many.add(session.key)\n", "            pass\n"),
    _unread("a_key_with_many_sessions_reads_some_and_loses_none",
            "            if bundle > self._folded:\n                return False\n", ""),
    _unread("keys_of_sessions_that_open_and_end_within_a_turn_are_not_remembered",
            "        self._many -= {key for key in self._asked if not self._has_unfired(key)}", "        pass"),
    _unread("keys_of_sessions_that_open_and_end_within_a_turn_are_not_remembered",
            "(key for key in fired if key in stored)", "fired", "millpy/windowing/session_state.py"),
    _of(STORED, UNREAD_SESSIONS, "millpy/store/sql/sessions.sql",
        "   AND k.value::json ->> 'emitted' IS DISTINCT FROM 'true'\n ORDER", " ORDER"),
    _of(STORED, CLOSED_PANES, "millpy/store/sql/reading.sql", "least(low_watermark, oldest_work)", "low_watermark"),
    _of(CORRECTED, f"{IN_MEMORY}test_correction_computed_from_a_row_that_was_changed_meanwhile_is_computed_again",
        "millpy/store/memory/requests.py", "self._row_of(window) != window.row:", "False:"),
    _of(CORRECTED, f"{POSTGRES}test_correction_is_fulfilled_only_over_the_row_that_was_read",
        "millpy/store/postgres/corrections.py", "WHERE f.old_row IS NOT DISTINCT FROM s.old_row::jsonb", "WHERE true"),
    _of(CORRECTED, f"{IN_MEMORY}test_corrections_on_postgresql_are_audited_and_in_the_history",
        "millpy/store/postgres/corrections.py", "mill.correction(made) FROM made\n",
        "mill.correction(made) FROM made WHERE why <> ''\n"),
    _of(DROPPED, f"{RETENTION}test_a_longer_lateness_than_the_retention_keeps_rows", FUNCTIONS,
        "greatest(t.retention_us, t.allowed_lateness_us) AS kept_us", "t.retention_us AS kept_us"),
    _of(DROPPED, f"{RETENTION}test_what_may_still_change_is_kept_and_no_reader_holds_up_a_commit", FUNCTIONS,
        "e.range_hi <= reference - parent.kept_us", "e.range_lo <= reference - parent.kept_us"),
    _of(DROPPED, f"{RETENTION}test_a_window_whose_rows_were_dropped_says_so_to_its_late_records",
        "millpy/store/postgres/corrections.py", "dropped_to.get(table_id, INSTANT_MIN)", "INSTANT_MIN"),
    _of(DROPPED, f"{IN_MEMORY}test_a_record_that_may_belong_to_a_session_whose_row_was_dropped_begins_none",
        "millpy/windowing/corrections.py", "window.start if isinstance(self._spec.windows, SessionWindows) else window.end",
        "window.end"),
    _of(GROWN, f"{UNIT}test_windows_that_the_end_has_closed_stay_as_they_are_and_later_ones_are_whole",
        "millpy/store/memory/reopening.py",
        "        header.horizon_floor = max(header.horizon_floor, ends.get(header.interval.computation, INSTANT_MIN))\n", ""),
    _of(GROWN, f"{UNIT}test_windows_that_the_end_has_closed_stay_as_they_are_and_later_ones_are_whole",
        "millpy/hosting/closed_ends.py", "                    at = Instant(at - 1)  # the event time of its last pane\n", ""),
    _of(GROWN, f"{POSTGRES}test_an_ended_partition_is_set_back_with_what_is_behind_it", "millpy/store/sql/reopen.sql",
        "       horizon_floor = greatest(i.horizon_floor, f.closed_end),\n", ""),
    _of(COPIED, f"{COPIES}test_rows_of_closed_windows_are_copied_once_by_a_copy_that_is_killed_and_goes_on",
        "millpy/store/postgres/deployment/copied_results.py", '_BETWEEN = sql.SQL("window_end > mill',
        '_BETWEEN = sql.SQL("window_end >= mill'),
    _of(COPIED, f"{COPIES}test_rows_of_closed_windows_are_copied_once_by_a_copy_that_is_killed_and_goes_on",
        "millpy/store/sql/copied_results.sql",
        "SELECT min(least(greatest(i.input_watermark - t.allowed_lateness_us, i.horizon_floor), i.low_watermark))",
        "SELECT min(greatest(i.input_watermark - t.allowed_lateness_us, i.horizon_floor))"),
    _of(SILENT, "tests/property/test_silence.py::test_silences_are_those_of_a_plain_loop", "millpy/operators/silence.py",
        "left -= max(0, begin - since)", "left -= max(0, end - since)"),
    _of(RESET, "tests/crash/test_changed_in_place.py::test_reset_computation_begins_anew_and_the_others_stay",
        "millpy/store/postgres/deployment/reset.py",
        "    await deploy(connection, lacking, on_purpose=True, back=True, reset=names)\n", ""),
    Mutant(SESSIONS, "<= self._folded and session.end > passed:", "<= self._folded:",
           ("tests/property/test_spilled_windows.py"
            "::test_a_session_that_is_over_stays_in_memory_while_stored_ones_are_deleted",)),
    Mutant(SESSIONS, "return session.end > over_by and self", "return self",
           equivalent="a session that is over takes no record, wherever it is, and expires in the turn that loads it"),
    Mutant("millpy/store/sql/sessions.sql", """k.value ~ '"waits": ?true'""", """strpos(k.value, '"waits":true') > 0""",
           ("tests/conformance/test_taking_back.py::test_panes_that_wait_are_read_after_an_aggregate_was_taken_back",)),
]  # fmt: skip
