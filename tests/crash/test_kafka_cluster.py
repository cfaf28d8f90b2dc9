"""Kafka to Kafka over three nodes: coordinators and leaders move when nodes die and freeze."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial

import pytest
from aiokafka.client import CoordinationType

from tests.crash.conftest import Survives
from tests.crash.kafka_to_kafka import Pipe
from tests.crash.world import Case, World
from tests.kafka_cluster import KafkaCluster
from tests.kafka_server import NONE, NoKafkaError

NUMBER = 400
PART = NUMBER // 4
CONTINUES_S_MAX = 120.0
"""A session of a dead node lasts 3 s here. A request to a frozen one lasts 10 s, and the next connection may meet it,
too; the coordinator of a transaction waits for it for the `request.timeout.ms` of the cluster, which is 5 s."""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KafkaCluster]:
    with ExitStack() as stack:
        yield _running(stack, tmp_path_factory)


def _running(stack: ExitStack, directories: pytest.TempPathFactory) -> KafkaCluster:
    """Start a cluster; with other ports if somebody has taken one of them since it was found free."""
    for attempts_left in (2, 1, 0):
        try:
            return stack.enter_context(KafkaCluster(directories.mktemp("cluster")))
        except NoKafkaError as error:
            if not attempts_left or "in use" not in str(error):
                pytest.skip(f"{NONE}: {error}")
    raise AssertionError("the last attempt has skipped")


def test_each_message_leaves_once_while_coordinators_and_leaders_move(
    survives: Survives, cluster: KafkaCluster
) -> None:
    survives(Case("Kafka to Kafka: nodes of a cluster die and freeze", "", partial(moved, cluster)))


def moved(cluster: KafkaCluster, world: World) -> None:
    """Kill the nodes on which the transactions depend, then freeze one and kill the worker; no node is waited for."""
    pipe = Pipe(world, cluster, NUMBER)
    worker = pipe.worker()
    pipe.publish(0, PART)
    pipe.await_sent(worker, PART)
    group = cluster.group()

    def strike(number: int, node: int) -> None:
        pipe.publish(number * PART, (number + 1) * PART)
        pipe.await_sent(worker, number * PART + 1)
        cluster.kill(node)
        pipe.await_sent(worker, (number + 1) * PART, CONTINUES_S_MAX)
        cluster.start(node)
        cluster.await_whole([pipe.source, pipe.target, "__consumer_offsets", "__transaction_state"])

    strike(1, cluster.coordinator(CoordinationType.TRANSACTION, group))
    strike(2, cluster.coordinator(CoordinationType.GROUP, group))
    pipe.publish(3 * PART, NUMBER)
    pipe.await_sent(worker, 3 * PART + 1)
    frozen = cluster.leader(pipe.target)
    cluster.freeze(frozen)
    world.kill(worker)
    worker = pipe.worker()
    pipe.await_sent(worker, NUMBER, CONTINUES_S_MAX)
    cluster.thaw(frozen)
    pipe.finish(worker)
