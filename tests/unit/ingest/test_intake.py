from __future__ import annotations

from datetime import datetime
from itertools import pairwise
from typing import Literal

import msgspec
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from millpy.ingest.intake import Intake, IntakeResult, IntakeSettings
from millpy.ingest.protocol import SourceBatch
from millpy.ingest.settings import AdvanceWithClock, Dedupe, EventTime
from millpy.ingest.source_position import SourcePosition
from millpy.limits import Limits
from millpy.model.checkpoint import DedupeRun, Kind
from millpy.model.record import RecordType
from millpy.model.stage import StoredInterval
from millpy.model.time import INSTANT_MAX, INSTANT_MIN, ClockReading, Instant, minutes, seconds

S = 1_000_000
NOW = Instant(1_000 * S)


class Reading(msgspec.Struct):
    id: int
    s: int | None = None


class OfFloat(msgspec.Struct):
    id: int
    s: float


TYPE = RecordType(Reading)
EVENT_TIME = EventTime("s", unit="s", max_disorder=seconds(10))


def an_intake(recovered: StoredInterval | None = None, runs: list[DedupeRun] | None = None, **how: object) -> Intake:
    settings = {"stream": "readings", "record_type": TYPE, "event_time": EVENT_TIME, **how}
    return Intake(IntakeSettings(**settings), recovered or StoredInterval(1, 1), runs or [])


def step(intake: Intake, *records: tuple[int, int | None] | bytes, **how: object) -> IntakeResult:
    payloads = [r if isinstance(r, bytes) else msgspec.json.encode({"id": r[0], "s": r[1]}) for r in records]
    return intake.step(SourceBatch("json", NOW, payloads=payloads, **how), clock=ClockReading.certain(NOW), quiet=False)


def counts(result: IntakeResult) -> dict[str, int]:
    return {e.namespace: int(e.values[0] or b"0") for e in result.delta if e.kind is Kind.COUNTER}


def stored(result: IntakeResult, watermark: Instant = INSTANT_MIN) -> StoredInterval:
    return StoredInterval(1, 2, low_watermark=watermark, entries=result.delta)


def test_row_carries_the_watermark_before_it() -> None:
    result = step(an_intake(), (1, 100), (2, 90), (3, 120), (4, 111))

    assert result.records.watermarks.tolist() == [INSTANT_MIN, 90 * S, 90 * S, 110 * S]
    assert result.records.event_times.tolist() == [100 * S, 90 * S, 120 * S, 111 * S]
    assert result.watermark == 110 * S


def test_late_record_is_accepted_and_does_not_pull_the_watermark_back() -> None:
    intake = an_intake()
    step(intake, (1, 100))

    result = step(intake, (2, 5))

    assert result.records.watermarks.tolist() == [90 * S]
    assert result.watermark == 90 * S


def test_new_owner_continues_at_the_last_commit() -> None:
    first = step(an_intake(), (1, 100), b"{", position=b'{"offset":7}')

    intake = an_intake(stored(first))

    assert intake.position == b'{"offset":7}'
    assert intake.watermark == 90 * S
    assert step(intake, (2, 95)).records.watermarks.tolist() == [90 * S]
    assert intake.counts == {"injected": 3, "accepted": 2, "duplicate": 0, "dead_lettered": 1}


def test_watermark_is_never_below_the_one_published() -> None:
    intake = an_intake(StoredInterval(1, 1, low_watermark=Instant(500 * S)))

    result = step(intake, (1, 100))

    assert result.records.watermarks.tolist() == [500 * S]
    assert result.watermark == 500 * S


def test_record_from_the_future_is_dead_lettered_and_moves_nothing() -> None:
    tolerant = EventTime("s", unit="s", max_disorder=seconds(10), future_tolerance=seconds(60))

    result = step(an_intake(event_time=tolerant), (1, 100), (2, 1061))

    assert [(d.reason, d.payload, d.event_time) for d in result.dead_letters] == [
        ("future", b'{"id":2,"s":1061}', 1061 * S)
    ]
    assert result.watermark == 90 * S


