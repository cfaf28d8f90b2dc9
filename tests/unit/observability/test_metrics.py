"""Metrics of workers on the in-memory store: every record once over all processes, whatever happens to turns."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Literal

import pytest

from millpy import seconds
from millpy.clock import SystemClock
from millpy.graph import Graph
from millpy.limits import Limits
from millpy.observability.metrics import Metrics
from millpy.runtime.worker import Worker
from millpy.store.memory.store import MemoryDatabase, MemoryStore
from tests.crash.memory_world import Reading, readings, source_of, started, two_stages

LIMITS = Limits(lease_ttl_s=60, bundle_records_max=100, retry_s_min=0.001)
RECORDS = 1_000


async def begin(graph: Graph, database: MemoryDatabase) -> tuple[Worker, Metrics, MemoryStore]:
    store, clock, metrics = MemoryStore(database), SystemClock(), Metrics(graph.name, SystemClock())
    worker = await started(store, graph, LIMITS, clock, observer=metrics)
    metrics.begun(worker)
    return worker, metrics, store


def records(metrics: Metrics, computation: str, outcome: str) -> float:
    labels = {"graph": "world", "computation": computation, "outcome": outcome}
    return metrics.registry.get_sample_value("millpy_records_total", labels) or 0.0


def gauge(metrics: Metrics, name: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(name, {"graph": "world", **labels})


async def test_a_successor_counts_what_it_commits_and_not_what_it_found(tmp_path: Path) -> None:
    graph, database = two_stages(tmp_path / "in", readings(RECORDS)), MemoryDatabase()
    first, of_first, _ = await begin(graph, database)
    while not records(of_first, "largest", "consumed"):
        await first.step()
    await first.cycle.await_in_flight()
    await first.owned.release(list(first.owned.intervals))
    await first.context.store.unregister(first.context.worker_id)
    await first.abandon()

    second, of_second, _ = await begin(graph, database)
    await second.run(asyncio.Event())

    for computation, outcome in (("readings", "accepted"), ("totals", "consumed"), ("largest", "consumed")):
        counts = [records(metrics, computation, outcome) for metrics in (of_first, of_second)]
        assert min(counts) > 0
        assert sum(counts) == RECORDS
    intervals = len(database.headers)
    assert [gauge(metrics, "millpy_takeovers_total") for metrics in (of_first, of_second)] == [intervals, intervals]


@pytest.mark.parametrize("landing", ["before", "never"])
async def test_a_commit_without_an_answer_is_counted_once(tmp_path: Path, landing: Literal["before", "never"]) -> None:
    graph, database = two_stages(tmp_path / "in", readings(RECORDS)), MemoryDatabase()
    worker, metrics, store = await begin(graph, database)
    while not records(metrics, "largest", "consumed"):
        await worker.step()
    database.faults.lose_answer_of_next_commit(landing, store=store)

    await worker.run(asyncio.Event())

    assert records(metrics, "readings", "accepted") == RECORDS
    assert records(metrics, "largest", "consumed") == RECORDS
    assert gauge(metrics, "millpy_turn_failures_total", error="CommitUnknownError") == 1


async def test_gauges_cover_only_intervals_owned_now(tmp_path: Path) -> None:
    graph, database = two_stages(tmp_path / "in", readings(RECORDS)), MemoryDatabase()
    worker, metrics, _ = await begin(graph, database)
    assert gauge(metrics, "millpy_intervals", computation="totals") is None
    while not records(metrics, "largest", "consumed"):
        await worker.step()

    assert gauge(metrics, "millpy_lease_trusted") == 1
    assert gauge(metrics, "millpy_intervals", computation="readings") == 1
    assert gauge(metrics, "millpy_sources_paused", computation="readings") == 0
    lag = gauge(metrics, "millpy_watermark_lag_seconds", computation="totals")
    assert lag is not None and lag > 1e9, "its records are from the seventies"
    await worker.maintenance.apply_backpressure()
    assert gauge(metrics, "millpy_backlog_records", producer="readings") == 0

    metrics.ended()

    assert gauge(metrics, "millpy_lease_trusted") == 0
    assert gauge(metrics, "millpy_intervals", computation="readings") is None
    await worker.abandon()


async def test_error_counters_exist_from_the_start(tmp_path: Path) -> None:
    # Prometheus takes a counter's first value for its beginning: the first thousand dead letters raised no alarm.
    graph = two_stages(tmp_path / "in", readings(10))
    worker, metrics, _ = await begin(graph, MemoryDatabase())
    while not gauge(metrics, "millpy_takeovers_total"):
        await worker.step()

    assert gauge(metrics, "millpy_dead_letters_total", computation="readings", reason="undecodable") == 0
    assert gauge(metrics, "millpy_dead_letters_total", computation="totals", reason="user_error") == 0
    assert gauge(metrics, "millpy_late_records_total", computation="totals") == 0
    assert gauge(metrics, "millpy_records_total", computation="readings", outcome="injected") is not None
    await worker.abandon()


async def test_silent_devices_are_counted_from_zero_and_by_each_new_owner(tmp_path: Path) -> None:
    graph, database = Graph("world"), MemoryDatabase()
    feed = [Reading("stops", 0, 1), *(Reading("continues", 1_000_000 * n, 1) for n in range(20))]
    source = source_of(graph, "readings", tmp_path / "in", feed)
    source.key_by("device").silent_after(seconds(5), name="silences").to_table("silences")
    worker, metrics, _ = await begin(graph, database)
    await worker.balance()
    assert gauge(metrics, "millpy_silent_devices", computation="silences") == 0

    while gauge(metrics, "millpy_silent_devices", computation="silences") != 2:  # at the end of the file all are
        await worker.step()
    await worker.cycle.await_in_flight()
    await worker.recover()  # as a new owner does, from what is stored

    assert gauge(metrics, "millpy_silent_devices", computation="silences") == 2
    await worker.abandon()


def test_alerts_use_existing_metrics() -> None:
    alerts = (Path(__file__).resolve().parents[3] / "compose" / "alerts.yaml").read_text()
    families = [family for family in Metrics("world", SystemClock()).registry.collect() if "millpy" in family.name]
    endings = {"counter": "_total", "histogram": "_bucket"}

    asked = set(re.findall(r"millpy_\w+", alerts))

    assert len(asked) > 8
    assert asked <= {f"{family.name}{endings.get(family.type, '')}" for family in families}


def test_every_metric_is_on_the_operations_page() -> None:
    page = (Path(__file__).resolve().parents[3] / "docs" / "operations.md").read_text()
    families = [family for family in Metrics("world", SystemClock()).registry.collect() if "millpy" in family.name]

    assert len(families) > 10
    for family in families:
        assert f"`{family.name}{'_total' if family.type == 'counter' else ''}`" in page
