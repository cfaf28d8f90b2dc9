"""Limit the failed attempts to authenticate of each address."""

from __future__ import annotations

from collections import OrderedDict

from millpy.clock import Clock
from millpy.config.addresses import client_of

FAILURES_MAX = 10
WITHIN_S = 60.0
ADDRESSES_MAX = 10_000


class FailureLimit:
    """Counts failures by address, of the newest ADDRESSES_MAX addresses. An IPv6 address counts as its /64 network."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._counts: OrderedDict[str, tuple[int, float]] = OrderedDict()

    def wait_s(self, address: str) -> float:
        """Return the seconds for which an address may not try again; 0 if it may."""
        count, since = self._counts.get(client_of(address), (0, 0.0))
        return max(0.0, since + WITHIN_S - self._clock.monotonic()) if count >= FAILURES_MAX else 0.0

    def count(self, address: str) -> None:
        """Count a failure."""
        group, now = client_of(address), self._clock.monotonic()
        count, since = self._counts.pop(group, (0, now))
        if now - since >= WITHIN_S:
            count, since = 0, now
        self._counts[group] = (count + 1, since)
        if len(self._counts) > ADDRESSES_MAX:
            self._counts.popitem(last=False)
