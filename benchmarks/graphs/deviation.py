"""W4: a Computation in Python that keeps each key's running mean and deviation and produces the outliers.

With BENCH_ARCHIVE, an archive of the readings beside it.
"""

import os

import msgspec

from millpy import Computation, Context, EventTime, File, Graph, Value, seconds

SIGMAS = 3.0
RECORDS_MIN = 10


class Reading(msgspec.Struct):
    device: str
    event_ms: int
    value: float
    humidity: float
    seq: int


class Usual(msgspec.Struct):
    count: int = 0
    mean: float = 0.0
    squares: float = 0.0


class Outlier(msgspec.Struct):
    device: str
    seq: int
    value: float
    mean: float


class Deviation(Computation):
    """Welford's running variance; a value beyond three sigma of those before it is an outlier."""

    usual = Value(Usual)

    def process_record(self, context: Context, record: Reading) -> None:
        usual = context[Deviation.usual]
        value = record.value
        away = value - usual.mean
        if usual.count >= RECORDS_MIN and away * away > SIGMAS * SIGMAS * usual.squares / usual.count:
            context.produce(Outlier(record.device, record.seq, value, usual.mean))
        usual.count += 1
        usual.mean += away / usual.count
        usual.squares += away * (value - usual.mean)


graph = Graph("w4")
readings = graph.inject(
    "readings",
    File(os.environ["BENCH_FILE"]),
    schema=Reading,
    event_time=EventTime("event_ms", unit="ms", max_disorder=seconds(2)),
)
outliers = readings.key_by("device").process(
    Deviation(), name="deviation", output=Outlier, intervals=int(os.environ.get("BENCH_INTERVALS", "4"))
)
outliers.to_table("outliers")
if os.environ.get("BENCH_ARCHIVE"):
    readings.key_by("device").archive()