def test_record_ahead_of_its_arrival_moves_the_watermark_only_to_its_arrival() -> None:
    result = step(an_intake(), (1, 100), (2, 1060), (3, 985), (4, 1001))

    assert result.records.event_times.tolist() == [100 * S, 1060 * S, 985 * S, 1001 * S]
    assert result.records.watermarks.tolist() == [INSTANT_MIN, 90 * S, 990 * S, 990 * S]
    assert result.watermark == 990 * S
    position = msgspec.json.decode(result.delta[0].values[0] or b"", type=SourcePosition)
    assert position.max_event_time == NOW


@pytest.mark.parametrize("s", [None, 10**15, -(10**15), 2**63 - 1])
@pytest.mark.parametrize("others", [0, 100])
def test_impossible_event_time_is_dead_lettered(s: int | None, others: int) -> None:
    result = step(an_intake(), *[(i, 100) for i in range(others)], (7, s))

    assert [d.reason for d in result.dead_letters] == ["event_time"]
    assert len(result.records) == others


@pytest.mark.parametrize("many", [False, True])
@pytest.mark.parametrize("unit", ["s", "ms", "us", "ns"])
def test_a_float_of_the_year_10000_is_no_event_time(unit: Literal["s", "ms", "us", "ns"], many: bool) -> None:
    at = {"s": 253_402_300_800.0, "ms": 253_402_300_800e3, "us": 253_402_300_800e6, "ns": 253_402_300_800e9}[unit]
    how = {"record_type": RecordType(OfFloat), "event_time": EventTime("s", unit=unit, max_disorder=seconds(10))}

    result = step(an_intake(**how), *[b'{"id":1,"s":1}'] * (100 * many), msgspec.json.encode(OfFloat(2, at)))

    assert [(letter.reason, letter.event_time) for letter in result.dead_letters] == [("event_time", None)]


def test_every_record_is_counted_once() -> None:
    dedupe = Dedupe("id", within=minutes(1))

    result = step(an_intake(dedupe=dedupe), (1, 100), (1, 101), b"{", (2, None), (2, 50), (3, 10**9))

    assert counts(result) == {"injected": 6, "accepted": 1, "duplicate": 2, "dead_lettered": 3}
    assert [d.reason for d in result.dead_letters] == ["undecodable", "event_time", "future"]


def test_duplicate_is_dropped_by_the_next_owner_too() -> None:
    dedupe = Dedupe("id", within=minutes(1))
    first = step(an_intake(dedupe=dedupe), (1, 100))
    assert first.dedupe_run is not None

    second = step(an_intake(stored(first), [first.dedupe_run], dedupe=dedupe), (1, 100), (2, 100))

    assert [o.id for o in second.records.objects()] == [2]


class Unnamed(msgspec.Struct):
    id: int | None = None
    part: str | None = None
    s: int = 100


@pytest.mark.parametrize("form", ["columns", "json"])
@pytest.mark.parametrize("fields", [("id",), ("id", "part")])
def test_record_whose_id_is_none_is_never_a_duplicate(form: str, fields: tuple[str, ...]) -> None:
    how = {"dedupe": Dedupe(*fields, within=minutes(1)), "record_type": RecordType(Unnamed)}
    records = [Unnamed(), Unnamed(), Unnamed(None, "a"), Unnamed(None, "a"), Unnamed(1, "a"), Unnamed(1, "a")]

    def run(intake: Intake) -> int:
        rows = [msgspec.to_builtins(record) for record in records]
        taken = SourceBatch("columns", NOW, batch=pa.RecordBatch.from_pylist(rows))
        if form == "json":
            taken = SourceBatch("json", NOW, payloads=[msgspec.json.encode(row) for row in rows])
        result = intake.step(taken, clock=ClockReading.certain(NOW), quiet=False)
        runs.extend([result.dedupe_run] if result.dedupe_run is not None else [])
        return len(result.records)

    runs: list[DedupeRun] = []
    intake = an_intake(**how)

    assert [run(intake), run(intake)] == [5, 4]
    assert run(an_intake(None, runs, **how)) == 4, "the next owner"


