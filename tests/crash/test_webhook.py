"""A worker that posts is killed and frozen around its requests: nothing is lost, and repeats are known and bounded."""

from __future__ import annotations

from functools import partial

import pytest

from tests.crash.cases.webhooks import POINTS, around_request
from tests.crash.conftest import Survives
from tests.crash.world import Case


@pytest.mark.parametrize(
    ("point", "batch"), [*((point, "") for point in POINTS), ("arrived", "json"), ("sent", "json")]
)
def test_a_kill_around_a_request_loses_nothing_and_repeats_only_known_ids(
    survives: Survives, point: str, batch: str
) -> None:
    verdict = survives(
        Case("SIGKILL around a request", point, partial(around_request, point=point, batch=batch, number=400))
    )
    assert verdict.kills + verdict.idle_kills == 1  # all may be in the outbox already


@pytest.mark.parametrize("point", ["arrived", "answered"])
def test_a_frozen_worker_that_wakes_up_repeats_only_known_ids(survives: Survives, point: str) -> None:
    survives(Case("SIGSTOP", point, partial(around_request, point=point, batch="", frozen=True, number=400)))
