"""Limits on the requests of one client: a token bucket each, and a bounded number of buckets."""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass

CLIENTS_MAX = 10_000
"""Clients that are remembered; the one that has been silent for longest is forgotten first."""


@dataclass(slots=True)
class _Bucket:
    """What a client may still send, and when that was counted."""

    left: float
    at: float


class RateLimiter:
    """Lets each client send `per_s` requests a second, and as many at once; None for no limit."""

    def __init__(self, per_s: float | None) -> None:
        self._per_s = per_s
        self._burst = max(1.0, per_s or 0.0)
        self._buckets: OrderedDict[str, _Bucket] = OrderedDict()

    def delay_s(self, client: str, now: float) -> int:
        """Count a request; return 0 if it is within the limit, else the seconds after which one is.

        Args:
            client: the name of a token, or an address.
            now: seconds on the monotonic clock.
        """
        if self._per_s is None:
            return 0
        bucket = self._buckets.get(client)
        if bucket is None:
            bucket = self._buckets[client] = _Bucket(self._burst, now)
            if len(self._buckets) > CLIENTS_MAX:
                self._buckets.popitem(last=False)
        self._buckets.move_to_end(client)
        bucket.left = min(self._burst, bucket.left + (now - bucket.at) * self._per_s)
        bucket.at = now
        if bucket.left < 1:
            return math.ceil((1 - bucket.left) / self._per_s)
        bucket.left -= 1
        return 0
