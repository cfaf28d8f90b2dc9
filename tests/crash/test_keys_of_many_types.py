"""Steps of one graph with keys that are equal in Python and not the same: over restarts each key stays where it is."""

from __future__ import annotations

from collections import Counter

import msgspec

from millpy.computation import Computation, Context, Value
from millpy.graph import Graph
from millpy.ingest.settings import EventTime
from millpy.limits import Limits
from millpy.model.time import minutes
from millpy.windowing.aggregates.numeric import Count
from millpy.windowing.window import FixedWindows, SlidingWindows
from tests.crash.graph_files import rows
from tests.crash.test_versions import fed
from tests.feed import Feed

LIMITS = Limits(progress_every_s=0.02, fold_every_s=0.2)


class Reading(msgspec.Struct):
    at: int
    flag: bool
    number: int
    text: str


class Seen(msgspec.Struct):
    number: int
    n: int


class Counted(Computation):
    n = Value(int, default=0)

    def process_record(self, context: Context, record: Reading) -> None:
        context[Counted.n] += 1
        context.produce(Seen(record.number, context[Counted.n]))


KEYS = {
    "texts": ("text",),  # the first one's keys name devices, and are hashed by the source
    "flags": ("flag", "text"),
    "numbers": ("number", "text"),
    "flag_numbers": ("flag", "number"),
    "number_flags": ("number", "flag"),
}


def graph_of(feed: Feed) -> Graph:
    graph = Graph("factory")
    source = graph.inject("readings", feed, schema=Reading, event_time=EventTime("at", unit="s", sorted=True))
    for name, fields in KEYS.items():
        windows = source.key_by(*fields).window(FixedWindows(minutes(10)), intervals=8, name=name)
        windows.aggregate(n=Count()).to_table(name)
    sliding = source.key_by("number").window(SlidingWindows(minutes(10), every=minutes(5)), intervals=8, name="sliding")
    sliding.aggregate(n=Count()).to_table("sliding")
    seen = source.key_by("number").process(Counted(), name="seen", output=Seen, intervals=8)
    seen.to_table("seen")
    return graph


async def test_a_key_stays_in_its_interval_across_restarts(database_url: str) -> None:
    """Each part begins with another of the keys that are equal, so that another one is hashed first."""
    feed, given = Feed(), []
    for part, (flag, number) in enumerate([(True, 1), (False, 1), (True, 0), (False, 0)]):
        for at in range(part * 60, part * 60 + 60):
            given.append(Reading(at, flag, number, "1" if at % 2 else "a"))
        feed.push(*map(msgspec.json.encode, given[-60:]))
        if part == 3:
            given.append(Reading(10_000, True, 7, "z"))
            feed.push(msgspec.json.encode(given[-1]))
        await fed(database_url, graph_of(feed), feed)

    for name, fields in KEYS.items():
        columns = ", ".join(fields)
        found = rows(database_url, f"SELECT {columns}, n FROM factory.{name} ORDER BY {columns}")
        counted = Counter(tuple(getattr(r, field) for field in fields) for r in given if r.at < 600)
        assert found == sorted((*key, n) for key, n in counted.items()), name
    found = rows(database_url, "SELECT number, n FROM factory.sliding WHERE window_start = to_timestamp(0) ORDER BY 1")
    assert found == sorted(Counter(r.number for r in given if r.at < 600).items())
    found = rows(database_url, "SELECT number, max(n) FROM factory.seen GROUP BY 1 ORDER BY 1")
    assert found == sorted(Counter(r.number for r in given).items())
    assert rows(database_url, "SELECT * FROM millpy.accounting WHERE NOT balanced") == []
