"""Clocks that jump, under real workers: nothing is doubled, nothing comes too late because of it, nothing is stuck."""

import pytest

from tests.clock_world import HOUR_S, YEAR_S, ClockWorld, a_graph

STEPS = [HOUR_S, -HOUR_S, 10 * YEAR_S, -10 * YEAR_S]


@pytest.mark.parametrize("step_s", STEPS)
def test_a_step_of_the_hosts_clock_lets_no_duplicate_pass(step_s: float) -> None:
    world = ClockWorld(a_graph())
    with world.running():
        machine = world.start()
        world.publish(1)
        machine.clock.jump(step_s)
        world.publish(1)

    assert world.counts() == {"accepted": 1, "duplicate": 1, "dead_lettered": 0}


@pytest.mark.parametrize("step_s", STEPS)
def test_ids_expire_after_a_clock_was_wrong_for_a_moment(step_s: float) -> None:
    world = ClockWorld(a_graph())
    with world.running():
        machine = world.start()
        for clock in (machine.clock, world.server):
            clock.jump(step_s)
            world.publish(1)
            clock.jump(-step_s)
            world.publish(1)
        world.pass_time(11 * 60)
        world.publish(1)

    assert world.counts() == {"accepted": 2, "duplicate": 3, "dead_lettered": 0}


@pytest.mark.parametrize("step_s", STEPS)
def test_nothing_is_late_after_the_databases_clock_was_wrong_for_some_seconds(step_s: float) -> None:
    world = ClockWorld(a_graph())
    with world.running():
        world.start()
        world.publish(1)
        world.pass_time(30)
        world.server.jump(step_s)
        world.pass_time(90)
        world.server.jump(-step_s)
        world.pass_time(90)
        for minute in range(6):
            world.publish(100 + minute)
            world.pass_time(59)

    assert world.late() == 0
    assert world.counts()["accepted"] == 7


@pytest.mark.parametrize("step_s", STEPS)
def test_a_worker_that_starts_while_the_databases_clock_is_wrong_makes_nothing_late(step_s: float) -> None:
    world = ClockWorld(a_graph(), server_ahead_s=step_s)
    with world.running():
        world.start()
        world.publish(1)
        world.pass_time(90)
        world.server.jump(-step_s)
        world.pass_time(90)
        for minute in range(6):
            world.publish(100 + minute)
            world.pass_time(59)

    assert world.late() == 0


# With both clocks wrong, the time without an owner is unknown.
@pytest.mark.parametrize(("host_s", "server_s"), [*((step, 0.0) for step in STEPS), *((0.0, step) for step in STEPS)])
def test_a_successor_with_other_clocks_lets_no_duplicate_pass(host_s: float, server_s: float) -> None:
    world = ClockWorld(a_graph())
    with world.running():
        first = world.start()
        world.publish(1)
        world.kill(first)
        world.server.jump(server_s)
        world.start(host_s)
        world.pass_time(20)
        world.publish(1)

    assert world.counts()["accepted"] == 1


@pytest.mark.parametrize("step_s", STEPS)
def test_ids_expire_in_time_after_both_clocks_stepped_for_good(step_s: float) -> None:
    world = ClockWorld(a_graph())
    with world.running():
        machine = world.start()
        world.publish(1)
        world.server.jump(step_s)
        machine.clock.jump(step_s)
        world.pass_time(120)
        assert [event["why"] for event in world.events("clock_followed")] == ["the host's clock agrees"]
        world.kill(machine)
        world.start(step_s)
        world.pass_time(20)
        world.publish(1, ahead_s=step_s)
        assert world.counts()["duplicate"] == 1
        world.pass_time(11 * 60)
        world.publish(1, ahead_s=step_s)

    assert world.counts() == {"accepted": 2, "duplicate": 1, "dead_lettered": 0}


def test_steps_of_the_databases_clock_are_reported() -> None:
    world = ClockWorld(a_graph())
    with world.running():
        machine = world.start()
        world.server.jump(HOUR_S)
        world.pass_time(70)
        world.server.jump(-HOUR_S)
        world.pass_time(10)

    (refused,) = world.events("clock_refused")
    assert refused["worker"] == str(machine.worker_id)
    assert refused["ahead_s"] == pytest.approx(HOUR_S, abs=1)
    assert len(world.events("clock_agrees")) == 1


@pytest.mark.parametrize("step_s", [HOUR_S, 10 * YEAR_S])
def test_processing_time_advances_after_a_worker_began_with_a_wrong_clock(step_s: float) -> None:
    world = ClockWorld(a_graph(), server_ahead_s=step_s)
    with world.running():
        world.start()
        world.publish(1)
        world.pass_time(20)
        world.server.jump(-step_s)
        world.pass_time(90)
        world.publish(2)
        world.pass_time(30)
        now_us = world.true.now_us()

    floors = [header.processing_floor for header in world.database.headers.values()]
    assert all(floor <= now_us + 2_000_000 for floor in floors)


@pytest.mark.parametrize("step_s", [HOUR_S, 10 * YEAR_S])
def test_intervals_of_a_worker_that_died_while_the_clock_was_ahead_are_taken_over(step_s: float) -> None:
    world = ClockWorld(a_graph())
    with world.running():
        first = world.start()
        world.server.jump(step_s)
        world.pass_time(20)
        world.kill(first)
        world.server.jump(-step_s)
        world.start()
        world.pass_time(20)
        world.publish(1)

    assert world.counts()["accepted"] == 1
