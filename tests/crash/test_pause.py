"""A feed with too many dead letters pauses, and acknowledges no record, until an operator resumes it."""

from __future__ import annotations

import asyncio

from millpy.ingest.settings import ErrorRate
from tests.crash.memory_world import World, until
from tests.crash.test_replay import payload, running, source
from tests.feed import Feed

LIMIT = ErrorRate(share=0.5, minimum=20)


def claims(world: World) -> int:
    """How often workers have claimed intervals, and opened them."""
    return sum(1 for _, event in world.database.events if event.kind == "claimed")


async def test_source_pauses_after_the_bundle_that_exceeds_the_error_rate() -> None:
    feed = Feed(batch_max=10)
    async with running(feed, pause_above=LIMIT) as world:
        feed.push(*(payload(n) for n in range(30)))
        feed.push(*(b"{" for _ in range(40)), *(payload(n) for n in range(100, 130)))
        await until(world, lambda: bool(world.database.requests.pauses), "it pauses")
        assert source(world) == {"injected": 50, "accepted": 30, "dead_lettered": 20}, "the limit is passed at 20 of 20"
        await asyncio.sleep(0.3)

        assert source(world)["injected"] == 50
        assert len(feed.unacknowledged) == 50, "what was not committed is not acknowledged"
        assert world.adds_up()

        await world.crash(world.running[0])
        before = claims(world)
        world.start()
        await until(world, lambda: claims(world) > before, "another worker owns the source")
        await asyncio.sleep(0.3)
        assert source(world)["injected"] == 50, "a new owner pauses, too"

        for interval_id in list(world.database.requests.pauses):
            world.database.requests.resume(interval_id)
        await until(world, lambda: source(world)["injected"] == 70, "it resumes, up to the next pause")
        await until(world, lambda: bool(world.database.requests.pauses), "it pauses again")
        for interval_id in list(world.database.requests.pauses):
            world.database.requests.resume(interval_id)
        feed.end()
        await world.finish()

        assert source(world) == {"injected": 100, "accepted": 60, "dead_lettered": 40}
        assert world.adds_up()


async def test_feed_below_the_error_rate_is_never_paused() -> None:
    feed = Feed(batch_max=10)
    async with running(feed, pause_above=LIMIT) as world:
        for n in range(100):
            feed.push(payload(n), b"{")
        feed.end()
        await world.finish()

        assert source(world) == {"injected": 200, "accepted": 100, "dead_lettered": 100}
        assert not world.database.requests.pauses
