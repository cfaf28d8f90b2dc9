"""How long a broker has been silent, though it is asked: a frozen broker, or a host that vanished, reports nothing.

The injector asks by a ping every WATCH_EVERY_S. Without any byte from the broker for SILENT_AFTER_S, it counts as
disconnected; the connection itself stays, as the broker may be busy, until HANG_UP_AFTER_S.
"""

from __future__ import annotations

WATCH_EVERY_S = 2.0
SILENT_AFTER_S = 6.0
HANG_UP_AFTER_S = 30.0


class BrokerSilence:
    """Measures the silence of one connection, from looks that come every WATCH_EVERY_S.

    Args:
        now: the time at which the connection was made, in seconds on the monotonic clock.
    """

    def __init__(self, now: float) -> None:
        self._heard_at = now
        self._looked_at = now
        self._reads = 0

    def look(self, reads: int, *, paused: bool, now: float) -> None:
        """Note what was read by now.

        While reading is paused nothing can be heard; and what arrived while this process slept, or its event loop was
        busy, is read only afterwards.
        """
        slept = now - self._looked_at > 2 * WATCH_EVERY_S
        if reads != self._reads or paused or slept:
            self._heard_at = now
        self._looked_at, self._reads = now, reads

    def seconds(self, now: float) -> float:
        """Return the seconds since the broker was last heard."""
        return max(0.0, now - self._heard_at)

    def answers(self, now: float) -> bool:
        """Tell whether the broker was heard after the ping before the last one, or the watch is late itself."""
        return self.seconds(now) < SILENT_AFTER_S - WATCH_EVERY_S / 2 or now - self._looked_at > 2 * WATCH_EVERY_S
