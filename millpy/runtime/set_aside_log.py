"""Tells the log what is set aside: who only reads logs must not find a graph silent that sets everything aside."""

from __future__ import annotations

import logging
from collections import Counter

import msgspec

from millpy.model.checkpoint import Checkpoint, Kind
from millpy.runtime.parking import KEY_NAMESPACE, Failure

log = logging.getLogger(__name__)

EVERY_S = 60.0
DEAD_LETTERS = ("record", "dead-lettered", "see `millpy dead-letters`")
PARKED = ("key", "stopped, parked", "see `millpy parked`; watermarks wait for it, and the end of a run")
What = tuple[tuple[str, str, str], str, str]


class SetAsideLog:
    """A line for the first of each computation and reason, then a line a minute with how many there were since."""

    def __init__(self) -> None:
        self._untold: Counter[What] = Counter()
        self._details: dict[What, str] = {}
        self._told_at: dict[What, float] = {}

    def add(self, computation: str, checkpoint: Checkpoint) -> None:
        """Take what a computation has just committed; `tell` says it."""
        for letter in checkpoint.dead_letters:
            self._add((DEAD_LETTERS, letter.computation, letter.reason), letter.detail)
        for (of, reason), count in checkpoint.unkept.items():
            self._add((DEAD_LETTERS, of, reason), "counted and not kept: too many of one cause", count)
        for entries in checkpoint.delta:
            if entries.kind is Kind.PARKED and entries.namespace == KEY_NAMESPACE:
                for value in filter(None, entries.values):
                    failure = msgspec.json.decode(value, type=Failure)
                    self._add((PARKED, computation, failure.reason), failure.detail)

    def _add(self, what: What, detail: str, count: int = 1) -> None:
        self._untold[what] += count
        self._details.setdefault(what, detail)

    def tell(self, now: float, *, everything: bool = False) -> None:
        """Say what is due at `now`, in seconds on the monotonic clock; `everything` when there is no later."""
        for what in list(self._untold):
            told_at = self._told_at.get(what)
            if told_at is not None and now - told_at < EVERY_S and not everything:
                continue
            self._told_at[what] = now
            (noun, done, hint), computation, reason = what
            count, detail = self._untold.pop(what), self._details.pop(what)
            counted = f"{count} {noun}{'s' if count != 1 else ''}"
            log.warning("%s of %s %s (%s): %s", counted, computation, done, reason, detail, extra={"hint": hint})
