"""Tells the log what is dead-lettered: who only reads logs must not find a graph that sets everything aside silent."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable

from millpy.model.checkpoint import DeadLetter

log = logging.getLogger(__name__)

EVERY_S = 60.0


class DeadLetterLog:
    """A line for the first of each computation and reason, then a line a minute with how many there were since."""

    def __init__(self) -> None:
        self._untold: Counter[tuple[str, str]] = Counter()
        self._details: dict[tuple[str, str], str] = {}
        self._told_at: dict[tuple[str, str], float] = {}

    def add(self, letters: Iterable[DeadLetter]) -> None:
        """Take what was just committed; `tell` says it."""
        for letter in letters:
            of = (letter.computation, letter.reason)
            self._untold[of] += 1
            self._details.setdefault(of, letter.detail)

    def tell(self, now: float, *, everything: bool = False) -> None:
        """Say what is due at `now`, in seconds on the monotonic clock; `everything` when there is no later."""
        for of in list(self._untold):
            told_at = self._told_at.get(of)
            if told_at is not None and now - told_at < EVERY_S and not everything:
                continue
            self._told_at[of] = now
            (computation, reason), records, detail = of, self._untold.pop(of), self._details.pop(of)
            log.warning(
                "%d record%s of %s dead-lettered (%s): %s",
                records,
                "s" if records != 1 else "",
                computation,
                reason,
                detail,
                extra={"hint": "see `millpy dead-letters`"},
            )
