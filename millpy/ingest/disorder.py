"""The disorder of a source partition: how far records lie behind the newest one, and the bound that is learned from it.

A record's *lag* is the largest event time before it minus its own, or 0 if it is not behind. Lags are counted in a
histogram with `len(EDGES)` buckets. An edge is at most 1/8 above the edge before it, or 1 ms if that is more, so a
quantile read from the histogram is too large by at most that, and never too small.

The histogram learns block by block, `BLOCK` records at a time: each new block makes the ones before it count for 1/128
less, so that about the newest 131,072 records decide. The bound changes only between two blocks, and is a function of
the histogram and the settings. It therefore depends on the order of the records alone, not on bundles or crashes (I9):
the histogram and the counts of the unfinished block are part of the commit that contains the records.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from millpy.ingest.settings import EventTime
from millpy.model.checkpoint import Entries, Kind
from millpy.model.record import Instants
from millpy.model.time import INSTANT_MAX, Instant

BLOCK = 1024
"""The number of records after which the histogram takes them up, and the bound may change."""
UNIT = 1024
"""The weight of a new record in the histogram, in which weights are whole numbers."""
FORGET_SHIFT = 7
"""A block makes each weight in the histogram smaller by this power of 1/2, rounded up."""
BEYOND_MIN = 10
"""The bound is learned once the histogram has this many records beyond the percentile; before, it is `max_disorder`."""
MILLISECONDS = [*range(8), *(k << shift for shift in range(37) for k in range(8, 16))]
EDGES = np.array([*(1_000 * ms for ms in MILLISECONDS), INSTANT_MAX], np.int64)
"""The largest lag of each bucket, in µs; 32 years in the last but one."""
NO_KEY = b'""'
COUNTED, LEARNED = "counted", "learned"

Histogram = npt.NDArray[np.int64]


def buckets_of(lags: Instants) -> npt.NDArray[np.int64]:
    """Return the buckets of positive lags, as `np.searchsorted(EDGES, lags)` does, which takes four times as long.

    Above 8 ms an edge is 8 to 15 times a power of two: the exponent and the first three bits of a float.
    """
    below = (lags + 999) // 1_000 - 1  # an edge is the largest lag of its bucket
    octaves = (below.astype(np.float64).view(np.int64) >> 49) - (1023 + 3) * 8 + 9
    return np.minimum(np.where(below < 8, below + 1, octaves), len(EDGES) - 1)


class _Counts(msgspec.Struct):
    """What is stored with each bundle; views read it by name.

    Attributes:
        records: records since the beginning.
        late: of these, those behind the watermark before them.
        late_by_percentile: of the late ones, those that `max_disorder` alone would not have made late.
        beyond: records whose lag was larger than the bound at the time.
        bound, max_disorder: the bound at present and the largest allowed, in µs.
        block: the unfinished block, as pairs of an edge and a number.
    """

    records: int = 0
    late: int = 0
    late_by_percentile: int = 0
    beyond: int = 0
    bound: int = 0
    max_disorder: int | None = None
    percentile: float | None = None
    block: list[tuple[int, int]] = []


class DisorderSettings(msgspec.Struct, frozen=True):
    """What `Disorder` needs to know of `EventTime`, for those that learn without a source's promise."""

    percentile: float | None
    max_disorder_us: int
    sorted: bool = False


