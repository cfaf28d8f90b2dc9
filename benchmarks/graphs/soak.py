"""Soak: deduplicated readings into windows, and a Computation that produces one row for every tenth record."""

import os

import msgspec

from millpy import (
    AdvanceWithClock,
    Computation,
    Context,
    Count,
    Dedupe,
    EventTime,
    FixedWindows,
    Graph,
    Max,
    Mean,
    Mqtt,
    Value,
    seconds,
)

SAMPLE_EVERY = 10


class Ping(msgspec.Struct):
    device: str
    event_us: int
    sent_ns: int
    seq: int


class Pong(msgspec.Struct):
    device: str
    sent_ns: int
    seq: int
    count: int


class Counting(Computation):
    """Counts each device's records; produces a sample of them."""

    seen = Value(int, default=0)

    def process_record(self, context: Context, record: Ping) -> None:
        count = context[Counting.seen] + 1
        context[Counting.seen] = count
        if record.seq % SAMPLE_EVERY == 0:
            context.produce(Pong(record.device, record.sent_ns, record.seq, count))


graph = Graph("soak")
pings = graph.inject(
    "pings",
    Mqtt("bench/ping", host="127.0.0.1", port=int(os.environ["BENCH_PORT"])),
    schema=Ping,
    event_time=EventTime("event_us", unit="us", max_disorder=seconds(1)),
    dedupe=Dedupe("seq", within=seconds(float(os.environ["BENCH_RETENTION_S"]))),
    idle=AdvanceWithClock(after=seconds(10)),
)
(
    pings.key_by("device")
    .window(FixedWindows(seconds(10)), allowed_lateness=seconds(10))
    .aggregate(n=Count(), mean=Mean("seq"), high=Max("seq"))
    .to_table("per_device_10s")
)
pings.key_by("device").process(Counting(), name="counting", output=Pong).to_table("pongs")
