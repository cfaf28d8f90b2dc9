"""Joins of real workers: kills change no joined record, and what a join keeps and waits for is shown."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import msgspec
import psycopg

from millpy import EventTime, Graph, seconds
from millpy.admin.diagnosis import read_facts
from millpy.admin.doctor import examine
from millpy.clock import SystemClock
from millpy.limits import Limits
from millpy.process.assembly import run_worker
from tests.crash.cases.joins import GRAPH, JOINS
from tests.crash.graph_files import rows
from tests.crash.harness import Worker
from tests.crash.joins import join_faults, write
from tests.feed import Feed

KILLS = ["after_step:9", "after_fence:6", "after_commit:7"]


def test_joins_of_killed_workers_are_those_of_a_batch(tmp_path: Path, database_url: str) -> None:
    """Real processes: the joins are killed three times, while another worker reads the sources."""
    source = tmp_path / "orders.ndjson"
    drawn = write(source, 5)
    settings: dict[str, Any] = {"graph": GRAPH, "bundle_records_max": 15, "turn_panes_max": 5}
    with Worker(tmp_path, database_url, source, only="orders,payments", **settings) as other:
        for kill in KILLS:
            with Worker(tmp_path, database_url, source, failpoint=f"{kill}:kill", only=JOINS, **settings) as one:
                one.await_killed()
        other.kill()
        with psycopg.connect(database_url, autocommit=True) as connection:
            kept = connection.execute("SELECT sum(runs), sum(bytes) FROM millpy.joins").fetchone()
            held = connection.execute("SELECT DISTINCT held_by FROM millpy.explain_watermark('counts')").fetchall()

    with Worker(tmp_path, database_url, source, **settings) as last:
        last.await_finished()

    assert kept is not None
    assert kept[0] > 3
    assert kept[1] > 1_000
    assert held
    assert join_faults(database_url, drawn) == []


LIMITS = Limits(progress_every_s=0.02, fold_every_s=0.05, lease_ttl_s=2)
EXPLAINED = """
SELECT held_by, detail LIKE 'a record of 1970%has no match yet%'
  FROM millpy.explain_watermark('shop', 'paid') ORDER BY step DESC LIMIT 1
"""


class Order(msgspec.Struct):
    customer: str
    at: int


def graph_of(orders: Feed, payments: Feed) -> Graph:
    graph = Graph("shop")
    event_time = EventTime("at", unit="s", max_disorder=seconds(0))
    left = graph.inject("orders", orders, schema=Order, event_time=event_time).key_by("customer")
    right = graph.inject("payments", payments, schema=Order, event_time=event_time).key_by("customer")
    left.join(right, within=seconds(60), how="left", intervals=1).to_table("paid")
    return graph


async def until(url: str, query: str, expected: Any) -> None:
    async with asyncio.timeout(60):
        while (found := await asyncio.to_thread(rows, url, query)) != expected:
            assert len(found) < 10, found
            await asyncio.sleep(0.02)


async def test_what_a_join_keeps_and_waits_for_is_shown(database_url: str) -> None:
    orders, payments = Feed(), Feed()
    stop = asyncio.Event()
    worker = asyncio.create_task(run_worker(graph_of(orders, payments), database_url, limits=LIMITS, stop=stop))
    orders.push(b'{"customer": "ada", "at": 1000}', b'{"customer": "bob", "at": 9000}')
    payments.push(b'{"customer": "eve", "at": 1030}')

    await until(database_url, "SELECT name FROM mill.graphs", [("shop",)])
    await until(database_url, EXPLAINED, [("join", True)])
    await until(database_url, "SELECT graph, computation, bytes > 100 FROM millpy.joins", [("shop", "paid", True)])
    facts = await asyncio.to_thread(read_facts, database_url, SystemClock())
    (finding,) = [finding for finding in examine(facts, LIMITS) if finding.check == "join"]
    assert re.search("payments is 2 h( [0-9]+ min)? behind the other side", finding.found)

    for feed in (orders, payments):
        feed.end()
    await worker
    assert sorted(rows(database_url, "SELECT customer, at_right FROM shop.paid")) == [("ada", None), ("bob", None)]
    await until(database_url, "SELECT count(*) FROM millpy.joins", [(0,)])
    assert rows(database_url, "SELECT * FROM millpy.accounting WHERE NOT balanced") == []
