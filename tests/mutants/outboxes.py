"""Mutants of sinks: outboxes, their delivery, and what the other side refuses."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

DRAIN = "millpy/runtime/outbox_drain.py"
REFUSED = "millpy/runtime/refused_messages.py"
OF_DRAIN = "tests/unit/runtime/test_outbox_drain.py::"
OF_STORE = "tests/conformance/test_memory_store.py::TestMemoryStore::"
OF_POSTGRES = "tests/conformance/test_postgres_store.py::"
MODEL = "tests/property/test_refusals.py::test_each_message_arrives_or_is_a_dead_letter_whatever_is_killed"
STORED = (
    "tests/unit/runtime/test_refused_messages.py::"
    "test_a_message_becomes_a_dead_letter_once_when_it_is_stored_and_passed"
)
OF_CRASH = "tests/crash/test_refusals.py::"
OF_SINKS = "tests/crash/test_sinks.py::"
REFUSALS = "A message that the other side refuses is delivered later, or is a dead letter, or its key is parked"
AT_LEAST_ONCE = "A sink without a position of its own gets each message at least once"
FAILING = "A sink that fails stops neither its worker nor a successor"

MUTANTS = [
    Mutant(
        "millpy/sinks/statement.py",
        "if len(bundle) and self._binding.is_current:",
        "if len(bundle) > 1 and self._binding.is_current:",
        killers=(f"{OF_SINKS}test_a_statement_runs_once_for_each_record_and_a_refused_one_is_a_dead_letter",),
        line="A statement of `to_sql` has its effect once, or its record is a dead letter",
    ),
    Mutant(
        "millpy/sinks/kafka/connection.py",
        "        return max(0, found)\n",
        "        return 0\n",
        killers=(f"{OF_SINKS}test_a_kill_around_the_commit_of_a_transaction_loses_and_doubles_nothing",),
        line="A message to a Kafka topic is committed once",
    ),
    Mutant(
        DRAIN,
        "not self._stores_positions and self._recorded < self.waiting.delivered",
        "not self._stores_positions and self._recorded < self.waiting.delivered - 20",
        killers=(MODEL,),
        line=AT_LEAST_ONCE,
    ),
    Mutant(
        DRAIN,
        "        self.waiting.rewind()\n        # One",
        "        # One",
        killers=(MODEL,),
        line=AT_LEAST_ONCE,
    ),
    Mutant(
        REFUSED,
        "                (behind if waits else sent).append(place)\n",
        "                sent.append(place)\n",
        killers=(MODEL,),
        line=REFUSALS,
    ),
    Mutant(
        REFUSED,
        "first.position not in self.changes and first.position < before",
        "first.position < before",
        killers=(STORED,),
        line=REFUSALS,
    ),
    Mutant(
        REFUSED,
        "first.position not in self.changes and first.position < before",
        "first.position not in self.changes",
        killers=(STORED,),
        line=REFUSALS,
    ),
    Mutant(
        REFUSED,
        "            if found is None:\n                self.settle([waiting.position], ())\n",
        "            if found is None:\n                continue\n",
        killers=(MODEL,),
        line=REFUSALS,
    ),
    Mutant(
        REFUSED,
        "        for waiting in self._places.values():\n            waiting.given_up = waiting.given_up or",
        "        for waiting in ():\n            waiting.given_up = waiting.given_up or",
        killers=(MODEL,),
        line=REFUSALS,
    ),
    Mutant(
        DRAIN,
        "        if (self._stores_positions or stable) and behind:\n",
        "        if stable and behind:\n",
        killers=(MODEL,),
        line=REFUSALS,
    ),
    Mutant(
        "millpy/hosting/step_counts.py",
        '        interval.count("consumed", of[letter.input], -1)\n',
        "        pass\n",
        killers=(f"{OF_CRASH}test_a_message_that_is_given_up_becomes_a_dead_letter_and_a_replay_sends_it",),
        line=REFUSALS,
    ),
    Mutant(
        DRAIN,
        "        if grant == self.grant:  # reports may have changed the store since it was read\n            return True\n",
        "        return True\n",
        killers=(
            "tests/unit/runtime/test_outbox_drains.py::"
            "test_a_message_that_a_failover_has_lost_is_not_sent_in_place_of_another",
        ),
    ),
    Mutant(
        "millpy/store/sql/outbox.sql",
        "UPDATE mill.refused_messages AS r SET parked = false, attempts = 0, why = ''",
        "UPDATE mill.refused_messages AS r SET attempts = 0, why = ''",
        killers=(f"{OF_POSTGRES}TestPostgresStore::test_a_settlement_is_in_the_commit_with_its_dead_letter",),
    ),
    Mutant(
        REFUSED,
        "        return records >= self._limits.refused_records_max or",
        "        return records < 0 or",
        killers=(f"{OF_CRASH}test_refused_messages_have_a_bound_and_then_the_others_wait",),
        line="Refused messages are bounded",
    ),
    Mutant(
        "millpy/hosting/step.py",
        "                    if not _settles(interval, inbox):\n                        continue\n",
        "                    continue\n",
        killers=(f"{OF_CRASH}test_what_is_given_up_leaves_a_full_outbox",),
        line="Refused messages are bounded",
    ),
    Mutant(
        "millpy/store/postgres/outbox.py",
        '    await all_rows(connection, statement("hold_outbox"), of_interval | {"sequencer": grant.sequencer})\n',
        "",
        killers=(f"{OF_POSTGRES}test_a_report_in_flight_at_a_takeover_is_read_by_the_new_owner",),
        line="A new owner reads an outbox that its predecessor changes no more",
    ),
    Mutant(
        "millpy/store/postgres/outbox.py",
        '        "reasons": Texts([storable(report.why) for report in reports]),\n',
        '        "reasons": Texts([report.why for report in reports]),\n',
        killers=(f"{OF_POSTGRES}TestPostgresStore::test_messages_follow_each_other_and_leave_when_they_are_delivered",),
        line=FAILING,
    ),
    Mutant(
        DRAIN,
        "        done, _ = await asyncio.wait([self._task], timeout=2 * CLOSE_S_MAX)\n",
        "        done, _ = await asyncio.wait([self._task])\n",
        killers=(f"{OF_DRAIN}test_a_sink_that_cannot_be_stopped_is_left_to_itself",),
        line=FAILING,
    ),
    Mutant(
        DRAIN,
        "        if self.connection.is_connected is None or (",
        "        if True or (",
        killers=(f"{OF_DRAIN}test_a_place_that_takes_connections_and_no_messages_is_disconnected_throughout",),
    ),
    Mutant(
        "millpy/runtime/waiting_rows.py",
        "        self._measure(found)\n",
        "",
        killers=(f"{OF_DRAIN}test_an_outbox_of_an_earlier_owner_is_no_longer_full_when_half_of_it_is_delivered",),
    ),
    Mutant(
        "millpy/store/memory/store.py",
        "            or self.database.refused_messages.get(header.interval.interval_id)\n",
        "",
        killers=(f"{OF_STORE}test_a_graph_with_waiting_or_refused_messages_has_not_finished",),
    ),
]

OF_REFUSED = "tests/unit/runtime/test_refused_messages.py::test_"
OF_WAITING = "tests/unit/runtime/test_waiting_rows.py::test_"


def _refused(old: str, new: str, test: str, file: str = REFUSED) -> Mutant:
    return Mutant(file, old, new, killers=(OF_REFUSED + test,))


def _waiting(old: str, new: str, test: str) -> Mutant:
    return Mutant("millpy/runtime/waiting_rows.py", old, new, killers=(OF_WAITING + test,))


MUTANTS += [
    _refused("now + max(delay, min(retry_after_s or 0.0, RETRY_AFTER_S_MAX))", "now + delay",
             "delays_double_and_the_other_side_may_ask_for_longer_ones"),
    _refused("retry_pause_s(waiting.attempts - 1, ", "retry_pause_s(waiting.attempts, ",
             "delays_double_and_the_other_side_may_ask_for_longer_ones"),
    _refused("            for waiting in islice(queue, 1 if firsts or queue[0].attempts else None):",
             "            for waiting in islice(queue, 1 if firsts else None):",
             "only_the_first_message_of_a_refused_key_is_sent_again_and_the_rest_at_once_after_it"),
    _refused("        while place and waiting.position < queue[place - 1].position:", "        while False:",
             "messages_that_are_added_out_of_order_wait_in_order"),
    _refused("                    other.position < position and not (other.given_up and self.final)",
             "                    other.position < position and not other.given_up",
             "a_message_that_is_given_up_holds_its_key_until_it_is_settled_unless_the_sink_stores_positions"),
    _refused("        if waiting.attempts == 0:\n            waiting.since_us = now_us",
             "        waiting.since_us = now_us", "a_message_is_given_up_after_its_attempts_or_its_time"),
    _refused("attempts >= self.attempts:", "attempts > self.attempts:",
             "a_message_is_given_up_after_its_attempts_or_its_time", "millpy/sinks/refusal_policy.py"),
    _refused("waited_us >= self.after // timedelta(microseconds=1)",
             "waited_us >= self.after // timedelta(milliseconds=1)",
             "a_message_is_given_up_after_its_attempts_or_its_time", "millpy/sinks/refusal_policy.py"),
    _refused("            if self.changes.get(stored.position) is stored:", "            if stored.position in self.changes:",
             "a_change_that_has_changed_again_is_stored_again"),
    _refused("first is not None and first.parked and first.key == key else None",
             "first is not None and first.parked else None", "a_parked_key_waits_for_its_ticket_and_begins_anew"),
    _refused("not parked.settling and parked.position not in self.changes and parked.position < before",
             "not parked.settling and parked.position < before", "a_parked_key_waits_for_its_ticket_and_begins_anew"),
    _refused('            waiting.parked = self._policy.then == "park"', "            waiting.parked = False",
             "a_parked_key_waits_for_its_ticket_and_begins_anew"),
    _refused("(waiting.attempts > 0 and not waiting.parked)", "waiting.attempts > 0",
             "a_sink_that_stores_positions_gives_up_what_was_refused_and_keeps_what_is_parked"),
    _waiting("        if rows.end <= self.head:\n            return", "        if False:\n            return",
             "rows_of_commits_are_taken_from_memory_in_order_and_once"),
    _waiting("        if rows.position == self._read_to and", "        if",
             "a_row_behind_one_that_is_only_in_the_store_is_not_taken_before_it"),
    _waiting("        skipped = max(0, self.delivered - rows.position)", "        skipped = 0",
             "a_new_owner_begins_behind_what_is_delivered"),
    _waiting("        if not found or found[0].position > self._read_to:", "        if not found:",
             "messages_that_another_owner_has_delivered_are_not_passed_over"),
    _waiting("            if stable:\n                break", "            if stable and room <= 0:\n                break",
             "a_send_that_must_be_repeated_alike_has_messages_of_one_commit"),
    _waiting("        self.delivered = max(self.delivered, position)", "        self.delivered = position",
             "what_was_taken_and_is_not_delivered_comes_again"),
]  # fmt: skip
