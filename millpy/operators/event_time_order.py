"""Event-time order: each record passes once the watermark has passed it, in the order of event times within its key.

What follows sees the records of a key as a batch would sort them: by event time, and those of one event time by
arrival. Records that are late go to the late records, so none is ever behind another. A retraction that is in time
takes its record back before it has passed; a later one is a late record.

The step is one side of a join without the other one: what it buffers, its log and its bounds are those of
`interval_join.py`.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pyarrow as pa

from millpy.model.identity import Identity
from millpy.model.record import RecordType
from millpy.model.stage import StageBinding, StoredInterval
from millpy.operators.as_of_join import AsOfJoin
from millpy.operators.interval_join import IntervalJoinLogic
from millpy.operators.join_reach import LEFT, IntervalReach
from millpy.operators.join_rows import Rows


class OrderedType:
    """The type of the records, which leave as they came."""

    def __init__(self, record_type: RecordType) -> None:
        self.record_type = record_type

    def batch(self, sides: Mapping[int, pa.RecordBatch]) -> pa.RecordBatch:
        """Return the records."""
        return sides[LEFT]


class EventTimeOrderLogic(IntervalJoinLogic):
    """A step that puts the records of each key into the order of their event times.

    Args:
        record_type: the type of the records.
        inputs: number of inputs.
        takes_retractions: whether some of the records may be retractions.
    """

    kind = "event_time_order"

    def __init__(self, record_type: RecordType, inputs: int, *, takes_retractions: bool) -> None:
        super().__init__(
            OrderedType(record_type), inputs, IntervalReach(0, 0), how="left", takes_retractions=takes_retractions
        )

    @property
    def retracts(self) -> bool:
        """Whether its output may have retractions: never."""
        return False

    def open(self, binding: StageBinding, recovered: StoredInterval) -> EventTimeOrder:
        """Build the soft state of one interval from its log."""
        return EventTimeOrder(self, binding, recovered)

    def identity(self) -> Identity:
        """Describe the step. Records that are buffered mean the same to every such step."""
        described = {"kind": self.kind}
        return described | ({"takes_retractions": True} if self.takes_retractions else {})


class EventTimeOrder(AsOfJoin):
    """The soft state of one interval: the rows that wait for the watermark."""

    def _emit_last(self, rows: Rows) -> None:
        """Emit the rows, in the order of event time and arrival."""
        self._made += len(rows)
        if self._is_wanted:
            rows = rows.take(np.lexsort((rows.numbers, rows.times)))
            self._add_emitted(rows.batch, rows.times, retracts=False)
