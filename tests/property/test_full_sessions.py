"""Sessions of a bounded number of records: a function of the order of input, never of bundles, crashes or columns."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millpy import Accumulation, Count, SessionWindows, Sum
from millpy.model.checkpoint import Kind
from millpy.model.record import RecordType, retractions_of
from millpy.model.time import instant
from millpy.windowing.logic import WindowedLogic
from tests.stage_driver import StageDriver, apply_rows, timedelta_us

GAP, MAX_RECORDS, MAX_DISORDER = 6, 3, 4


class Reading(msgspec.Struct):
    key: str
    number: int


def subject(windows: SessionWindows, allowed: int, few: int, mode: Accumulation) -> StageDriver:
    aggregates = {"n": Count(), "total": Sum("number")}
    logic = WindowedLogic(windows, timedelta_us(allowed), aggregates, few_records_max=few, accumulation=mode)
    outputs = {"panes": logic.output_type(RecordType(Reading), ("key",))}
    return StageDriver(logic, Reading, outputs=outputs, tables={"panes": 1}, max_disorder=MAX_DISORDER)


def table_of(driver: StageDriver) -> dict[Any, tuple[int, int]]:
    """Return the result table: (key, start, end) -> (number of records, sum)."""
    table: dict[Any, tuple[int, int]] = {}
    for result in driver.results:
        apply_rows(table, result)
    return table


def late_of(driver: StageDriver) -> Counter[Any]:
    """Return the late records with the session that each would have opened."""
    return Counter(
        row
        for result in driver.results
        for late in result.late
        for row in zip(late.keys, late.payloads, late.window_starts, late.window_ends, strict=True)
    )


def standing_of(driver: StageDriver, mode: Accumulation) -> Counter[Any]:
    """Return the records of the panes that consumers have, by window; in other modes than retracting by key."""
    standing: Counter[Any] = Counter()
    for result in driver.results:
        panes = result.productions.get("panes")
        for pane, retracts in (
            [] if panes is None else zip(panes.objects(), retractions_of(panes).tolist(), strict=True)
        ):
            name = pane.key, instant(pane.window_start), instant(pane.window_end)
            standing[name if mode is Accumulation.RETRACTING else pane.key] += (-1 if retracts else 1) * pane.n
    return standing


rows = st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 40)), min_size=1, max_size=30).map(
    lambda found: [(Reading(key, number), at) for number, (key, at) in enumerate(found)]
)
cuts = st.lists(st.tuples(st.integers(1, 8), st.sampled_from(["", "restart", "lose"])), min_size=1, max_size=10)


@pytest.mark.parametrize("mode", Accumulation, ids=lambda mode: mode.value)
@settings(max_examples=25, deadline=None)
@given(fed=rows, cuts=cuts, allowed=st.sampled_from([0, 5, 1_000]), length=st.sampled_from([None, 15]))
def test_bundles_crashes_and_columns_do_not_change_which_records_fill_a_session(
    mode: Accumulation, fed: list[Any], cuts: list[tuple[int, str]], allowed: int, length: int | None
) -> None:
    windows = SessionWindows(
        timedelta_us(GAP), max_records=MAX_RECORDS, max_length=None if length is None else timedelta_us(length)
    )
    one_by_one = subject(windows, allowed, 10_000, mode)
    for row in fed:
        published = one_by_one.watermark
        panes = one_by_one.feed([row]).productions.get("panes")
        for pane, retracts in (
            [] if panes is None else zip(panes.objects(), retractions_of(panes).tolist(), strict=True)
        ):
            amends = retracts or pane.pane_index or pane.late_count
            assert amends or instant(pane.window_end) > published, "it would be late at once"
    bundled, place, number = subject(windows, allowed, 0, mode), 0, 0
    while place < len(fed):
        size, fault = cuts[number % len(cuts)]
        bundle = fed[place : place + size]
        if fault == "lose":
            bundled.lose(bundle, columns=True)
        elif fault == "restart":
            bundled.restart()
        bundled.feed(bundle, columns=True)
        place, number = place + size, number + 1
    for driver in (one_by_one, bundled):
        driver.finish()
        assert not {name for name in driver.stored if name[0] is Kind.WINDOW}

    table, late = table_of(bundled), late_of(bundled)
    assert table == table_of(one_by_one)
    assert late == late_of(one_by_one)
    assert sum(n for n, _ in table.values()) + sum(late.values()) == len(fed), "each record counts once"
    assert sum(total for _, total in table.values()) + sum(
        msgspec.json.decode(payload)["number"] * times for (_, payload, _, _), times in late.items()
    ) == sum(record.number for record, _ in fed)
    if allowed == 1_000:  # no session is forgotten, so that none can begin inside it again
        for key in "ab":
            spans = sorted((start, end) for name, start, end in table if name == key)
            assert all(end <= start for (_, end), (start, _) in pairwise(spans))
        assert all(length is None or start // length == (end - 1) // length for _, start, end in table)
    standing = standing_of(bundled, mode)
    if mode is Accumulation.RETRACTING:
        assert +standing == Counter({name: n for name, (n, _) in table.items()})
    if mode is Accumulation.DISCARDING:
        assert sum(standing.values()) + sum(late.values()) == len(fed)


@settings(max_examples=25, deadline=None)
@given(times=st.lists(st.integers(0, 60), min_size=1, max_size=30, unique=True), few=st.sampled_from([0, 10_000]))
def test_records_in_order_fill_sessions_of_exactly_the_bound(times: list[int], few: int) -> None:
    windows = SessionWindows(timedelta_us(GAP), max_records=MAX_RECORDS)
    driver = subject(windows, 0, few, Accumulation.ACCUMULATING)
    driver.feed([(Reading("a", at), at) for at in sorted(times)], columns=few == 0)
    driver.finish()

    wanted: list[list[int]] = []
    for at in sorted(times):
        if not wanted or at - wanted[-1][-1] >= GAP or len(wanted[-1]) == MAX_RECORDS:
            wanted.append([])
        wanted[-1].append(at)
    assert table_of(driver) == {
        ("a", part[0], part[-1] + (1 if len(part) == MAX_RECORDS else GAP)): (len(part), sum(part)) for part in wanted
    }


def test_the_size_of_a_session_is_not_a_column_and_survives_a_longer_list_of_aggregates() -> None:
    windows = SessionWindows(timedelta_us(GAP), max_records=2)
    driver = subject(windows, 0, 0, Accumulation.ACCUMULATING)
    driver.feed([(Reading("a", 1), 1)])
    logic = WindowedLogic(windows, timedelta_us(0), {"n": Count(), "total": Sum("number"), "more": Sum("number")})
    driver.deploy(logic, {"panes": logic.output_type(RecordType(Reading), ("key",))})
    driver.feed([(Reading("a", 2), 2), (Reading("a", 4), 3)])
    driver.finish()

    panes = [pane for pane, _ in driver.produced("panes")]
    assert [(pane.n, pane.total, pane.more) for pane in panes] == [(2, 3, None), (1, 4, 4)]
