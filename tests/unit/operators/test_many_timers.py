"""Many timers of one key: all of them fire, once, in due order, in time, in as many turns as they need."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from millpy.computation import Computation, Context, Value
from millpy.limits import Limits
from millpy.model.bundle import Bundle
from millpy.model.keys import KeyHasher
from millpy.model.record import RecordType
from millpy.model.stage import Work
from millpy.model.time import INSTANT_MAX, Instant
from millpy.model.timer import Timer
from millpy.operators.callbacks import TIMER_CHAIN_MAX, CallbackStep, Calls
from millpy.operators.keyed import ComputationLogic
from tests.stage_driver import SOURCE, StageDriver

MANY = 19_999


class Order(msgspec.Struct):
    key: str
    what: str
    number: int = 0


class Out(msgspec.Struct):
    name: str


class Timers(Computation):
    seen = Value(int, default=0)

    def process_record(self, context: Context, record: Any) -> None:
        context[self.seen] += 1
        if record.what == "set":
            context.set_timer(f"t{record.number}", at=1_000_000 + record.number % 7)
        elif record.what == "delete":
            context.delete_timer(f"t{record.number}")
        elif record.what == "fan":
            context.set_timer("fan", at=1_000_000)
        elif record.what.startswith("again "):
            context.set_timer(record.what, at=1_000_000, processing=record.what.endswith("processing"))
        elif record.what == "fail":
            raise ValueError("as ordered")
        else:
            context.set_timer(record.what, at=1_000_000)

    def process_timer(self, context: Context, timer: Timer) -> None:
        context.produce(Out(timer.name))
        if timer.name.startswith("again"):
            context.set_timer(timer.name, at=timer.at, processing=timer.processing)
        elif timer.name in ("ping", "pong"):
            context.set_timer({"ping": "pong", "pong": "ping"}[timer.name], at=timer.at)
        elif timer.name.startswith("new"):
            context.set_timer(f"new{len(timer.name)}" + "x" * (len(timer.name) % 50), at=timer.at)
        elif timer.name == "minutes" and timer.at_us < 1_000_000 + 5 * TIMER_CHAIN_MAX:
            context.set_timer("minutes", at=timer.at_us + 1)
        elif timer.name == "fan":
            for number in range(3 * TIMER_CHAIN_MAX):
                context.set_timer(f"t{number}", at=timer.at)


def subject() -> StageDriver:
    return StageDriver(ComputationLogic(Timers()), Order, outputs={"out": RecordType(Out)}, limits=Limits())


def fired(driver: StageDriver) -> list[str]:
    return [out.name for out, _ in driver.produced("out")]


@pytest.mark.parametrize("fails", [False, True], ids=["", "beside a record that fails"])
def test_many_timers_of_one_key_are_set_replaced_deleted_and_fired_quickly(fails: bool) -> None:
    driver, started = subject(), time.process_time()
    driver.feed([(Order("k", "set", n), n) for n in range(MANY)] + ([(Order("k", "fail"), MANY)] if fails else []))
    driver.feed([(Order("k", "set", n + 1), MANY + n) for n in range(0, MANY, 3)])
    driver.feed([(Order("k", "delete", n), 2 * MANY + n) for n in range(0, MANY, 2)])
    driver.feed([], watermark=2_000_000)

    names = fired(driver)
    expected = {f"t{n}" for n in range(1, MANY, 2)} | {f"t{MANY}"}  # the last was set by the second bundle
    assert len(names) == len(set(names))
    assert set(names) == expected
    assert not driver.interval.next_due()[0] < INSTANT_MAX
    assert time.process_time() - started < 30, (
        "20,000 took longer than the watchdog, and four times as long for twice as many"
    )


def test_more_different_timers_than_the_guard_allows_may_be_due_at_one_time() -> None:
    driver = subject()
    driver.feed([(Order("k", "set", n * 7), n) for n in range(5 * TIMER_CHAIN_MAX)])
    driver.feed([(Order("other", "fan"), 6 * TIMER_CHAIN_MAX)])
    driver.feed([], watermark=2_000_000)

    assert len(fired(driver)) == 5 * TIMER_CHAIN_MAX + 1 + 3 * TIMER_CHAIN_MAX
    assert not [dead_letter for result in driver.results for dead_letter in result.dead_letters]


@pytest.mark.parametrize("what", ["again", "ping", "new"])
def test_a_timer_that_resets_itself_at_its_own_time_stops_and_others_fire(what: str) -> None:
    driver = subject()
    driver.feed([(Order("k", "set", n), n) for n in range(2_000)] + [(Order("k", what), 3_000)])
    driver.feed([], watermark=2_000_000)

    dead_letters = [dead_letter for result in driver.results for dead_letter in result.dead_letters]
    assert len(dead_letters) == 1
    assert "again and again" in dead_letters[0].detail
    assert {f"t{n}" for n in range(2_000)} <= set(fired(driver))


def test_a_timer_that_is_set_again_later_fires_as_long_as_it_is_due() -> None:
    driver = subject()
    driver.feed([(Order("k", "minutes"), 0)])
    driver.feed([], watermark=2_000_000)

    assert len(fired(driver)) == 5 * TIMER_CHAIN_MAX + 1


@pytest.mark.parametrize("bound", ["timers", "time"])
@pytest.mark.parametrize("what", ["set", "again"])
def test_a_turn_fires_up_to_its_limit_and_leaves_the_rest_due(bound: str, what: str) -> None:
    whole, parted = subject(), subject()
    for driver in (whole, parted):
        driver.feed([(Order(f"k{n % 3}", "set", n), n) for n in range(500)] + [(Order("k", what, 7), 600)])
    whole.feed([], watermark=2_000_000)
    turns, unfinished, looks = 0, True, iter(range(10**9))
    while unfinished:
        turns += 1
        parted.bundle += 1
        before, parted.watermark = parted.watermark, Instant(2_000_000)
        more = (7, lambda: False) if bound == "timers" else (10**9, lambda: next(looks) % 5 == 4)
        result = parted.interval.step(
            Work(parted.bundle, [], before, parted.watermark, Instant(0), (), 10**9, *more)  # type: ignore[arg-type]
        )
        parted.commit(result)
        parted.results.append(result)
        unfinished = result.unfinished
        assert turns < 2_000

    assert turns > 50
    assert sorted(fired(parted)) == sorted(fired(whole))
    assert parted.stored == whole.stored


@pytest.mark.parametrize("restarts", [False, True], ids=["one owner", "an owner a turn"])
@pytest.mark.parametrize("domain", ["event", "processing"])
def test_a_chain_of_timers_is_as_long_if_records_of_its_key_come_between_turns(domain: str, restarts: bool) -> None:
    driver = subject()
    driver.timers_max = 300
    driver.feed([(Order("k", f"again {domain}"), 1_000_000)], now_us=1_000_000)
    for number in range(10):
        if restarts:
            driver.restart()
        driver.feed([(Order("k", "set", number), 1_500_000 + number)], now_us=2_000_000)

    dead_letters = [dead_letter for result in driver.results for dead_letter in result.dead_letters]
    assert len(dead_letters) == 1
    assert "again and again" in dead_letters[0].detail
    assert fired(driver).count(f"again {domain}") == TIMER_CHAIN_MAX


class Ticks(Computation):
    """Ticks each second of event time, from when its processing timer has fired, as over records of last year."""

    def process_record(self, context: Context, record: Any) -> None:
        context.set_timer(record.what, at=context.now_us, processing=True)

    def process_timer(self, context: Context, timer: Timer) -> None:
        context.produce(Out(timer.name))
        if timer.name != "again":
            context.set_timer("tick", at=context.input_watermark_us + 1_000_000)
        elif timer.processing:
            context.set_timer("again", at=0)
        else:
            context.set_timer("again", at=context.now_us, processing=True)


def ticks() -> StageDriver:
    return StageDriver(ComputationLogic(Ticks()), Order, outputs={"out": RecordType(Out)}, limits=Limits())


def test_a_timer_of_event_time_that_waits_for_the_watermark_is_in_no_chain_of_processing_timers() -> None:
    driver, count = ticks(), TIMER_CHAIN_MAX + 10
    driver.feed([(Order("k", "tick"), 0)], now_us=10**15)
    for second in range(1, count + 1):
        driver.feed([], watermark=second * 1_000_000)

    assert fired(driver) == ["tick"] * (count + 1)
    assert not [dead_letter for result in driver.results for dead_letter in result.dead_letters]


def test_a_chain_of_timers_of_both_times_ends() -> None:
    driver = ticks()
    driver.feed([(Order("k", "again"), 0)], now_us=10**15)

    (dead_letter,) = [dead_letter for result in driver.results for dead_letter in result.dead_letters]
    assert "again and again" in dead_letter.detail
    assert fired(driver) == ["again"] * TIMER_CHAIN_MAX


def test_a_key_that_a_chain_of_timers_has_stopped_is_released_once_the_code_is_mended() -> None:
    outputs = {"out": RecordType(Out)}
    driver = StageDriver(ComputationLogic(Timers(), parks=True), Order, outputs=outputs, limits=Limits())
    driver.feed([(Order("k", "ping"), 0)], watermark=2_000_000)
    assert len(driver.parked()) == 1
    driver.deploy(ComputationLogic(Ticks(), parks=True), outputs)

    driver.release()

    assert not driver.parked()
    assert fired(driver)[TIMER_CHAIN_MAX:] == ["ping"]


def test_a_turn_does_not_look_at_all_keys_that_have_timers() -> None:
    """Not even while their state takes more memory than it may, which keys with timers keep in memory."""

    def seconds_of_turns(limits: Limits) -> float:
        driver = StageDriver(ComputationLogic(Timers()), Order, outputs={"out": RecordType(Out)}, limits=limits)
        driver.feed([(Order(f"k{n}", "set", n), n) for n in range(MANY)])
        driver.fold()
        started = time.process_time()
        for number in range(50):
            driver.feed([(Order("k0", "set", number), MANY)])
        return time.process_time() - started

    assert seconds_of_turns(Limits(state_cache_bytes_max=1)) < 2 * seconds_of_turns(Limits()) + 0.1


def test_values_leave_memory_once_they_are_rows_and_their_keys_have_no_timers() -> None:
    """Also those of keys that could not leave yet when their turn came."""
    driver = StageDriver(
        ComputationLogic(Timers()), Order, outputs={"out": RecordType(Out)}, limits=Limits(state_cache_bytes_max=1)
    )

    def in_memory() -> set[str]:
        driver.feed([(Order("other", "delete"), 2)])
        keys = ["changed", "timed", "other"]
        records = driver.records([(Order(key, ""), 2) for key in keys])
        bundle = Bundle(0, SOURCE, 1, Instant(0), records, records.keys(("key",), KeyHasher()))
        return set(keys) - {msgspec.json.decode(key) for key in driver.interval.missing_keys([bundle])}

    driver.feed([(Order("changed", "delete"), 0), (Order("timed", "set"), 1)])
    unfolded = in_memory()
    driver.fold()
    folded = in_memory()
    driver.feed([], watermark=1_000_000)
    driver.fold()

    assert (unfolded, folded) == ({"changed", "timed", "other"}, {"timed", "other"})
    assert in_memory() == {"other"}


@pytest.mark.parametrize("limits", [Limits(), Limits(state_cache_bytes_max=1)], ids=["in memory", "loaded"])
def test_a_turn_looks_at_no_more_keys_than_may_fire(monkeypatch: pytest.MonkeyPatch, limits: Limits) -> None:
    driver = StageDriver(ComputationLogic(Timers()), Order, outputs={"out": RecordType(Out)}, limits=limits)
    driver.feed([(Order(f"k{n}", "set", n), n) for n in range(500)])
    driver.timers_max = 10
    looked_at: list[int] = []
    fire_due = Calls.fire_due

    def counted(calls: Calls, step: CallbackStep, codes: Sequence[int]) -> None:
        looked_at.append(len(codes))
        fire_due(calls, step, codes)

    monkeypatch.setattr(Calls, "fire_due", counted)
    driver.feed([], watermark=2_000_000)
    while driver.results[-1].unfinished:
        driver.feed([], watermark=2_000_000)

    assert len(fired(driver)) == len(set(fired(driver))) == 500
    assert looked_at == [11] * 49 + [10]
