"""Sessions that leave memory before they fire: by key, read back by records, emitted once in bounded turns."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from millpy import Count, Max, SessionWindows, Sum
from millpy.limits import Limits
from millpy.model.record import RecordType
from millpy.model.stored_windows import ClosedKind, EndedSessions
from millpy.model.time import INSTANT_MAX
from millpy.windowing import unfired_sessions
from millpy.windowing.logic import WindowedLogic
from tests.stage_driver import StageDriver, timedelta_us

GAP, KEYS = 100, 200


class Reading(msgspec.Struct):
    key: str
    number: int
    text: str = ""


def driver(allowed: int = 0, sessions: int = 20, gap: int = GAP, bound: int | None = None, **aggregates: Any) -> Any:
    """Return a driver that may keep `sessions` unfired sessions in memory."""
    windows = SessionWindows(timedelta_us(gap), max_records=bound)
    logic = WindowedLogic(windows, timedelta_us(allowed), aggregates or {"n": Count(), "total": Sum("number")})
    outputs = {"panes": logic.output_type(RecordType(Reading), ("key",))}
    limits = Limits(unfired_windows_bytes_max=sessions * 1_250, closed_windows_bytes_max=sessions * 1_250)
    return StageDriver(logic, Reading, outputs=outputs, tables={"panes": 1}, max_disorder=1_000, limits=limits)


def in_memory(subject: Any) -> int:
    return sum(map(len, subject.interval._open.by_key.values()))


def fill(subject: Any) -> None:
    """Feed a record of each key, some at a time, and fold. All sessions have the same span."""
    for lo in range(0, KEYS, 25):
        subject.feed([(Reading(f"k{n}", 1), 1) for n in range(lo, lo + 25)])
        assert subject.interval.needs_fold() == (in_memory(subject) > 20)
        subject.fold()
        assert in_memory(subject) <= 20
        assert not subject.interval.waits_for_fold()


def emitted(result: Any) -> list[tuple[str, int, int]]:
    panes = result.productions.get("panes")
    return [] if panes is None else [(pane.key, pane.n, pane.pane_index) for pane in panes.objects()]


def fed_until_done(subject: Any, watermark: int) -> list[tuple[str, int, int]]:
    return rest(subject, subject.feed([], watermark=watermark))


def rest(subject: Any, result: Any, *, fold: bool = False) -> list[tuple[str, int, int]]:
    """Return the panes of a turn, and of those that finish its work."""
    found = emitted(result)
    for _ in range(500):
        if not result.unfinished:
            return found
        if fold:
            subject.fold()
        found += emitted(result := subject.feed([]))
    raise AssertionError("the work does not come to an end")


@pytest.mark.parametrize("allowed", [0, 50])
@pytest.mark.parametrize("interrupts", ["", "restart", "fold", "fold behind", "restart and fold"])
def test_due_sessions_fire_in_turns_and_hold_the_watermark_until_all_are_out(interrupts: str, allowed: int) -> None:
    subject = driver(allowed)
    fill(subject)
    subject.panes_max = 30
    subject.watermark = 1 + GAP
    found: list[Any] = []
    while True:
        result = subject.feed([])
        now = emitted(result)
        found += now
        assert len(now) <= 30
        assert in_memory(subject) <= 20 + (30 if allowed == 0 else len(found))
        if len(found) == KEYS:
            break
        assert result.unfinished
        assert subject.interval.oldest_work() == GAP
        assert subject.low_watermark <= GAP
        if "restart" in interrupts:
            subject.restart()
        if "fold" in interrupts:
            subject.fold(behind="behind" in interrupts)

    assert sorted(found) == sorted((f"k{n}", 1, 0) for n in range(KEYS))
    assert not rest(subject, subject.feed([]))  # a new owner deletes what may be left in the store
    assert subject.low_watermark == 1 + GAP
    assert subject.interval.oldest_work() == INSTANT_MAX
    subject.finish()
    subject.check_ended()


def test_a_record_reads_back_what_it_touches_and_a_merge_of_stored_sessions() -> None:
    subject = driver()
    subject.feed([(Reading("wide", 1), 1), (Reading("wide", 1), 150)])
    fill(subject)
    before = subject.loaded
    assert "wide" not in subject.interval._open.by_key

    subject.feed([(Reading("k3", 1), 2), (Reading("wide", 1), 75), (Reading("new", 1), 2)])

    assert subject.loaded - before <= 3
    found = fed_until_done(subject, 10 * GAP)
    assert {key: n for key, n, _ in found if n > 1} == {"k3": 2, "wide": 3}
    assert len(found) == KEYS + 2
    subject.check_ended()


def test_sessions_of_a_key_leave_together_and_come_back_together() -> None:
    subject = driver(sessions=3)
    subject.feed([(Reading("k", 1), at) for at in (1, 200, 400)])
    subject.feed([(Reading(f"other{n}", 1), 1) for n in range(4)])
    subject.fold()
    assert "k" not in subject.interval._open.by_key
    assert subject.interval.next_due()[0] == 1 + GAP

    subject.feed([(Reading("k", 1), 401)])  # it touches one

    assert [(s.start, s.end) for s in subject.interval._open.by_key["k"]] == [(1, 101), (200, 300), (400, 501)]
    loaded = subject.loaded
    subject.feed([(Reading("k", 1), 402)])
    assert subject.loaded == loaded, "the key is whole"
    found = fed_until_done(subject, 10 * GAP)
    assert sorted(n for key, n, _ in found if key == "k") == [1, 1, 3]
    assert len(found) == 7


def test_a_key_with_many_sessions_reads_some_and_loses_none() -> None:
    subject = driver(sessions=2)
    subject.max_disorder = 100_000
    times = range(0, 4_000, 200)
    subject.feed([(Reading("k", 1), at) for at in times])
    subject.feed([(Reading("other", 1), 1)])
    subject.fold()
    for _ in range(3):
        subject.feed([(Reading("k", 1), 3_801)])
        assert in_memory(subject) < 10
        subject.fold(behind=True)

    subject.restart()
    found = fed_until_done(subject, 10_000)

    assert sorted(n for key, n, _ in found if key == "k") == [1] * 19 + [4]
    subject.check_ended()


@pytest.mark.parametrize("bound", [None, 2])
def test_a_row_that_is_not_folded_away_is_no_session(bound: int | None) -> None:
    """The row of a session that has grown, or become full and shorter, stays until the next fold."""
    subject = driver(sessions=1, bound=bound)
    subject.feed([(Reading("k", 1), 50), (Reading("o", 1), 700)])
    subject.feed([(Reading("p", 1), 700)])
    subject.fold()
    assert "many" not in subject.interval._open.by_key

    first = subject.feed([(Reading("k", 1), 60)], watermark=70 if bound else None)
    found = emitted(first) + fed_until_done(subject, 165)
    subject.feed([(Reading("p", 1), 701)])
    found += fed_until_done(subject, 2_000)

    assert sorted(found) == [("k", 2, 0), ("o", 1, 0), ("p", 2, 0)]
    subject.fold()
    subject.check_ended()


def test_the_row_of_a_session_that_grows_in_the_turn_in_which_it_ends_is_no_session() -> None:
    subject = driver(sessions=1)
    subject.max_disorder = 100_000
    subject.feed([(Reading("k", 1), at) for at in range(1, 2_000, 300)])  # some of them stay unread
    subject.feed([(Reading("other", 1), 5_000)])
    subject.fold()
    subject.feed([(Reading("k", 1), 1)])

    result = subject.feed([(Reading("k", 1), 5)], watermark=105)

    assert emitted(result) == [("k", 3, 0)]
    assert len(fed_until_done(subject, 10_000)) == 7
    subject.check_ended()


def test_the_row_of_a_session_that_has_become_shorter_is_none_though_its_key_has_left() -> None:
    subject = driver(sessions=1, bound=2)
    subject.max_disorder = 100_000
    subject.feed([(Reading("k", 1), 50), (Reading("k", 1), 700), (Reading("p", 1), 700)])
    subject.feed([(Reading("q", 1), 700)])
    subject.fold()
    subject.feed([(Reading("p", 1), 700), (Reading("q", 1), 700)])
    assert emitted(subject.feed([(Reading("k", 1), 60)], watermark=70)) == [("k", 2, 0)]  # it is full
    subject.fold(behind=True)

    found = fed_until_done(subject, 300)

    assert found == []
    assert sorted(fed_until_done(subject, 2_000)) == [("k", 1, 0), ("p", 2, 0), ("q", 2, 0)]


def test_a_key_of_which_a_stored_session_has_fired_may_have_others() -> None:
    subject = driver(sessions=1)
    subject.feed([(Reading("k", 1), 1), (Reading("k", 1), 500), (Reading("o", 1), 1)])
    subject.fold()

    found = [fed_until_done(subject, 150), fed_until_done(subject, 700)]

    assert list(map(sorted, found)) == [[("k", 1, 0), ("o", 1, 0)], [("k", 1, 0)]]
    subject.check_ended()


def test_a_session_of_a_key_with_many_that_a_record_makes_due_out_of_turn_is_emitted_once() -> None:
    subject = driver(sessions=1)
    subject.max_disorder = 100_000
    subject.feed([(Reading("k", 1), at) for at in range(1, 2_000, 300)])
    subject.feed([(Reading(key, 1), 0) for key in "abc"])
    subject.fold()
    subject.panes_max = 1

    found = rest(subject, subject.feed([(Reading("k", 1), 1)], watermark=150))

    assert sorted(found) == [("a", 1, 0), ("b", 1, 0), ("c", 1, 0), ("k", 2, 0)]


def test_due_sessions_that_wait_in_memory_stay_there() -> None:
    subject = driver(sessions=5)
    subject.feed([(Reading(f"k{n}", 1), n) for n in range(9)])
    subject.panes_max = 2

    found = emitted(subject.feed([], watermark=500))
    subject.fold()
    found += rest(subject, subject.feed([]))

    assert sorted(found) == [(f"k{n}", 1, 0) for n in range(9)]


def test_keys_of_sessions_that_open_and_end_within_a_turn_are_not_remembered() -> None:
    subject = driver(sessions=1)
    subject.max_disorder = 100_000
    spilled = subject.interval._open.spilled
    subject.feed([(Reading("many", 1), 200 * n) for n in range(unfired_sessions.OTHERS_MAX)])
    subject.feed([(Reading("later", 1), 50_000)])
    subject.fold()
    assert "many" not in subject.interval._open.by_key

    assert len(fed_until_done(subject, 5_000)) == unfired_sessions.OTHERS_MAX
    for key in ("new", "many"):  # of the latter, rows are stored that have fired
        subject.feed([(Reading(key, 1), 5_100)], watermark=6_000)
        assert emitted(subject.results[-1]) == [(key, 1, 0)]
        assert not subject.results[-1].unfinished
        assert not spilled._fired
        assert not spilled._many
    subject.finish()
    subject.check_ended()


def test_a_late_record_of_a_session_that_is_over_does_not_bring_its_row_back() -> None:
    subject = driver()
    fill(subject)
    subject.panes_max = 30
    subject.watermark = 1 + GAP
    found = emitted(subject.feed([]))
    subject.largest = 1 + GAP + 1_000  # so that they are late

    result = subject.feed([(Reading(key, 1), 1) for key, _, _ in found[:5]])

    assert sum(result.late_by_input.values()) == 5
    found += rest(subject, result)
    assert sorted(found) == sorted((f"k{n}", 1, 0) for n in range(KEYS))


def test_a_session_that_a_record_makes_due_out_of_turn_is_emitted_once() -> None:
    subject = driver(sessions=1)
    fill_keys = [f"k{n}" for n in range(9)]
    subject.feed([(Reading(key, 1), 1) for key in fill_keys])
    subject.fold()
    subject.panes_max = 2

    result = subject.feed([(Reading(key, 1), 2) for key in fill_keys[:5]], watermark=300)
    found = rest(subject, result)

    assert sorted(found) == sorted((key, 1 + (key in fill_keys[:5]), 0) for key in fill_keys)
    subject.check_ended()


def test_sessions_that_have_changed_stay_and_others_leave() -> None:
    subject = driver()
    for n in range(6):
        cold = [(Reading(f"cold{n}{at}", 1), 1) for at in range(6)]
        subject.feed(cold + [(Reading(f"hot{at}", 1), n) for at in range(8)])
        subject.fold()

    assert {f"hot{at}" for at in range(8)} <= set(subject.interval._open.by_key)
    assert in_memory(subject) <= 20
    assert not subject.loaded


def test_a_late_record_of_a_session_that_has_left_before_and_after_it_fired() -> None:
    subject = driver(allowed=500)
    fill(subject)
    subject.panes_max = 30
    subject.watermark = 1 + GAP
    left = {key for key, _, _ in emitted(subject.feed([]))}
    subject.fold()
    waiting = {f"k{n}" for n in range(KEYS)} - left
    late = sorted(left)[:2] + sorted(waiting)[:2]

    subject.largest = 1 + GAP + 1_000 + 1  # so that they are late
    result = subject.feed([(Reading(key, 1), 1) for key in late])

    by_key = {key: (n, index) for key, n, index in emitted(result)}
    assert [by_key[key] for key in late] == [(2, 1), (2, 1), (2, 0), (2, 0)]
    rest(subject, subject.feed([]))
    found = [pane for one in subject.results for pane in emitted(one)]
    assert len(found) == KEYS + 2, "no pane twice"
    subject.finish()
    subject.check_ended()


def test_expiry_leaves_stored_sessions_that_wait_to_be_emitted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unfired_sessions, "PANES_MIN", 2)
    subject = driver(allowed=10, sessions=1)
    subject.feed([(Reading("early", 1), 0), (Reading("x", 1), 1)])
    subject.feed([], watermark=GAP)
    subject.feed([(Reading(f"k{n}", 1), 50) for n in range(9)])
    subject.fold()

    found = rest(subject, subject.feed([], watermark=2_000), fold=True)

    assert sorted(key for key, _, _ in found) == sorted(["x", *(f"k{n}" for n in range(9))])
    subject.finish()
    subject.check_ended()


def test_a_new_owner_reads_no_session_until_it_is_needed() -> None:
    subject = driver()
    fill(subject)

    subject.restart()
    assert "many" not in subject.interval._open.by_key
    assert subject.interval.oldest_work() == GAP
    assert not subject.interval.immediate
    subject.feed([(Reading("k7", 1), 2)])
    assert in_memory(subject) == 1
    assert sorted(fed_until_done(subject, 200))[-1] == ("k99", 1, 0)
    subject.check_ended()


def test_a_new_owner_knows_that_a_key_with_changes_may_have_other_sessions() -> None:
    subject = driver(sessions=1)
    subject.feed([(Reading("k", 1), 1), (Reading("k", 1), 500), (Reading("other", 1), 1)])
    subject.fold()
    subject.feed([(Reading("k", 1), 501)])

    subject.restart()
    assert in_memory(subject) == 1
    subject.feed([(Reading("k", 1), 50)])

    assert [(s.start, s.end) for s in subject.interval._open.by_key["k"]] == [(1, 150), (500, 601)]
    assert sorted(fed_until_done(subject, 2_000)) == [("k", 2, 0), ("k", 2, 0), ("other", 1, 0)]
    subject.check_ended()


def test_what_a_turn_opens_has_room_whatever_is_open() -> None:
    subject = driver(sessions=2)
    each = subject.interval._open.weights.each
    subject.interval._bytes_max = 10 * each
    for n in range(5):
        result = subject.feed([(Reading(f"k{n}{at}", 1), 1) for at in range(10)])
        assert not result.dead_letters
        assert subject.interval.waits_for_fold()
        subject.fold()

    result = subject.feed([(Reading(f"more{at}", 1), 1) for at in range(12)])

    assert [letter.reason for letter in result.dead_letters] == ["windows"] * 2
    assert len(fed_until_done(subject, 200)) == 60


@pytest.mark.parametrize(("aggregates", "leaves"), [({"n": Count("text")}, True), ({"high": Max("text")}, False)])
def test_sessions_whose_aggregates_may_be_long_stay_in_memory(aggregates: Any, leaves: bool) -> None:
    subject = driver(**aggregates)
    subject.feed([(Reading(f"k{n}", 1, "text"), 1) for n in range(50)])
    subject.fold()

    assert (in_memory(subject) <= 20) == leaves
    assert (subject.stage.closed_kind is ClosedKind.UNFIRED_SESSIONS) == leaves


def test_a_session_that_is_emitted_out_of_turn_does_not_expire_before_its_place_is_reached(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(unfired_sessions, "PANES_MIN", 1)
    subject = driver(sessions=1)
    subject.max_disorder = 100_000
    subject.feed([(Reading("k", 1), at) for at in (150, 200, 1_000, 1_300, 1_600, 1_900, 2_200, 2_500)])
    subject.feed([(Reading("u", 1), 250)])
    subject.fold()
    subject.feed([(Reading("h", 1), 100), (Reading("y", 1), 200)])
    found = emitted(result := subject.feed([(Reading("k", 1), 200)], watermark=400))
    subject.fold(behind=True)
    while result.unfinished:
        found += emitted(result := subject.feed([]))
    assert sorted(found) == [("h", 1, 0), ("k", 3, 0), ("u", 1, 0), ("y", 1, 0)]


def test_sessions_that_wait_to_be_emitted_stay_in_memory_during_a_pass_over_expired_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(unfired_sessions, "PANES_MIN", 1)
    subject = driver(allowed=10, sessions=1)
    subject.max_disorder = 100_000
    closed = [f"c{n}" for n in range(5)]
    subject.feed([(Reading(key, 1), 1) for key in closed])
    found = fed_until_done(subject, 105)
    subject.fold()
    subject.feed([(Reading("u", 1), 250), (Reading("v", 1), 251)])
    subject.fold()
    waiting = [f"h{n}" for n in range(9)]
    subject.feed([(Reading(key, 1), 100 + n) for n, key in enumerate(waiting)])
    subject.panes_max = 4
    found += emitted(result := subject.feed([], watermark=400))
    subject.fold()
    while result.unfinished:
        found += emitted(result := subject.feed([]))
        subject.fold()
    assert sorted(found) == sorted((key, 1, 0) for key in [*closed, *waiting, "u", "v"])


def test_a_turn_does_not_read_the_due_rows_behind_what_it_emits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unfired_sessions, "PANES_MIN", 10)
    subject = driver(sessions=1_000)
    subject.max_disorder = 100_000
    subject.feed([(Reading("early", 1), 50)])
    subject.feed([(Reading(f"u{n}", 1), 5_000) for n in range(2_000)])
    subject.fold()
    subject.feed([(Reading(f"k{n}", 1), 100) for n in range(250)])
    subject.fold()
    assert "k0" in subject.interval._open.by_key
    assert "early" not in subject.interval._open.by_key
    queries = reads = 0
    ask = subject.query_windows

    def counted(folded: int, query: Any) -> Any:
        nonlocal reads, queries
        found = ask(folded, query)
        queries += 1
        reads += len(found)
        return found

    monkeypatch.setattr(subject, "query_windows", counted)
    found = fed_until_done(subject, 400)
    assert len(found) == 251
    assert (reads <= 3 * len(found), queries <= 100) == (True, True), (reads, queries)


def test_what_has_left_keeps_no_accumulators_in_a_queue() -> None:
    subject = driver(allowed=1_000)
    fill(subject)
    fed_until_done(subject, GAP + 1)
    subject.fold()

    queued = [entry[4] for queue in subject.interval._open._queues() for entry in queue._heap]
    left = [session for session in queued if not session.alive]
    assert len(left) > KEYS // 2, "a queue keeps some"
    assert {len(session.pane.values) for session in left} == {0}


def test_a_pass_over_expired_sessions_is_not_followed_by_one_each_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    subject = driver(allowed=10_000, sessions=1)
    subject.max_disorder = 100_000
    for at in (1, 8_000):
        subject.feed([(Reading(f"k{n}", 1), at) for n in range(30)])
        fed_until_done(subject, at + 1_000)
        subject.fold()
        subject.feed([])
    passes, ask = 0, subject.query_windows

    def counted(folded: int, query: Any) -> Any:
        nonlocal passes
        passes += isinstance(query, EndedSessions)
        return ask(folded, query)

    monkeypatch.setattr(subject, "query_windows", counted)
    for watermark in range(15_000, 15_010):
        fed_until_done(subject, watermark)

    assert passes == 1, "those of the first half have gone, and none of the others is due"
