"""Mutants of sinks, and of Kafka's transactions at both edges."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

CONNECTION = "millpy/sinks/kafka/connection.py"
DRAIN = "millpy/runtime/outbox_drain.py"
INJECTOR = "millpy/sources/kafka/injector.py"
OF_KAFKA = "tests/conformance/test_kafka_sink.py::"
OF_SINKS = "tests/crash/test_sinks.py::"
LATE = f"{OF_KAFKA}test_a_request_that_is_lost_or_late_loses_and_doubles_nothing"
ONCE = "A message to a Kafka topic is committed once"

MUTANTS = [
    Mutant(
        CONNECTION,
        "            if isinstance(request, _OF_TRANSACTIONS):\n",
        "            if not request:\n",
        killers=(f"{LATE}[RequestFault.LATE-28]",),
        line=ONCE,
    ),
    Mutant(
        CONNECTION,
        "{TopicPartition(topic, 0): marked(messages.end)}, self.id",
        "{TopicPartition(topic, 0): marked(messages.position)}, self.id",
        killers=(f"{LATE}[RequestFault.LOST_ANSWER-26]",),
        line=ONCE,
    ),
    Mutant(
        CONNECTION,
        "        await asyncio.gather(*self._sent)\n        await producer.commit",
        "        await producer.commit",
        killers=(f"{OF_KAFKA}test_a_batch_that_the_broker_refuses_is_named_with_the_setting",),
        line="A batch that the broker refuses is not lost",
    ),
    Mutant(
        CONNECTION,
        "            max_batch_size=topic.message_bytes_max,\n",
        "            max_batch_size=topic.message_bytes_max + 1_000,\n",
        killers=(f"{OF_KAFKA}test_batches_are_no_larger_than_the_topic_allows",),
    ),
    Mutant(
        CONNECTION,
        "            await self._check_topic(client)\n",
        "",
        killers=(f"{OF_KAFKA}test_a_missing_topic_is_named_at_once_and_not_created",),
    ),
    Mutant(
        CONNECTION,
        "            self._count_partitions(producer)\n            sending =",
        "            sending =",
        killers=(f"{OF_KAFKA}test_a_connection_follows_the_number_of_partitions",),
    ),
    Mutant(
        "millpy/sinks/kafka/positions.py",
        "if offset != NO_OFFSET and",
        "if offset < NO_OFFSET and",
        killers=(f"{OF_KAFKA}test_an_offset_that_somebody_has_set_is_no_position",),
        line=ONCE,
    ),
    Mutant(
        "millpy/sinks/statement.py",
        "                rows += self._rows(bundle.records.objects())\n",
        "                rows += 2 * self._rows(bundle.records.objects())\n",
        killers=(f"{OF_SINKS}test_a_statement_runs_once_for_each_record_and_a_refused_one_is_a_dead_letter",),
        line="A statement of `to_sql` has its effect once",
    ),
    Mutant(
        DRAIN,
        "            or waiting.size * share > limits.outbox_bytes_max\n"
        "            or messages * share > limits.outbox_records_max\n",
        "",
        killers=(f"{OF_SINKS}test_a_full_outbox_makes_its_input_wait_and_nothing_else",),
        line="While the other side is away, messages wait",
    ),
    Mutant(
        DRAIN,
        "        if not self._setup.trusted():",
        "        if self._setup is None:",
        killers=("tests/unit/runtime/test_outbox_drain_opening.py::test_a_worker_without_a_lease_does_not_connect",),
        line="A worker without a lease shuts out no owner",
    ),
    Mutant(
        DRAIN,
        "                await self._context.store.record_delivered([self._report({})])\n            self._begin",
        "                pass\n            self._begin",
        killers=("tests/unit/runtime/test_outbox_drain_opening.py::test_only_an_owner_suspects_the_database",),
    ),
    Mutant(
        INJECTOR,
        "        if position < end or self._waits_for_transaction(client, end, now):\n",
        "        if position < end:\n",
        killers=(
            "tests/conformance/test_kafka.py::"
            "test_an_open_transaction_is_not_the_end_and_one_that_stays_open_is_reported",
        ),
        line="Records of a transaction that is open are not late because of it",
    ),
]
