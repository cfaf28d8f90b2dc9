"""A worker that time has passed by: frozen past its lease, or waiting while its sources went on."""

import random
from collections.abc import Sequence
from pathlib import Path

import pytest

from millpy.clock import fresh_identity
from millpy.errors import StaleSequencerError
from millpy.limits import Limits
from millpy.model.time import INSTANT_MIN
from millpy.runtime.isolation import Isolation
from millpy.runtime.ownership import Lease
from millpy.runtime.plan import plan
from millpy.runtime.probe import NoProbe
from millpy.runtime.steps import Inbox
from millpy.runtime.worker import Worker
from millpy.store.memory import MemoryDatabase, MemoryStore
from millpy.store.protocol import Polled, Want
from millpy.testing.clock import ManualClock
from tests.crash.memory_world import readings, two_stages


class SlowToAnswer(MemoryStore):
    """A poll takes a minute."""

    async def poll(self, wants: Sequence[Want], bytes_max: int) -> Sequence[Polled]:
        clock = self.database.clock
        assert isinstance(clock, ManualClock)
        clock.advance(60)
        return await super().poll(wants, bytes_max)


async def a_worker(path: Path, only: Sequence[str] = (), store_type: type[MemoryStore] = MemoryStore) -> Worker:
    clock, limits = ManualClock(), Limits()
    store = store_type(MemoryDatabase(clock))
    await store.open()
    graph = two_stages(path, readings(100))
    deployed = plan(graph, await store.deploy(graph.spec()), limits)
    lease = Lease(limits, clock)
    worker = Worker(
        store, deployed, fresh_identity(), limits=limits, clock=clock, probe=NoProbe(), lease=lease,
        rng=random.Random(1), only=only,
    )  # fmt: skip
    await worker.start()
    await worker._balance()
    return worker


async def test_a_worker_that_polls_what_its_successor_wrote_gives_up_instead_of_dying(tmp_path: Path) -> None:
    worker = await a_worker(tmp_path / "in")
    intervals = worker.holdings.intervals
    consumer = next(i for i in intervals.values() if i.plan.name == "largest")
    producer, subscriptions = next(iter(consumer.plan.producers.items()))
    want = Want(consumer.interval_id, consumer.deployed.index, producer, subscriptions, after=0)
    beyond = Polled(want, (), intervals[producer].bundle + 7, INSTANT_MIN, truncated=False)

    with pytest.raises(StaleSequencerError) as raised:
        worker._steps.run(
            Inbox(worker._processing_time(), 0.0, {consumer.interval_id: [beyond]}), intervals, Isolation()
        )

    assert list(raised.value.stale) == [producer]
    await worker._abandon()


async def test_time_is_read_before_the_sources_so_that_an_idle_watermark_overtakes_nothing(tmp_path: Path) -> None:
    worker = await a_worker(tmp_path / "in", ("readings", "largest"), SlowToAnswer)
    looked_at = worker._processing_time()

    inbox = await worker._gather()

    assert inbox is not None
    assert worker._processing_time() >= looked_at + 60_000_000
    assert inbox.now_us == looked_at
    await worker._abandon()