class Disorder:
    """Counts the lags of one source partition, and gives the watermark before each record.

    Args:
        settings: the source's promise about order.
        recovered: the stored entries.

    Attributes:
        bound_us: the bound at present: learned with a percentile, else `max_disorder`.
    """

    def __init__(self, settings: EventTime | DisorderSettings, recovered: Sequence[Entries] = ()) -> None:
        self._percentile = settings.percentile
        self._max_us = settings.max_disorder_us
        self._counted = _Counts()
        self._block, self._learned = (np.zeros(len(EDGES), np.int64) for _ in range(2))
        for entries in recovered:
            if entries.kind is Kind.DISORDER:
                self._absorb(entries)
        self._filled = int(self._block.sum())
        self._counted.max_disorder = None if settings.sorted else self._max_us
        self._counted.percentile = self._percentile
        self._is_counted = self._has_learned = False  # since the last write
        self.bound_us = self._bound()

    def _absorb(self, entries: Entries) -> None:
        for subkey, value in zip(entries.subkeys, entries.values, strict=True):
            assert value is not None, "never deleted"
            if subkey == COUNTED:
                self._counted = msgspec.json.decode(value, type=_Counts)
                self._block = _histogram(self._counted.block)
            else:
                self._learned = _histogram(msgspec.json.decode(value, type=list[tuple[int, int]]))

    def take(
        self, before: Instants, times: Instants, watermark: Instant, promised: Instant
    ) -> tuple[Instants, Instant]:
        """Count a bundle's records. Return the watermark before each row and behind the last, and the one promised.

        Args:
            before: the largest event time before each row, and behind the last: one more than `times`.
            times: the event times.
            watermark: the published watermark, below which none may fall (I5).
            promised: the watermark by `max_disorder` alone; without a percentile it is `watermark`.
        """
        lags = before[:-1] - times
        filled = self._filled
        bounds = self._learn(lags)
        of_row: Instants | int = self.bound_us
        if len(bounds) > 1:
            sizes = np.full(len(bounds), BLOCK)
            sizes[0] -= filled
            sizes[-1] = len(before) - sizes[:-1].sum()
            of_row = np.repeat(np.array(bounds, np.int64), sizes)
        watermarks = np.maximum(before - of_row, watermark)
        counted = self._counted
        if self._percentile is None:
            promised = Instant(int(watermarks[-1]))
        else:
            np.maximum.accumulate(watermarks, out=watermarks)  # the bound can have grown
            by_promise = np.maximum(before - self._max_us, promised)
            promised = Instant(int(by_promise[-1]))
            late = (times < watermarks[:-1]) & (times >= by_promise[:-1])
            counted.late_by_percentile += int(np.count_nonzero(late))
        counted.records += len(times)
        counted.late += int(np.count_nonzero(times < watermarks[:-1]))
        counted.beyond += int(np.count_nonzero(lags > (of_row if isinstance(of_row, int) else of_row[:-1])))
        self.bound_us = bounds[-1]
        self._is_counted = True
        return watermarks, promised

    def count(self, before: Instants, times: Instants, watermarks: Instants) -> None:
        """Count records whose watermarks go by site.

        Args:
            before: the largest event time of its site before each row.
            times: the event times.
            watermarks: the watermark of its site before each row.
        """
        lags = np.maximum(before - times, 0)
        self._learn(lags)
        counted = self._counted
        counted.records += len(times)
        counted.late += int(np.count_nonzero(times < watermarks))
        counted.beyond += int(np.count_nonzero(lags > self._max_us))
        self._is_counted = True

    def _learn(self, lags: Instants) -> list[int]:
        """Count lags, and take up the blocks that they fill. Return the bound in each block that they are in."""
        behind = np.flatnonzero(lags > 0)
        places = buckets_of(lags[behind]) if len(behind) else behind
        filled, blocks = self._filled, (self._filled + len(lags)) // BLOCK + 1
        self._filled = (filled + len(lags)) % BLOCK
        if blocks == 1:
            self._block[0] += len(lags) - len(behind)
            if len(behind):
                self._block += np.bincount(places, minlength=len(EDGES))
            return [self.bound_us]
        places += (filled + behind) // BLOCK * len(EDGES)
        counts = np.bincount(places, minlength=blocks * len(EDGES)).reshape(blocks, len(EDGES))
        sizes = np.full(blocks, BLOCK)
        sizes[0] -= filled
        sizes[-1] = self._filled
        counts[:, 0] = sizes - counts.sum(axis=1)
        counts[0] += self._block
        bounds = [self.bound_us]
        for block in counts[:-1]:
            self._learned += block * UNIT - (self._learned + ((1 << FORGET_SHIFT) - 1) >> FORGET_SHIFT)
            if self._percentile is not None:
                bounds.append(self._bound())
        self._block, self._has_learned = counts[-1], True
        return bounds

    def _bound(self) -> int:
        """Return the bound in µs that the histogram gives, at most `max_disorder`."""
        if self._percentile is None:
            return self._max_us
        reached = np.cumsum(self._learned)
        total = int(reached[-1])
        if total * (1 - self._percentile) < BEYOND_MIN * UNIT:
            return self._max_us
        return min(int(EDGES[np.searchsorted(reached, total * self._percentile)]), self._max_us)

    def entries(self) -> tuple[Entries, ...]:
        """Return what has changed since the last write, and mark it written: at most 20 kB."""
        if not self._is_counted:
            return ()
        self._counted.bound, self._counted.block = self.bound_us, _pairs(self._block)
        found = Entries(Kind.DISORDER, "")
        found.add(NO_KEY, 0, COUNTED, msgspec.json.encode(self._counted))
        if self._has_learned:
            found.add(NO_KEY, 0, LEARNED, msgspec.json.encode(_pairs(self._learned)))
        self._is_counted = self._has_learned = False
        return (found,)


def _pairs(histogram: Histogram) -> list[tuple[int, int]]:
    """Return the buckets that are not empty, each as its edge and its number."""
    used = np.flatnonzero(histogram)
    return list(zip(EDGES[used].tolist(), histogram[used].tolist(), strict=True))


def _histogram(pairs: Sequence[tuple[int, int]]) -> Histogram:
    histogram = np.zeros(len(EDGES), np.int64)
    for edge, number in pairs:
        histogram[np.searchsorted(EDGES, edge)] = number
    return histogram
