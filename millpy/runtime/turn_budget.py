"""The budget of a turn: as much as the limits allow, and less after a turn that was too large or too slow.

Two measures apply, and the smaller one counts:

    size   every limit times `factor`. A turn that was stepped and could not be committed (a time-out, no memory, a
           lost connection, a lost lease) halves the factor, so it is not repeated unchanged. Committed turns double it
           again; the more recent halvings, the more turns have to commit first.
    time   as many records as fit in `Limits.step_s_max` at the speed of the last steps. The speed is unknown at the
           beginning, so the first takes are small. A slower step counts at once, a faster one step by step.

Takes from sources, polls of segments and stages (`Work.panes_max`, `Work.timers_max`) obey the budget. Work that a
turn leaves undone is due in the next one.
"""

from __future__ import annotations

from millpy.limits import Limits

FIRST_RECORDS = 16
"""Records of the first turns, while the time per record is unknown."""
FACTOR_MIN = 2.0**-16
"""The factor falls no lower; a turn of this factor counts as one that cannot get smaller."""
FASTER = 1 / 16
"""The estimated time per record falls from one step to the next at most to this fraction."""
REFUSED_HALVINGS = 3
"""Halvings after a search for poison that took too long: such a turn has much more poison than a search can find."""
PASSES_MAX = 32
"""At most this many turns commit before a factor below 1 is doubled."""
FORGET_HALVINGS_PASSES = 100
"""After this many turns of full size, earlier halvings are forgotten."""


class TurnBudget:
    """The budget of one worker's turns, shared by all of its intervals.

    Attributes:
        factor: factor in (0, 1] by which every limit of a turn is multiplied.
        takers: number of sources and consumers of segments that share the records of a turn.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self.factor = 1.0
        self.takers = 1
        self._record_s = limits.step_s_max / FIRST_RECORDS
        self._record_bytes = limits.segment_poll_bytes_max / limits.bundle_records_max
        self._passes = 0
        self._passes_wanted = 1

    @property
    def records(self) -> int:
        """Number of records that each taker may bring into the next turn, at least one; takers share the time bound."""
        by_time = self._limits.step_s_max / self._record_s / max(1, self.takers) if self._record_s else float("inf")
        return max(1, int(min(self._limits.bundle_records_max * self.factor, by_time)))

    @property
    def bytes(self) -> int:
        """Number of bytes that each taker may bring into the next turn, not shared; one record may exceed it."""
        return self._scaled(self._limits.bundle_bytes_max)

    @property
    def segment_bytes(self) -> int:
        """Number of bytes of segments that one poll may read: about the size of the records that the turn may take."""
        wanted = self.records * max(1, self.takers) * self._record_bytes
        return max(1, int(min(self._limits.segment_poll_bytes_max * self.factor, wanted)))

    @property
    def panes(self) -> int:
        """Number of panes that one interval may emit in the next turn."""
        return self._scaled(self._limits.turn_panes_max)

    @property
    def timers(self) -> int:
        """Number of timers of one interval that may fire at the end of the next turn."""
        return self._scaled(self._limits.turn_timers_max)

    def polled(self, records: int, size: int) -> None:
        """Take the bytes of a record in segments from a poll, of which a turn takes `records` at most.

        What a poll reads beyond that is read again by the next one.
        """
        if records:
            self._record_bytes = size / records

    def stepped(self, records: int, seconds: float) -> None:
        """Estimate the time per record from a step that took in `records` within `seconds`."""
        if records:
            self._record_s = max(seconds / records, self._record_s * FASTER)

    def voided(self) -> None:
        """Halve the budget, because a stepped turn is void and will be taken again."""
        self.factor = max(FACTOR_MIN, self.factor / 2)
        self._passes = 0
        self._passes_wanted = min(PASSES_MAX, self._passes_wanted * 2)

    def refused(self, records: int, rows: int) -> None:
        """Shrink the budget below a turn of `records` and result `rows` that has more poison than a search can find.

        The limits may be far above the size of that turn; halving them alone would bring the same turn again and again.
        """
        for _ in range(REFUSED_HALVINGS):
            self.voided()
        while self.factor > FACTOR_MIN and self.records > records // 2 and self.panes > rows // 2:
            self.voided()

    def passed(self) -> None:
        """Count a committed turn, and double the budget when enough have committed."""
        self._passes += 1
        if self.factor < 1.0:
            if self._passes >= self._passes_wanted:
                self.factor, self._passes = min(1.0, self.factor * 2), 0
        elif self._passes >= FORGET_HALVINGS_PASSES:
            self._passes, self._passes_wanted = 0, 1

    def _scaled(self, limit: int) -> int:
        return max(1, int(limit * self.factor))
