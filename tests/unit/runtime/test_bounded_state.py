"""What a device makes a computation remember is bounded: timers of ever new keys, and large records that wait."""

from __future__ import annotations

import msgspec

from millpy.computation import Computation, Context, Value
from millpy.limits import Limits
from millpy.model.keys import KeyHasher
from millpy.operators.keyed import ComputationLogic
from tests.stage_driver import StageDriver


class Reading(msgspec.Struct):
    key: str
    text: str = ""


class Quiet(Computation):
    count = Value(int, default=0)

    def process_record(self, context: Context, record: Reading) -> None:
        context[Quiet.count] += 1
        context.set_timer("quiet", at=context.event_time_us + 1_000)


class Stops(Computation):
    def process_record(self, context: Context, record: Reading) -> None:
        raise ValueError("no")


def test_timers_of_new_keys_are_bounded_and_known_keys_continue() -> None:
    subject = StageDriver(ComputationLogic(Quiet()), Reading, limits=Limits(open_timers_max=50))
    subject.feed([(Reading(f"k{n}"), 1) for n in range(30)])

    flood = subject.feed([(Reading(f"n{n}"), 1) for n in range(100)])
    assert len(flood.dead_letters) == 80
    assert {dead_letter.reason for dead_letter in flood.dead_letters} == {"refused"}
    assert flood.consumed_by_input == {0: 20} and flood.dead_lettered_by_input == {0: 80}
    assert not subject.feed([(Reading(f"k{n}"), 2) for n in range(30)]).dead_letters
    subject.restart()
    assert len(subject.feed([(Reading("another"), 2), (Reading("k1"), 2)]).dead_letters) == 1

    subject.feed([], watermark=2_000)
    assert not subject.feed([(Reading(f"n{n}"), 3_000) for n in range(50)]).dead_letters


def test_parked_records_are_bounded_in_bytes() -> None:
    limits = Limits(parked_bytes_max=100_000)
    subject = StageDriver(ComputationLogic(Stops(), parks=True), Reading, limits=limits)
    dead_letters = 0
    for _ in range(50):
        dead_letters += len(subject.feed([(Reading("a", "x" * 10_000), 1)]).dead_letters)
    assert dead_letters == 40
    subject.restart()
    assert len(subject.feed([(Reading("a", "x"), 1)]).dead_letters) == 1


def test_cached_hashes_of_long_keys_are_bounded() -> None:
    hasher = KeyHasher(keys_max=1_000)
    for n in range(100):
        hasher.hashes([f"{n}-{k}-" + "x" * 990 for k in range(10)])
        assert sum(map(len, hasher._by_type.values())) <= 110
