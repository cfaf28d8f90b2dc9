"""As-of join: each record of the left stream with the last record of the right one that is not after it, by key.

    left.event_time - within <= right.event_time <= left.event_time

A left record waits until the watermark has passed it: then every right record that is not after it has come, except
late ones. So it is joined once, with the right record that a batch would choose, and nothing of it is ever retracted: a
retraction that is in time takes its record back before it was used. Of right records with one event time, the last to
arrive counts.

The step, what it buffers and its log are those of the interval join (`interval_join.py`); only what leaves is joined.
"""

from __future__ import annotations

from datetime import timedelta

import numpy as np
import pyarrow as pa

from millpy.model.stage import StageBinding, StoredInterval
from millpy.model.time import Instant, microseconds
from millpy.operators.interval_join import IntervalJoin, IntervalJoinLogic
from millpy.operators.join_output import How, JoinedType
from millpy.operators.join_pairs import last_matches
from millpy.operators.join_reach import LEFT, RIGHT, IntervalReach
from millpy.operators.join_rows import Rows, joined_rows


class AsOfJoinLogic(IntervalJoinLogic):
    """An as-of join in a graph.

    Args:
        joined: the type of its output.
        left_inputs: number of inputs of the left side; the others are of the right side.
        within: how old a right record may be, in event time, at the left one.
        how: "inner", or "left" for left records without a match as well.
        allowed_lateness: how far the watermark may be past a record that is still joined.
        takes_retractions: whether some of the records may be retractions.
    """

    kind = "as_of_join"

    def __init__(
        self,
        joined: JoinedType,
        left_inputs: int,
        within: timedelta,
        *,
        how: How,
        allowed_lateness: timedelta,
        takes_retractions: bool,
    ) -> None:
        super().__init__(
            joined,
            left_inputs,
            IntervalReach(microseconds(within), 0),
            how=how,
            allowed_lateness=allowed_lateness,
            takes_retractions=takes_retractions,
        )

    @property
    def retracts(self) -> bool:
        """Whether its output may have retractions: never."""
        return False

    def open(self, binding: StageBinding, recovered: StoredInterval) -> AsOfJoin:
        """Build the soft state of one interval from its log."""
        return AsOfJoin(self, binding, recovered)


class AsOfJoin(IntervalJoin):
    """The soft state of one interval: the left rows that wait, and the right ones that may be the last."""

    def _outer_sides(self) -> tuple[bool, bool]:
        """Return which sides' rows are wanted when they leave: the left ones, with a match or without."""
        return True, False

    def _join(self, pairs_max: int) -> int:
        """Join nothing yet: a row is joined when it leaves."""
        self._pending = [[], []]
        return 0

    @property
    def _first_pending(self) -> int:
        """Zero: a row that is still buffered has not been joined, so what is retracted in time was not used yet."""
        return 0

    def _let_leave(self, watermark: Instant, unmatched_max: int) -> bool:
        """Join the left rows that the watermark has passed; return whether some have to wait for the next turn."""
        left, right = self._sides
        reached = left.bounded(watermark, unmatched_max)
        gone, leaving = left.leave(reached)
        if leaving:
            self._emit_last(joined_rows(leaving))
        self._forget(gone)
        gone, _ = right.leave(reached)
        self._forget(gone)
        self._clock = Instant(max(self._clock, reached))
        return reached < watermark

    def _emit_last(self, rows: Rows) -> None:
        """Emit left rows with the last right row of each, in the order of event time and arrival."""
        rows = rows.take(np.lexsort((rows.numbers, rows.times)))
        found = last_matches(self._candidates(LEFT, rows))
        matched = np.flatnonzero(found.tiers >= 0)
        batches, places = [], []
        if len(matched) and self._is_wanted:
            tiers = self._sides[RIGHT].tiers
            for number in np.unique(found.tiers[matched]).tolist():
                mine = matched[found.tiers[matched] == number]
                other = tiers[number].rows.batch.take(pa.array(found.positions[mine]))
                batches.append(self._logic.joined.batch({LEFT: rows.batch.take(pa.array(mine)), RIGHT: other}))
                places.append(mine)
        alone = np.flatnonzero(found.tiers < 0)
        count = len(matched)
        if self._logic.how == "left" and len(alone):
            count += len(alone)
            batches.append(self._logic.joined.batch({LEFT: rows.batch.take(pa.array(alone))}))
            places.append(alone)
        self._made += count
        if batches and self._is_wanted:
            of = np.concatenate(places)
            order = np.argsort(of, kind="stable")
            batch = pa.concat_batches(batches).take(pa.array(order))
            self._add_emitted(batch, rows.times[of[order]], retracts=False)
