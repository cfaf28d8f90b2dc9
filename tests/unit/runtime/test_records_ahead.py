"""Records that are ahead of their arrival, among punctual ones: nobody else is late because of them."""

import pytest

from millpy.ingest.settings import Dedupe, EventTime
from millpy.model.time import minutes, seconds
from tests.clock_world import YEAR_S, ClockWorld, a_graph

AHEAD = [0.5, 30.0, 590.0, 3_590.0, 10 * YEAR_S]


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize(("ahead_s", "disorder_s"), [*((ahead, 5) for ahead in AHEAD), (0.5, 0), (3_590.0, 0)])
def test_one_record_ahead_makes_no_other_late(ahead_s: float, disorder_s: int) -> None:
    world = ClockWorld(a_graph(event_time=EventTime("at", unit="us", max_disorder=seconds(disorder_s)), idle=None))
    with world.running():
        world.start()
        world.publish(1, ahead_s=ahead_s)
        minutes_after = (round(ahead_s / 60) if ahead_s < 3_600 else 0) + 10  # until its time has come, if it is near
        for minute in range(minutes_after):
            world.publish(100 + minute)
            world.pass_time(59)

    assert world.late() == 0
    assert world.counts()["accepted"] >= minutes_after


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("ahead_s", AHEAD)
def test_a_fleet_that_is_ahead_makes_no_other_device_late(ahead_s: float) -> None:
    world = ClockWorld(a_graph())
    with world.running():
        world.start()
        for minute in range(10):
            world.publish(*range(1_000 * minute, 1_000 * minute + 20), ahead_s=ahead_s)
            world.publish(100_000 + minute)
            world.pass_time(58)

    assert world.late() == 0
    assert world.counts()["accepted"] >= 10


def test_a_record_that_is_ahead_keeps_its_event_time_and_its_window() -> None:
    world = ClockWorld(a_graph())
    with world.running():
        world.start()
        at = world.true.now_us() + 300_000_000
        world.publish(7, ahead_s=300)
        world.pass_time(420)

    (row,) = world.database.rows("counts")
    assert row["window_start"] == at // 60_000_000 * 60_000_000


def test_one_record_ahead_does_not_advance_a_named_dedupe_clock() -> None:
    world = ClockWorld(a_graph(dedupe=Dedupe("id", within=minutes(2), time="at", unit="us")))
    with world.running():
        world.start()
        world.publish(1)
        world.publish(2, ahead_s=590)
        world.publish(1)

    assert world.counts() == {"accepted": 2, "duplicate": 1, "dead_lettered": 0}


def test_a_sorted_source_continues_after_a_record_that_is_ahead() -> None:
    world = ClockWorld(a_graph(event_time=EventTime("at", unit="us", sorted=True)))
    with world.running():
        world.start()
        world.publish(1, ahead_s=590)
        for minute in range(5):
            world.pass_time(10)
            world.publish(100 + minute)

    assert world.counts() == {"accepted": 6, "duplicate": 0, "dead_lettered": 0}


@pytest.mark.parametrize(("tolerance", "accepted"), [(seconds(30), 1), (minutes(5), 2)])
def test_a_source_sets_how_far_ahead_a_record_may_be(tolerance: object, accepted: int) -> None:
    time = EventTime("at", unit="us", max_disorder=seconds(5), future_tolerance=tolerance)  # type: ignore[arg-type]
    world = ClockWorld(a_graph(event_time=time))
    with world.running():
        world.start()
        world.publish(1, ahead_s=29)
        world.publish(2, ahead_s=290)

    assert world.counts() == {"accepted": accepted, "duplicate": 0, "dead_lettered": 2 - accepted}
    assert [dead_letter.reason for _, _, dead_letter in world.database.dead_letters] == ["future"] * (2 - accepted)
