"""The algebra of watermarks: each law by itself, as nothing that uses it says which law it needs."""

from __future__ import annotations

import itertools

import pytest

from millpy.model.time import INSTANT_MAX, INSTANT_MIN, Instant
from millpy.model.watermark import advance, input_watermark, low_watermark

TIMES = [INSTANT_MIN, Instant(-1), Instant(0), Instant(7), INSTANT_MAX]
PAIRS = list(itertools.product(TIMES, TIMES))


@pytest.mark.parametrize("watermarks", list(itertools.permutations([Instant(3), Instant(7), Instant(5)])))
def test_slowest_producer_holds_the_input_watermark(watermarks: tuple[Instant, ...]) -> None:
    assert input_watermark(watermarks) == 3


def test_stage_without_a_producer_is_at_the_end() -> None:
    assert input_watermark([]) == INSTANT_MAX


@pytest.mark.parametrize(("oldest_work", "upstream"), PAIRS)
def test_low_watermark_passes_neither_oldest_work_nor_input(oldest_work: Instant, upstream: Instant) -> None:
    published = low_watermark(oldest_work, upstream)

    assert published <= oldest_work
    assert published <= upstream
    assert published in (oldest_work, upstream)


@pytest.mark.parametrize(("current", "candidate"), PAIRS)
def test_watermark_never_regresses(current: Instant, candidate: Instant) -> None:
    after = advance(current, candidate)

    assert after >= current
    assert after >= candidate
    assert after == advance(candidate, current) == advance(after, candidate)
