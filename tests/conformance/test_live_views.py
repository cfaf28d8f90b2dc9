"""The views `…_live`: open windows as they stand are what the engine would emit now."""

from __future__ import annotations

import random
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from enum import Enum
from typing import Any

import msgspec
import psycopg
import pytest

from millpy import (
    Accumulation,
    AfterCount,
    AfterWatermark,
    Count,
    EventTime,
    First,
    FixedWindows,
    GlobalWindow,
    Graph,
    Last,
    Max,
    Mean,
    Min,
    SessionWindows,
    SlidingWindows,
    Sum,
    Variance,
    hours,
    seconds,
)
from millpy.limits import Limits
from millpy.store.postgres.store import PostgresStore
from tests.commands import millpy
from tests.crash.graph_files import rows
from tests.crash.test_versions import fed
from tests.feed import Feed

UNFOLDED = Limits(progress_every_s=0.02, fold_every_s=30, lease_ttl_s=1)
NAMES = "device, room, window_start, window_end"
TYPED = "cost, cheapest, priced, day, last_day, state"
COLUMNS = f"{NAMES}, n, total, wide, mean, exact, low, high, first, last, newest, late_count, {TYPED}"
AGGREGATES = {
    "n": Count(),
    "total": Sum("value"),
    "wide": Sum("whole"),
    "mean": Mean("value"),
    "exact": Mean("whole"),
    "low": Min("label"),
    "high": Max("at"),
    "first": First("value"),
    "last": Last("label"),
    "newest": Last("at"),
    "cost": Sum("price"),
    "cheapest": Min("price"),
    "priced": Last("price"),
    "day": Max("day"),
    "last_day": Last("day"),
    "state": First("state"),
    "spread": Variance("value"),
}
VALUES = [0.5, -7.25, 3.25, 0.0, 5e-324, 5e-324]
"""Sums of these are the same in any order."""
PRICES = [None, Decimal("0.10"), Decimal("-12.345"), Decimal("1e-38"), Decimal(10**37)]
WHOLE = [3, -(2**62), 2**62 + 1, 2**53 + 1, 7]


class State(Enum):
    ON = "on"
    OFF = "off"


class Reading(msgspec.Struct):
    device: str
    room: int
    at: datetime
    value: float | None
    whole: int
    label: str
    price: Decimal | None
    day: date
    state: State


def graph_of(
    feed: Feed, windows: Any, mode: Accumulation, *more: str, generation: int = 1, name: str = "factory"
) -> Graph:
    """Windows that emit at their end, and the same windows, that emit at each record."""
    graph = Graph(name, generation=generation)
    source = graph.inject("readings", feed, schema=Reading, event_time=EventTime("at", max_disorder=seconds(5)))
    keyed = source.key_by("device", "room")
    aggregates = AGGREGATES | {name: Count() for name in more}
    # With early panes, windows that are open have rows in the table, too.
    rare = AfterWatermark(early=AfterCount(3)) if isinstance(windows, FixedWindows) else AfterWatermark()
    plain = keyed.window(windows, allowed_lateness=hours(1), accumulation=mode, trigger=rare, intervals=2)
    plain.aggregate(**aggregates).to_table("sums", history=True)
    eager = AfterWatermark(early=AfterCount(1))
    keyed.window(windows, allowed_lateness=hours(1), accumulation=mode, trigger=eager).aggregate(**aggregates).to_table(
        "told"
    )
    return graph


def readings(seed: int, start: int, count: int) -> list[bytes]:
    rng = random.Random(seed)
    found = []
    for number in range(start, start + count):
        at = datetime.fromtimestamp(1_700_000_000 + number + rng.randrange(5) - rng.choice([0, 0, 0, 40]), UTC)
        value, label = rng.choice([None, *VALUES]), rng.choice(["a", 'ä\\"{}', "", "😀"])
        more = rng.choice(PRICES), date(1969, 12, 31) + timedelta(rng.randrange(3)), rng.choice([*State])
        device, room = rng.choice(["d'1", 'd"2']), rng.randrange(2)
        found.append(msgspec.json.encode(Reading(device, room, at, value, rng.choice(WHOLE), label, *more)))
    last = datetime.fromtimestamp(1_700_000_000 + start + count, UTC)
    for value in (5e-324, 0.0):  # their mean is too small for a double
        found.append(msgspec.json.encode(Reading("tiny", 0, last, value, 1, "", None, last.date(), State.ON)))
    return found


@pytest.mark.parametrize(
    ("windows", "mode"),
    [(FixedWindows(seconds(30)), Accumulation.ACCUMULATING), (SessionWindows(seconds(4)), Accumulation.RETRACTING)],
)
async def test_open_windows_are_what_the_engine_would_emit_now(
    database_url: str, windows: Any, mode: Accumulation
) -> None:
    feed = Feed(batch_max=7)
    opened = in_table = 0
    for number, limits in enumerate((UNFOLDED, UNFOLDED, Limits(fold_every_s=0.01, lease_ttl_s=1))):
        feed.push(*readings(number, number * 60, 60))
        await fed(database_url, graph_of(feed, windows, mode), feed, limits)

        live = rows(database_url, f"SELECT {COLUMNS} FROM factory.sums_live ORDER BY {NAMES}")
        assert live == rows(database_url, f"SELECT {COLUMNS} FROM factory.told ORDER BY {NAMES}")
        (found,) = rows(
            database_url,
            "SELECT count(*) FILTER (WHERE pane_timing = 'open'), count(*) FILTER (WHERE spread IS NOT NULL),"
            " count(*) FILTER (WHERE is_final), count(*) - count(DISTINCT (device, room, window_start, window_end)),"
            " (SELECT count(*) FROM factory.sums WHERE spread IS NOT NULL), count(*) FILTER (WHERE pane_index > 0"
            " AND pane_timing = 'open') FROM factory.sums_live",
        )
        opened += found[0]
        in_table += found[5]
        assert found[1] <= found[4]  # SQL cannot read a variance
        assert found[3] == 0
    assert opened > 2
    assert (in_table > 0) == isinstance(windows, FixedWindows)


