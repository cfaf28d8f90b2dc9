"""W2, W2b and W5: BENCH_STAGES Computations in a row, each with one state cell; the last one's records are rows.

BENCH_IMMEDIATE runs their callbacks on the event loop rather than in the thread; BENCH_DEDUPE turns dedupe ids on;
BENCH_SORTED says that the source is in order.
"""

import os

import msgspec

from millpy import Computation, Context, Dedupe, EventTime, Graph, Mqtt, Value, seconds


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
    """Counts the records of each device."""

    immediate = bool(os.environ.get("BENCH_IMMEDIATE"))
    seen = Value(int, default=0)

    def process_record(self, context: Context, record: Ping | Pong) -> None:
        count = context[Counting.seen] + 1
        context[Counting.seen] = count
        context.produce(Pong(record.device, record.sent_ns, record.seq, count))


graph = Graph("stages")
stream = graph.inject(
    "pings",
    Mqtt("bench/ping", host="127.0.0.1", port=int(os.environ["BENCH_PORT"])),
    schema=Ping,
    event_time=EventTime("event_us", unit="us", sorted=True)
    if os.environ.get("BENCH_SORTED")
    else EventTime("event_us", unit="us", max_disorder=seconds(1)),
    dedupe=Dedupe("seq", within=seconds(60)) if os.environ.get("BENCH_DEDUPE") else None,
)
for stage in range(int(os.environ["BENCH_STAGES"])):
    stream = stream.key_by("device").process(Counting(), name=f"stage_{stage + 1}", output=Pong)
stream.to_table("pongs")
