"""Per-key tools at exact bounds."""

from __future__ import annotations

import pytest

from millpy import minutes, seconds
from tests.per_key_events import at, driver_of, event, grid


@pytest.mark.parametrize(
    ("beyond", "values"),
    [(0.0, [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]), (0.001, [0.0])],
    ids=["as long as the limit", "longer"],
)
def test_a_gap_as_long_as_the_limit_is_filled_linearly_and_a_longer_one_is_not(
    beyond: float, values: list[float]
) -> None:
    driver = driver_of(lambda keyed: grid(keyed, method="linear", limit=minutes(5)))
    driver.feed("events", [event(0, value=0.0), event(300 + beyond, value=5.0)])

    driver.end()

    points = [record for record in driver.records("g") if record.at <= at(300)]
    assert [point.value for point in points] == pytest.approx(values)


def test_a_record_passes_exactly_as_long_after_the_last_one_as_max_silence() -> None:
    driver = driver_of(lambda keyed: keyed.changes("value", max_silence=seconds(10), name="c"))
    driver.feed("events", [event(second) for second in (0, 9.999999, 10, 19, 20.000001)])

    driver.end()

    assert [record.at for record in driver.records("c")] == [at(0), at(10), at(20.000001)]
