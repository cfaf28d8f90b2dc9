"""Low-watermark algebra: pure values with stated laws (MillWheel, section 4.5).

Input watermark(C) = min over C's producers of their watermark at the position consumed.
Low watermark(C) = min(input watermark(C), oldest work of C). Nothing else publishes (I5).
"""

from __future__ import annotations

from collections.abc import Iterable

from millpy.model.time import INSTANT_MAX, Instant


def input_watermark(watermarks: Iterable[Instant]) -> Instant:
    """Combine the producers' watermarks at the positions consumed; no producer at all reports the end."""
    return min(watermarks, default=INSTANT_MAX)


def low_watermark(oldest_work: Instant, input_watermark: Instant) -> Instant:
    """Combine local work and upstream progress; nothing pending reports INSTANT_MAX as oldest work."""
    return min(oldest_work, input_watermark)


def advance(current: Instant, candidate: Instant) -> Instant:
    """Move a watermark forward, never back: a smaller candidate is old news, not an error.

    Invariants:
        advance(a, b) >= a; commutative, associative and idempotent.
    """
    return max(current, candidate)
