"""Whether a source partition is connected, since when, and why not: kept by the source, read by its worker.

A source that connects in the background calls `connected` and `disconnected`; of any other source the worker knows
whether it is open. The worker stores what has changed (`runtime/source_health.py`), also without a turn.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from millpy.errors import ConfigError, SourceUnavailableError
from millpy.model.time import INSTANT_MIN, Instant

WHY_CHARACTERS_MAX = 500
"""The length above which the end of a reason is left out: brokers may say much."""


@dataclass(frozen=True, slots=True)
class Outage:
    """A time without connection: from and until, in µs since the epoch, why, and the attempts to connect in it."""

    since_us: Instant
    until_us: Instant
    why: str
    attempts: int


class ConnectionState:
    """The state of the connection of one source partition; for one event loop.

    Args:
        now_us: returns the time, in µs since the epoch.

    Attributes:
        is_connected: None until the first attempt has ended.
        since_us: since when it is so.
        why: why there is no connection; "" while there is one.
        attempts: the attempts to connect that have failed since then.
        accepted: whether the other side has let a worker in before: what it refuses later may be in order again.
        managed: whether the source reports its connection itself.
        held: what the source waits for although it is connected, such as a schema registry; "" for nothing.
        failing: whether the source has failed, and has given nothing since then.
        address: where other workers reach the owner of the partition, for a source whose workers pass records on.
        outage: the last time without connection that is over; None if there was none.
    """

    __slots__ = (
        "_now_us",
        "accepted",
        "address",
        "attempts",
        "failing",
        "held",
        "is_connected",
        "managed",
        "outage",
        "since_us",
        "why",
    )

    def __init__(self, now_us: Callable[[], Instant] = lambda: INSTANT_MIN) -> None:
        self._now_us = now_us
        self.is_connected: bool | None = None
        self.since_us = INSTANT_MIN
        self.why = ""
        self.attempts = 0
        self.accepted = False
        self.managed = False
        self.held = ""
        self.failing = False
        self.address = ""
        self.outage: Outage | None = None

    def connected(self) -> None:
        """Note that the source is connected, and answers."""
        if self.is_connected or self.held:
            return
        now_us = self._now_us()
        if self.is_connected is False:
            self.outage = Outage(self.since_us, now_us, self.why, self.attempts)
        self.is_connected, self.since_us, self.why, self.attempts = True, now_us, "", 0

    def hold(self, why: str) -> None:
        """Note that the source takes nothing before something else answers; it then counts as not connected."""
        self.held = why
        self.disconnected(why)

    def release(self) -> None:
        """Note that what the source has waited for is there."""
        if self.held:
            self.held = ""
            self.connected()

    def is_outage(self, error: BaseException, refusals: type[ConfigError] = ConfigError) -> bool:
        """Tell whether to wait and connect again after an error: a refusal ends a worker that was never accepted."""
        return isinstance(error, SourceUnavailableError) or (self.accepted and isinstance(error, refusals))

    def disconnected(self, why: str, *, attempted: bool = False, since_us: Instant | None = None) -> None:
        """Note that there is no connection.

        Args:
            why: the reason; the last one counts.
            attempted: whether an attempt to connect has failed.
            since_us: when the connection was lost, if that was earlier than now.
        """
        if self.is_connected is not False:
            self.is_connected, self.attempts = False, 0
            self.since_us = self._now_us() if since_us is None else since_us
        self.why = why if len(why) <= WHY_CHARACTERS_MAX else why[: WHY_CHARACTERS_MAX - 1] + "…"
        self.attempts += attempted
