"""Modes: the table is the same in each; retractions equal the panes that they take back, and discarded panes add up."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millpy import Accumulation
from millpy.model.record import RecordType, retractions_of
from millpy.model.time import instant
from millpy.store.memory.tables import column_values
from millpy.windowing.accumulation import newest_of
from millpy.windowing.accumulator import AccumulatorSet, Aggregate
from millpy.windowing.aggregates.numeric import Count, Max, Min, Sum
from millpy.windowing.aggregates.positional import First
from millpy.windowing.aggregates.quantile import Median
from millpy.windowing.logic import WindowedLogic
from millpy.windowing.pane_codec import OpenPane, PaneContent, decode_pane, encode_panes
from millpy.windowing.window import SessionWindows, Windows
from tests.property.test_windowed import (
    AGGREGATES,
    FIXED,
    MAX_DISORDER,
    Name,
    Reading,
    Sites,
    breaks,
    kinds,
    lateness,
    oracle,
    rows,
    run,
    table_of,
    us,
)
from tests.stage_driver import StageDriver

EVERY: dict[str, Aggregate] = {**AGGREGATES, "sites": Sites()}
few_of = st.sampled_from([0, 3, 10_000])


def driven(
    windows: Windows,
    mode: Accumulation,
    aggregates: dict[str, Aggregate],
    feed: list[Any],
    where: list[str],
    allowed: int,
    few: int,
    panes_max: int = 10**6,
) -> StageDriver:
    logic = WindowedLogic(windows, allowed * us, aggregates, few_records_max=few, accumulation=mode)
    outputs = {"windows": logic.output_type(RecordType(Reading), ("key", "site"))}
    subject = StageDriver(
        logic, Reading, key=("key", "site"), outputs=outputs, tables={"windows": 1}, max_disorder=MAX_DISORDER
    )
    subject.panes_max = panes_max
    run(subject, feed, where, columns=few == 0)
    return subject


def name_of(pane: Any) -> Name:
    return pane.key, pane.site, instant(pane.window_start), instant(pane.window_end)


def final_rows(subject: StageDriver) -> dict[Name, tuple[Any, ...]]:
    found: dict[Name, tuple[Any, ...]] = {}
    for result in subject.results:
        for name in subject.deleted(result):
            del found[name]
        for part in result.results:
            for row in zip(*map(column_values, part.columns), strict=True):
                found[row[:4]] = row[4:]
    return found


@kinds
@settings(max_examples=60, deadline=None)
@given(feed=rows, where=breaks, allowed=lateness, few=few_of, panes_max=st.sampled_from([2, 10**6]))
def test_a_retraction_equals_the_pane_that_consumers_have(
    windows: Windows, feed: list[Any], where: list[str], allowed: int, few: int, panes_max: int
) -> None:
    subject = driven(windows, Accumulation.RETRACTING, EVERY, feed, where, allowed, few, panes_max)

    have: dict[Name, str] = {}
    stored: set[Name] = set()
    for result in subject.results:
        records = result.productions.get("windows")
        made = 0 if records is None else len(records)
        assert result.emitted_by_stream["windows"] == made
        gone = set(subject.deleted(result))
        for pane, retracts in (
            () if records is None else zip(records.objects(), retractions_of(records).tolist(), strict=True)
        ):
            if retracts:
                assert have.pop(name_of(pane)) == repr(pane)
            else:
                assert name_of(pane) not in have
                have[name_of(pane)] = repr(pane)
        stored = (stored - gone) | {
            row[:4] for part in result.results for row in zip(*map(column_values, part.columns), strict=True)
        }
        assert have.keys() == stored
    assert table_of(subject) == have.keys()
    assert have.keys() == oracle(windows, feed, allowed).windows.keys()


@kinds
@settings(max_examples=30, deadline=None)
@given(feed=rows, where=breaks, elsewhere=breaks, allowed=lateness, few=few_of)
def test_the_table_is_the_same_in_each_mode(
    windows: Windows, feed: list[Any], where: list[str], elsewhere: list[str], allowed: int, few: int
) -> None:
    exact: dict[str, Aggregate] = {"n": Count(), "whole": Sum("number"), "low": Min("value"), "earliest": First("text")}
    tables = [
        final_rows(driven(windows, mode, exact, feed, cut, allowed, many))
        for mode, cut, many in zip(Accumulation, (where, elsewhere, where), (few, 0, few), strict=True)
    ]

    columns = slice(0, 4)  # how often a window was amended depends on bundles
    assert [{name: row[columns] for name, row in table.items()} for table in tables] == [
        {name: row[columns] for name, row in tables[0].items()}
    ] * 3


@kinds
@settings(max_examples=60, deadline=None)
@given(feed=rows, where=breaks, allowed=lateness, few=few_of)
def test_discarded_panes_add_up(windows: Windows, feed: list[Any], where: list[str], allowed: int, few: int) -> None:
    aggregates: dict[str, Aggregate] = {"n": Count(), "whole": Sum("number"), "high": Max("number")}
    subject = driven(windows, Accumulation.DISCARDING, aggregates, feed, where, allowed, few)

    sums: dict[Any, Counter[str]] = {}
    highest: dict[Any, int | None] = {}
    sessions = isinstance(windows, SessionWindows)
    for result in subject.results:
        for records in (result.productions["windows"],) if "windows" in result.productions else ():
            assert records.retracts is None
            for pane in records.objects():
                assert pane.n > 0, "a pane has something new"
                name = name_of(pane)[:2] if sessions else name_of(pane)
                found = sums.setdefault(name, Counter())
                found["n"] += pane.n
                found["whole"] += pane.whole or 0
                found["late"] += pane.late_count
                highest[name] = max((x for x in (highest.get(name), pane.high) if x is not None), default=None)
    wanted: dict[Any, Counter[str]] = {}
    most: dict[Any, int | None] = {}
    for key, (n, whole, high, _, _, late) in final_rows(subject).items():
        name = key[:2] if sessions else key
        wanted.setdefault(name, Counter()).update({"n": n, "whole": whole or 0, "late": late})
        most[name] = max((x for x in (most.get(name), high) if x is not None), default=None)
    assert sums == wanted
    assert highest == most


@pytest.mark.parametrize("mode", Accumulation)
def test_a_window_that_fires_once_is_the_same_in_each_mode(mode: Accumulation) -> None:
    feed = [(Reading("a", 1, 1.0, 1, None), at) for at in (0, 3, 7, 25, 60)]
    subject = driven(FIXED, mode, {"n": Count()}, feed, [], 0, 0)

    panes = [record for record, _ in subject.produced("windows")]
    assert [(pane.n, pane.pane_index) for pane in panes] == [(3, 0), (1, 0), (1, 0)]
    assert not any(result.deleted for result in subject.results)


@pytest.mark.parametrize("value", [1.5, float("inf")], ids=["as JSON", "exactly"])
def test_what_a_mode_keeps_is_stored(value: float) -> None:
    """No window needs it today: every change of a fired window makes a pane in its turn."""
    accumulators = AccumulatorSet({"total": Sum("value"), "middle": Median("value")}, RecordType(Reading))
    kept = PaneContent([value, {3: 1}], 2)
    pane = OpenPane([value, {3: 1, 4: 2}], pane_index=1, late_count=3, emitted=True, kept=kept)

    (stored,) = encode_panes([pane], accumulators)

    found = decode_pane(stored, accumulators)
    assert found == pane
    assert newest_of(found) == kept
    assert newest_of(OpenPane([1.0])) is None
    assert newest_of(OpenPane([1.0], pane_index=1, kept=PaneContent([]))) is None, "its records were retracted"
