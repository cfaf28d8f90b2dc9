"""Kafka to Kafka in short: the whole is `make crash ONLY="Kafka to Kafka"`."""

from __future__ import annotations

from functools import partial

import pytest

from tests.crash.cases.kafka_to_kafka import broker_killed, frozen, killed, request_lost
from tests.crash.conftest import Survives
from tests.crash.world import Case
from tests.kafka_proxy import END_TXN, RequestFault
from tests.kafka_server import KafkaServer

SHORT = 300


def test_each_message_leaves_once_when_workers_are_killed(survives: Survives, kafka: KafkaServer) -> None:
    run = partial(killed, company=True, server=kafka, number=SHORT)
    verdict = survives(Case("Kafka to Kafka: SIGKILL three times", "two workers", run))
    assert verdict.kills + verdict.idle_kills == 3


@pytest.mark.parametrize("fault", [RequestFault.LATE, RequestFault.LOST_ANSWER])
def test_each_message_leaves_once_when_the_end_of_a_transaction_is_late_or_unanswered(
    survives: Survives, kafka: KafkaServer, fault: RequestFault
) -> None:
    survives(Case("Kafka to Kafka", fault.value, partial(request_lost, END_TXN, fault, kafka, SHORT)))


def test_a_worker_that_was_frozen_past_its_lease_does_not_shut_out_the_new_owner(
    survives: Survives, kafka: KafkaServer
) -> None:
    run = partial(frozen, point="produced", company=True, server=kafka, number=SHORT)
    survives(Case("Kafka to Kafka: SIGSTOP beyond the transaction's timeout", "produced", run))


def test_each_message_leaves_once_when_the_broker_is_killed_in_a_transaction(
    survives: Survives, kafka: KafkaServer
) -> None:
    run = partial(broker_killed, point="produced", server=kafka, number=SHORT)
    survives(Case("Kafka to Kafka: broker killed in a transaction", "produced", run))
