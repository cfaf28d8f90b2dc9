"""The bound on open windows: what has no room is dead-lettered and nothing else changes; memory is bounded."""

from __future__ import annotations

import random
from datetime import timedelta
from typing import Any

import msgspec
import numpy as np
import pytest

from millpy.limits import Limits
from millpy.model.record import Records, RecordType
from millpy.model.stage import StepResult
from millpy.model.time import INSTANT_MAX
from millpy.windowing.accumulator import Aggregate
from millpy.windowing.aggregates.numeric import Count, Sum
from millpy.windowing.aggregates.positional import Collect, Last
from millpy.windowing.logic import WindowedLogic
from millpy.windowing.session_state import OpenSessions
from millpy.windowing.window import FixedWindows, SessionWindows, SlidingWindows, Windows
from tests.stage_driver import StageDriver


def us(number: int) -> timedelta:
    return timedelta(microseconds=number)


KINDS: dict[str, Windows] = {
    "fixed": FixedWindows(us(10)),
    "slices": SlidingWindows(us(12), every=us(4)),
    "sliding": SlidingWindows(us(10), every=us(4)),
    "sessions": SessionWindows(us(6)),
}
ROOM = 30_000


class Reading(msgspec.Struct):
    key: str
    number: int


class Without(StageDriver):
    """Some of the rows do not come, but the watermark moves as if they did."""

    missing: frozenset[int] = frozenset()

    def records(self, rows: Any, *, columns: bool = False, **settings: Any) -> Records:
        kept = [place for place, (record, _) in enumerate(rows) if record.number not in self.missing]
        return super().records(rows, columns=columns, **settings).take(np.array(kept, np.int64))


def driver(
    kind: str, few: int = 0, room: int = ROOM, cls: type[StageDriver] = StageDriver, **aggregates: Aggregate
) -> Any:
    found = aggregates or {"n": Count(), "total": Sum("number"), "last": Last("key")}  # text stays until they fire
    logic = WindowedLogic(KINDS[kind], us(20), found, few_records_max=few)
    output = logic.output_type(RecordType(Reading), ("key",))
    limits = Limits(open_windows_bytes_max=room, closed_windows_bytes_max=1)
    return cls(logic, Reading, outputs={"w": output}, tables={"w": 5}, limits=limits, max_disorder=15)


def rows_of(result: StepResult) -> list[Any]:
    found = []
    for part in result.results:
        columns = [c if isinstance(c, list) else c.to_pylist() for c in part.columns]
        found += [*zip(*columns, strict=True)]
    return sorted(found, key=str)


def numbers(result: StepResult) -> list[int]:
    assert {dead_letter.reason for dead_letter in result.dead_letters} <= {"windows"}
    return [msgspec.json.decode(dead_letter.payload)["number"] for dead_letter in result.dead_letters]


def open_panes(subject: Any) -> int:
    found = subject.interval._open
    if isinstance(found, OpenSessions):
        return sum(map(len, found.by_key.values()))
    return sum(map(len, found.panes.values()))


def some_bundles(seed: int) -> list[list[tuple[Reading, int]]]:
    rng = random.Random(seed)
    number, bundles = 0, []
    for turn in range(40):
        bundle = []
        for _ in range(rng.choice([1, 5, 30])):
            number += 1
            key = rng.choice(["a", "b", f"new{rng.randrange(400)}"])
            bundle.append((Reading(key, number), 3 * turn + rng.randrange(-25, 10)))
        bundles.append(bundle)
    return bundles


@pytest.mark.parametrize("few", [0, 1_000], ids=["columns", "plain"])
@pytest.mark.parametrize("kind", KINDS)
def test_record_without_room_has_no_effect(kind: str, few: int) -> None:
    refused_somewhere = loaded = 0
    for seed in range(6):
        rng = random.Random(seed)
        subject, other, spilling = driver(kind, few), driver(kind, few, 10**12, Without), driver(kind, few)
        for bundle in some_bundles(seed):
            result = subject.feed(bundle)
            refused = numbers(result)
            assert numbers(spilling.feed(bundle)) == refused, "a refusal depends on what is in memory"
            assert rows_of(spilling.results[-1]) == rows_of(result)
            other.missing = frozenset(refused)
            expected = other.feed(bundle)

            assert rows_of(result) == rows_of(expected)
            assert result.late_by_input == expected.late_by_input
            assert result.dead_lettered_by_input.get(0, 0) == len(refused)
            taken = result.consumed_by_input.get(0, 0) + result.late_by_input.get(0, 0)
            assert taken + len(refused) == len(bundle)
            weights = subject.interval._open.weights
            assert weights.panes == open_panes(subject) == open_panes(other)
            assert subject.interval._counted_bytes() <= ROOM
            refused_somewhere += len(refused)
            if rng.random() < 0.3:
                spilling.fold(behind=rng.random() < 0.5)
                loaded += spilling.loaded
            if rng.random() < 0.2:
                spilling.restart()
                subject.restart()
                assert subject.interval._open.weights.panes == weights.panes
        result, expected = subject.finish(), other.finish()
        assert rows_of(result) == rows_of(expected)
        assert subject.interval._open.weights.total == 0 == open_panes(subject)
    assert refused_somewhere > 20
    assert loaded


