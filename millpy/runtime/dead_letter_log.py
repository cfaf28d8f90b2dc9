"""Log messages about dead letters and parked keys, so that a graph that dead-letters all of its input is not silent."""

from __future__ import annotations

import logging
from collections import Counter

import msgspec

from millpy.model.checkpoint import Checkpoint, Kind
from millpy.operators.parking import KEY_NAMESPACE, Failure

log = logging.getLogger(__name__)

EVERY_S = 60.0
DEAD_LETTERS = ("record", "dead-lettered", "see `millpy dead-letters`")
PARKED = ("key", "parked", "see `millpy parked`; watermarks and the end of a run wait for parked keys")
What = tuple[tuple[str, str, str], str, str]


class DeadLetterLog:
    """A log of dead letters: the first of each computation and reason, then at most a line a minute with the count."""

    def __init__(self) -> None:
        self._unlogged: Counter[What] = Counter()
        self._details: dict[What, str] = {}
        self._logged_at: dict[What, float] = {}

    def add(self, computation: str, checkpoint: Checkpoint) -> None:
        """Count the dead letters and parked keys of a committed checkpoint; `log_due` logs them."""
        for letter in checkpoint.dead_letters:
            self._add((DEAD_LETTERS, letter.computation, letter.reason), letter.detail)
        for (of, reason), count in checkpoint.unstored.items():
            self._add((DEAD_LETTERS, of, reason), "counted but not kept: too many of one cause", count)
        for entries in checkpoint.delta:
            if entries.kind is Kind.PARKED and entries.namespace == KEY_NAMESPACE:
                for value in filter(None, entries.values):
                    failure = msgspec.json.decode(value, type=Failure)
                    self._add((PARKED, computation, failure.reason), failure.detail)

    def _add(self, what: What, detail: str, count: int = 1) -> None:
        self._unlogged[what] += count
        self._details.setdefault(what, detail)

    def log_due(self, now: float, *, everything: bool = False) -> None:
        """Log the counts that are due at `now` (seconds, monotonic): once a minute per cause; all if `everything`."""
        for what in list(self._unlogged):
            logged_at = self._logged_at.get(what)
            if logged_at is not None and now - logged_at < EVERY_S and not everything:
                continue
            self._logged_at[what] = now
            (noun, done, hint), computation, reason = what
            count, detail = self._unlogged.pop(what), self._details.pop(what)
            counted = f"{count} {noun}{'s' if count != 1 else ''}"
            log.warning("%s of %s %s (%s): %s", counted, computation, done, reason, detail, extra={"hint": hint})
