"""How long accepted ids are needed: until the watermark is two horizons past them, in memory and in the store."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from millpy.model.time import Instant
from millpy.operators.first_seen import FirstSeen
from millpy.operators.kept_records import KeptRecords

WITHIN, ID = 10, bytes(range(16))


def check(subject: FirstSeen | KeptRecords, at: int | None, clock: int) -> tuple[bool, Any]:
    """Judge a record, if there is one; return whether it passes, and the run to be stored."""
    ids, times = (b"", np.empty(0, np.int64)) if at is None else (ID, np.array([at]))
    if isinstance(subject, FirstSeen):
        passes, run = subject.check(ids, times, Instant(clock))
    else:
        marks, retracts = np.zeros(len(times), np.uint64), np.zeros(len(times), np.bool_)
        passes, run = subject.check(ids, times, marks, retracts, Instant(clock))
    return bool(passes.any()), run


@pytest.mark.parametrize("restart", [False, True])
@pytest.mark.parametrize("of", [FirstSeen, KeptRecords])
def test_the_oldest_record_that_is_judged_still_meets_those_one_horizon_before_it(of: Any, restart: bool) -> None:
    subject = of(WITHIN)
    passes, run = check(subject, 0, 0)
    assert passes

    clock = 2 * WITHIN  # the oldest record that is still judged is one horizon behind it
    assert check(subject, None, clock) == (False, None)
    if restart:
        subject = of(WITHIN, [run] if run.expires_at >= clock else [])

    assert check(subject, WITHIN, clock) == (False, None)
    assert check(subject, WITHIN + 1, clock)[0]