def test_record_from_the_future_does_not_advance_the_dedupe_clock() -> None:
    dedupe = Dedupe("id", within=minutes(1), time="s", unit="s")
    intake = an_intake(dedupe=dedupe, record_type=RecordType(msgspec.defstruct("R", [("id", int), ("s", int)])))
    step(intake, (1, 100))

    result = step(intake, (2, 10**9), (1, 110))

    assert counts(result) == {"injected": 3, "accepted": 1, "duplicate": 1, "dead_lettered": 1}


def test_a_tolerated_record_from_the_future_does_not_advance_the_dedupe_clock_past_its_arrival() -> None:
    dedupe = Dedupe("id", within=minutes(1), time="s", unit="s")
    times = EventTime("s", unit="s", max_disorder=minutes(60), future_tolerance=minutes(10))
    record_type = RecordType(msgspec.defstruct("R", [("id", int), ("s", int)]))
    intake = an_intake(dedupe=dedupe, event_time=times, record_type=record_type)
    step(intake, (1, 950), (2, 1_500))

    again = step(intake, (1, 950))

    assert counts(again) == {"injected": 3, "accepted": 2, "duplicate": 1, "dead_lettered": 0}


def test_out_of_order_record_of_a_sorted_source_is_dead_lettered() -> None:
    intake = an_intake(event_time=EventTime("s", unit="s", sorted=True))

    result = step(intake, (1, 100), (2, 99), (3, 100), (4, 101))
    again = step(intake, (5, 100), (6, 101))

    assert result.records.watermarks.tolist() == [INSTANT_MIN, 100 * S, 100 * S]
    assert [d.reason for d in (*result.dead_letters, *again.dead_letters)] == ["event_time", "event_time"]
    assert again.watermark == 101 * S


class OfSite(msgspec.Struct):
    id: int
    s: int
    site: str


def test_order_of_the_sites_beyond_the_bound_does_not_depend_on_bundles() -> None:
    times = {"a": [5, 4, 6], "b": [9, 9, 10], "c": [20, 19, 21], "d": [7, 20, 22], "e": [19, 30, 2]}
    records = [OfSite(number, times[site][number], site) for number in range(3) for site in times]
    how = {"record_type": RecordType(OfSite), "event_time": EventTime("s", unit="s", sorted=True, watermark_by="site")}

    def refused(bundles: list[list[OfSite]]) -> list[bytes]:
        intake = an_intake(**how, limits=Limits(sites_max=2))
        results = [step(intake, *map(msgspec.json.encode, bundle)) for bundle in bundles]
        return [letter.payload for result in results for letter in result.dead_letters]

    bad = [("a", 4), ("d", 7), ("e", 19), ("c", 19), ("c", 21), ("d", 22), ("e", 2)]
    expected = [msgspec.json.encode(r) for r in records if (r.site, r.s) in bad]
    assert refused([records]) == expected
    assert refused([[record] for record in records]) == expected


def test_finished_source_reports_the_greatest_time_once() -> None:
    intake = an_intake()

    last = step(intake, (1, 100), finished=True)
    after = intake.step(SourceBatch("json", NOW, finished=True), clock=ClockReading.certain(NOW), quiet=True)

    assert last.watermark == INSTANT_MAX
    assert last.records.watermarks.tolist() == [INSTANT_MIN]
    assert not after.changed
    assert an_intake(stored(last, INSTANT_MAX)).finished


def test_a_source_whose_end_was_set_back_goes_from_the_watermark_of_its_header() -> None:
    intake = an_intake()
    step(intake, (1, 100))
    last = step(intake, (2, 120), (3, 50), finished=True)
    ended = an_intake(stored(last, INSTANT_MAX))
    assert ended.ended_at == 110 * S

    intake = an_intake(stored(last, Instant(115 * S)))

    assert not intake.finished
    assert intake.watermark == 115 * S
    again = step(intake, (4, 110), (5, 130), finished=True)
    assert again.records.watermarks.tolist() == [115 * S, 115 * S]
    assert an_intake(stored(again, INSTANT_MAX)).ended_at == 120 * S


