"""Live workers, running sources, current generations: the views' verdicts on both sides of each limit."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import psycopg
import pytest_asyncio

from millpy.admin.diagnosis import read_facts
from millpy.admin.doctor import examine
from millpy.clock import SystemClock
from millpy.limits import Limits
from millpy.model.time import INSTANT_MAX, Instant
from millpy.store.postgres.store import PostgresStore
from millpy.store.protocol import SourceReport
from tests.conformance.store_builders import LEASE_S, Owner, a_graph

LIVE = "SELECT DISTINCT live FROM millpy.watermarks WHERE computation = 'readings'"
WORKERS = "SELECT live FROM millpy.workers"
CONNECTED = "SELECT connected FROM millpy.sources ORDER BY source_partition"
STATES = "SELECT state FROM millpy.sources ORDER BY source_partition"


@pytest_asyncio.fixture
async def owner(database_url: str) -> AsyncIterator[Owner]:
    """A live worker that owns nothing yet."""
    async with PostgresStore(database_url) as store:
        found = Owner(store, await store.deploy(a_graph()))
        await found.register()
        yield found


def column(url: str, query: str) -> list[Any]:
    with psycopg.connect(url, autocommit=True) as connection:
        return [row[0] for row in connection.execute(query.encode()).fetchall()]


async def test_interval_is_live_while_its_owners_lease_is_valid(owner: Owner, database_url: str) -> None:
    assert column(database_url, LIVE) == [False], "nobody owns it"
    await owner.claim()
    assert (column(database_url, LIVE), column(database_url, WORKERS)) == ([True], [True])

    await owner.expire()

    assert (column(database_url, LIVE), column(database_url, WORKERS)) == ([False], [False])


async def test_a_lease_from_before_the_clock_was_set_back_counts_nowhere(owner: Owner, database_url: str) -> None:
    await owner.claim()
    assert await owner.store.heartbeat(owner.worker_id, 2 * LEASE_S + 30), "as if the clock had been ahead"

    assert (column(database_url, LIVE), column(database_url, WORKERS)) == ([False], [False])
    assert column(database_url, STATES) == ["without a worker"] * 2
    assert column(database_url, "SELECT detail FROM millpy.explain_watermark('factory', 'sums')") == [
        "no live worker owns this interval"
    ]
    judged = {finding.check: finding.found for finding in examine(read_facts(database_url, SystemClock()), Limits())}
    assert "before the server's clock was set back" in judged["expired lease"]
    assert "0 workers" in judged["connections"]
    assert "have no owner" in judged["graph"]


async def test_source_runs_while_its_worker_lives_and_until_its_input_ends(owner: Owner, database_url: str) -> None:
    a, _ = owner.deployment.intervals_of("readings")
    assert column(database_url, STATES) == ["without a worker"] * 2
    await owner.claim()
    assert column(database_url, STATES) == ["running", "running"]
    last = Instant(INSTANT_MAX - 1)
    await owner.commit(owner.checkpoint(a, input_watermark=last, low_watermark=last))
    assert column(database_url, STATES) == ["running", "running"]

    await owner.commit(owner.checkpoint(a, input_watermark=INSTANT_MAX, low_watermark=INSTANT_MAX))
    assert column(database_url, STATES) == ["ended", "running"]
    await owner.expire()
    assert column(database_url, STATES) == ["ended", "without a worker"]


async def test_source_is_connected_as_the_worker_that_owns_it_now_has_said(owner: Owner, database_url: str) -> None:
    a, b = owner.deployment.intervals_of("readings")
    assert column(database_url, CONNECTED) == [False, False], "nobody owns it"
    await owner.claim()
    assert column(database_url, CONNECTED) == [None, None], "its owner has not said yet"
    said = [
        SourceReport(a.interval_id, True, Instant(5), "", 0),
        SourceReport(b.interval_id, False, Instant(5), "x", 1),
    ]
    await owner.store.report_sources(owner.worker_id, said)
    assert column(database_url, CONNECTED) == [True, False]

    with psycopg.connect(database_url, autocommit=True) as connection:
        connection.execute("UPDATE mill.source_connections SET worker_id = gen_random_uuid()")
    assert column(database_url, CONNECTED) == [None, None], "the owner before has said it"

    await owner.store.report_sources(owner.worker_id, said)
    await owner.store.release(owner.worker_id, list(owner.grants.values()))
    assert column(database_url, CONNECTED) == [False, False]


async def test_only_the_generation_with_the_graphs_name_is_current(owner: Owner, database_url: str) -> None:
    await owner.store.deploy(replace(a_graph(intervals=3), generation=2))

    assert column(database_url, "SELECT current FROM millpy.graphs ORDER BY graph") == [True, False]
