from __future__ import annotations

import pytest

from millpy.errors import GraphError
from millpy.ingest.error_rate import RecentErrorRate
from millpy.ingest.settings import ErrorRate


def test_share_is_computed_over_the_newest_bundles_with_enough_records() -> None:
    rate = RecentErrorRate(ErrorRate(share=0.5, minimum=100))

    assert rate.count(1_000, 0) is None
    assert rate.count(60, 60) is None  # with the bundle before: 60 of 1,060
    pause = rate.count(40, 1)

    assert pause is not None
    assert pause.reason == "61 of the last 100 records are dead letters, more than 50%"


def test_too_few_records_decide_nothing() -> None:
    rate = RecentErrorRate(ErrorRate(share=0.0, minimum=10))

    assert [rate.count(3, 3) for _ in range(3)] == [None] * 3
    assert rate.count(1, 1) is not None


def test_share_at_the_limit_is_allowed_and_a_pause_resets_the_count() -> None:
    rate = RecentErrorRate(ErrorRate(share=0.5, minimum=4))

    assert rate.count(4, 2) is None
    assert rate.count(4, 3) is not None
    assert rate.count(3, 3) is None


def test_without_a_limit_the_source_never_pauses() -> None:
    assert RecentErrorRate(None).count(1_000, 1_000) is None


@pytest.mark.parametrize("how", [{"share": 1.0}, {"share": -0.1}, {"share": 0.5, "minimum": 0}])
def test_meaningless_rate_is_refused(how: dict[str, float]) -> None:
    with pytest.raises(GraphError):
        ErrorRate(**how)  # type: ignore[arg-type]
