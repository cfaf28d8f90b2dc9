"""Empty panes are emitted where the rules of a step ask for them, and panes wait for what may make them due."""

from __future__ import annotations

from itertools import product

import pytest

from millpy import AfterCount, AfterPercentile, Every
from millpy.windowing.firing import PaneTriggers
from millpy.windowing.pane_codec import FiringState, OpenPane
from millpy.windowing.pane_rules import FiringBehavior, PaneRules
from millpy.windowing.triggers import Trigger
from tests.stage_driver import timedelta_us

ALWAYS, IF_NOT_EMPTY = FiringBehavior.ALWAYS, FiringBehavior.IF_NOT_EMPTY
LAST = [False, True]


@pytest.mark.parametrize(("on_time_pane", "final_pane"), [*product((ALWAYS, IF_NOT_EMPTY), repeat=2)])
@pytest.mark.parametrize("last", LAST)
@pytest.mark.parametrize("timing", ["early", "on_time", "late"])
@pytest.mark.parametrize("since_end", [0, 1], ids=["first since the end", "second"])
def test_an_empty_pane_is_the_last_one_or_the_first_since_the_end(
    on_time_pane: FiringBehavior, final_pane: FiringBehavior, last: bool, timing: str, since_end: int
) -> None:
    trigger = Every(timedelta_us(50))
    triggers = PaneTriggers(trigger, PaneRules(on_time_pane=on_time_pane, final_pane=final_pane))
    firing = FiringState(trigger.fresh())
    firing.on_time_index = since_end - 1

    wanted = set()
    if last and final_pane is ALWAYS:
        wanted.add("the last one")
    if timing != "early" and not since_end and on_time_pane is ALWAYS:
        wanted.add("the first one since the end")
    assert triggers._gives_empty(firing, timing, last) is bool(wanted)


@pytest.mark.parametrize("expected", [False, True])
@pytest.mark.parametrize(
    ("trigger", "by_percentile"), [(AfterPercentile(0.9), True), (AfterCount(5), False)], ids=["percentile", "count"]
)
def test_a_pane_whose_end_has_passed_waits_for_the_percentile(
    trigger: Trigger, by_percentile: bool, expected: bool
) -> None:
    triggers = PaneTriggers(trigger)
    pane = OpenPane([])
    pane.firing = FiringState(trigger.fresh(), passed=True, expected=expected)

    assert triggers.note_waiting(pane) is (by_percentile and not expected)
    assert pane.firing.waits is (by_percentile and not expected)
