"""Bundle: the records that one consumer interval takes at once from one producer, and where they came from."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from millpy.model.keys import KeyColumn
from millpy.model.record import Records
from millpy.model.time import Instant


@dataclass(slots=True)
class Bundle:
    """One slice: the records of one producer's bundle for one consumer interval.

    Attributes:
        input: index into the consumer's inputs (its subscriptions, in declaration order).
        producer: interval id of the producer.
        seq: the producer's bundle number.
        watermark: the producer's watermark at `seq`; valid only at this position (I5).
        records: the records, in the producer's order.
        keys: the records' keys by the subscription's key fields.
        previous_seq: number of the producer's bundle for this subscription before it, 0 for none; None if it was passed
            in memory.
    """

    input: int
    producer: int
    seq: int
    watermark: Instant
    records: Records
    keys: KeyColumn
    previous_seq: int | None = None

    def __len__(self) -> int:
        return len(self.records)

    def take(self, rows: npt.NDArray[np.int64]) -> Bundle:
        """Return a bundle of the given rows, in the given order."""
        return Bundle(
            self.input, self.producer, self.seq, self.watermark, self.records.take(rows), self.keys.take(rows),
            self.previous_seq,
        )  # fmt: skip
