"""What clients send to a source that they connect to, counted in one worker, for its metrics."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(slots=True)
class RequestTraffic:
    """The requests to a source in one worker. Another thread reads it, so no key is ever added.

    Attributes:
        requests: the first digit of a status -> the number of answers to clients, also for other workers.
        refusals: the reason -> the number of requests, or connections, that were refused.
        records: records of this worker's partitions in requests that were answered as committed.
        bytes: bytes of bodies as sent by clients, of requests that were read to their end.
        waiting_requests: requests that are being read or wait for their commit, of other workers, too.
        waiting_bytes: bytes of their bodies, after decompression.
        connections: open connections of the address of the source.
    """

    requests: dict[int, int]
    refusals: dict[str, int]
    records: int = 0
    bytes: int = 0
    waiting_requests: int = 0
    waiting_bytes: int = 0
    connections: int = field(default=0)

    @classmethod
    def of_reasons(cls, reasons: Iterable[str]) -> RequestTraffic:
        """Return counters at 0, for these reasons of refusals."""
        return cls(dict.fromkeys((2, 4, 5), 0), dict.fromkeys(reasons, 0))
