"""Whether the database answers, by the heartbeats, which run also when no turn does."""

from __future__ import annotations

import logging

from millpy.clock import Clock
from millpy.model.time import Instant, describe

log = logging.getLogger(__name__)
OUTAGES_MAX = 100


class DatabaseHealth:
    """Whether the database answers heartbeats. Their thread writes it; the worker's event loop reads it.

    Attributes:
        why: why the last heartbeat failed.
        outages: the details of the outages that are over and not told yet, at most OUTAGES_MAX.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._failing: tuple[float, Instant] | None = None
        self.why = ""
        self.outages: list[dict[str, object]] = []

    @property
    def answers(self) -> bool:
        """Whether the last heartbeat has succeeded."""
        return self._failing is None

    @property
    def failing_s(self) -> float:
        """Seconds since the first failure; 0 while the database answers."""
        failing = self._failing
        return 0.0 if failing is None else max(0.0, self._clock.monotonic() - failing[0])

    def failed(self, why: str) -> None:
        """Note that the database cannot be reached."""
        self.why = why
        if self._failing is None:
            self._failing = (self._clock.monotonic(), self._clock.now_us())

    def answered(self) -> None:
        """Note that the database has answered."""
        failing, self._failing = self._failing, None
        if failing is None:
            return
        began, since_us = failing
        seconds = max(0.0, self._clock.monotonic() - began)
        until_us = Instant(since_us + round(seconds * 1e6))
        detail = {"since": describe(since_us), "until": describe(until_us), "seconds": round(seconds, 1)}
        log.warning("the database answers again, after %.1f s: %s", seconds, self.why)
        if len(self.outages) < OUTAGES_MAX:
            self.outages.append({**detail, "why": self.why})
