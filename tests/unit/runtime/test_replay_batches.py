"""Replays enter turns by their budget, like any other input."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from millpy.hosting.interval_state import PauseState
from millpy.ingest.dead_letters import PayloadFormat
from millpy.limits import Limits
from millpy.model.checkpoint import PastWindow, Request
from millpy.model.time import Instant
from millpy.runtime.gather import next_replay, take
from millpy.runtime.turn_budget import TurnBudget


def test_a_voided_turn_is_retried_with_fewer_requests_and_skips_none() -> None:
    asked = [Request("dead_letters", number, 1, "s", "c", b"{}", wire='{"format":"json"}') for number in range(1_000)]
    interval: Any = SimpleNamespace(requested=list(asked), plan=SimpleNamespace(stage=None))
    budget = TurnBudget(Limits())
    for _ in range(20):
        budget.stepped(1_000, 0.001)
    for _ in range(10):
        budget.voided()

    taken, sizes = [], []
    while (replay := next_replay(interval, Instant(0), budget.records)) is not None:
        taken += replay.requests
        sizes.append(len(replay.requests))

    assert taken == asked
    assert max(sizes) == budget.records < 100


@pytest.mark.parametrize("format", ["json", "message"])
def test_a_message_that_may_become_as_many_records_as_a_turn_has_is_replayed_alone(format: Any) -> None:
    wire = msgspec.json.encode(PayloadFormat(format)).decode()
    asked = [Request("dead_letters", number, 1, "s", "c", b"x", wire=wire) for number in range(20)]
    interval: Any = SimpleNamespace(requested=list(asked), plan=SimpleNamespace(stage=None))

    sizes = []
    while (replay := next_replay(interval, Instant(0), 1_000)) is not None:
        sizes.append(len(replay.requests))

    assert sizes == ([1] * 20 if format == "message" else [20])


def test_requests_for_finished_windows_come_apart_from_others_and_letters_for_theirs_alone() -> None:
    def request(number: int, **of: Any) -> Request:
        return Request("late_records", number, 1, "s", "c", b"{}", **of)

    window = PastWindow(b'"k"', 0, 60, True)
    asked = [
        *(request(number) for number in range(3)),
        *(request(number, into_window=True, window=window) for number in range(3, 8)),
        *(request(number, into_window=True) for number in range(8, 10)),
        request(10),
    ]
    interval: Any = SimpleNamespace(requested=list(asked), plan=SimpleNamespace(stage=None))

    taken = []
    while (replay := next_replay(interval, Instant(0), 2)) is not None:
        taken.append([found.id for found in replay.requests])

    assert taken == [[0, 1], [2], [3, 4, 5, 6, 7], [8], [9], [10]]


@pytest.mark.parametrize("why", ["nothing", "replay", "held back", "backpressure", "finished", "paused"])
async def test_a_source_that_gives_nothing_to_a_turn_is_not_read(why: str) -> None:
    """What is read and not stepped would be lost: the source continues behind it."""

    class Source:
        reads = 0

        async def take(self) -> bytes:
            self.reads += 1
            return b"records"

        def quiet(self) -> bool:
            return False

    source = Source()
    interval: Any = SimpleNamespace(
        interval_id=1,
        injector=source,
        backpressured=why == "backpressure",
        finished=why == "finished",
        pause=PauseState.COMMITTED if why == "paused" else PauseState.NO,
    )
    replays: Any = {1: object()} if why == "replay" else {}
    found, _ = await take({1: interval}, replays, frozenset({1} if why == "held back" else ()))
    assert source.reads == len(found) == (why == "nothing")
