"""How much goes into one turn: what the limits allow, less after a turn that was too large or too slow.

Two measures, and the smaller one counts:

    size   every limit times `factor`. A turn that was stepped and could not be committed (a time-out, no memory, a
           lost connection, a lost lease) halves it: it is not repeated unchanged. Turns that pass double it again; the
           more often it was halved of late, the more turns have to pass first.
    time   what `Limits.step_s_max` holds, by the seconds that a record took in the last steps. Nothing is known at
           the beginning, so the first takes are small; a step that got slower counts at once, a faster one by and by.

Takes of sources and polls of segments go by it, and so do the stages (`Work.panes_max`, `Work.timers_max`): what a
turn leaves undone is due in the next one.
"""

from __future__ import annotations

from millpy.limits import Limits

FIRST_RECORDS = 16
"""What a turn takes before anything is known of how long a record takes."""
FACTOR_MIN = 2.0**-16
FASTER = 1 / 16
"""From one step to the next a record is believed to take at least this part of what it took."""
REFUSED_HALVINGS = 3
"""After a search for poison that took too long: such a turn has much more of it than can be found."""
PASSES_MAX = 32
"""So many turns pass at most before a factor below 1 is doubled."""
CALM_PASSES = 100
"""After so many turns in full size, earlier halvings are forgotten."""


class TurnBudget:
    """What one worker puts into a turn; one for all of its intervals.

    Attributes:
        factor: in (0, 1]; what every limit of a turn is multiplied by.
        takers: how many sources and consumers of segments share the records of a turn.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self.factor = 1.0
        self.takers = 1
        self._record_s = limits.step_s_max / FIRST_RECORDS
        self._passes = 0
        self._passes_wanted = 1

    @property
    def records(self) -> int:
        """Records that one taker may bring into the next turn, at least one."""
        by_time = self._limits.step_s_max / self._record_s / max(1, self.takers) if self._record_s else float("inf")
        return max(1, int(min(self._limits.bundle_records_max * self.factor, by_time)))

    @property
    def bytes(self) -> int:
        """Bytes that one taker may bring into the next turn; a single record may have more."""
        return self._scaled(self._limits.bundle_bytes_max)

    @property
    def segment_bytes(self) -> int:
        """Bytes of segments that one poll reads: no more than the records that are taken are likely to have."""
        share = min(1.0, self.records * max(1, self.takers) / self._limits.bundle_records_max)
        return max(1, int(self._limits.segment_poll_bytes_max * min(self.factor, share)))

    @property
    def panes(self) -> int:
        """Panes that one interval may emit in the next turn."""
        return self._scaled(self._limits.turn_panes_max)

    @property
    def timers(self) -> int:
        """Timers of one interval that may fire at the end of the next turn."""
        return self._scaled(self._limits.turn_timers_max)

    def stepped(self, records: int, seconds: float) -> None:
        """Learn from a step: how many records it took in, and how long it took."""
        if records:
            self._record_s = max(seconds / records, self._record_s * FASTER)

    def voided(self) -> None:
        """A turn that was stepped is void and will be taken again: smaller."""
        self.factor = max(FACTOR_MIN, self.factor / 2)
        self._passes = 0
        self._passes_wanted = min(PASSES_MAX, self._passes_wanted * 2)

    def refused(self, records: int, rows: int) -> None:
        """A turn of so many records and result rows is refused for more than can be found: it comes again smaller.

        The limits may be far above what was in it; halving them alone would bring the same turn again and again.
        """
        for _ in range(REFUSED_HALVINGS):
            self.voided()
        while self.factor > FACTOR_MIN and self.records > records // 2 and self.panes > rows // 2:
            self.voided()

    def passed(self) -> None:
        """A turn is committed."""
        self._passes += 1
        if self.factor < 1.0:
            if self._passes >= self._passes_wanted:
                self.factor, self._passes = min(1.0, self.factor * 2), 0
        elif self._passes >= CALM_PASSES:
            self._passes, self._passes_wanted = 0, 1

    def _scaled(self, limit: int) -> int:
        return max(1, int(limit * self.factor))
