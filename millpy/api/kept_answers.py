"""The answers of the last second to what many viewers ask for."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

KEPT_S = 1.0
"""A kept answer is used by the requests that come so long after it began to be read."""
ASKED_MAX = 2
"""An answer is kept for what was asked for more often than this in about KEPT_S."""
KEPT_BYTES_MAX = 16_000_000
T_co = TypeVar("T_co", covariant=True)


@dataclass(frozen=True, slots=True)
class KeptAnswer(Generic[T_co]):
    """What a call has returned, and when it began."""

    began_at: float
    value: T_co


class KeptAnswers:
    """The answers that later requests may have.

    Args:
        clock: returns monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._answers: dict[Hashable, tuple[KeptAnswer[object], int]] = {}  # with their bytes
        self._asked: Counter[int] = Counter()  # by the hash of the key, which is long and comes from outside
        self._asked_before: Counter[int] = Counter()
        self._counted_from = self._forgotten_at = -math.inf

    def find(self, key: Hashable) -> KeptAnswer[object] | None:
        """Count a request; return the answer that it may have."""
        now = self._clock()
        if now - self._counted_from >= KEPT_S:
            recent = now - self._counted_from < 2 * KEPT_S
            self._asked, self._asked_before = Counter(), self._asked if recent else Counter()
            self._counted_from = now
            self._drop_old(now)
        self._asked[hash(key)] += 1
        found, _ = self._answers.get(key, (None, 0))
        return found if found is not None and now - found.began_at < KEPT_S else None

    def keep(self, key: Hashable, answer: KeptAnswer[object], size: int) -> None:
        """Keep an answer of `size` bytes, if many ask for it and nothing was forgotten since it began."""
        asked = self._asked[hash(key)] + self._asked_before[hash(key)]
        if size > KEPT_BYTES_MAX or answer.began_at <= self._forgotten_at or asked <= ASKED_MAX:
            return
        if sum(kept for _, kept in self._answers.values()) + size > KEPT_BYTES_MAX:
            self._answers.clear()
        self._answers[key] = answer, size

    def forget(self) -> None:
        """Forget all answers, and those that are being read, because something has changed."""
        self._forgotten_at = self._clock()
        self._answers.clear()

    def _drop_old(self, now: float) -> None:
        """Drop what is no longer used: its key comes from outside, and may be long."""
        for key in [key for key, (answer, _) in self._answers.items() if now - answer.began_at >= KEPT_S]:
            del self._answers[key]
