"""Sources that learn their disorder bound: workers are killed, the graph changes, devices misbehave.

Whatever happens, row watermarks and counts are those of a plain loop over the accepted records.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path

import aiomqtt
import msgspec
import pytest
from aiokafka import AIOKafkaProducer

from millpy import Count, EventTime, FixedWindows, Graph, milliseconds
from millpy.embedded import EmbeddedBroker, mosquitto_program
from millpy.limits import Limits
from millpy.process.assembly import deploy
from tests.crash.disorder_graph import TOPIC, Reading
from tests.crash.graph_files import one, rows
from tests.crash.harness import Worker, await_true, owned_by
from tests.crash.test_versions import fed
from tests.feed import Feed
from tests.kafka_server import KafkaServer
from tests.kafka_topics import make_topic
from tests.property.test_disorder import CAP_US, by_loop, feed, late_counts

GRAPH = Path(__file__).with_name("disorder_graph.py")
COUNTS = "SELECT records, late, late_by_percentile, p50 <= p99 FROM millpy.disorder"
LATE = """
SELECT (extract(epoch FROM event_time) * 1000000)::bigint, (extract(epoch FROM watermark) * 1000000)::bigint
  FROM millpy.late_records ORDER BY 1, 2
"""
ON_TIME = "SELECT sum(n) FROM disorder.by_ms"
HISTOGRAM = "SELECT max(share), sum(records) > 1000 FROM millpy.disorder_histogram"
PENDING_OR_OPEN = "SELECT (SELECT count(*) FROM millpy.windows) + coalesce(sum(pending), 0) FROM millpy.accounting"
LIMITS = Limits(progress_every_s=0.02, fold_every_s=0.2)
ACCEPTED = "SELECT coalesce(sum(records), 0) FROM millpy.disorder"
OF_SOURCE = (
    "SELECT coalesce(min(low_watermark), -(2::bigint ^ 62)::bigint) FROM mill.places WHERE computation = 'readings'"
)


def lines(times: Sequence[int], first: int = 0) -> list[bytes]:
    return [msgspec.json.encode(Reading(f"d{k % 3}", at, k)) for k, at in enumerate(times, first)]


def missed_of(times: Sequence[int], watermarks: Sequence[int]) -> list[tuple[int, int]]:
    """Return the records that are too late for their window of 1 ms, with the watermarks before them."""
    pairs = zip(times, watermarks, strict=False)
    return sorted((at, before) for at, before in pairs if (at // 1_000 + 1) * 1_000 <= before)


def test_killed_source_goes_on_with_the_bound_that_it_had_learned(tmp_path: Path, database_url: str) -> None:
    times = feed(random.Random(5), 6_000)
    source = tmp_path / "in.ndjson"
    source.write_bytes(b"\n".join(lines(times)))
    for failpoint in ("before_commit:9", "after_commit:14", "after_fence:11", ""):
        with Worker(tmp_path, database_url, source, graph=GRAPH, failpoint=failpoint) as worker:
            status = worker.process.wait(120)
            assert (status == 0) == (not failpoint), worker.log

    *watermarks, _ = by_loop(times, 0.9)
    missed = missed_of(times, watermarks)
    assert len(missed) > 100
    assert rows(database_url, COUNTS) == [(len(times), *late_counts(times, watermarks), True)]
    assert one(database_url, ON_TIME) == len(times) - len(missed)
    stored = rows(database_url, LATE)
    assert set(stored) <= set(missed)
    assert len(stored) >= 100
    assert rows(database_url, HISTOGRAM) == [(1.0, True)]


@pytest.fixture(params=["mqtt", "kafka"])
def live(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A broker with a topic, as the graph names it."""
    if request.param == "kafka":
        kafka: KafkaServer = request.getfixturevalue("kafka")
        asyncio.run(make_topic(kafka.address, TOPIC, 1))
        return f"kafka,{kafka.address}"
    if mosquitto_program() is None:
        pytest.skip("mosquitto is not installed")
    stack = ExitStack()
    request.addfinalizer(stack.close)
    return f"mqtt,{stack.enter_context(EmbeddedBroker(tmp_path / 'broker')).port}"


async def publish(place: str, payloads: Sequence[bytes]) -> None:
    """Publish records in their order."""
    kind, _, address = place.partition(",")
    if kind == "kafka":
        async with AIOKafkaProducer(bootstrap_servers=address) as producer:
            for payload in payloads:
                await producer.send(TOPIC, payload, partition=0)
        return
    async with aiomqtt.Client("127.0.0.1", int(address)) as client:
        for payload in payloads:
            await client.publish(TOPIC, payload, qos=1)


