from __future__ import annotations

import pytest

from millpy.errors import GraphError
from millpy.injectors.health import Health
from millpy.injectors.settings import Rate


def test_share_is_that_of_the_newest_bundles_that_have_enough_records() -> None:
    health = Health(Rate(share=0.5, minimum=100))

    assert health.count(1_000, 0) is None
    assert health.count(60, 60) is None  # with the bundle before: 60 of 1,060
    pause = health.count(40, 1)

    assert pause is not None
    assert pause.reason == "61 of its last 100 records were set aside, more than 50%"


def test_too_few_records_say_nothing() -> None:
    health = Health(Rate(share=0.0, minimum=10))

    assert [health.count(3, 3) for _ in range(3)] == [None] * 3
    assert health.count(1, 1) is not None


def test_share_at_the_limit_is_bearable_and_a_pause_counts_anew() -> None:
    health = Health(Rate(share=0.5, minimum=4))

    assert health.count(4, 2) is None
    assert health.count(4, 3) is not None
    assert health.count(3, 3) is None


def test_without_a_limit_nothing_pauses() -> None:
    assert Health(None).count(1_000, 1_000) is None


@pytest.mark.parametrize("how", [{"share": 1.0}, {"share": -0.1}, {"share": 0.5, "minimum": 0}])
def test_rate_that_means_nothing_is_refused(how: dict[str, float]) -> None:
    with pytest.raises(GraphError):
        Rate(**how)  # type: ignore[arg-type]
