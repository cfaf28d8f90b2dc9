"""Bundle: records of one subscription as one consumer takes them, and where they came from."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from millpy.model.keys import KeyColumn
from millpy.model.record import Records
from millpy.model.time import Instant


@dataclass(slots=True)
class Bundle:
    """One slice: what one producer's bundle holds for one consumer interval.

    Attributes:
        input: index into the consumer's inputs (its subscriptions, in declaration order).
        producer: interval id of the producer.
        seq: the producer's bundle number.
        watermark: the producer's watermark at `seq`; belongs to this position and to no other (I5).
        records: the records, in the producer's order.
        keys: their keys by the subscription's key fields.
    """

    input: int
    producer: int
    seq: int
    watermark: Instant
    records: Records
    keys: KeyColumn

    def __len__(self) -> int:
        return len(self.records)

    def take(self, rows: npt.NDArray[np.int64]) -> Bundle:
        """The same slice with some of its rows."""
        return Bundle(
            self.input, self.producer, self.seq, self.watermark, self.records.take(rows), self.keys.take(rows)
        )
