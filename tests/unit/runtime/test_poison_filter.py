"""Poison isolation finds exactly the refused records, with logarithmically many trials."""

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import pytest

from millpy.errors import PoisonError, TransientError
from millpy.hosting.isolation import EVERYTHING, Isolation
from millpy.hosting.step import TurnInput
from millpy.model.checkpoint import Checkpoint, Grant, ResultRows
from millpy.model.record import Records, RecordType
from millpy.model.time import INSTANT_MIN
from millpy.runtime.poison_filter import find_refused, without_rows
from millpy.runtime.poison_search import PoisonSearch
from millpy.runtime.turn import Turn


class Reading(msgspec.Struct):
    value: int


def some_records(values: list[int]) -> Records:
    return Records(RecordType(Reading), np.zeros(len(values), np.int64), objects=[Reading(v) for v in values])


@pytest.mark.parametrize("bad", [[0], [99], [17, 63], [5, 6, 7]])
async def test_bisection_finds_every_refused_record(bad: list[int]) -> None:
    trials = 0

    async def trial(isolation: Isolation) -> PoisonError | None:
        nonlocal trials
        trials += 1
        isolation.seen = 0
        values = list(range(100))
        rows, _ = isolation.admit(some_records(values))
        admitted = values if rows is None else rows.tolist()
        return PoisonError("check constraint", table="sums") if set(admitted) & set(bad) else None

    isolation = Isolation()
    while await trial(isolation) is not None:
        assert await find_refused(trial, isolation, 100, PoisonError("check constraint", table="sums")) is None
    isolation.seen = 0
    rows, blamed = isolation.admit(some_records(list(range(100))))

    assert sorted(isolation.refused) == bad
    assert rows is not None
    assert rows.tolist() == [v for v in range(100) if v not in bad]
    assert [(b.row, b.detail, b.table) for b in blamed] == [(value, "check constraint", "sums") for value in bad]
    assert trials <= len(bad) * 10 + 2


@pytest.mark.parametrize("bad", [range(100), range(0, 100, 2), range(50, 100), range(0, 100, 10)])
async def test_many_refused_records_are_found_in_a_few_trials_each(bad: range) -> None:
    trials = 0

    async def trial(isolation: Isolation) -> PoisonError | None:
        nonlocal trials
        trials += 1
        taken = [place for place in range(min(100, isolation.upto)) if place not in isolation.refused]
        return PoisonError("check constraint", table="sums") if set(taken) & set(bad) else None

    isolation = Isolation()
    while await trial(isolation) is not None:
        assert await find_refused(trial, isolation, 100, PoisonError("check constraint", table="sums")) is None

    assert sorted(isolation.refused) == list(bad)
    assert trials <= len(bad) * (2 + bad.step.bit_length()) + 20


async def test_search_ends_when_the_database_refuses_what_it_has_just_taken() -> None:
    answers = iter([None, PoisonError("taken by another session"), None, None])

    async def trial(isolation: Isolation) -> PoisonError | None:
        return next(answers)

    isolation = Isolation(refused={1: ("check constraint", "sums")})

    assert await find_refused(trial, isolation, 2, PoisonError("taken by another session", table="sums")) is None
    assert sorted(isolation.refused) == [0, 1]


async def test_a_turn_that_is_refused_without_any_record_is_not_blamed_on_one() -> None:
    async def trial(isolation: Isolation) -> PoisonError | None:
        return PoisonError("an old window")

    isolation = Isolation()

    assert await find_refused(trial, isolation, 10, PoisonError("an old window")) is not None
    assert isolation.refused == {}


def test_refused_result_rows_become_dead_letters() -> None:
    rows = ResultRows(1, [["a", "b", "c"], [1, 2, 3]], 3, first=True)
    checkpoint = Checkpoint(Grant(1, 1), 1, INSTANT_MIN, INSTANT_MIN, results=[rows])

    (kept,) = without_rows([checkpoint], EVERYTHING, {1: "too large"}, {1: "sums"})

    assert kept.results[0].columns == [["a", "c"], [1, 3]]
    assert [(d.computation, msgspec.json.decode(d.payload)) for d in kept.dead_letters] == [("sums", ["b", 2])]


async def test_record_alone_in_its_turn_is_refused_in_the_words_of_the_database() -> None:
    async def trial(isolation: Isolation) -> PoisonError | None:
        return None

    isolation = Isolation()

    assert await find_refused(trial, isolation, 1, PoisonError("violates not_42", table="sums")) is None
    assert isolation.refused == {0: ("violates not_42", "sums")}


@pytest.mark.parametrize("named", [0, -1], ids=["first", "last"])
@pytest.mark.parametrize("whys", [{2: "two", 5: "five"}, {0: "first", 7: "last"}, {3: "three", 4: "four", 6: "six"}])
async def test_each_refused_row_becomes_a_dead_letter_with_its_own_reason(whys: dict[int, str], named: int) -> None:
    """Of several refused rows the database names one, which is not always the one that a search finds next."""
    rows = ResultRows(1, [list(range(8))], 8, True)
    checkpoint = Checkpoint(Grant(1, 1), 1, INSTANT_MIN, INSTANT_MIN, results=[rows])
    turn = Turn(TurnInput(clock=Any, monotonic=0.0), [checkpoint], [], 0, {})  # type: ignore[arg-type]

    async def step(_: Isolation) -> Turn:
        return turn

    async def refusal(checkpoints: Sequence[Checkpoint]) -> PoisonError | None:
        sent = [place for part in checkpoints[0].results for place in part.columns[0]]
        refused = [place for place in sent if place in whys]
        return PoisonError(whys[refused[named]]) if refused else None

    found = await PoisonSearch(step, refusal, {1: "sums"}, {}).run(10, PoisonError("refused"), lambda: False)

    assert found is not None
    (checkpoint,) = found.checkpoints
    assert [part.columns for part in checkpoint.results] == [[[place for place in range(8) if place not in whys]]]
    assert {letter.payload: letter.detail for letter in checkpoint.dead_letters} == {
        b"[%d]" % place: why for place, why in whys.items()
    }


@pytest.mark.parametrize("blamed", ["records", "rows"])
async def test_a_search_whose_time_is_over_ends_after_one_more_trial(blamed: str) -> None:
    """Every record or row is refused; the turn becomes smaller, and the next search has time again."""
    rows = ResultRows(1, [list(range(8))], 8, True)
    checkpoint = Checkpoint(Grant(1, 1), 1, INSTANT_MIN, INSTANT_MIN, results=[rows])
    turn = Turn(TurnInput(clock=Any, monotonic=0.0), [checkpoint], [], 8, {})  # type: ignore[arg-type]
    isolations: list[Isolation] = []

    async def step(isolation: Isolation) -> Turn:
        isolations.append(isolation)
        return turn

    async def refusal(checkpoints: Sequence[Checkpoint]) -> PoisonError | None:
        if blamed == "records" and isolations[-1].upto == 0:
            return None
        return PoisonError("refused") if any(part.columns[0] for part in checkpoints[0].results) else None

    search = PoisonSearch(step, refusal, {1: "sums"}, {})
    answers = iter([False, True])

    with pytest.raises(TransientError, match="and more"):
        await search.run(100, PoisonError("refused"), lambda: next(answers))

    assert search.is_exhausted
    assert (search.records, search.rows) == {"records": (1, 0), "rows": (0, 1)}[blamed]