async def test_live_views_follow_their_table_and_obey_its_policies(database_url: str) -> None:
    feed = Feed()
    windows, mode = FixedWindows(seconds(30)), Accumulation.ACCUMULATING
    feed.push(*readings(1, 0, 90))
    await fed(database_url, graph_of(feed, windows, mode), feed, UNFOLDED)
    before = rows(database_url, f"SELECT {COLUMNS} FROM factory.sums_live ORDER BY {NAMES}")
    with psycopg.connect(database_url, autocommit=True) as connection:
        connection.execute("CREATE ROLE someone")
        try:
            connection.execute("GRANT SELECT ON factory.sums_live TO someone")
            async with PostgresStore(database_url) as store:
                await store.deploy(graph_of(feed, windows, mode, "m").spec(), on_purpose=True)
                assert rows(database_url, "SELECT count(*) FROM factory.sums_live WHERE m IS NULL") == [(len(before),)]
                await store.deploy(graph_of(feed, windows, mode).spec(), on_purpose=True, back=True)
            assert rows(database_url, f"SELECT {COLUMNS} FROM factory.sums_live ORDER BY {NAMES}") == before

            connection.execute("SET ROLE someone")
            with pytest.raises(psycopg.errors.InsufficientPrivilege):
                connection.execute("SELECT count(*) FROM factory.sums_live")
            connection.execute("RESET ROLE")
            connection.execute("GRANT USAGE ON SCHEMA factory, millpy TO someone")
            connection.execute("GRANT SELECT ON ALL TABLES IN SCHEMA factory, millpy TO someone")
            connection.execute("ALTER TABLE factory.sums ENABLE ROW LEVEL SECURITY")
            connection.execute("CREATE POLICY one ON factory.sums TO someone USING (room = 1)")
            connection.execute("SET ROLE someone")
            seen = connection.execute("SELECT DISTINCT room, pane_timing = 'open' FROM factory.sums_live").fetchall()
            assert seen == [(1, False)]
            connection.execute("RESET ROLE")
        finally:
            connection.execute("RESET ROLE")
            connection.execute("DROP OWNED BY someone")
            connection.execute("DROP ROLE someone")
    async with PostgresStore(database_url) as store:
        await store.deploy(graph_of(feed, windows, mode, generation=2).spec())
        assert rows(database_url, "SELECT count(*) FROM factory_2.sums_live") == [(0,)]
        await store.switch("factory", 2, behind_us_max=None)
    assert rows(database_url, f"SELECT {COLUMNS} FROM factory_1.sums_live ORDER BY {NAMES}") == before
    assert rows(database_url, "SELECT count(*) FROM factory.sums_live") == [(0,)]


@pytest.mark.parametrize("name", ["factory", "order"])  # a word of SQL is quoted there
async def test_windows_open_shows_open_windows(database_url: str, name: str) -> None:
    feed = Feed()
    feed.push(*readings(1, 0, 18))
    graph = graph_of(feed, FixedWindows(hours(1)), Accumulation.ACCUMULATING, name=name)
    await fed(database_url, graph, feed, UNFOLDED)

    found = msgspec.json.decode(millpy("windows", "sums", "--open", "--json", "--database", database_url))

    assert sum(row["n"] for row in found["rows"]) == 20
    assert {row["pane_timing"] for row in found["rows"]} == {"open", "early"}


async def test_open_global_windows_are_shown_once_with_their_end(database_url: str) -> None:
    feed = Feed()
    graph = Graph("factory")
    source = graph.inject("readings", feed, schema=Reading, event_time=EventTime("at", max_disorder=seconds(5)))
    windowed = source.key_by("device").window(GlobalWindow(), trigger=AfterWatermark(early=AfterCount(4)))
    windowed.aggregate(n=Count()).to_table("sums")
    for start in (0, 20):
        feed.push(*readings(1, start, 20 - start // 2))
        await fed(database_url, graph, feed, UNFOLDED)

    found = rows(database_url, "SELECT count(*), count(window_end), sum(n), max(window_end) FROM factory.sums_live")

    assert found == [(3, 3, 34, datetime(9999, 1, 1, tzinfo=UTC))]


def test_windows_that_sql_cannot_read_have_no_live_view() -> None:
    def live_of(windows: Any, **aggregates: Any) -> tuple[tuple[int, str], ...]:
        graph = Graph("factory")
        source = graph.inject("readings", Feed(), schema=Reading, event_time=EventTime("at", max_disorder=seconds(5)))
        source.key_by("device").window(windows).aggregate(**aggregates).to_table("sums")
        (table,) = graph.spec().tables
        return table.live

    assert live_of(SlidingWindows(seconds(30), every=seconds(10)), n=Count()) == ()
    assert live_of(FixedWindows(seconds(30)), v=Variance("value")) == ((0, ""),)
    assert live_of(FixedWindows(seconds(30)), v=Variance("value"), n=Count()) == ((0, ""), (1, "value"))
