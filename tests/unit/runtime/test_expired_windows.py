"""Which windows of the store a worker may delete."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from millpy.runtime.owned_interval import OwnedInterval


def test_windows_that_expire_in_a_turn_in_flight_keep_their_rows() -> None:
    stage = SimpleNamespace(expired_windows=lambda: (("0/60", 7), ("60/120", 8)))
    interval: Any = SimpleNamespace(stage=stage, committed_bundle=7)

    assert OwnedInterval.expired_windows(interval) == ["0/60"], "the turn of bundle 8 may fail"

    interval.committed_bundle = 8
    assert OwnedInterval.expired_windows(interval) == ["0/60", "60/120"]
