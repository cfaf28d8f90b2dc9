"""Every call of a Computation gets its record unchanged, and dropping one record drops no other."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from millpy.computation import Computation, Context, Value
from millpy.model.checkpoint import Kind
from millpy.model.record import RecordType
from millpy.operators.keyed import ComputationLogic
from tests.stage_driver import StageDriver


class Reading(msgspec.Struct):
    key: str
    value: float
    tags: list[str] = []


class Doubling(Computation):
    """Works on the record itself before it fails."""

    total = Value(float, default=0.0)

    def process_record(self, context: Context, record: Reading) -> None:
        record.value *= 2
        record.tags.append("doubled")
        context[Doubling.total] += record.value * len(record.tags)
        if record.value == 14:
            raise ValueError("seven")


class AsyncDoubling(Doubling):
    async def process_record(self, context: Context, record: Reading) -> None:  # type: ignore[override]
        super().process_record(context, record)


def stored(driver: StageDriver, kind: Kind) -> dict[str, Any]:
    return {name[1]: msgspec.json.decode(value) for name, (value, _, _) in driver.stored.items() if name[0] is kind}


@pytest.mark.parametrize("computation", [Doubling, AsyncDoubling])
@pytest.mark.parametrize("cuts", [[3], [1, 1, 1]], ids=["one bundle", "three bundles"])
def test_a_record_changed_by_one_call_is_unchanged_for_the_next(
    computation: type[Computation], cuts: Sequence[int]
) -> None:
    # When a row raises, its key's rows run again, and the failing one is retried: each must get fresh records.
    driver = StageDriver(ComputationLogic(computation()), Reading)
    rows = [(Reading("a", value), at) for at, value in enumerate((1.0, 7.0, 2.0))]
    given = [record for record, _ in rows]

    dead_letters = []
    for count in cuts:
        dead_letters += driver.feed(rows[:count]).dead_letters
        del rows[:count]

    assert stored(driver, Kind.STATE) == {"total": 6.0}
    assert [msgspec.json.decode(dead_letter.payload)["value"] for dead_letter in dead_letters] == [7.0]
    assert given == [Reading("a", 1.0), Reading("a", 7.0), Reading("a", 2.0)]  # what other consumers get


class Careful(Computation):
    seen = Value(list[float])

    def process_record(self, context: Context, record: Reading) -> None:
        if record.value != record.value:
            raise ValueError("not a number")
        context[Careful.seen] = [*(context[Careful.seen] or []), record.value]


def test_discarding_a_record_that_could_not_wait_discards_no_other() -> None:
    driver = StageDriver(ComputationLogic(Careful(), parks=True), Reading)

    stopped = driver.feed([(Reading("a", 1.0), 1), (Reading("a", float("nan")), 2), (Reading("a", 3.0), 3)])
    driver.restart()
    discarded = driver.release([(Reading("a", 4.0), 4)], discard=True)

    assert len(stopped.dead_letters) == 1  # JSON has no NaN, so it could not be parked
    assert discarded.dead_letters == []
    assert stored(driver, Kind.STATE) == {"seen": [1.0, 3.0, 4.0]}
    assert (stopped.consumed_by_input, discarded.consumed_by_input) == ({0: 1}, {0: 2})


class Late(Computation):
    late = Value(list[bool])

    def process_record(self, context: Context, record: Reading) -> None:
        context[Late.late] = [*(context[Late.late] or []), context.late]


@pytest.mark.parametrize("columns", [False, True])
def test_a_record_at_the_watermark_is_not_late_and_the_one_before_it_is(columns: bool) -> None:
    driver = StageDriver(ComputationLogic(Late()), Reading)
    driver.feed([(Reading("a", 1.0), 10)])

    driver.feed([(Reading("a", 2.0), 10), (Reading("a", 3.0), 9), (Reading("a", 4.0), 11)], columns=columns)

    assert stored(driver, Kind.STATE) == {"late": [False, False, True, False]}


class Endless(Computation):
    def process_record(self, context: Context, record: Reading) -> None:
        for number in itertools.count() if record.value == 7 else range(5):
            context.produce(Reading(record.key, number))


def test_a_call_that_produces_without_end_is_a_dead_letter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("millpy.computation.CALL_RECORDS_MAX", 5)
    driver = StageDriver(ComputationLogic(Endless()), Reading, outputs={"made": RecordType(Reading)})

    result = driver.feed([(Reading("a", value), at) for at, value in enumerate((1.0, 7.0, 2.0))])

    assert [dead_letter.detail for dead_letter in result.dead_letters] == [
        "RefusedValueError: a call produces more than 5 records"
    ]
    assert [made.value for made in result.productions["made"].objects()] == 2 * [0, 1, 2, 3, 4]
