"""Mutants of what PostgreSQL itself checks: fence, cursors, ownership, rings, and how a commit is sent."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

FUNCTIONS = "migrations/versions/0002_functions.sql"
COMMIT = "millpy/store/sql/commit.sql"
OWNERSHIP = "millpy/store/sql/ownership.sql"


def _store(file: str, old: str, new: str, *tests: str, line: str = "") -> Mutant:
    killers = tuple(f"tests/conformance/test_postgres_store.py::TestPostgresStore::{test}" for test in tests)
    return Mutant(file, old, new, killers, line=line)


MUTANTS = [
    _store(FUNCTIONS, "       AND i.sequencer = e.sequencer\n       AND i.bundle = e.bundle - 1\n", "       AND i.bundle = e.bundle - 1\n",
           "test_stale_sequencer_cannot_commit", line="A worker that has lost its lease can change nothing"),
    _store(FUNCTIONS, "       AND i.bundle = e.bundle - 1\n       AND i.low", "       AND i.bundle <= e.bundle\n       AND i.low",
           "test_bundle_cannot_commit_twice"),
    _store(FUNCTIONS, "       AND i.bundle = e.bundle - 1\n       AND i.low", "       AND i.bundle < e.bundle\n       AND i.low",
           "test_bundle_number_cannot_be_skipped"),
    _store(FUNCTIONS, "       AND i.low_watermark <= e.low_watermark\n", "", "test_watermarks_cannot_go_back",
           line="Watermarks, sequencers and positions never go back"),
    _store(FUNCTIONS, "       AND i.low_watermark <= e.low_watermark\n", "       AND i.low_watermark < e.low_watermark\n",
           "test_turn_of_several_intervals_commits_completely", "test_pane_replaces_the_pane_before_it"),
    _store(FUNCTIONS, "       AND i.graph_version = p_graph_version;", ";", "test_another_version_of_the_graph_cannot_commit"),
    _store(FUNCTIONS, "    IF held <> cardinality(p_intervals) THEN", "    IF held = 0 THEN",
           "test_turn_with_one_stale_grant_commits_nothing"),
    _store(FUNCTIONS, "           low_watermark = e.low_watermark,\n", "",
           "test_watermarks_cannot_go_back", "test_head_watermark_belongs_to_the_position_polled"),
    _store(FUNCTIONS, "           input_watermark = e.input_watermark,\n", "", "test_new_owner_reads_what_was_committed"),
    _store(FUNCTIONS, "coalesce(nullif(e.processing_floor, -4611686018427387904), i.processing_floor)", "i.processing_floor",
           "test_new_owner_reads_what_was_committed"),
    _store(FUNCTIONS, "    IF p_own > 0 THEN", "    IF p_own > 1 THEN", "test_pane_that_skips_an_index_is_refused"),
    _store(FUNCTIONS, "    IF p_written <> p_sent THEN", "    IF p_written > p_sent THEN",
           "test_cursor_moves_neither_back_nor_past_its_producer"),
    _store(FUNCTIONS, "    IF p_settled <> p_sent THEN", "    IF p_settled > p_sent THEN",
           "test_withdrawn_request_is_not_fulfilled"),
    Mutant(FUNCTIONS, "     WHERE interval_id = p_interval AND sequencer = p_sequencer AND folded_bundle = p_folded;",
           "     WHERE interval_id = p_interval AND folded_bundle = p_folded;",
           ("tests/conformance/test_postgres_commit.py::test_fold_of_a_stale_owner_is_refused",)),
    _store(FUNCTIONS, "AND s.producer = p.interval_id AND s.seq > k.seq));",
           "AND s.producer = p.interval_id AND s.seq > k.seq + 1));",
           "test_retention_never_frees_what_a_cursor_still_needs"),
    _store(FUNCTIONS, "AND s.producer = p.interval_id AND s.seq > k.seq));",
           "AND s.producer = p.interval_id AND s.seq >= k.seq));", "test_retention_frees_what_every_consumer_has_read"),
    _store(FUNCTIONS, "AND d.interval_id = i.interval_id AND d.bundle > i.folded_bundle));",
           "AND d.interval_id = i.interval_id AND d.bundle > i.folded_bundle + 1));",
           "test_retention_keeps_deltas_until_they_are_folded"),
    _store(FUNCTIONS, "AND r.expires_at >= latest.clock", "AND r.expires_at < latest.clock",
           "test_retention_keeps_dedupe_runs_until_they_expire"),
    _store(FUNCTIONS, "    SELECT EXISTS (SELECT FROM mill.workers WHERE worker_id = p_worker AND lease_deadline > clock_timestamp()",
           "    SELECT EXISTS (SELECT FROM mill.workers WHERE worker_id = p_worker AND lease_deadline < clock_timestamp()",
           "test_interval_of_a_live_worker_cannot_be_claimed", "test_heartbeat_keeps_the_lease"),
    _store(FUNCTIONS, "                     AND lease_deadline <= clock_timestamp() + 2 * make_interval(secs => lease_s))", "    )",
           "test_a_lease_from_before_the_clock_was_set_back_does_not_block_others"),
    _store(COMMIT, "     WHERE c.consumer = e.consumer AND c.producer = e.producer AND c.seq <= e.seq",
           "     WHERE c.consumer = e.consumer AND c.producer = e.producer",
           "test_cursor_moves_neither_back_nor_past_its_producer"),
    _store(COMMIT, " AND p.bundle >= e.seq\n", "\n", "test_cursor_moves_neither_back_nor_past_its_producer"),
    _store(COMMIT, "    UPDATE mill.cursors AS c SET seq = e.seq, watermark = e.watermark",
           "    UPDATE mill.cursors AS c SET seq = e.seq", "test_new_owner_reads_what_was_committed"),
    _store(COMMIT, "    ON CONFLICT (producer, subscription_id) DO UPDATE SET seq = excluded.seq",
           "    ON CONFLICT (producer, subscription_id) DO NOTHING",
           "test_owner_knows_the_last_segment_of_each_subscription"),
    _store(COMMIT, "ids, times, whole > 0\n", "ids, times, whole < 0\n", "test_whole_run_replaces_those_before_it"),
    _store(OWNERSHIP, "           AND (h.worker_id = %(worker_id)s OR NOT mill.alive(h.worker_id))\n", "",
           "test_interval_of_a_live_worker_cannot_be_claimed"),
    _store(OWNERSHIP, "           AND (h.worker_id = %(worker_id)s OR NOT mill.alive(h.worker_id))\n",
           "           AND NOT mill.alive(h.worker_id)\n", "test_interval_whose_claim_got_no_answer_is_claimed_again"),
    _store(OWNERSHIP, "UPDATE mill.intervals AS i SET worker_id = %(worker_id)s, sequencer = i.sequencer + 1",
           "UPDATE mill.intervals AS i SET worker_id = %(worker_id)s",
           "test_interval_of_an_expired_worker_is_claimed_under_a_higher_sequencer"),
    _store(OWNERSHIP, "SET sequencer = 1 + i.sequencer, worker_id = %(worker_id)s", "SET worker_id = %(worker_id)s",
           "test_seized_interval_leaves_its_live_owner_with_a_stale_grant"),
    _store(OWNERSHIP, " WHERE i.interval_id = free.interval_id AND mill.alive(%(worker_id)s)\n",
           " WHERE i.interval_id = free.interval_id\n", "test_expired_worker_claims_nothing_and_learns_it_from_its_heartbeat"),
    _store(OWNERSHIP, "   AND i.graph_version = (SELECT w.graph_version FROM mill.workers AS w WHERE w.worker_id = %(worker_id)s)\n",
           "", "test_worker_of_another_version_of_the_graph_gets_nothing"),
    _store(OWNERSHIP, " WHERE worker_id = %(worker_id)s AND lease_deadline > clock_timestamp();",
           " WHERE worker_id = %(worker_id)s;", "test_expired_worker_claims_nothing_and_learns_it_from_its_heartbeat"),
    Mutant(OWNERSHIP, "   AND NOT mill.alive(w.worker_id) AND a.xact_start IS NOT NULL;", "   AND a.xact_start IS NOT NULL;",
           ("tests/conformance/test_postgres_commit.py::test_commit_of_a_live_owner_is_never_terminated",)),
    Mutant(FUNCTIONS, "    IF p_slots <> (SELECT", "    IF false AND p_slots <> (SELECT",
           ("tests/conformance/test_postgres_commit.py::test_commit_continues_after_another_worker_turned_the_rings",)),
]  # fmt: skip
