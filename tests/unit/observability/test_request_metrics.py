"""Metrics of requests: each answer to a client once, by the worker that it reached."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from millpy import Count, EventTime, FixedWindows, Graph, Http, HttpBounds, seconds
from millpy.clock import SystemClock
from millpy.embedded import free_port
from millpy.limits import Limits
from millpy.observability.metrics import Metrics
from millpy.sources.http.answers import REFUSAL_REASONS
from millpy.store.memory.store import MemoryDatabase, MemoryStore
from tests.crash.memory_world import started

LIMITS = Limits(lease_ttl_s=60, retry_s_min=0.001)


class Reading(msgspec.Struct):
    device: str
    at: int


class Running:
    """A worker of one HTTP source, with its metrics."""

    def __init__(self, metrics: Metrics, url: str, session: aiohttp.ClientSession) -> None:
        self._metrics, self._url, self._session = metrics, url, session

    def value(self, name: str, **labels: str) -> float | None:
        labels = {"graph": "posted", "computation": "readings", **labels}
        return self._metrics.registry.get_sample_value(f"millpy_http_{name}", labels)

    async def post(self, records: Any, **how: Any) -> int:
        async with self._session.post(self._url, json=records, **how) as answer:
            return answer.status


@asynccontextmanager
async def running(**settings: Any) -> AsyncIterator[Running]:
    url, graph = f"http://127.0.0.1:{free_port()}", Graph("posted")
    readings = graph.inject(
        "readings",
        Http("/readings", url=url, **settings),
        schema=Reading,
        event_time=EventTime("at", unit="s", max_disorder=seconds(10)),
    )
    readings.key_by("device").window(FixedWindows(seconds(10))).aggregate(n=Count()).to_table("counts")
    clock = SystemClock()
    metrics = Metrics("posted", clock)
    worker = await started(MemoryStore(MemoryDatabase()), graph, LIMITS, clock, observer=metrics)
    metrics.begun(worker)
    stop = asyncio.Event()
    work = asyncio.create_task(worker.run(stop))
    async with aiohttp.ClientSession() as session, asyncio.timeout(30):
        while not worker.context.sources.parts:  # noqa: ASYNC110 - the worker has no signal for it
            await asyncio.sleep(0)
        try:
            yield Running(metrics, f"{url}/readings", session)
        finally:
            stop.set()
            await work


async def test_answers_are_counted_by_status_and_reason() -> None:
    async with running() as client:
        assert client.value("requests_total", status="2xx") == 0
        good, bad = {"device": "a", "at": 1_700_000_000}, {"device": 7, "at": 1}
        statuses = [await client.post(records) for records in ([good, good], good, [good, bad], [good] * 10_001)]
        statuses += [await client.post(good, headers={"Origin": "http://x"})]

        assert statuses == [200, 200, 400, 413, 403]
        assert [client.value("requests_total", status=status) for status in ("2xx", "4xx", "5xx")] == [2, 3, 0]
        refused = {reason: client.value("refused_total", reason=reason) for reason in REFUSAL_REASONS}
        assert {reason: count for reason, count in refused.items() if count} == {
            "bad_records": 1, "size": 1, "token": 1,
        }  # fmt: skip
        assert client.value("records_total") == 3
        assert 300_000 < (client.value("bytes_total") or 0) < 500_000
        assert [client.value(f"waiting_{what}") for what in ("requests", "bytes")] == [0, 0]


async def test_rate_and_room_are_two_reasons() -> None:
    async with running(bounds=HttpBounds(requests_per_s=0.001)) as client:
        statuses = [await client.post({"device": "a", "at": 1_700_000_000}) for _ in range(2)]

        assert statuses == [200, 429]
        assert [client.value("refused_total", reason=reason) for reason in ("rate", "full")] == [1, 0]


async def test_what_waits_is_shown_while_it_waits() -> None:
    async with running() as client:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(client._url.split(":")[2].split("/")[0]))
        writer.write(b"POST /readings HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n{}")
        while client.value("waiting_bytes") != 2:  # noqa: ASYNC110 - the worker has no signal for it
            await asyncio.sleep(0)
        assert client.value("waiting_requests") == client.value("connections") == 1
        writer.close()
        while client.value("refused_total", reason="cut_off") != 1:  # noqa: ASYNC110 - as above
            await asyncio.sleep(0)
        assert client.value("waiting_requests") == client.value("waiting_bytes") == 0
        del reader


def test_every_reason_is_on_the_page() -> None:
    page = (Path(__file__).resolve().parents[3] / "docs" / "http.md").read_text()

    assert [reason for reason in sorted(REFUSAL_REASONS) if f"`{reason}`" not in page] == []