def published(place: str, payloads: Sequence[bytes]) -> bool:
    asyncio.run(publish(place, payloads))
    return True


def test_another_worker_goes_on_with_the_bound_that_a_killed_one_has_learned(
    tmp_path: Path, database_url: str, live: str
) -> None:
    times = feed(random.Random(6), 5_000)
    payloads = lines(times)
    *watermarks, last = by_loop(times, 0.9)
    seen: list[int] = []

    def accepted(count: int) -> bool:
        seen.append(one(database_url, OF_SOURCE))
        return bool(one(database_url, ACCEPTED) >= count)

    def worker(**options: str) -> Worker:
        return stack.enter_context(Worker(tmp_path, database_url, Path(live), graph=GRAPH, **options))  # type: ignore[arg-type]

    with ExitStack() as stack:
        owner = worker()
        owner.await_while_running(lambda: published(live, payloads[:1]) and accepted(1), "connected")
        asyncio.run(publish(live, payloads[1:1_500]))
        owner.await_while_running(lambda: accepted(1_500), "the first part")
        heir = worker(failpoint="after_fence:12:kill")
        owner.kill()
        await_true(lambda: bool(owned_by(database_url, heir)), "taken over", 30)
        asyncio.run(publish(live, payloads[1_500:3_500]))
        heir.await_killed()
        last_one = worker()
        asyncio.run(publish(live, payloads[3_500:]))
        last_one.await_while_running(lambda: accepted(5_000), "all")
        last_one.drain()
        last_one.await_finished()

    assert rows(database_url, COUNTS) == [(len(times), *late_counts(times, watermarks), True)]
    assert one(database_url, OF_SOURCE) == last
    assert set(rows(database_url, LATE)) <= set(missed_of(times, watermarks))
    assert seen == sorted(seen)


def test_clock_closes_the_windows_of_a_quiet_broker_by_the_learned_bound(
    tmp_path: Path, database_url: str, quick_broker: EmbeddedBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DISORDER_IDLE", "yes")
    place, rng = f"mqtt,{quick_broker.port}", random.Random(8)
    with Worker(tmp_path, database_url, Path(place), graph=GRAPH) as worker:
        first = lines([time.time_ns() // 1_000])
        worker.await_while_running(lambda: published(place, first) and one(database_url, ACCEPTED) == 1, "connected")
        now_us = time.time_ns() // 1_000
        published(place, lines([now_us - rng.randrange(50_000) for _ in range(1_499)], 1))
        worker.await_while_running(lambda: one(database_url, ACCEPTED) == 1_500, "all are accepted")
        behind_s = await_true(lambda: one(database_url, OF_SOURCE) > now_us, "the watermark has passed them", 20)
        assert behind_s < CAP_US / 1e6 / 2
        await_true(lambda: one(database_url, PENDING_OR_OPEN) == 0, "all windows are closed", 20)

    late = one(database_url, "SELECT sum(late) FROM millpy.accounting WHERE consumer IS NOT NULL")
    assert one(database_url, ON_TIME) + late == 1_500


def changing(records: Feed, event_time: EventTime) -> Graph:
    graph = Graph("disorder")
    readings = graph.inject("readings", records, schema=Reading, event_time=event_time)
    readings.key_by("device").window(FixedWindows(milliseconds(1))).aggregate(n=Count()).to_table("by_ms")
    return graph


async def test_percentile_comes_changes_and_goes_over_stored_state(database_url: str) -> None:
    times = feed(random.Random(7), 9_000)
    phases: list[tuple[float | None, int]] = [
        (None, CAP_US), (0.9, CAP_US), (0.97, CAP_US), (0.97, CAP_US // 40), (None, CAP_US // 40), (0.5, CAP_US)
    ]  # fmt: skip
    records, each = Feed(batch_max=700), len(times) // len(phases)
    reached = []
    for number, (percentile, cap_us) in enumerate(phases):
        event_time = EventTime("at", unit="us", max_disorder=timedelta(microseconds=cap_us), percentile=percentile)
        records.push(*lines(times[number * each : (number + 1) * each], number * each))
        graph = changing(records, event_time)
        await deploy(graph, database_url)
        await fed(database_url, graph, records, LIMITS)
        reached.append(one(database_url, OF_SOURCE))

    changes = {number * each: phase for number, phase in enumerate(phases)}
    *watermarks, _ = by_loop(times, changes=changes)
    assert one(database_url, "SELECT version FROM mill.graphs") == len(phases)
    assert reached == [list(by_loop(times[: at + each], changes=changes))[-1] for at in changes]
    assert one(database_url, "SELECT late FROM millpy.disorder") == late_counts(times, watermarks)[0]
    assert set(rows(database_url, LATE)) <= set(missed_of(times, watermarks))
