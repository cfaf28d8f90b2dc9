"""W4, the step alone: a running mean, count and deviation a key, 65,536 records a bundle over 100,000 keys.

python benchmarks/keyed_step.py    prints records a CPU second, and the µs of a bundle of one
"""

from __future__ import annotations

import random
import time
from datetime import datetime

import msgspec
import numpy as np
import pyarrow as pa

from millpy.computation import Computation, Context, Value
from millpy.limits import Limits
from millpy.model.bundle import Bundle
from millpy.model.keys import KeyHasher
from millpy.model.record import Records, RecordType
from millpy.model.stage import InputBundle, InputSpec, StageBinding, StoredInterval, Work
from millpy.model.time import INSTANT_MAX, INSTANT_MIN, Instant
from millpy.operators.keyed import ComputationLogic

RECORDS, KEYS = 65_536, 100_000
START = 1_700_000_000_000_000


class Reading(msgspec.Struct):
    device: str
    at: datetime
    temperature: float
    id: str


class Usual(msgspec.Struct):
    count: int = 0
    mean: float = 0.0
    deviation: float = 0.0


class Running(Computation):
    usual = Value(Usual)

    def process_record(self, context: Context, record: Reading) -> None:
        usual = context[Running.usual]
        usual.count += 1
        delta = record.temperature - usual.mean
        usual.mean += delta / usual.count
        usual.deviation += delta * (record.temperature - usual.mean)


class Bundles:
    """Bundles of readings with uniformly drawn keys."""

    def __init__(self) -> None:
        self._type = RecordType(Reading)
        self._hasher = KeyHasher()
        self._random = np.random.default_rng(random.Random(1).getrandbits(32))
        self._seq = 0

    def work(self, count: int) -> Work:
        self._seq += 1
        times = START + self._seq * 1_000_000 + np.arange(count)
        codes = self._random.integers(0, KEYS, count)
        batch = pa.RecordBatch.from_arrays(
            [
                pa.array([f"device-{code}" for code in codes.tolist()]),
                pa.array(times, pa.int64()).cast(pa.timestamp("us", tz="UTC")),
                pa.array(self._random.normal(20, 3, count)),
                pa.array([f"id-{self._seq}-{n}" for n in range(count)]),
            ],
            schema=self._type.schema,
        )
        records = Records(self._type, times, watermarks=times - 1, batch=batch)
        bundle = Bundle(0, 1, self._seq, Instant(int(times[-1])), records, records.keys(("device",), self._hasher))
        watermark = Instant(int(times[-1]))
        return Work(self._seq, [InputBundle(bundle, INSTANT_MAX)], INSTANT_MIN, watermark, Instant(START))


def main() -> None:
    """Measure."""
    record_type = RecordType(Reading)
    spec = InputSpec("readings", record_type, ("device",), (str,), True)
    binding = StageBinding("running", (spec,), {}, {}, frozenset(), Limits())
    interval = ComputationLogic(Running()).bind(binding).open(StoredInterval(1, 1))
    bundles = Bundles()
    for _ in range(6):
        work = bundles.work(RECORDS)
        started = time.process_time()
        result = interval.step(work)
        spent = time.process_time() - started
        changed = sum(len(entries) for entries in result.delta)
        print(f"{RECORDS} records, {changed} keys: {spent * 1e3:.0f} ms, {RECORDS / spent:,.0f} records a CPU second")
    single = [bundles.work(1) for _ in range(200)]
    started = time.process_time()
    for work in single:
        interval.step(work)
    print(f"a bundle of one: {(time.process_time() - started) / len(single) * 1e6:.0f} µs")


if __name__ == "__main__":
    main()
