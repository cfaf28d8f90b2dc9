"""Mutants of the lines of docs/guarantees.md that no mutant of a part breaks: with them every line has one."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

FUNCTIONS = "migrations/versions/0002_functions.sql"
OWNERSHIP = "millpy/store/sql/ownership.sql"
ERRORS = "millpy/store/postgres/errors.py"
INJECTOR = "millpy/sources/mqtt/injector.py"
CONNECTION = "millpy/sources/mqtt/connection.py"
LANES = "millpy/store/postgres/connection.py"


def _of(line: str, killer: str, file: str, old: str, new: str) -> Mutant:
    return Mutant(file, old, new, (f"tests/{killer}",), line=line)


def _of_store(line: str, killer: str, file: str, old: str, new: str) -> Mutant:
    return _of(line, f"conformance/test_postgres_store.py::TestPostgresStore::{killer}", file, old, new)


MUTANTS = [
    _of("A bundle's effects are visible together or not at all",
        "crash/test_every_point.py::test_killed_worker_is_started_again[after_fence]",
        "millpy/store/postgres/commit.py", "            await _pipeline(connection, [(BEGIN, []), fence], sending)",
        "            await _pipeline(connection, [(BEGIN, []), fence, (COMMIT, []), (BEGIN, [])], sending)"),
    _of_store("A commit whose answer is lost is resolved, not repeated",
              "test_unknown_commit_is_resolved_by_taking_over_from_oneself",
              OWNERSHIP, "AS i SET sequencer = i.sequencer + 1", "AS i SET sequencer = i.sequencer"),
    _of("Workers come back by themselves", "crash/test_database_faults.py::test_sessions_terminated_at_random", ERRORS,
        '    if _connection_lost(error, state) or state[:2] in ("53", "58"):', '    if state[:2] in ("53", "58"):'),
    _of("A full disk, a statement timeout or a deadlock delays and costs nothing",
        "crash/test_database_faults.py::test_deadlock", ERRORS, '    if state[:2] in ("40", "25") or state in (', "    if state in ("),
    _of("Another worker takes over within the lease and about a second",
        "crash/test_recovery_time.py::test_lost_intervals_commit_soon_after_the_lease", FUNCTIONS,
        "worker_id = p_worker AND lease_deadline > clock_timestamp()",
        "worker_id = p_worker AND lease_deadline > clock_timestamp() - interval '5 s'"),
    _of("The accounting shows a record that millpy loses or doubles",
        "crash/test_accounting.py::test_record_lost_or_doubled_is_found[less-accepted_records-200]",
        "migrations/versions/0003_views.sql", "produced + coalesce(added, 0) = coalesce(filtered, 0)",
        "produced + coalesce(added, 0) >= coalesce(filtered, 0)"),
    _of("Results of a stage that one source partition feeds are a function of the input's order alone",
        "crash/test_memory_engine.py::test_crashes_and_lost_commits_change_nothing[at-once-0]", "millpy/hosting/step.py",
        "            cursors=interval.take_moved(),\n", "            cursors=(),\n"),
    _of("A live change keeps stored data correct", "property/test_added_aggregates.py::test_added_aggregates_are_exact_or_null",
        "millpy/windowing/accumulator.py", "if place < len(values) else None", "if place < len(values) else member.result_of(member.empty())"),
    _of("A join makes the pairs of a batch", "property/test_interval_join.py::test_a_join_equals_that_of_a_batch",
        "millpy/operators/join_pairs.py", "tier.rows.numbers[places] < before[queries]",
        "tier.rows.numbers[places] != before[queries]"),
    _of("All records of a turn see one version of a lookup table",
        "unit/runtime/test_lookups.py::test_a_turn_that_is_stepped_again_sees_the_version_that_it_saw",
        "millpy/runtime/turn.py", "inbox.tables = dict(self._context.lookups.versions)",
        "inbox.tables = self._context.lookups.versions"),
    _of("All records of a turn see one version of a lookup table",
        "unit/runtime/test_lookups.py::test_a_search_for_a_refused_value_loses_no_record_of_a_step_that_waits",
        "millpy/hosting/step.py", "            each.use_tables(inbox.tables)", "            pass"),
    _of("An addition can be taken back", "crash/test_deploy_matrix.py::test_addition_can_be_removed_and_added_again[all of them-rows-0]",
        "millpy/store/postgres/deployment/rollback.py", "            await _shorten_records(connection, graph_id, name, lost, len(kept))\n", "            pass\n"),
    _of("A key stays in its interval",
        "property/test_key_hashes.py::test_hasher_with_a_full_cache_gives_every_key_its_own_hash", "millpy/model/keys.py",
        "        known = self._by_type.setdefault(types, {})", "        known = self._by_type.setdefault(None, {})"),
    _of("The memory that devices can use in a worker is",
        "unit/runtime/test_bounded_state.py::test_timers_of_new_keys_are_bounded_and_known_keys_continue",
        "millpy/operators/callbacks.py", "lambda: len(self._book) < timers_max)", "lambda: True)"),
    _of("However slow your code is, a worker keeps its lease while calls return",
        "unit/runtime/test_slow_steps.py::test_a_step_whose_calls_end_is_not_stuck", "millpy/runtime/lease.py",
        "        if progress.units != self._units:", "        if progress.units < self._units:"),
    _of("An exception in your code costs its record, not the worker",
        "unit/runtime/test_errors_of_any_class.py::test_only_its_record_is_dead_lettered[OwnError-process_record]",
        "millpy/operators/callbacks.py",
        "            except BaseException as error:  # user code: dead-lettered, see the module docstring\n                self._check_is_user_error(error, run)\n                _drive(",
        "            except Exception as error:\n                self._check_is_user_error(error, run)\n                _drive("),
    _of("Messages that queue up during an outage are not late because of it",
        "crash/test_broker.py::test_messages_queued_for_ten_minutes_of_outage_are_not_late", INJECTOR,
        "        if session is None or session.inbox:\n            return False\n        slept",
        "        if session is None:\n            return True\n        if session.inbox:\n            return False\n        slept"),
    _of("A broker that dies with its queue saved loses nothing",
        "crash/test_broker.py::test_broker_killed_with_its_queue_saved_loses_nothing", CONNECTION,
        "            clean_start=False if five", "            clean_start=True if five"),
    _of("Files and Kafka: the position is part of the commit", "unit/sources/test_files.py::test_reading_resumes_at_every_position",
        "millpy/sources/files/source.py", "            position=msgspec.json.encode(piece.after),",
        "            position=msgspec.json.encode(msgspec.structs.replace(piece.after, offset=0)),"),
    _of("`synchronous_commit` of the worker's commits is on",
        "conformance/test_durability.py::test_commits_are_durable_whatever_the_default_of_the_database", LANES,
        '            "synchronous_commit": self._synchronous_commit,\n', ""),
    _of("Other settings of a server, database or role change nothing",
        "conformance/test_search_path.py::test_millpy_calls_no_function_that_others_put_on_the_path",
        "millpy/store/postgres/session_settings.py", 'SEARCH_PATH = "pg_catalog, pg_temp"', 'SEARCH_PATH = "public, pg_catalog, pg_temp"'),
    _of("What you put on result tables",
        "conformance/test_users_tables.py::test_any_error_of_a_users_trigger_dead_letters_its_row[as if it were a conflict-before]", ERRORS,
        "    if users and state and _raised(error):", "    if users and not state and _raised(error):"),
    _of("`fsync` and `full_page_writes` must be on", "unit/test_doctor.py::test_an_unhealthy_server_has_findings", "millpy/admin/doctor.py",
        '    for name in ("fsync", "full_page_writes"):', '    for name in ("fsync",):'),
    _of("Results that are computed from results are those of a batch",
        "property/test_retractions.py::test_a_window_whose_every_record_is_retracted_loses_its_row_and_gets_it_back",
        "millpy/windowing/accumulation.py", "        if pane.pane_index and pane.kept is None:",
        "        if pane.pane_index and pane.kept is not None:"),
    _of("Your code runs again", "unit/operators/test_stateless.py::test_a_record_is_tried_again_before_it_is_dead_lettered",
        "millpy/operators/stateless.py", "            for attempt in range(1, attempts_max + 1):\n                try:\n                    values",
        "            for attempt in range(attempts_max, attempts_max + 1):\n                try:\n                    values"),
    _of("Beyond the horizon of `Dedupe` a repeated record is a new one.",
        "property/test_dedupe.py::test_ids_beyond_the_horizon_leave_memory", "millpy/ingest/dedupe.py",
        "        tiers = [old for old in self._tiers if old.newest >= horizon]", "        tiers = list(self._tiers)"),
    _of("Several source partitions into one stage: which comes first is not fixed.",
        "crash/test_memory_engine.py::test_several_source_partitions_lose_and_double_nothing", "millpy/model/watermark.py",
        "    return min(watermarks, default=INSTANT_MAX)", "    return max(watermarks, default=INSTANT_MAX)"),
    _of("What a broker loses.", "crash/test_broker.py::test_broker_killed_without_its_queue_loses_that_and_nothing_else",
        "millpy/ingest/intake.py", '        self._counts["dead_lettered"] += len(letters)\n',
        '        self._counts["dead_lettered"] += 2 * len(letters)\n'),
    _of("What a broker drops", "crash/test_broker.py::test_broker_whose_queue_is_too_short_drops_the_rest_and_nothing_else",
        INJECTOR, "        if session is self._session:\n            session.connection.acknowledge(token.packet_ids)\n",
        "        if session is self._session:\n            session.connection.acknowledge(token.packet_ids[1:])\n"),
    _of("What a failover forgets.", "crash/test_other_history.py::test_consumer_rereads_what_a_promoted_standby_lacks[idle]",
        LANES, "            if self._serves_turns and known is not None and", "            if not self._serves_turns and known is not None and"),
    _of_store("A worker that is not restarted", "test_interval_of_an_expired_worker_is_claimed_under_a_higher_sequencer",
              OWNERSHIP, "           AND (h.worker_id = %(worker_id)s OR NOT mill.alive(h.worker_id))\n",
              "           AND (h.worker_id = %(worker_id)s OR h.worker_id IS NULL)\n"),
]  # fmt: skip
