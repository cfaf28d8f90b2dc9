"""Alarms: which items are due, in an order that does not depend on how the alarms were set."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from millpy.model.time import INSTANT_MAX, Instant
from millpy.windowing.firing import Alarms

settings_of_alarms = st.lists(
    st.tuples(st.sampled_from("abcdef"), st.sampled_from([10, 20, 30, INSTANT_MAX]).map(Instant)), max_size=30
)


@settings(max_examples=300, deadline=None)
@given(settings_of_alarms, st.sampled_from([5, 10, 20, 30]), st.integers(0, 8))
def test_the_first_items_of_the_earliest_times_are_due(
    given_: list[tuple[str, Instant]], now_us: int, items_max: int
) -> None:
    alarms: Alarms[str] = Alarms()
    for item, at in given_:
        alarms.set(item, at)
    current = {item: at for item, at in dict(given_).items() if at < INSTANT_MAX}

    found = alarms.due(Instant(now_us), items_max)

    wanted = sorted((at, item) for item, at in current.items() if at <= now_us)[:items_max]
    assert sorted(found) == sorted(item for _, item in wanted)
    assert alarms.next_time() == min(current.values(), default=INSTANT_MAX)
    assert sorted(alarms.due(Instant(now_us), items_max)) == sorted(found), "they stay until they are set anew"


def test_an_item_that_is_set_again_is_due_once() -> None:
    alarms: Alarms[str] = Alarms()
    alarms.set("a", Instant(10))
    alarms.set("a", INSTANT_MAX)
    alarms.set("b", Instant(10))
    alarms.set("c", Instant(20))

    assert alarms.due(Instant(20), 2) == ["b", "c"]
