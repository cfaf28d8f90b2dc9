"""What is stored after an addition was taken back is read as before it."""

from __future__ import annotations

import msgspec

from millpy import Count, EventTime, File, FixedWindows, Graph, Sum, minutes, seconds
from millpy.limits import Limits
from millpy.model.checkpoint import Kind
from millpy.model.deployment import GraphSpec
from millpy.model.stage import StoredInterval
from millpy.model.stored_windows import ClosedKind
from millpy.model.time import Instant
from millpy.process.assembly import deploy, run_worker
from millpy.store.postgres.store import PostgresStore
from tests.conformance.store_builders import Owner, contents, entries
from tests.crash.graph_files import rows
from tests.crash.test_versions import fed
from tests.feed import Feed

LIMITS = Limits(progress_every_s=0.02, lease_ttl_s=1)


class Reading(msgspec.Struct):
    device: str
    at: int
    value: int


class ReadingMore(msgspec.Struct):
    device: str
    at: int
    value: int
    unit: str = "mm"


def spec_of(**more: Sum) -> GraphSpec:
    graph = Graph("factory")
    time = EventTime("at", unit="s", max_disorder=seconds(0))
    keyed = graph.inject("readings", File("in.ndjson"), schema=Reading, event_time=time).key_by("device")
    keyed.window(FixedWindows(minutes(1)), intervals=1).aggregate(n=Count(), **more).to_table("minutes")
    return graph.spec()


async def test_panes_that_wait_are_read_after_an_aggregate_was_taken_back(database_url: str) -> None:
    async with PostgresStore(database_url) as store:
        owner = Owner(store, await store.deploy(spec_of(total=Sum("value"))))
        await owner.register()
        await owner.claim()
        (windows,) = owner.deployment.intervals_of("minutes")
        waits = {"values": [1, 5], "firing": {"waits": True}}
        delta = entries(Kind.WINDOW, "", ("a", {"values": [2, 6]}, "0/60", 60), ("b", waits, "0/60", 60))
        await owner.commit(owner.checkpoint(windows, low_watermark=Instant(120), delta=(delta,)))

        owner = Owner(store, await store.deploy(spec_of(), on_purpose=True, back=True))
        await owner.register()
        await owner.claim()
        (windows,) = owner.deployment.intervals_of("minutes")
        grant = owner.grants[windows.interval_id]

        async def found(closed_rows_max: int) -> StoredInterval:
            bounds = {"state_rows_max": 0, "closed_rows_max": closed_rows_max}
            (read,) = await store.read([grant], **bounds, closed=ClosedKind.PANES)
            return read.recovered

        part, whole = contents(await found(1)), contents(await found(2))
        of_b = ("window", "", '"b"', "0/60")
        assert part == {of_b: ({"values": [1], "firing": {"waits": True}}, 60)}
        assert whole == {**part, ("window", "", '"a"', "0/60"): ({"values": [2]}, 60)}


class Renamed(msgspec.Struct, rename="pascal", tag="reading", tag_field="kind"):
    device_name: str
    at: int


class RenamedMore(Renamed, rename="pascal", tag="reading", tag_field="kind"):
    unit_name: str = "mm"


async def test_parked_records_lose_a_renamed_field_that_was_taken_back(database_url: str) -> None:
    def renamed(schema: type[msgspec.Struct]) -> GraphSpec:
        graph = Graph("factory")
        time = EventTime("at", unit="s", max_disorder=seconds(0))
        keyed = graph.inject("readings", File("in.ndjson"), schema=schema, event_time=time).key_by("device_name")
        keyed.window(FixedWindows(minutes(1)), intervals=1).aggregate(n=Count()).to_table("minutes")
        return graph.spec()

    record = {"kind": "reading", "DeviceName": "a", "At": 1}
    async with PostgresStore(database_url) as store:
        owner = Owner(store, await store.deploy(renamed(RenamedMore)))
        await owner.register()
        await owner.claim()
        (windows,) = owner.deployment.intervals_of("minutes")
        (subscription,) = owner.deployment.subscription_ids.values()
        parked = entries(Kind.PARKED, str(subscription), ("a", {"record": {**record, "UnitName": "km"}}, "1/1", 5))
        await owner.commit(owner.checkpoint(windows, delta=(parked,)))

        owner = Owner(store, await store.deploy(renamed(Renamed), on_purpose=True, back=True))
        await owner.register()
        await owner.claim()
        (windows,) = owner.deployment.intervals_of("minutes")
        (read,) = await store.read([owner.grants[windows.interval_id]], state_rows_max=0)

    (((left, _),)) = contents(read.recovered).values()
    assert left == {"record": record}


def changes_of(feed: Feed, schema: type) -> Graph:
    graph = Graph("factory")
    time = EventTime("at", unit="s", max_disorder=seconds(60))
    keyed = graph.inject("readings", feed, schema=schema, event_time=time).key_by("device")
    keyed.changes("value", name="changed").to_table("changed")
    return graph


async def test_records_that_wait_for_their_turn_lose_a_field_that_was_taken_back(database_url: str) -> None:
    feed = Feed()
    feed.push(*(b'{"device":"d","at":%d,"value":%d}' % (at, at) for at in range(3)))
    await fed(database_url, changes_of(feed, Reading), feed, LIMITS)
    feed.push(*(b'{"device":"d","at":%d,"value":%d,"unit":"km"}' % (at, at) for at in range(3, 6)))
    await fed(database_url, changes_of(feed, ReadingMore), feed, LIMITS)

    await deploy(changes_of(feed, Reading), database_url, back=True)
    feed.push(*(b'{"device":"d","at":%d,"value":%d}' % (at, at) for at in range(6, 9)))
    await fed(database_url, changes_of(feed, Reading), feed, LIMITS)
    await deploy(changes_of(feed, ReadingMore), database_url)
    feed.push(b'{"device":"d","at":9,"value":9,"unit":"km"}')
    feed.end()
    await run_worker(changes_of(feed, ReadingMore), database_url, limits=LIMITS)

    found = rows(database_url, "SELECT value, unit FROM factory.changed ORDER BY value")
    assert found == [*((value, "mm") for value in range(9)), (9, "km")]
