"""When the archives of a worker take input."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any, cast

from millpy.hosting.interval_state import IntervalState
from millpy.hosting.plan import Plan
from millpy.limits import Limits
from millpy.model.time import INSTANT_MAX, INSTANT_MIN, Instant
from millpy.runtime.archive_pace import ArchivePace
from millpy.store.protocol import PollResult, SegmentQuery

STAGE, ARCHIVE, PRODUCER, ENOUGH = 1, 2, 3, 1_000
ALL = [SegmentQuery(STAGE, 0, PRODUCER, (1,), 0), SegmentQuery(ARCHIVE, 0, PRODUCER, (2,), 0)]
OF_STAGE = ALL[:1]


def a_pace(every_s: float = 10.0) -> ArchivePace:
    computations = [
        SimpleNamespace(archives=archives, intervals=[SimpleNamespace(interval_id=interval_id)])
        for interval_id, archives in ((STAGE, False), (ARCHIVE, True))
    ]
    return ArchivePace(cast(Plan, computations), Limits(archive_bytes_min=ENOUGH), every_s)


def intervals(waiting: int = 0, watermark: Instant = INSTANT_MIN) -> dict[int, IntervalState]:
    def state(**known: Any) -> IntervalState:
        return cast(IntervalState, SimpleNamespace(memory_bytes_min=0, low_watermark=watermark, **known))

    return {of: state(waiting_bytes=waiting) for of in (STAGE, ARCHIVE, PRODUCER)}


def an_answer(query: SegmentQuery, head: int) -> PollResult:
    return PollResult(query, (), head, INSTANT_MIN, False)


def polled(pace: ArchivePace, at: float, head: int = 0, owned: dict[int, IntervalState] | None = None) -> None:
    pace.polled([an_answer(query, head) for query in ALL], owned or intervals(), at)


def test_archive_takes_input_at_once_and_then_every_few_seconds() -> None:
    pace = a_pace()

    assert pace.due(ALL, intervals(), 100.0) == ALL
    polled(pace, 100.0)

    assert pace.due(ALL, intervals(), 109.9) == OF_STAGE
    assert pace.due_at() == 110.0
    assert pace.due(ALL, intervals(), 110.0) == ALL


def test_archive_that_is_behind_takes_more_at_once() -> None:
    pace = a_pace()

    polled(pace, 100.0, head=7)

    assert pace.due(ALL, intervals(), 100.1) == ALL, "the last poll ended before the head"


def test_archive_takes_early_what_is_enough_for_a_file_and_forgets_it_then() -> None:
    pace, owned = a_pace(), intervals(waiting=ENOUGH)
    polled(pace, 100.0)

    assert pace.due(ALL, intervals(waiting=ENOUGH - 1), 101.0) == OF_STAGE
    assert pace.due(ALL, owned, 101.0) == ALL
    polled(pace, 101.0, owned=owned)

    assert pace.due(ALL, owned, 102.0) == OF_STAGE


def test_archive_takes_the_rest_when_its_input_has_ended() -> None:
    pace = a_pace()
    polled(pace, 100.0)

    assert pace.due(ALL, intervals(watermark=INSTANT_MAX), 101.0) == ALL


def test_poll_of_other_stages_is_no_poll_of_archives() -> None:
    pace = a_pace()
    polled(pace, 100.0)

    pace.polled([an_answer(OF_STAGE[0], 9)], intervals(), 109.0)

    assert pace.due_at() == 110.0


def test_held_archive_takes_nothing_not_even_in_memory_until_it_is_resumed() -> None:
    pace, owned = a_pace(), intervals(waiting=ENOUGH, watermark=INSTANT_MAX)

    pace.hold("the disk is full")
    pace.apply(owned)

    assert pace.due(ALL, owned, 1e9) == OF_STAGE
    assert pace.due_at() == float("inf")
    assert owned[ARCHIVE].memory_bytes_min == sys.maxsize
    assert owned[STAGE].memory_bytes_min == 0
    pace.resume()
    pace.apply(owned)
    assert pace.due(ALL, owned, 0.0) == ALL
    assert owned[ARCHIVE].memory_bytes_min == ENOUGH


def test_other_stages_do_not_wait_where_there_is_no_archive() -> None:
    assert a_pace().due(OF_STAGE, intervals(), 0.0) == OF_STAGE
