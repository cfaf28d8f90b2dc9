"""Dead letters and late records are replayed after a fix: once, under their ids, whatever happens to the workers."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from contextlib import AbstractAsyncContextManager
from typing import ClassVar

import msgspec
import pytest

from millpy.computation import Computation, Context, Value
from millpy.graph import Graph
from millpy.ingest.settings import Dedupe, ErrorRate, EventTime
from millpy.limits import Limits
from millpy.model.time import hours, milliseconds, seconds
from millpy.windowing.aggregates.numeric import Count, Sum
from millpy.windowing.window import FixedWindows, SlidingWindows
from tests.crash.memory_world import LIMITS, World, running_world, until
from tests.feed import Feed

FAULTY = 13


class Faults:
    """Trouble that lasts until it is repaired."""

    decoding: ClassVar[bool] = False
    computing: ClassVar[bool] = False
    mapping: ClassVar[bool] = False


@pytest.fixture(autouse=True)
def all_is_broken() -> None:
    Faults.decoding = Faults.computing = Faults.mapping = True


class Reading(msgspec.Struct):
    id: int
    device: str
    at: int
    value: int
    kind: str = "plain"

    def __post_init__(self) -> None:
        if Faults.decoding and self.kind == "decode":
            raise ValueError("this version cannot read it")


class Total(msgspec.Struct):
    device: str
    total: int
    value: int


class Totals(Computation):
    total = Value(int, default=0)

    def process_record(self, context: Context, record: Reading) -> None:
        if Faults.computing and record.kind == "compute":
            raise ValueError("not yet")
        context[Totals.total] += record.value
        context.produce(Total(record.device, context[Totals.total], record.value))


def careful(record: Reading) -> Reading:
    if Faults.mapping and record.kind == "map":
        raise ValueError("a bug")
    return record


def a_graph(feed: Feed, pause_above: ErrorRate | None = None) -> Graph:
    graph = Graph("world")
    source = graph.inject(
        "readings",
        feed,
        schema=Reading,
        event_time=EventTime("at", unit="us", max_disorder=milliseconds(5)),
        dedupe=Dedupe("id", within=hours(1)),
        pause_above=pause_above,
    )
    mapped = source.map(careful, output=Reading)
    totals = mapped.key_by("device").process(Totals(), name="totals", output=Total)
    totals.to_table("totals")
    (
        source.key_by("device")
        .window(FixedWindows(seconds(1)), intervals=2)
        .aggregate(n=Count(), total=Sum("value"))
        .to_table("windows")
    )
    (
        source.key_by("device")
        .window(SlidingWindows(milliseconds(20), every=milliseconds(10)), intervals=2)
        .aggregate(n=Count())
        .to_table("sliding")
    )
    return graph


def payload(number: int, at: int | None = None, kind: str = "plain", value: int = 1) -> bytes:
    at = 1_000 * number if at is None else at
    return json.dumps({"id": number, "device": f"dev-{number % 5}", "at": at, "value": value, "kind": kind}).encode()


def running(
    feed: Feed, limits: Limits = LIMITS, pause_above: ErrorRate | None = None
) -> AbstractAsyncContextManager[World]:
    return running_world(a_graph(feed, pause_above), limits)


def source(world: World) -> Counter[str]:
    (account,) = world.database.accounting(world.graph_id).sources
    counts = {name: getattr(account, name) for name in ("injected", "accepted", "duplicate", "dead_lettered")}
    return Counter({name: count for name, count in counts.items() if count})


def states(world: World) -> list[tuple[str, int]]:
    requests = world.database.requests
    found = [requests.state_of("dead_letters", n + 1) for n in range(len(world.database.dead_letters))]
    return [(record.state, record.attempts) for record in found]


def replay_all(world: World) -> int:
    return sum(world.database.requests.replay("dead_letters", n + 1) for n in range(len(world.database.dead_letters)))


def settled(world: World) -> bool:
    return all(state != "requested" for state, _ in states(world))


async def test_dead_letter_is_replayed_after_a_fix_and_counted_as_accepted() -> None:
    feed = Feed()
    async with running(feed) as world:
        feed.push(payload(1), payload(2, kind="decode"), b"{", payload(3))
        await until(world, lambda: source(world)["injected"] == 4, "all are read")
        assert source(world) == {"injected": 4, "accepted": 2, "dead_lettered": 2}

        Faults.decoding = False
        assert replay_all(world) == 2
        await until(world, lambda: settled(world), "both are settled")

        assert states(world) == [("replayed", 0), ("open", 1)]
        assert source(world) == {"injected": 4, "accepted": 3, "dead_lettered": 1}
        assert world.adds_up()


async def test_replayed_record_is_not_a_duplicate_of_itself() -> None:
    feed = Feed()
    future = world_now() + 3_600_000_000
    async with running(feed) as world:
        feed.push(payload(1, at=future), payload(1, at=future))
        await until(world, lambda: source(world)["injected"] == 2, "both are read")
        assert source(world) == {"injected": 2, "duplicate": 1, "dead_lettered": 1}

        corrected = payload(999, at=5)
        assert world.database.requests.replay("dead_letters", 1, corrected)
        await until(world, lambda: settled(world), "it is settled")
        feed.push(payload(1, at=6))
        await until(world, lambda: source(world)["injected"] == 3, "a copy is read")

        assert states(world) == [("replayed", 0)]
        assert source(world) == {"injected": 3, "accepted": 1, "duplicate": 2}


async def test_replayed_record_without_an_id_before_is_a_duplicate_of_a_later_one() -> None:
    feed = Feed()
    async with running(feed) as world:
        feed.push(payload(7, kind="decode"), payload(7, kind="decode"), payload(8))
        await until(world, lambda: source(world)["dead_lettered"] == 2, "both are dead-lettered")

        Faults.decoding = False
        feed.push(payload(7, kind="decode"))
        await until(world, lambda: source(world)["accepted"] == 2, "the third copy is accepted")
        replay_all(world)
        await until(world, lambda: settled(world), "both are settled")

        assert source(world) == {"injected": 4, "accepted": 2, "duplicate": 2}
        assert sum(row["total"] for row in world.database.rows("totals") if row["device"] == "dev-2") == 1


async def test_record_that_failed_in_a_computation_is_replayed_into_its_key() -> None:
    feed = Feed()
    async with running(feed) as world:
        feed.push(payload(1), payload(6, kind="compute"), payload(2, kind="compute"), payload(11))
        await until(world, lambda: len(world.database.dead_letters) == 2, "two are dead-lettered")
        replay_all(world)
        await until(world, lambda: settled(world), "both have failed again")
        assert states(world) == [("open", 1), ("open", 1)]
        assert world.adds_up()

        Faults.computing = False
        replay_all(world)
        await until(world, lambda: settled(world), "both are taken")

        assert states(world) == [("replayed", 1), ("replayed", 1)]
        await until(world, lambda: len(world.database.rows("totals")) == 4, "all have come through")
        newest = Counter({row["device"]: row["total"] for row in world.database.rows("totals")})
        assert newest == {"dev-1": 3, "dev-2": 1}
        assert world.adds_up()
        assert len(world.database.dead_letters) == 2


async def test_record_that_failed_in_an_operator_is_replayed_to_the_one_consumer_that_lacks_it() -> None:
    feed = Feed()
    async with running(feed) as world:
        feed.push(payload(1, kind="map"), payload(6))
        await until(world, lambda: len(world.database.dead_letters) == 1, "one is dead-lettered")
        replay_all(world)
        await until(world, lambda: settled(world), "it has failed again")
        Faults.mapping = False
        replay_all(world)
        await until(world, lambda: settled(world), "it is taken")
        await until(world, lambda: len(world.database.rows("totals")) == 2, "both have come through")

        assert states(world) == [("replayed", 1)]
        feed.end()
        await world.finish()
        assert [(row["device"], row["n"]) for row in world.database.rows("windows")] == [("dev-1", 2)]
        assert world.adds_up()


async def test_replayed_record_may_be_late_and_moves_no_watermark() -> None:
    feed = Feed()
    async with running(feed) as world:
        feed.push(payload(1, at=10_000, kind="decode"), payload(2, at=5_000_000))
        await until(world, lambda: source(world)["injected"] == 2, "both are read")
        Faults.decoding = False
        ahead = payload(3, at=9_000_000)
        assert world.database.requests.replay("dead_letters", 1)
        await until(world, lambda: settled(world), "it is taken")
        await until(world, lambda: len(late_rows(world)) == 3, "its windows are closed")

        feed.push(b"{")
        await until(world, lambda: source(world)["injected"] == 3, "rubbish is read")
        world.database.requests.replay("dead_letters", 2, ahead)
        await until(world, lambda: settled(world), "it is taken")
        (header,) = [h for h in world.database.headers.values() if h.interval.computation == "readings"]
        assert header.low_watermark == 5_000_000 - 5_000
        assert world.adds_up()


def late_rows(world: World) -> list[tuple[str, bool]]:
    rows = [late for _, _, late in world.database.late_records]
    return [(late.computation, whole) for late in rows for whole in late.whole or [True] * len(late)]


async def test_replayed_late_record_is_late_again_and_counted_in_its_rows() -> None:
    feed = Feed()
    async with running(feed) as world:
        feed.push(payload(1, at=5_000_000), payload(2, at=10_000), payload(3, at=4_986_000))
        await until(world, lambda: len(late_rows(world)) == 4, "one is late for three windows, one for one of two")
        rows = late_rows(world)
        assert Counter(rows) == {("windows", True): 1, ("sliding", True): 1, ("sliding", False): 2}

        asked = [n + 1 for n in range(len(rows)) if world.database.requests.replay("late_records", n + 1)]
        assert [rows[n - 1][1] for n in asked] == [True, True]
        records = [world.database.requests.state_of("late_records", n) for n in asked]
        await until(world, lambda: all(record.state != "requested" for record in records), "both are settled")

        assert [(record.state, record.attempts) for record in records] == [("open", 1)] * 2
        assert late_rows(world) == rows, "no row is added"
        assert world.adds_up()


async def test_record_that_the_database_refused_is_replayed_unchanged() -> None:
    feed = Feed()
    async with running(feed) as world:
        world.database.constrain("totals", "not_13", lambda row: row["value"] != FAULTY)
        feed.push(payload(1), payload(2, value=FAULTY), payload(3))
        await until(world, lambda: source(world)["injected"] == 3, "all are read")
        await until(world, lambda: len(world.database.dead_letters) == 1, "one is refused")
        (_, _, dead_letter), *_ = world.database.dead_letters
        assert (dead_letter.computation, dead_letter.payload) == ("totals", payload(2, value=FAULTY))
        assert source(world) == {"injected": 3, "accepted": 2, "dead_lettered": 1}

        replay_all(world)
        await until(world, lambda: settled(world), "it is refused again")
        assert states(world) == [("open", 1)]
        world.database.table("totals").constraints.clear()
        replay_all(world)
        await until(world, lambda: settled(world), "it is taken")

        assert states(world) == [("replayed", 1)]
        assert source(world) == {"injected": 3, "accepted": 3}
        assert len(world.database.rows("totals")) == 3
        assert world.adds_up()


async def test_withdrawn_request_voids_only_its_turn() -> None:
    feed = Feed()
    async with running(feed) as world:
        feed.push(payload(1, kind="decode"), payload(2))
        await until(world, lambda: source(world)["injected"] == 2, "both are read")
        Faults.decoding = False
        for _ in range(20):
            world.database.requests.replay("dead_letters", 1)
            await asyncio.sleep(0.013)
            if world.database.requests.discard("dead_letters", 1):
                world.database.requests.state_of("dead_letters", 1).state = "open"
        world.database.requests.replay("dead_letters", 1)
        await until(world, lambda: settled(world), "it is settled")
        feed.push(payload(3))
        await until(world, lambda: source(world)["injected"] == 3, "the feed continues")

        assert source(world) == {"injected": 3, "accepted": 3}
        assert world.adds_up()


@pytest.mark.parametrize("seed", range(5))
async def test_crashes_and_lost_commits_neither_lose_nor_double_a_replay(seed: int) -> None:
    rng = random.Random(seed)
    kinds = ["plain", "plain", "decode", "compute", "map"]
    payloads = [payload(number, kind=rng.choice(kinds)) for number in range(400)]
    feed = Feed(batch_max=50)
    async with running(feed) as world:
        world.start()
        feed.push(*payloads)
        await until(world, lambda: source(world)["injected"] == len(payloads), "all are read")
        await until(world, world.adds_up, "all has come through")
        Faults.decoding = Faults.computing = Faults.mapping = False

        for _ in range(12):
            replay_all(world)
            await asyncio.sleep(rng.uniform(0.0, 0.08))
            fault = rng.randrange(3)
            if fault == 0:
                await world.crash(rng.choice(world.running))
                world.start()
            elif fault == 1:
                world.database.faults.lose_answer_of_next_commit(rng.choice(["before", "later", "never"]))
            else:
                world.database.faults.land_lost_commits()
            assert world.adds_up()

        def all_have_come_through() -> bool:
            # A loss asked for above may strike any commit until the end, and a turn computed before the repair may
            # still dead-letter records, so commits and replays continue until every row is there.
            world.database.faults.land_lost_commits()
            replay_all(world)
            taken = all(state == "replayed" for state, _ in states(world))
            return taken and len(world.database.rows("totals")) == len(payloads)

        await until(world, all_have_come_through, "all are taken and have come through")

        assert source(world)["accepted"] == len(payloads)
        newest: Counter[str] = Counter()
        for row in world.database.rows("totals"):
            newest[row["device"]] = max(newest[row["device"]], row["total"])
        assert newest == {f"dev-{n}": len(payloads) // 5 for n in range(5)}
        assert world.adds_up()


def as_dict(limits: Limits) -> dict[str, float]:
    return {name: getattr(limits, name) for name in Limits.__dataclass_fields__}


def world_now() -> int:
    from millpy.clock import SystemClock

    return SystemClock().now_us()
