"""Laws of an allowed lateness that changes while windows are open: what is over stays over, and nothing else is lost.

The oracle is a plain loop that judges each record by the present lateness and by a floor: the windows that end by it
were over at a change. Bundles, restarts, columns and bounds on panes do not show.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millpy import AfterCount, AfterWatermark, WindowFunction
from millpy.model.record import RecordType
from millpy.model.time import INSTANT_MIN
from millpy.windowing.aggregates.numeric import Count, Max
from millpy.windowing.logic import WindowedLogic
from millpy.windowing.triggers import Trigger
from millpy.windowing.window import SlidingWindows, Windows
from tests.property.test_added_aggregates import feed_until
from tests.property.test_user_windows import Sliding, moment
from tests.property.test_user_windows import us as micros
from tests.property.test_windowed import (
    MAX_DISORDER,
    SIZE,
    WINDOWS,
    Group,
    Outcome,
    PlainLoop,
    Reading,
    breaks,
    newest_panes,
    payload,
    rows,
    run,
    us,
)
from tests.stage_driver import StageDriver


class Visits(WindowFunction):
    """The sessions of `WINDOWS`."""

    merges = True

    def assign(self, record: Any, at: datetime, key: Any) -> Iterable[tuple[datetime, datetime]]:
        return [(at, moment(micros(at) + (6 if (record.key, record.site) == ("b", 1) else 3)))]


OWN: dict[str, tuple[Windows, Windows]] = {
    "own": (SlidingWindows(SIZE * us, every=4 * us), Sliding(SIZE, 4)),
    "own sessions": (WINDOWS["sessions"], Visits()),
}
AGGREGATES = {"n": Count(), "high": Max("number")}
latenesses = st.lists(st.tuples(st.sampled_from([0, 5, 10, 30, 1000]), st.integers(0, 15)), min_size=2, max_size=3)


def counted(group: Group) -> tuple[Any, ...]:
    numbers = [record.number for record, _ in group.records if record.number is not None]
    return len(group.records), max(numbers, default=None)


def expected(windows: Windows, parts: list[tuple[int, list[Any]]]) -> Outcome:
    """Recount by a plain loop."""
    loop, late, largest = PlainLoop(windows, parts[0][0]), [], INSTANT_MIN + MAX_DISORDER
    for allowed, part in parts:
        loop.change(allowed, largest - MAX_DISORDER)
        for record, at in part:
            watermark, largest = largest - MAX_DISORDER, max(largest, at)
            late += [(at, payload(record))] * loop.take(record, at, watermark)
    return Outcome(loop.outcome(counted), sorted(late))


@pytest.mark.parametrize("name", [*WINDOWS, *OWN])
@settings(max_examples=25, deadline=None)
@given(
    feed=rows,
    where=breaks,
    changes=latenesses,
    few=st.sampled_from([0, 3, 10_000]),
    panes_max=st.sampled_from([1, 99]),
    trigger=st.sampled_from([AfterWatermark(), AfterWatermark(early=AfterCount(2), late=AfterCount(1))]),
)
def test_lateness_changes_for_the_windows_that_are_not_over(
    name: str,
    feed: list[Any],
    where: list[str],
    changes: list[tuple[int, int]],
    few: int,
    panes_max: int,
    trigger: Trigger,
) -> None:
    plain, windows = OWN.get(name) or (WINDOWS[name], WINDOWS[name])
    logics = [
        WindowedLogic(windows, allowed * us, AGGREGATES, few_records_max=few, trigger=trigger) for allowed, _ in changes
    ]
    outputs = {"windows": logics[0].output_type(RecordType(Reading), ("key", "site"))}
    subject = StageDriver(
        logics[0], Reading, key=("key", "site"), outputs=outputs, tables={"windows": 1}, max_disorder=MAX_DISORDER
    )
    subject.panes_max = panes_max
    parts, left = [], feed
    for place, (logic, (allowed, count)) in enumerate(zip(logics, changes, strict=True)):
        if place:
            subject.change_lateness(logic, changes[place - 1][0])
        part, left = (left[:count], left[count:]) if place < len(changes) - 1 else (left, [])
        parts.append((allowed, part))
        if place < len(changes) - 1:
            feed_until(subject, part, where, columns=few == 0)
    run(subject, parts[-1][1], where, columns=few == 0)

    wanted, panes = expected(plain, parts), newest_panes(subject, AGGREGATES)
    late = [
        row for r in subject.results for part in r.late for row in zip(part.event_times, part.payloads, strict=True)
    ]
    assert sorted(late) == wanted.late
    assert {window: values[:2] for window, values in panes.items()} == {
        window: values[:2] for window, values in wanted.windows.items()
    }
    assert {window: values[-1] for window, values in panes.items()} == {
        window: values[-1] for window, values in wanted.windows.items()
    }
