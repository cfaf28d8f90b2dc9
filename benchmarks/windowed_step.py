"""W1, the step alone: fixed, sliding and session windows over 1,000 keys, a record a millisecond, a tenth delayed.

python benchmarks/windowed_step.py     prints CPU ms per bundle of 65,536 records, and the µs of a bundle of one
"""

from __future__ import annotations

import time
from datetime import timedelta

import msgspec
import numpy as np
import pyarrow as pa

from millpy.limits import Limits
from millpy.model.bundle import Bundle
from millpy.model.keys import KeyHasher, tile_key_space
from millpy.model.record import Records, RecordType
from millpy.model.stage import InputBundle, InputSpec, StageBinding, StoredInterval, Work
from millpy.model.time import INSTANT_MAX, INSTANT_MIN, Instant, seconds
from millpy.windowing.aggregates.numeric import Count, Max, Mean
from millpy.windowing.logic import WindowedLogic
from millpy.windowing.window import FixedWindows, SessionWindows, SlidingWindows, Windows

RECORDS, KEYS, MAX_DISORDER_US = 65_536, 1_000, 2_000_000
START = 1_700_000_000_000_000


FIXED = FixedWindows(seconds(10))


class Reading(msgspec.Struct):
    device: str
    value: float


class Feed:
    """Makes bundles like an injector, cut for one or more intervals."""

    def __init__(self, intervals: int) -> None:
        self._type = RecordType(Reading)
        self._hasher = KeyHasher()
        self._random = np.random.default_rng(1)
        self._seq = 0
        self._largest = INSTANT_MIN
        self._los = [interval.lo for interval in tile_key_space(intervals)]

    def works(self, count: int) -> list[Work]:
        at = START + (self._seq * count + np.arange(count)) * 1_000
        delayed = self._random.random(count) < 0.1
        times = at - np.where(delayed, self._random.exponential(500_000, count).astype(np.int64), 0)
        largest = np.maximum(np.maximum.accumulate(times), self._largest)
        before = np.concatenate(([self._largest], largest[:-1])) - MAX_DISORDER_US
        self._seq, self._largest = self._seq + 1, Instant(int(largest[-1]))
        codes = self._random.integers(0, KEYS, count).tolist()
        columns = [pa.array([f"device-{code:04d}" for code in codes]), pa.array(self._random.normal(20, 3, count))]
        records = Records(
            self._type,
            times,
            watermarks=before,
            batch=pa.RecordBatch.from_arrays(columns, schema=self._type.schema),
        )
        keys = records.keys(("device",), self._hasher)
        watermark = Instant(self._largest - MAX_DISORDER_US)
        whole = Bundle(0, 1, self._seq, watermark, records, keys)
        owners = (np.searchsorted(self._los, keys.hashes, side="right") - 1)[keys.codes]
        parts = [whole.take(np.flatnonzero(owners == owner)) for owner in range(len(self._los))]
        return [
            Work(self._seq, [InputBundle(part, INSTANT_MAX)], INSTANT_MIN, watermark, Instant(START)) for part in parts
        ]


def measure(intervals: int, lateness: timedelta, windows: Windows = FIXED) -> None:
    """Measure some bundles, and print their times."""
    logic = WindowedLogic(windows, lateness, {"n": Count(), "mean": Mean("value"), "high": Max("value")})
    record_type = RecordType(Reading)
    spec = InputSpec("readings", record_type, ("device",), (str,), True)
    output = logic.output_type(record_type, ("device",))
    binding = StageBinding("windows", (spec,), {"windows": output}, {"windows": 1}, frozenset(), Limits())
    stages = [logic.bind(binding).open(StoredInterval(n, 1)) for n in range(intervals)]
    feed = Feed(intervals)
    spent, rows = [], 0
    for _ in range(15):
        works = feed.works(RECORDS)
        started = time.process_time()
        results = [stage.step(work) for stage, work in zip(stages, works, strict=True)]
        spent.append(time.process_time() - started)
        rows = sum(part.count for result in results for part in result.results)
    entries = sum(len(part) for result in results for part in result.delta)
    print(
        f"{type(windows).__name__}, {intervals} intervals, lateness {lateness}: "
        f"median {np.median(spent) * 1e3:.1f} ms, least {min(spent) * 1e3:.1f} ms for {RECORDS} records, "
        f"{rows} result rows, {entries} entries"
    )
    single = [feed.works(1)[0] for _ in range(200)]
    started = time.process_time()
    for work in single:
        stages[0].step(work)
    print(f"  a bundle of one: {(time.process_time() - started) / len(single) * 1e6:.0f} µs")


if __name__ == "__main__":
    measure(1, timedelta(0))
    measure(4, timedelta(0))
    measure(4, timedelta(minutes=1))
    measure(4, timedelta(0), SlidingWindows(seconds(10), every=seconds(2.5)))
    measure(4, timedelta(minutes=1), SlidingWindows(seconds(10), every=seconds(2.5)))
    measure(4, timedelta(0), SessionWindows(seconds(3)))
    measure(4, timedelta(minutes=1), SessionWindows(seconds(3)))
