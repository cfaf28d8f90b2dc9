"""Mutants of sinks: outboxes, their delivery, and what the other side refuses."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

DRAIN = "millpy/runtime/outbox_drain.py"
REFUSED = "millpy/runtime/refused_messages.py"
OF_DRAIN = "tests/unit/runtime/test_outbox_drain.py::"
OF_STORE = "tests/conformance/test_memory_store.py::TestMemoryStore::"
OF_POSTGRES = "tests/conformance/test_postgres_store.py::"
MODEL = "tests/property/test_refusals.py::test_each_message_arrives_or_is_a_dead_letter_whatever_is_killed"
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
        killers=(MODEL,),
        line=REFUSALS,
    ),
    Mutant(
        REFUSED,
        "first.position not in self.changes and first.position < before",
        "first.position not in self.changes",
        killers=(MODEL,),
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
        "millpy/hosting/step.py",
        '        interval.count("consumed", of[letter.input], -1)\n',
        "        pass\n",
        killers=(f"{OF_CRASH}test_a_message_that_is_given_up_becomes_a_dead_letter_and_a_replay_sends_it",),
        line=REFUSALS,
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
        killers=(f"{OF_STORE}test_a_graph_with_refused_messages_has_not_finished",),
    ),
]
