"""`deduplicate` passes the same records as a plain loop, in any bundles and across restarts."""

from __future__ import annotations

import time
import tracemalloc
from collections import Counter
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from millpy.model.horizons import KEPT, HorizonChange
from millpy.model.record import RecordType, retractions_of
from millpy.model.time import INSTANT_MIN, Instant
from millpy.operators.deduplicate import DeduplicateLogic
from millpy.operators.first_seen import FirstSeen
from tests.stage_driver import StageDriver, timedelta_us

WITHIN, DISORDER = 10, 6


class Note(msgspec.Struct):
    id: str
    number: int


notes = st.lists(st.tuples(st.sampled_from("abcd"), st.integers(0, 80)), max_size=60)
breaks = st.lists(st.sampled_from(["none", "none", "cut", "restart", 3, 10, 25]), max_size=60)
"""Behind each record: what happens to its bundle, or which horizon is deployed."""


def by_a_loop(rows: list[tuple[str, int]], cuts: Sequence[str | int] = ()) -> tuple[list[int], list[int], int]:
    """(numbers let through, numbers of late ones, duplicates)."""
    kept: list[int] = []
    late: list[int] = []
    taken: dict[str, list[int]] = {}
    largest: int | None = None
    within, floor = WITHIN, INSTANT_MIN
    for number, (id_, at) in enumerate(rows):
        watermark = INSTANT_MIN if largest is None else largest - DISORDER
        largest = at if largest is None else max(largest, at)
        if at < max(watermark - within, floor):
            late.append(number)
        elif all(abs(at - other) > within for other in taken.get(id_, ())):
            taken.setdefault(id_, []).append(at)
            kept.append(number)
        if number < len(cuts) and isinstance(cuts[number], int) and cuts[number] != within:
            floor, within = max(floor, largest - DISORDER - 2 * within), int(cuts[number])
            taken = {id_: [at for at in times if at >= floor] for id_, times in taken.items()}
    return kept, late, len(rows) - len(kept) - len(late)


def outcome(rows: list[tuple[str, int]], cuts: Sequence[str | int], *, columns: bool) -> Any:
    within, logic = WITHIN, DeduplicateLogic(["id"], timedelta_us(WITHIN))
    subject = StageDriver(logic, Note, key=("id",), outputs={"out": RecordType(Note)}, max_disorder=DISORDER)
    bundle: list[Any] = []
    for number, (id_, at) in enumerate(rows):
        bundle.append((Note(id_, number), at))
        cut = cuts[number] if number < len(cuts) else "none"
        if cut != "none":
            subject.feed(bundle, columns=columns)
            bundle = []
        if cut == "restart":
            subject.restart()
        elif isinstance(cut, int) and cut != within:
            change = HorizonChange("unique", KEPT, within, cut)
            subject.change_within(DeduplicateLogic(["id"], timedelta_us(cut)), change)
            within = cut
    subject.feed(bundle, columns=columns)
    subject.finish()
    late = [
        msgspec.json.decode(payload)["number"] for r in subject.results for rows in r.late for payload in rows.payloads
    ]
    counted: Counter[int] = Counter()
    for result in subject.results:
        counted.update(result.duplicates_by_input)
    assert not subject.live_runs()
    return [note.number for note, _ in subject.produced("out")], late, counted[0]


@settings(max_examples=200, deadline=None)
@given(notes, breaks, st.booleans())
def test_the_first_of_each_id_passes_in_any_bundles_restarts_and_changes(
    rows: list[tuple[str, int]], cuts: list[str | int], columns: bool
) -> None:
    assert outcome(rows, cuts, columns=columns) == by_a_loop(rows, cuts)


Change = tuple[str, int, int, bool]
"""(id, content, event time, whether it is retracted)."""
changes = st.lists(
    st.tuples(st.sampled_from("abc"), st.integers(0, 1), st.integers(0, 60), st.booleans(), st.integers(0, 99)),
    max_size=50,
)


def with_retractions(drawn: list[tuple[str, int, int, bool, int]]) -> list[Change]:
    """Records, and retractions of records that came before and are not yet retracted."""
    script: list[Change] = []
    left: list[tuple[str, int, int]] = []
    for id_, content, at, retracts, which in drawn:
        if retracts and left:
            script.append((*left.pop(which % len(left)), True))
        else:
            left.append((id_, content, at))
            script.append((id_, content, at, False))
    return script


