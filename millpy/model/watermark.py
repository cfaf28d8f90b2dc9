"""Low-watermark algebra: pure values with stated laws (MillWheel, section 4.5).

Input watermark(C) = min over C's producers of their watermark at the position consumed.
Low watermark(C) = min(input watermark(C), oldest work of C). No other code publishes watermarks (I5).
"""

from __future__ import annotations

from collections.abc import Iterable

from millpy.model.time import INSTANT_MAX, Instant


def input_watermark(watermarks: Iterable[Instant]) -> Instant:
    """Return the smallest of the producers' watermarks at the consumed positions; INSTANT_MAX without producers."""
    return min(watermarks, default=INSTANT_MAX)


def low_watermark(oldest_work: Instant, input_watermark: Instant) -> Instant:
    """Return the low watermark of a computation; `oldest_work` is INSTANT_MAX if no work is pending."""
    return min(oldest_work, input_watermark)


def advance(current: Instant, candidate: Instant) -> Instant:
    """Return the later of two watermarks. A candidate that is earlier than the current one is outdated, not an error.

    Invariants:
        advance(a, b) >= a; commutative, associative and idempotent.
    """
    return max(current, candidate)
