"""Retentions: the lengths of partitions, and which partitions a row needs."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from millpy import Count, EventTime, FixedWindows, GlobalWindow, Graph, days, hours, minutes
from millpy.errors import GraphError
from millpy.model.graph_changes import changes_between
from millpy.model.retention import LENGTHS, PARTITIONS_WANTED, RETENTION_MAX, RETENTION_MIN, partition_length
from millpy.model.time import INSTANT_MAX, INSTANT_MIN
from millpy.store.postgres.partitions import HOUR_US, KnownPartitions, hours_of
from tests.feed import Feed


class Reading(msgspec.Struct):
    device: str
    at: datetime


TIMES = st.lists(st.integers(INSTANT_MIN, INSTANT_MAX) | st.integers(-2 * HOUR_US, 9 * HOUR_US), max_size=20)


def graph_of(retention: Any, windows: Any = None, lateness: timedelta = timedelta(0)) -> Graph:
    graph = Graph("factory")
    source = graph.inject("readings", Feed(), schema=Reading, event_time=EventTime("at", max_disorder=minutes(1)))
    windowed = source.key_by("device").window(windows or FixedWindows(minutes(1)), allowed_lateness=lateness)
    windowed.aggregate(n=Count()).to_table("counts", retention=retention)
    return graph


@given(st.timedeltas(RETENTION_MIN, RETENTION_MAX))
def test_rows_of_a_retention_need_few_partitions_of_whole_hours(retention: timedelta) -> None:
    length = partition_length(retention)

    assert retention <= PARTITIONS_WANTED * length
    assert length == LENGTHS[0] or retention > PARTITIONS_WANTED * LENGTHS[LENGTHS.index(length) - 1]
    assert length % hours(1) == timedelta(0)


@given(TIMES, st.lists(st.integers(0, 9), min_size=2, max_size=6, unique=True).map(sorted))
def test_a_row_has_a_partition_if_its_hour_has(times: list[int], bounds: list[int]) -> None:
    known = KnownPartitions()
    known.learn([(lo * HOUR_US, hi * HOUR_US) for lo, hi in zip(bounds[::2], bounds[1::2], strict=False)])
    held = [(lo, hi) for lo, hi in zip(bounds[::2], bounds[1::2], strict=False)]

    found = hours_of(np.array(times, np.int64))
    missing = known.missing(found)

    assert list(found) == sorted({max(at // HOUR_US * HOUR_US, INSTANT_MIN) for at in times})
    inside = {at for at in found if any(lo <= at // HOUR_US < hi for lo, hi in held)}
    assert set(missing) == set(found) - inside


@pytest.mark.parametrize(
    ("retention", "windows", "lateness", "reason"),
    [
        (90, None, 0, "not a duration"),
        (minutes(59), None, 0, "hundred years"),
        (days(40_000), None, 0, "hundred years"),
        (days(1), GlobalWindow(), 0, "never ends"),
        (hours(2), None, 3, "allowed lateness"),
    ],
)
def test_a_retention_that_could_not_hold_is_refused(retention: Any, windows: Any, lateness: int, reason: str) -> None:
    with pytest.raises(GraphError, match=reason):
        graph_of(retention, windows, hours(lateness))


@pytest.mark.parametrize(
    ("before", "after", "kind", "words"),
    [
        (days(90), days(30), "setting", "older rows are dropped"),
        (days(90), days(91), "setting", "retention"),
        (None, days(30), "meaning", "no partitions"),
        (days(30), None, "meaning", "keep all rows"),
    ],
)
def test_only_a_table_with_partitions_changes_its_retention(before: Any, after: Any, kind: str, words: str) -> None:
    stored, wanted = (graph_of(retention).spec().description() for retention in (before, after))

    (change,) = changes_between(stored, wanted)

    assert change.kind == kind
    assert words in str(change)
    assert changes_between(stored, stored) == []
