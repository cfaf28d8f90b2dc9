"""What is stored of windows after an addition was taken back is read as before it."""

from __future__ import annotations

import msgspec

from millpy import Count, EventTime, File, FixedWindows, Graph, Sum, minutes, seconds
from millpy.model.checkpoint import Kind
from millpy.model.deployment import GraphSpec
from millpy.model.stage import StoredInterval
from millpy.model.stored_windows import ClosedKind
from millpy.model.time import Instant
from millpy.store.postgres.store import PostgresStore
from tests.conformance.store_builders import Owner, contents, entries


class Reading(msgspec.Struct):
    device: str
    at: int
    value: int


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
