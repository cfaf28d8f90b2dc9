"""Why a connection to Kafka fails, told soon, whatever a broker does; and how long each server has to answer."""

from __future__ import annotations

import socket
import time
from types import SimpleNamespace
from typing import Any, cast

import pytest
from aiokafka.client import AIOKafkaClient
from aiokafka.errors import NodeNotReadyError

from millpy.embedded import free_port
from millpy.errors import SourceUnavailableError
from millpy.sources.kafka import connect_errors
from millpy.sources.kafka.client import bootstrap_in_turn
from millpy.sources.kafka.connect_errors import reason

PROBE_S = 0.5
HANGING = 3


async def test_brokers_that_hang_delay_the_reason_only_for_a_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    """A frozen host accepts connections and answers nothing; meanwhile its reader cannot connect to the others."""
    monkeypatch.setattr(connect_errors, "PROBE_S_MAX", PROBE_S, raising=False)
    hanging = [socket.create_server(("127.0.0.1", 0)) for _ in range(HANGING)]
    hosts: list[tuple[Any, ...]] = [(*found.getsockname(), socket.AF_INET) for found in hanging]
    hosts.append(("127.0.0.1", free_port(), socket.AF_INET))
    client = cast(AIOKafkaClient, SimpleNamespace(hosts=hosts, cluster=SimpleNamespace(brokers=list)))
    started = time.monotonic()
    try:
        found = await reason(client, {}, NodeNotReadyError("no broker answers"))
    finally:
        for listening in hanging:
            listening.close()
    assert isinstance(found, SourceUnavailableError)
    assert found.message == f"Kafka: 127.0.0.1:{hosts[0][1]} does not answer"
    assert time.monotonic() - started < HANGING * PROBE_S, "they are asked one after the other"


@pytest.mark.parametrize(("servers", "each_ms"), [(1, 10_000), (2, 3_333), (9, 3_000)])
async def test_each_named_server_has_a_part_of_the_time_to_answer(servers: int, each_ms: int) -> None:
    client = SimpleNamespace(hosts=[("host", 9092)] * servers, _request_timeout_ms=10_000)
    seen: list[int] = []

    async def bootstrap() -> None:
        seen.append(client._request_timeout_ms)

    client.bootstrap = bootstrap
    bootstrap_in_turn(cast("AIOKafkaClient", client))
    await client.bootstrap()

    assert (seen, client._request_timeout_ms) == ([each_ms], 10_000)