def kept_by_a_loop(script: list[Change]) -> tuple[list[Change], int]:
    """(what passes, how many are duplicates): equal records are interchangeable."""
    passed: list[Change] = []
    late = 0
    kept: dict[tuple[str, int], list[int]] = {}  # (id, event time) -> content, equal records
    largest: int | None = None
    for id_, content, at, retracts in script:
        watermark = INSTANT_MIN if largest is None else largest - DISORDER
        largest = at if largest is None else max(largest, at)
        found = kept.get((id_, at))
        if at < watermark - WITHIN:
            late += 1
        elif found is not None and found[0] == content:
            found[1] += -1 if retracts else 1
            if not found[1]:
                del kept[id_, at]
                passed.append((id_, content, at, True))
        elif not retracts and not any(other == id_ and abs(at - time_) <= WITHIN for other, time_ in kept):
            kept[id_, at] = [content, 1]
            passed.append((id_, content, at, False))
    return passed, len(script) - len(passed) - late


@settings(max_examples=200, deadline=None)
@given(changes, breaks, st.booleans())
def test_a_retraction_takes_the_way_of_its_record(drawn: Any, cuts: list[str], columns: bool) -> None:
    script = with_retractions(drawn)
    logic = DeduplicateLogic(["id"], timedelta_us(WITHIN), takes_retractions=True)
    subject = StageDriver(logic, Note, key=("id",), outputs={"out": RecordType(Note)}, max_disorder=DISORDER)
    start = 0
    for end in range(1, len(script) + 1):
        cut = cuts[end - 1] if end <= len(cuts) else "none"
        if cut == "none" and end < len(script):
            continue
        part, start = script[start:end], end
        given_ = [(Note(id_, content), at) for id_, content, at, _ in part]
        subject.feed(given_, columns=columns, retracts=[retracts for *_, retracts in part])
        if cut == "restart":
            subject.restart()
    subject.finish()

    found = []
    for result in subject.results:
        for records in (result.productions["out"],) if "out" in result.productions else ():
            marks = retractions_of(records).tolist()
            found += [
                (note.id, note.number, at, retracts)
                for note, at, retracts in zip(records.objects(), records.event_times.tolist(), marks, strict=True)
            ]
    passed, duplicates = kept_by_a_loop(script)
    assert found == passed
    assert sum(result.duplicates_by_input.get(0, 0) for result in subject.results) == duplicates
    assert not subject.live_runs()


@settings(max_examples=100, deadline=None)
@given(st.lists(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2), st.integers(0, 60)), max_size=20), max_size=6))
def test_ids_with_one_equal_half_are_distinct(bundles: list[list[tuple[int, int, int]]]) -> None:
    subject = FirstSeen(WITHIN)
    taken: dict[tuple[int, int], list[int]] = {}

    for bundle in bundles:
        ids = b"".join(np.array([hi, lo], ">u8").tobytes() for hi, lo, _ in bundle)
        accepted, _ = subject.check(ids, np.array([at for *_, at in bundle], np.int64), Instant(0))
        for (hi, lo, at), passes in zip(bundle, accepted.tolist(), strict=True):
            mine = taken.setdefault((hi, lo), [])
            assert passes == all(abs(at - other) > WITHIN for other in mine)
            if passes:
                mine.append(at)


def test_ids_are_forgotten_when_no_record_can_match_them() -> None:
    subject = FirstSeen(WITHIN)
    runs = []
    for number in range(200):
        ids = np.arange(2 * 50 * number, 2 * 50 * (number + 1)).astype(">u8").tobytes()
        accepted, run = subject.check(ids, np.full(50, number, np.int64), Instant(number))
        assert accepted.all()
        runs.append(run)
    assert len(subject) <= 2 * 50 * 2 * WITHIN

    assert len(FirstSeen(WITHIN, [run for run in runs[-2 * WITHIN :] if run])) == 50 * 2 * WITHIN
    nothing, last = subject.check(b"", np.empty(0, np.int64), Instant(1_000))
    assert last is not None
    assert (len(nothing), len(subject), last.ids, last.clock) == (0, 0, b"", 1_000)
    assert subject.check(b"", np.empty(0, np.int64), Instant(2_000))[1] is None


def test_cost_of_a_repeated_id_is_linear() -> None:
    """A device may send one id for as many moments as the watermark leaves open, and then as often as it likes."""
    subject, id_, known, asked = FirstSeen(WITHIN), bytes(16), 8_000, 20_000
    moments = np.arange(known, dtype=np.int64) * (WITHIN + 1)
    begun = time.process_time()
    assert subject.check(id_ * known, moments, Instant(0))[0].all()

    tracemalloc.start()
    again, _ = subject.check(id_ * asked, np.resize(moments[::-1], asked) + WITHIN // 2, Instant(0))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()

    assert not again.any()
    assert peak < 1_000 * (known + asked)
    assert time.process_time() - begun < 5
