"""Mutants of the lines of docs/guarantees.md that no mutant of a part breaks: with them every line has one."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

FUNCTIONS = "migrations/versions/0002_functions.sql"
OWNERSHIP = "millpy/store/sql/ownership.sql"
ERRORS = "millpy/store/postgres/errors.py"
INJECTOR = "millpy/injectors/mqtt_injector.py"
CONNECTION = "millpy/injectors/mqtt_connection.py"
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
    _of("Another worker goes on within the lease and about a second",
        "crash/test_recovery_time.py::test_lost_intervals_commit_soon_after_the_lease", FUNCTIONS,
        "worker_id = p_worker AND lease_deadline > clock_timestamp()",
        "worker_id = p_worker AND lease_deadline > clock_timestamp() - interval '5 s'"),
    _of("The account sees a record that we lose or double",
        "crash/test_accounting.py::test_record_lost_or_doubled_is_found[less-accepted_records-200]",
        "migrations/versions/0003_views.sql", "produced + coalesce(added, 0) = coalesce(filtered, 0)",
        "produced + coalesce(added, 0) >= coalesce(filtered, 0)"),
    _of("Results of a stage that one source partition feeds are a function of the input's order alone",
        "crash/test_memory_engine.py::test_crashes_and_lost_commits_change_nothing[at-once-0]", "millpy/runtime/steps.py",
        "            cursors=interval.take_moved(),\n", "            cursors=(),\n"),
    _of("A live change leaves what is stored right", "property/test_added_aggregates.py::test_added_aggregates_are_exact_or_null",
        "millpy/windowing/fold.py", "if place < len(values) else None", "if place < len(values) else fold.result_of(fold.empty())"),
    _of("An addition can be taken back", "crash/test_deploy_matrix.py::test_addition_is_taken_back_and_brought_in_again[all of them-rows-0]",
        "millpy/store/postgres/taking_back.py", "            await _shorten_records(connection, graph_id, name, lost, len(kept))\n", "            pass\n"),
    _of("A key stays in its interval",
        "property/test_key_places.py::test_hasher_that_serves_many_steps_gives_every_key_its_own_place", "millpy/model/keys.py",
        "        known = self._by_type.setdefault(types, {})", "        known = self._by_type.setdefault(None, {})"),
    _of("What devices make a worker remember is",
        "unit/runtime/test_bounded_state.py::test_timers_of_ever_new_keys_have_a_bound_and_keys_that_have_one_go_on",
        "millpy/runtime/calls.py", "lambda: len(self._book) < timers_max)", "lambda: True)"),
    _of("However slow your code is, a worker keeps its lease while calls return",
        "unit/runtime/test_slow_steps.py::test_a_step_whose_calls_end_is_not_stuck", "millpy/runtime/ownership.py",
        "        if progress.units != self._units:", "        if progress.units < self._units:"),
    _of("Whatever your code raises ends its record, not the worker",
        "unit/runtime/test_errors_of_any_class.py::test_only_its_record_is_dead_lettered[OwnError-process_record]",
        "millpy/runtime/calls.py",
        "            except BaseException as error:  # user code: quarantined, see the module\n                self._check_is_users(error, run)\n                _drive(",
        "            except Exception as error:\n                self._check_is_users(error, run)\n                _drive("),
    _of("What queues up during an outage is not late because of it",
        "crash/test_broker.py::test_ten_minutes_of_messages_after_an_outage_are_not_late", INJECTOR,
        "        if session is None or session.inbox:\n            return False\n        slept",
        "        if session is None:\n            return True\n        if session.inbox:\n            return False\n        slept"),
    _of("A broker that dies with its queue saved loses nothing",
        "crash/test_broker.py::test_broker_killed_with_its_queue_saved_loses_nothing", CONNECTION,
        "            clean_start=False if five", "            clean_start=True if five"),
    _of("Files and Kafka: the position is in our commit", "unit/injectors/test_files.py::test_reading_resumes_at_every_position",
        "millpy/injectors/files.py", "            position=msgspec.json.encode(piece.after),",
        "            position=msgspec.json.encode(msgspec.structs.replace(piece.after, offset=0)),"),
    _of("`synchronous_commit` of the worker's commits is on",
        "conformance/test_durability.py::test_commits_are_durable_whatever_the_databases_default", LANES,
        '            "synchronous_commit": self._synchronous_commit,\n', ""),
    _of("Whatever else a server, database or role sets",
        "conformance/test_search_path.py::test_nothing_that_millpy_does_calls_what_others_have_put_on_the_path",
        "millpy/session_settings.py", 'SEARCH_PATH = "pg_catalog, pg_temp"', 'SEARCH_PATH = "public, pg_catalog, pg_temp"'),
    _of("What you put on result tables",
        "conformance/test_users_tables.py::test_whatever_a_users_trigger_raises_is_the_rows_fault[as if it were a conflict-before]", ERRORS,
        "    if users and state and _raised(error):", "    if users and not state and _raised(error):"),
    _of("`fsync` and `full_page_writes` must be on", "unit/test_doctor.py::test_a_server_that_is_not_well", "millpy/doctor.py",
        '    for name in ("fsync", "full_page_writes"):', '    for name in ("fsync",):'),
    _of("Your code runs again", "unit/runtime/test_operators.py::test_a_record_is_tried_again_before_it_is_set_aside",
        "millpy/runtime/operators.py", "            for attempt in range(1, attempts_max + 1):\n                try:\n                    values",
        "            for attempt in range(attempts_max, attempts_max + 1):\n                try:\n                    values"),
    _of("Beyond the horizon of `Dedupe` a repeated record is a new one.",
        "property/test_dedupe.py::test_what_left_the_horizon_leaves_memory", "millpy/injectors/dedupe.py",
        "        tiers = [old for old in self._tiers if old.newest >= horizon]", "        tiers = list(self._tiers)"),
    _of("Several source partitions into one stage: which comes first is not fixed.",
        "crash/test_memory_engine.py::test_several_source_partitions_lose_and_double_nothing", "millpy/model/watermark.py",
        "    return min(watermarks, default=INSTANT_MAX)", "    return max(watermarks, default=INSTANT_MAX)"),
    _of("What a broker loses.", "crash/test_broker.py::test_broker_killed_without_its_queue_loses_that_and_nothing_else",
        "millpy/injectors/intake.py", '        self._counts["dead_lettered"] += len(letters)\n',
        '        self._counts["dead_lettered"] += 2 * len(letters)\n'),
    _of("What a broker drops", "crash/test_broker.py::test_broker_whose_queue_is_too_short_drops_the_rest_and_nothing_else",
        INJECTOR, "        if session is self._session:\n            session.connection.acknowledge(token.packet_ids)\n",
        "        if session is self._session:\n            session.connection.acknowledge(token.packet_ids[1:])\n"),
    _of("What a failover forgets.", "crash/test_other_history.py::test_consumer_reads_again_what_a_promoted_standby_lacks[idle]",
        LANES, "            if self._soft and known is not None and", "            if not self._soft and known is not None and"),
    _of_store("A worker that nobody starts again", "test_interval_of_an_expired_worker_is_claimed_under_a_higher_sequencer",
              OWNERSHIP, "           AND (h.worker_id = %(worker_id)s OR NOT mill.alive(h.worker_id))\n",
              "           AND (h.worker_id = %(worker_id)s OR h.worker_id IS NULL)\n"),
]  # fmt: skip
