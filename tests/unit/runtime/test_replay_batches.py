"""Replays enter turns by their budget, like any other input."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from millpy.ingest.dead_letters import PayloadFormat
from millpy.limits import Limits
from millpy.model.checkpoint import Request
from millpy.model.time import Instant
from millpy.runtime.gather import next_replay
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
