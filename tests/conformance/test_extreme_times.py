"""The edges of time as PostgreSQL stores them: result rows, late records, dead letters, and the views on them."""

import psycopg
import pytest

from millpy.model.time import YEARS_HI, YEARS_LO, days, minutes, to_datetime
from millpy.process.assembly import run_worker
from millpy.windowing.window import FixedWindows, SessionWindows, SlidingWindows, Windows
from tests.feed import Feed
from tests.property.test_extreme_times import EDGES, a_graph, payloads_of

VIEWS = ("dead_letters", "late_records", "timers", "windows", "watermarks", "accounting", "events")


@pytest.mark.parametrize(
    "windows",
    [FixedWindows(days(7)), SlidingWindows(minutes(10), every=minutes(1)), SessionWindows(minutes(1))],
    ids=["fixed", "sliding", "session"],
)
async def test_every_edge_of_time_is_stored_or_dead_lettered(database_url: str, windows: Windows) -> None:
    feed = Feed(batch_max=40)
    payloads = payloads_of([*((edge, None) for edge in EDGES), *((edge, at) for edge in EDGES[:3] for at in EDGES)])
    feed.push(*payloads)
    feed.end()

    await run_worker(a_graph(feed, windows, minutes(10)), database_url)

    with psycopg.connect(database_url) as connection:
        connection.execute("SET timezone = 'UTC'")
        counted = connection.execute("SELECT sum(n) FROM whole.panes").fetchone()
        named = connection.execute("SELECT count(*) FROM whole.named_rows").fetchone()
        unbalanced = connection.execute("SELECT count(*) FROM millpy.accounting WHERE NOT balanced").fetchone()
        for view in VIEWS:
            connection.execute(f"SELECT v::text FROM millpy.{view} AS v").fetchall()  # type: ignore[call-overload]
    assert counted is not None
    assert named is not None
    in_windows = 10 if isinstance(windows, SlidingWindows) else 1
    assert 0 < counted[0] <= named[0] * in_windows
    assert unbalanced == (0,)


def test_views_show_every_microsecond_of_the_years_1_to_9999(database_url: str) -> None:
    """Numbers of microseconds beyond 2^53 are no doubles."""
    instants = [YEARS_LO, -(2**53) - 1, -1, 0, 2**53 + 1, 253_370_764_800_000_001, YEARS_HI]

    with psycopg.connect(database_url) as connection:
        connection.execute("SET timezone = 'UTC'")
        query = "SELECT mill.moment(at), mill.instant(mill.moment(at)) FROM unnest(%s::bigint[]) AS t (at)"
        found = connection.execute(query, [instants]).fetchall()

    assert found == [(to_datetime(at), at) for at in instants]


def test_times_in_views_take_no_call_of_a_function_for_each_row(database_url: str) -> None:
    with psycopg.connect(database_url) as connection:
        times = "mill.moment(at), mill.instant(now() + at * interval '1 s')"
        query = f"EXPLAIN VERBOSE SELECT {times} FROM unnest(%s::bigint[]) AS t (at)"
        plan = connection.execute(query, [[0]]).fetchall()

    assert "mill." not in str(plan), plan
