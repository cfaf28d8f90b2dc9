"""The baseline of `bench-kafka`: an aiokafka consumer that receives records and does nothing.

    python -m benchmarks.bare_kafka --servers 127.0.0.1:9092 --records 1000000

One partition, assigned by hand, committed records only, fetched in pieces as large as ours, checksums checked, taken
with `getmany`. The clock runs from before connecting to the last record. Prints one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from typing import Any

from aiokafka import AIOKafkaConsumer, TopicPartition

from millpy.sources.kafka.client import FETCH_BYTES

TOPIC = "bench"
AT_ONCE = 65_536


async def drain(servers: str, records: int) -> dict[str, Any]:
    """Connect, receive `records` records, and disconnect. Return the counts and times."""
    place = TopicPartition(TOPIC, 0)
    started, cpu_started, taken, batches = time.monotonic(), time.process_time(), 0, 0
    consumer = AIOKafkaConsumer(
        bootstrap_servers=servers,
        enable_auto_commit=False,
        isolation_level="read_committed",
        max_partition_fetch_bytes=FETCH_BYTES,
    )
    await consumer.start()
    try:
        consumer.assign([place])
        consumer.seek(place, 0)
        while taken < records:
            found = await consumer.getmany(place, timeout_ms=1_000, max_records=AT_ONCE)
            taken += sum(map(len, found.values()))
            batches += 1
        seconds, cpu_s = time.monotonic() - started, time.process_time() - cpu_started
    finally:
        await consumer.stop()
    return {"records": taken, "seconds": seconds, "cpu_s": cpu_s, "batches": batches}


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.bare_kafka")
    parser.add_argument("--servers", required=True)
    parser.add_argument("--records", type=int, required=True)
    options = parser.parse_args()
    print(json.dumps(asyncio.run(drain(options.servers, options.records))))


if __name__ == "__main__":
    main()