@pytest.mark.parametrize("kind", KINDS)
def test_known_keys_have_room_that_new_keys_do_not_have(kind: str) -> None:
    subject = driver(kind)
    subject.feed([(Reading("known", 0), 1)])
    flood = subject.feed([(Reading(f"new{n}", n), 1) for n in range(100)])
    assert numbers(flood)

    assert numbers(subject.feed([(Reading("newer", 0), 6)])) == [0]
    for number, at in enumerate([1, 5, 9, 13]):
        assert numbers(subject.feed([(Reading("known", number), at)])) == []


@pytest.mark.parametrize("kind", KINDS)
def test_input_waits_for_a_fold_while_closed_windows_exceed_their_bound(kind: str) -> None:
    subject = driver(kind)
    subject.feed([(Reading(f"k{n}", n), 1) for n in range(20)])
    assert not subject.interval.waits_for_fold(), "open windows do not leave memory"

    subject.feed([(Reading("later", 0), 40)])
    assert subject.interval.waits_for_fold()
    subject.fold()
    assert not subject.interval.waits_for_fold()
    assert open_panes(subject) < 10

    subject.feed([(Reading("k1", 0), 1)])
    assert 0 < subject.loaded < 10, "a late record loads only what it needs"
    assert subject.interval.waits_for_fold()


@pytest.mark.parametrize(("panes", "needs", "waits"), [(10, False, False), (25, True, False), (40, True, True)])
def test_a_fold_begins_before_input_has_to_wait_for_it(panes: int, needs: bool, waits: bool) -> None:
    each = driver("fixed").interval._open.weights.each
    logic = WindowedLogic(KINDS["fixed"], us(20), {"n": Count(), "total": Sum("number")})
    output = logic.output_type(RecordType(Reading), ("key",))
    limits = Limits(closed_windows_bytes_max=20 * each)
    subject: Any = StageDriver(logic, Reading, outputs={"w": output}, limits=limits, max_disorder=15)

    subject.feed([(Reading(f"k{n}", n), 1) for n in range(panes)])
    assert not subject.interval.needs_fold(), "open windows do not leave memory"
    subject.feed([(Reading("later", 0), 40)])

    assert (subject.interval.needs_fold(), subject.interval.waits_for_fold()) == (needs, waits)


@pytest.mark.parametrize("kind", ["fixed", "slices", "sliding"])
def test_stored_windows_expire_without_being_loaded_or_written(kind: str) -> None:
    subject = driver(kind, 0)
    subject.feed([(Reading(f"k{n}", n), 1) for n in range(20)])
    subject.feed([(Reading("later", 0), 40)])
    subject.fold()
    subject.feed([(Reading("k1", 0), 12)])
    assert subject.interval.needs_fold()
    before, stored = subject.loaded, len(subject.stored)

    result = subject.feed([], watermark=100)

    written = sum(map(len, result.delta))
    assert subject.loaded == before
    assert 0 < written < 10, "only what is in memory has tombstones"
    assert len(subject.stored) == stored - written > 10
    kept, subject.bundle = subject.bundle, subject.bundle - 1
    subject.delete_expired()
    assert len(subject.stored) == stored - written, "the bundle is not committed"
    subject.bundle = kept
    subject.delete_expired()
    subject.feed([], watermark=INSTANT_MAX)
    subject.check_ended()


def test_new_keys_are_accepted_when_there_is_room_again() -> None:
    subject = driver("fixed")
    bundle = [(Reading(f"new{n}", n), 1) for n in range(100)]
    refused = numbers(subject.feed(bundle))
    subject.feed([], watermark=100)

    assert numbers(subject.feed([(Reading(f"new{n}", n), 200) for n in refused[:20]])) == []


@pytest.mark.parametrize("kind", ["fixed", "sliding", "sessions"])
@pytest.mark.parametrize("keys", [1, 400], ids=["long key", "long lists"])
def test_panes_beyond_the_room_stop_growing_and_small_ones_continue(kind: str, keys: int) -> None:
    subject = driver(kind, room=200_000, n=Count(), numbers=Collect("number", limit=10_000))
    subject.feed([(Reading("small", 0), 1)])
    big = "x" * 900 if keys == 1 else "big"
    accepted = 0
    for turn in range(60):
        refused = numbers(subject.feed([(Reading(big + str(n % keys), turn), 1) for n in range(400)]))
        accepted += 400 - len(refused)
        assert subject.interval._open.weights.total < 400_000
    assert 0 < accepted < 60 * 400

    assert numbers(subject.feed([(Reading("small", 1), 1)])) == []
    subject.restart()
    assert numbers(subject.feed([(Reading("small", 1), 1), (Reading(big + "0", 1), 1)])) == [1]
    subject.finish()
    assert subject.interval._open.weights.total == 0


def test_session_that_grows_repeatedly_leaves_no_state_behind() -> None:
    subject = driver("sessions")
    for turn in range(3_000):
        subject.feed([(Reading("a", turn), turn)])
    opened = subject.interval._open
    assert len(opened._unfired) + len(opened._unexpired) < 5_000