def test_clock_advances_only_after_quiet_for_the_whole_time() -> None:
    intake = an_intake(idle=AdvanceWithClock(after=seconds(30)))
    step(intake, (1, 100))

    def idle(at: int, quiet: bool = True) -> int:
        return intake.step(None, clock=ClockReading.certain(Instant(NOW + at * S)), quiet=quiet).watermark // S

    assert [idle(1), idle(20), idle(21, quiet=False), idle(22), idle(51)] == [90] * 5
    assert idle(52) == (NOW // S + 52 - 30 - 10)


@pytest.mark.parametrize("by_site", [False, True], ids=["", "by site"])
def test_silence_begins_anew_when_the_source_has_been_connected_again(by_site: bool) -> None:
    """No turn need have seen that it was away, and devices that could not send meanwhile were not silent."""
    how: dict[str, object] = {"idle": AdvanceWithClock(after=seconds(30))}
    if by_site:
        times = EventTime("s", unit="s", sorted=True, watermark_by="site")
        how |= {"record_type": RecordType(OfSite), "event_time": times}
    intake = an_intake(**how)
    step(intake, b'{"site": "a", "s": 100, "id": 1}')

    def idle(at: int) -> int:
        return intake.step(None, clock=ClockReading.certain(Instant(NOW + at * S)), quiet=True).watermark

    before = idle(1)
    intake.source_opened()

    assert [idle(at) for at in (31, 60)] == [before] * 2
    assert idle(62) > before


def test_waiting_source_holds_its_watermark() -> None:
    intake = an_intake()
    step(intake, (1, 100))

    results = [intake.step(None, clock=ClockReading.certain(Instant(NOW + at)), quiet=True) for at in (0, 10**12)]

    assert [r.changed for r in results] == [False, False]


rows = st.lists(st.tuples(st.integers(0, 8), st.one_of(st.none(), st.integers(0, 5_000))), min_size=1, max_size=150)


@given(rows, st.lists(st.integers(0, 150)))
def test_bundling_makes_no_difference(records: list[tuple[int, int | None]], cuts: list[int]) -> None:
    dedupe = Dedupe("id", within=minutes(1))
    whole = step(an_intake(dedupe=dedupe), *records)
    bounds = sorted({0, len(records), *(cut for cut in cuts if cut < len(records))})

    intake = an_intake(dedupe=dedupe)
    parts = [step(intake, *records[start:end]) for start, end in pairwise(bounds)]

    assert [o for p in parts for o in p.records.objects()] == whole.records.objects()
    assert [t for p in parts if len(p.records) for t in p.records.watermarks.tolist()] == (
        whole.records.watermarks.tolist() if len(whole.records) else []
    )
    assert counts(parts[-1]) == counts(whole)
    assert parts[-1].watermark == whole.watermark


def test_naive_datetime_as_event_time_is_dead_lettered() -> None:
    moments = RecordType(msgspec.defstruct("M", [("at", datetime)]))
    intake = an_intake(record_type=moments, event_time=EventTime("at", max_disorder=seconds(1)))

    result = step(intake, b'{"at":"1970-01-01T00:10:00"}', b'{"at":"1970-01-01T00:10:00Z"}')

    assert [d.reason for d in result.dead_letters] == ["event_time"]
    assert result.records.event_times.tolist() == [600 * S]


def idle(intake: Intake, now: int) -> IntakeResult:
    return intake.step(None, clock=ClockReading.certain(Instant(now)), quiet=True)


def test_ids_of_a_source_that_has_gone_quiet_do_not_keep_their_slots() -> None:
    dedupe = Dedupe("id", within=minutes(1))
    intake = an_intake(dedupe=dedupe)
    first = step(intake, (1, 100)).dedupe_run
    assert first is not None

    assert not idle(intake, NOW + 60 * S).changed
    reported = idle(intake, NOW + 61 * S)

    assert reported.changed
    assert reported.dedupe_run is not None
    assert first.expires_at < reported.dedupe_run.clock
    assert reported.dedupe_run.expires_at < reported.dedupe_run.clock
    assert not idle(intake, NOW + 600 * S).changed


def test_ids_stay_for_the_whole_horizon_after_a_takeover() -> None:
    dedupe = Dedupe("id", within=minutes(1))
    first = step(an_intake(dedupe=dedupe), (1, 100))
    assert first.dedupe_run is not None
    intake = an_intake(stored(first), [first.dedupe_run], dedupe=dedupe)

    assert not idle(intake, NOW + 500 * S).changed, "nobody knows how the hosts' clocks differ"
    assert not idle(intake, NOW + 560 * S).changed
    assert idle(intake, NOW + 561 * S).dedupe_run is not None


def test_ids_outlive_an_owner_whose_clock_was_two_hours_behind_and_in_doubt() -> None:
    dedupe, behind = Dedupe("id", within=minutes(1)), NOW - 7_200 * S
    in_doubt = ClockReading(Instant(behind), Instant(behind), NOW, 0)
    first = step(an_intake(dedupe=dedupe), (1, 100))
    assert first.dedupe_run is not None
    doubtful = an_intake(stored(first), [first.dedupe_run], dedupe=dedupe)
    batch = SourceBatch("json", Instant(behind), payloads=[b'{"id":2,"s":101}'])
    second = doubtful.step(batch, clock=in_doubt, quiet=False)
    assert second.dedupe_run is not None

    intake = an_intake(stored(second), [first.dedupe_run, second.dedupe_run], dedupe=dedupe)

    assert counts(step(intake, (1, 100), (2, 101)))["duplicate"] == 2


def test_ids_on_a_named_clock_wait_for_that_clock() -> None:
    intake = an_intake(dedupe=Dedupe("id", within=minutes(1), time="s", unit="s"))
    step(intake, (1, 100))

    assert not idle(intake, NOW + 400 * S).changed
    moved = idle(intake, NOW + 480 * S).dedupe_run
    assert not idle(intake, NOW + 900 * S).changed
    again = idle(intake, NOW + 960 * S).dedupe_run

    assert moved == again
    assert moved is not None
    assert moved.whole
    assert (len(moved.ids), moved.clock) == (16, 100 * S)
    after = an_intake(runs=[moved], dedupe=Dedupe("id", within=minutes(1), time="s", unit="s"))
    assert counts(step(after, (1, 160), (2, 160))) == {"injected": 2, "accepted": 1, "duplicate": 1, "dead_lettered": 0}


def test_a_finished_source_keeps_no_ids() -> None:
    intake = an_intake(dedupe=Dedupe("id", within=minutes(1)))
    first = step(intake, (1, 100)).dedupe_run
    last = step(intake, (2, 101), finished=True).dedupe_run

    assert first is not None
    assert last is not None
    assert max(first.expires_at, last.expires_at) < last.clock


def test_records_are_counted_by_the_count_of_a_source_that_has_one() -> None:
    """It hands over more than it gives to this interval: what left it for elsewhere counts, too, and once."""
    intake = an_intake()

    assert counts(step(intake, (1, 100), total=5))["injected"] == 1  # it was not opened here: nothing to compare with
    assert counts(step(intake, (2, 100), (3, 100), total=9))["injected"] == 1 + 4
    intake.source_opened()
    assert counts(step(intake, (4, 100), total=3))["injected"] == 1 + 4 + 3
    assert counts(step(intake, (5, 100), total=4))["injected"] == 1 + 4 + 3 + 1
    assert counts(step(intake, (6, 100)))["injected"] == 1 + 4 + 3 + 1 + 1


def test_a_row_that_its_source_cannot_describe_is_a_dead_letter_all_the_same() -> None:
    def describe(row: int) -> str:
        return ["first\0"][row]

    result = step(an_intake(), b"{", b"[", (1, 100), describe=describe)

    assert counts(result)["accepted"] == 1
    first, second = (letter.position for letter in result.dead_letters)
    assert first == r"first\x00"
    assert second == "row 1 of a batch; its source cannot describe it: IndexError: list index out of range"
