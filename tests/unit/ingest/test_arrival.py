"""`EventTime.arrival()`: the event time of a record is its arrival, which its commit records."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest

from millpy.errors import UsageError
from millpy.graph.loader import load_graph
from millpy.ingest.intake import Intake, IntakeResult, IntakeSettings
from millpy.ingest.protocol import SourceBatch
from millpy.ingest.settings import AdvanceWithClock, Dedupe, EventTime
from millpy.limits import Limits
from millpy.model.checkpoint import Request
from millpy.model.record import RecordType
from millpy.model.stage import StoredInterval
from millpy.model.time import ClockReading, Instant, minutes, seconds
from millpy.spark.job import make_job
from millpy.testing.crash_test.session import refuse_arrival

S = 1_000_000


class Level(msgspec.Struct):
    tank: str
    level: float


def an_intake(recovered: StoredInterval | None = None, **how: object) -> Intake:
    settings = IntakeSettings(stream="levels", record_type=RecordType(Level), event_time=EventTime.arrival(), **how)
    return Intake(settings, recovered or StoredInterval(1, 1))


def step(intake: Intake, at_s: int, *payloads: bytes, brokers: list[int] | None = None) -> IntakeResult:
    arrivals = None if brokers is None else lambda: np.array(brokers, np.int64) * S
    taken = SourceBatch("json", Instant(at_s * S), payloads=payloads, arrivals=arrivals) if payloads else None
    return intake.step(taken, clock=ClockReading.certain(Instant(at_s * S)), quiet=not payloads)


def level(tank: str = "a") -> bytes:
    return msgspec.json.encode(Level(tank, 1.0))


def times(result: IntakeResult) -> list[int]:
    return [at // S for at in result.records.event_times.tolist()]


def test_event_time_is_the_arrival_and_the_watermark_follows_it() -> None:
    result = step(an_intake(), 100, level(), level())

    assert times(result) == [100, 100]
    assert result.watermark == 100 * S
    assert not result.dead_letters


def test_arrivals_never_fall_even_if_the_clock_does_or_the_owner_changes() -> None:
    intake = an_intake()
    first = step(intake, 100, level())

    assert times(step(intake, 90, level())) == [100]

    taken_over = an_intake(StoredInterval(1, 2, low_watermark=first.watermark, entries=first.delta))
    late = step(taken_over, 95, level())
    assert times(late) == [100]
    assert (late.records.watermarks <= late.records.event_times).all()


def test_no_record_is_late_after_the_clock_has_moved_the_watermark() -> None:
    intake = an_intake(idle=AdvanceWithClock(after=seconds(1)))
    step(intake, 100, level())
    for at_s in (110, 120):
        step(intake, at_s)
    assert intake.watermark == 119 * S

    assert times(step(intake, 115, level())) == [119]


def test_broker_tells_the_arrival_but_never_a_later_one_than_the_take() -> None:
    result = step(an_intake(), 100, *[level()] * 5, brokers=[50, 40, -1, 99, 5_000])

    assert times(result) == [50, 50, 100, 100, 100]


@pytest.mark.parametrize("cut", range(6))
def test_arrivals_do_not_depend_on_the_cut_of_bundles(cut: int) -> None:
    payloads = [level(), b"{", level(), level("b"), level("c")]
    brokers = [10, 90, 20, 15, 30]  # the undecodable record and its time leave no trace
    whole = times(step(an_intake(), 100, *payloads, brokers=brokers))
    intake = an_intake()

    pieces = [
        at
        for part in (slice(0, cut), slice(cut, None))
        for at in times(step(intake, 100, *payloads[part], brokers=brokers[part]))
    ]

    assert pieces == whole == [10, 20, 20, 30]


def test_duplicates_leave_no_trace_in_the_arrivals() -> None:
    intake = an_intake(dedupe=Dedupe("tank", within=minutes(1)))

    result = step(intake, 100, level("a"), level("a"), level("b"), brokers=[10, 90, 20])

    assert times(result) == [10, 20]


@pytest.mark.parametrize("corrected", [level("mended"), b"still not JSON"])
def test_replayed_dead_letter_keeps_its_first_arrival(corrected: bytes) -> None:
    intake = an_intake()
    [letter] = step(intake, 100, b"{").dead_letters
    assert (letter.reason, letter.event_time) == ("undecodable", 100 * S)
    step(intake, 200, level())
    request = Request(
        "dead_letters", 1, 1, "levels", "levels", corrected, wire=letter.wire, event_time=letter.event_time
    )

    result = intake.replay([request], Instant(300 * S), ClockReading.certain(Instant(300 * S)))

    [outcome] = result.outcomes
    if outcome.dead_letter is None:
        assert times(result) == [100]
        assert result.records.watermarks.tolist() == [200 * S]  # so it is judged as late
    else:
        assert outcome.dead_letter.event_time == 100 * S
    assert intake.watermark == 200 * S


def test_crash_test_and_batches_of_files_refuse_a_graph_by_arrival(tmp_path: Path) -> None:
    (tmp_path / "plant.py").write_text(
        "import msgspec\n"
        "from millpy import Count, EventTime, File, Graph, GlobalWindow\n"
        "class Level(msgspec.Struct):\n"
        "    tank: str\n"
        "graph = Graph('plant')\n"
        "levels = graph.inject('levels', File('a.ndjson'), schema=Level, event_time=EventTime.arrival())\n"
        "levels.key_by('tank').window(GlobalWindow()).aggregate(n=Count()).to_table('n')\n"
    )
    with pytest.raises(UsageError, match="other arrivals"):
        refuse_arrival(load_graph(str(tmp_path / "plant.py")))
    (tmp_path / "a.ndjson").write_bytes(b"")
    with pytest.raises(UsageError, match="files do not tell when"):
        make_job(str(tmp_path / "plant.py"), [str(tmp_path / "a.ndjson")], limits=Limits(), now_us=Instant(0))


def test_redelivered_record_arrives_when_it_is_committed() -> None:
    """A crash voids the first try: nothing of it is stored, so the second arrival is the only one."""
    step(an_intake(), 100, level())

    assert times(step(an_intake(), 107, level())) == [107]
