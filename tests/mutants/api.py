"""Mutants of the API: who may ask, what is shared, and what a dead or hanging API leaves behind."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

ACTIONS = "millpy/admin/actions.py"
AUTHENTICATION = "millpy/api/authentication.py"
WHOLE = "A request to the API happens whole or not at all"
LIVE = "tests/conformance/test_api_live.py::"
ACCESS = "tests/conformance/test_api_access.py::"
LANE = "tests/unit/test_api_lane.py::"
KEPT = "millpy/api/kept_answers.py"
SHARED = (f"{LANE}test_many_viewers_share_the_answer_of_the_last_second",)
REPEATED = (f"{ACCESS}test_of_repeated_headers_the_one_that_the_proxy_added_counts",)

MUTANTS = [
    Mutant(ACTIONS, "        done = _count(run(_DISCARD[what], ids=own))",
           '        done = _count(run(_DISCARD[what], ids=own))\n        run("COMMIT")',
           (f"{LIVE}test_an_api_that_is_killed_leaves_nothing_behind[the events]",), line=WHOLE),
    Mutant("millpy/admin/queries.py", 'own = {"statement_timeout": limit, "idle_in_transaction_session_timeout": limit}',
           'own = {"statement_timeout": limit}',
           (f"{LIVE}test_an_api_that_hangs_in_an_action_gives_its_locks_back_and_has_done_nothing",), line=WHOLE),
    Mutant("millpy/api/database.py", "                self._shared.pop(key, None)", "                pass",
           (f"{LANE}test_a_request_that_comes_while_another_is_answered_asks_again",)),
    Mutant("millpy/api/database.py", "await asyncio.shield(found)", "await found",
           (f"{LANE}test_a_client_that_has_gone_takes_no_answer_from_the_others",)),
    Mutant("millpy/api/answers.py", "request.scope[\"query_string\"], role, apart)", "request.scope[\"query_string\"], apart)",
           (f"{LANE}test_users_with_different_roles_of_the_database_share_nothing",)),
    Mutant(AUTHENTICATION, 'rpartition(",")[2].strip()', 'partition(",")[0].strip()', REPEATED),
    Mutant(AUTHENTICATION, "request.headers.getlist(name)) > 1", "request.headers.getlist(name)) > 2", REPEATED),
    Mutant(AUTHENTICATION, "if principal is None and (wait_s",
           "if False and (wait_s", (f"{ACCESS}test_wrong_tokens_are_limited_by_address_and_lock_out_nobody_else",)),
    Mutant(AUTHENTICATION, "if request.method not in SAFE and not hmac", "if False and not hmac",
           (f"{ACCESS}test_no_action_with_a_viewers_token_or_without_the_csrf_token",)),
    Mutant("millpy/api/server.py", "> self._connections_max:", "> 10**9:",
           (f"{LIVE}test_connections_beyond_the_limit_are_closed_and_leave_room_for_others",)),
    Mutant("millpy/api/server.py", "ssl_handshake_timeout=HEAD_S_MAX if tls else None", "ssl_handshake_timeout=None",
           ("tests/unit/test_api_server.py::test_connections_without_a_handshake_end",)),
    Mutant("millpy/api/actions.py", "        databases.reading.forget()\n", "        pass\n",
           (f"{LIVE}test_an_action_shows_at_once_however_many_look",)),
    Mutant(KEPT, "answer.began_at <= self._forgotten_at or ", "",
           (f"{LANE}test_an_answer_that_began_before_something_changed_is_not_kept",)),
    Mutant(KEPT, "if found is not None and now - found.began_at < KEPT_S", "if found is not None",
           (f"{LANE}test_an_answer_that_is_too_old_is_not_used_and_takes_no_memory_nor_does_its_key",)),
    Mutant(KEPT, " or asked <= ASKED_MAX", "", SHARED),
    Mutant(KEPT, "        if sum(kept for _, kept in self._answers.values()) + size > KEPT_BYTES_MAX:\n", "        if False:\n",
           (f"{LANE}test_kept_answers_have_a_bound_in_bytes",)),
    Mutant("millpy/api/answers.py", "    if wishes & FRESH:\n", "    if False:\n",
           (f"{LANE}test_a_request_may_ask_for_a_fresh_answer",)),
    Mutant("millpy/admin/queries.py", "int((self._until - SystemClock().monotonic()) * 1000)", "1500",
           ("tests/conformance/test_admin_limits.py::test_statements_have_a_time_together",)),
    Mutant("millpy/api/database.py", "if size is not None and self.is_crowded:", "if size is not None:",
           (f"{LANE}test_few_viewers_get_a_fresh_answer_each",)),
    Mutant("millpy/api/live.py", "        self._lane.is_crowded = len(self._streams) > CROWD\n        return stream",
           "        return stream", ("tests/unit/test_api_hub.py::test_a_crowd_of_viewers_lets_answers_be_kept",)),
]  # fmt: skip
