"""What `explain_watermark` says of windows that wait for the times of their records."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from millpy import Count, EventTime, Graph, SessionWindows, TimestampCombiner, days, seconds
from millpy.limits import Limits
from tests.crash.graph_files import rows
from tests.crash.test_versions import fed
from tests.feed import Feed

LIMITS = Limits(progress_every_s=0.02, fold_every_s=0.05, lease_ttl_s=1)


class Reading(msgspec.Struct):
    device: str
    at: int


@pytest.mark.parametrize(
    ("combiner", "holder"), [(TimestampCombiner.EARLIEST, '"slow"'), (TimestampCombiner.END_OF_WINDOW, '"quick"')]
)
async def test_the_window_with_the_oldest_record_is_the_one_that_holds(
    database_url: str, combiner: TimestampCombiner, holder: str
) -> None:
    feed = Feed()
    graph = Graph("factory")
    event_time = EventTime("at", unit="s", max_disorder=seconds(0))
    source = graph.inject("readings", feed, schema=Reading, event_time=event_time)
    windows: Any = SessionWindows(seconds(5), by_key={"slow": days(1)})
    windowed = source.key_by("device").window(windows, timestamp_combiner=combiner, name="sums", intervals=1)
    windowed.aggregate(n=Count()).to_table("sums")
    feed.push(*map(msgspec.json.encode, [Reading("slow", 10), Reading("quick", 12), Reading("quick", 13)]))

    await fed(database_url, graph, feed, LIMITS)

    held = (
        "SELECT o.kind, o.key, o.at = i.oldest_work FROM mill.intervals AS i JOIN mill.computations AS c USING"
        " (computation_id) CROSS JOIN LATERAL mill.oldest_entry(i.interval_id) AS o WHERE c.name = 'sums'"
    )
    assert rows(database_url, held) == [("window", holder, True)]
