"""An aggregate has one answer, to the last bit and sign, however its records were cut into bundles."""

from __future__ import annotations

import struct
import sys
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from millpy.model.delta import encode_value
from millpy.model.record import RecordType
from millpy.model.time import instant
from millpy.windowing.accumulator import Aggregate
from millpy.windowing.aggregates.numeric import Max, Mean, Min, StandardDeviation, Sum, Variance
from millpy.windowing.aggregates.positional import Collect, First, Last, Top
from millpy.windowing.aggregates.quantile import Median
from millpy.windowing.logic import WindowedLogic
from millpy.windowing.window import Windows
from tests.property.test_windowed import AGGREGATES, MAX_DISORDER, Reading, breaks, kinds, run, us
from tests.stage_driver import StageDriver

INEXACT = {"variance", "deviation"}
"""The last digits of these depend on the order of adding."""
FLOATS: dict[str, Aggregate] = {
    "low": Min("value"),
    "high": Max("value"),
    "total": Sum("value"),
    "mean": Mean("value"),
    "best": Top("value", n=3),
    "least": Top("value", n=3, smallest=True),
    "earliest": First("value"),
    "latest": Last("value"),
    "all": Collect("value"),
    "median": Median("value"),
}
EVERY = FLOATS | {f"more_{name}": one for name, one in AGGREGATES.items() if name not in INEXACT}
# 0 is what a field of floats has by a default that was written like that.
values = st.sampled_from([None, 0.0, -0.0, 0, 1.0, -1.0, 0.5, 1024.0])
readings = st.builds(
    Reading,
    key=st.sampled_from("ab"),
    site=st.just(1),
    value=values,
    number=st.sampled_from([None, 0, 1, -1, 2**53 + 1, 2**63 - 1]),
    text=st.sampled_from([None, "", "x", "é", "😀"]),
)
feeds = st.lists(st.tuples(readings, st.integers(0, 12)), max_size=24)


def answers(
    windows: Windows, feed: list[Any], where: list[str], few: int, every: dict[str, Aggregate] = EVERY
) -> dict[Any, Any]:
    logic = WindowedLogic(windows, 1_000 * us, every, few_records_max=few)
    outputs = {"windows": logic.output_type(RecordType(Reading), ("key", "site"))}
    subject = StageDriver(
        logic, Reading, key=("key", "site"), outputs=outputs, tables={"windows": 1}, max_disorder=MAX_DISORDER
    )
    run(subject, feed, where, columns=few == 0)
    found = {}
    for result in subject.results:
        for window in subject.deleted(result):
            del found[window]
        for record in result.productions["windows"].objects() if "windows" in result.productions else ():
            window = (record.key, record.site, instant(record.window_start), instant(record.window_end))
            found[window] = {name: exactly(getattr(record, name)) for name in every}
    return found


def exactly(value: Any) -> Any:
    if isinstance(value, list):
        return list(map(exactly, value))
    return struct.pack(">d", value).hex() if isinstance(value, float) else repr(value)


@kinds
@settings(max_examples=25, deadline=None)
@given(feed=feeds, where=breaks, elsewhere=breaks, few=st.sampled_from([0, 3, 10_000]))
def test_results_do_not_depend_on_bundles(
    windows: Windows, feed: list[Any], where: list[str], elsewhere: list[str], few: int
) -> None:
    assert answers(windows, feed, where, few) == answers(windows, feed, elsewhere, 0)


SPREADS: dict[str, Aggregate] = {
    "variance": Variance("value"),
    "deviation": StandardDeviation("value"),
    "of_all": StandardDeviation("value", population=True),
}
huge = st.sampled_from([sys.float_info.max, -sys.float_info.max, 2.0**1000, -(2.0**1000), 2.0**600])


@kinds
@settings(max_examples=20, deadline=None)
@given(
    feed=st.lists(
        st.tuples(huge.map(lambda value: Reading("a", 1, value, None, None)), st.integers(0, 12)), max_size=6
    ),
    where=breaks,
    elsewhere=breaks,
    few=st.sampled_from([0, 3, 10_000]),
)
def test_variance_beyond_the_range_of_doubles_is_no_error(
    windows: Windows, feed: list[Any], where: list[str], elsewhere: list[str], few: int
) -> None:
    found, other = (answers(windows, feed, at, most, SPREADS) for at, most in ((where, few), (elsewhere, 0)))

    assert found.keys() == other.keys()


def test_zero_that_is_stored_has_the_sign_that_the_database_gives_it() -> None:
    assert encode_value(-0.0) == b"0.0"
    assert encode_value([-0.0, "-0.0", {"-0.0": -0.05, 'a"-0.0': [-0.0]}]) == (
        b'[0.0,"-0.0",{"-0.0":-0.05,"a\\"-0.0":[0.0]}]'
    )


@kinds
@settings(max_examples=25, deadline=None)
@given(feed=feeds, where=breaks, few=st.sampled_from([0, 10_000]))
def test_window_without_lateness_has_exactly_one_pane(
    windows: Windows, feed: list[Any], where: list[str], few: int
) -> None:
    """So windows over its panes count every window once."""
    logic = WindowedLogic(windows, 0 * us, {"low": Min("value")}, few_records_max=few)
    outputs = {"windows": logic.output_type(RecordType(Reading), ("key", "site"))}
    subject = StageDriver(logic, Reading, key=("key", "site"), outputs=outputs, max_disorder=MAX_DISORDER)
    run(subject, feed, where, columns=few == 0)

    panes = [record for record, _ in subject.produced("windows")]
    assert {(pane.pane_index, pane.pane_timing) for pane in panes} <= {(0, "on_time")}
    assert len({(pane.key, pane.window_start, pane.window_end) for pane in panes}) == len(panes)
