"""Retractions on PostgreSQL: in segments, through takeovers, into result tables whose rows change, go and come back."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import msgspec
import pytest

from millpy import Accumulation, Count, EventTime, FixedWindows, Graph, SessionWindows, SlidingWindows, Sum, seconds
from millpy.limits import Limits
from millpy.process.assembly import run_worker
from tests.crash.graph_files import rows
from tests.crash.test_versions import fed
from tests.feed import Feed

GAP, SIZE, LATE = 3, 20, 1_000
LIMITS = Limits(progress_every_s=0.02, fold_every_s=0.05, lease_ttl_s=1)


class Reading(msgspec.Struct):
    device: str
    group: str
    at: int
    value: float


def graph_of(feed: Feed, windows: Any) -> Graph:
    graph = Graph("factory")
    source = graph.inject(
        "readings", feed, schema=Reading, event_time=EventTime("at", unit="s", max_disorder=seconds(2))
    )
    late = timedelta(seconds=LATE)
    inner = source.key_by("group", "device").window(
        windows, allowed_lateness=late, accumulation=Accumulation.RETRACTING, name="visits"
    )
    visits = inner.aggregate(n=Count(), total=Sum("value"))
    visits.to_table("visits")
    outer = visits.key_by("group").window(FixedWindows(seconds(SIZE)), allowed_lateness=late)
    outer.aggregate(visits=Count(), n=Sum("n"), total=Sum("total")).to_table("totals")
    return graph


def readings(seed: int) -> list[Reading]:
    rng = random.Random(seed)
    return [
        Reading(
            rng.choice("abc"), rng.choice("xy"), max(0, step // 3 - rng.choice([0, 0, 0, 1, 30])), rng.random() * 1e6
        )
        for step in range(400)
    ]


def expected(records: Sequence[Reading]) -> dict[tuple[str, int], tuple[int, int]]:
    """Visits and readings by group and window: a visit is a session of a device, and counts where it ends."""
    found: Counter[tuple[str, int]] = Counter()
    amounts: Counter[tuple[str, int]] = Counter()
    for key in {(r.group, r.device) for r in records}:
        times = sorted(r.at for r in records if (r.group, r.device) == key)
        start = 0
        for place in range(1, len(times) + 1):
            if place == len(times) or times[place] - times[place - 1] >= GAP:
                window = (key[0], (times[place - 1] + GAP - 1) // SIZE * SIZE)
                found[window] += 1
                amounts[window] += place - start
                start = place
    return {window: (count, amounts[window]) for window, count in found.items()}


def totals(url: str) -> dict[tuple[str, int], tuple[int, int]]:
    query = "SELECT grp.group, extract(epoch FROM window_start)::int, visits, n FROM factory.totals AS grp"
    return {(group, start): (visits, int(n)) for group, start, visits, n in rows(url, query)}


@pytest.mark.parametrize("apart", [False, True], ids=["one worker", "one for each step"])
async def test_totals_of_sessions_that_merge_are_those_of_a_batch(database_url: str, apart: bool) -> None:
    records = readings(7)
    feed = Feed(batch_max=23)
    for start in range(0, len(records), 100):
        feed.push(*map(msgspec.json.encode, records[start : start + 100]))
        graph = graph_of(feed, SessionWindows(seconds(GAP)))
        if apart:  # the panes wait in segments
            await fed(database_url, graph, feed, LIMITS, ["readings", "visits"])
        await fed(database_url, graph, feed, LIMITS)
    feed.end()
    await run_worker(graph_of(feed, SessionWindows(seconds(GAP))), database_url, limits=LIMITS)

    assert totals(database_url) == expected(records)
    sums = dict(rows(database_url, "SELECT t.group, sum(total) FROM factory.totals AS t GROUP BY 1"))
    for group in "xy":
        assert sums[group] == pytest.approx(sum(r.value for r in records if r.group == group), rel=1e-12)
    assert rows(database_url, "SELECT * FROM millpy.accounting WHERE NOT balanced") == []
    assert rows(database_url, "SELECT count(*) FROM millpy.late_records") == [(0,)]
    assert rows(database_url, "SELECT max(pane_index) FROM factory.totals")[0][0] > 0, "nothing was amended"


def is_kept(pane: Any) -> bool:
    return bool(pane.n % 3)


async def test_a_row_goes_with_the_last_record_of_its_window_and_comes_back(database_url: str) -> None:
    feed = Feed()
    graph = Graph("factory")
    source = graph.inject(
        "readings", feed, schema=Reading, event_time=EventTime("at", unit="s", max_disorder=seconds(1))
    )
    late = timedelta(seconds=LATE)
    mode = Accumulation.RETRACTING
    inner = source.key_by("device").window(
        FixedWindows(seconds(10)), allowed_lateness=late, accumulation=mode, name="tens"
    )
    kept = inner.aggregate(n=Count(), total=Sum("value")).filter(is_kept).key_by("device")
    outer = kept.window(SlidingWindows(seconds(40), every=seconds(20)), allowed_lateness=late)
    outer.aggregate(tens=Count(), n=Sum("n"), total=Sum("total")).to_table("totals")

    found = []
    for push in ([(1, 0.1), (99, 0.0)], [(2, 0.2)], [(3, 1e17)], [(4, 0.3)]):
        feed.push(*(msgspec.json.encode(Reading("a", "x", at, value)) for at, value in push))
        await fed(database_url, graph, feed, LIMITS)
        query = "SELECT n::int, total, pane_index FROM factory.totals WHERE window_start < to_timestamp(60) ORDER BY 1"
        found.append(rows(database_url, query))

    last = sum([0.1, 0.2, 1e17, 0.3])
    assert found == [[(1, 0.1, 0)] * 2, [(2, 0.1 + 0.2, 1)] * 2, [], [(4, last, 2)] * 2]
    assert rows(database_url, "SELECT * FROM millpy.accounting WHERE NOT balanced") == []
