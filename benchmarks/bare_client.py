"""The baseline of W3: an aiomqtt client that receives messages and does nothing.

    python -m benchmarks.bare_client --port 1883 --messages 200000

As fast as the public interface allows: MQTT 5 (mosquitto keeps only 20 messages in flight for 3.1.1), QoS 1, a
persistent session, acknowledged by the library on receipt, and its queue drained in batches instead of a task per
message. The clock runs from before connecting to the last message. With --messages 0 it only subscribes, so that the
broker queues for it. Prints one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from typing import Any

import aiomqtt
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties

from benchmarks.publisher import TOPIC

IDENTIFIER = "bare"
SESSION_EXPIRY_S = 3_600
PAUSE_S = 0.005
"""Between batches; waiting for each message instead wakes a task for each, and is slower."""


async def drain(port: int, messages: int) -> dict[str, Any]:
    """Connect, receive `messages` messages, and disconnect. Return the counts and times."""
    properties = Properties(PacketTypes.CONNECT)
    properties.SessionExpiryInterval = SESSION_EXPIRY_S
    queue: asyncio.Queue[aiomqtt.Message] = asyncio.Queue()
    client = aiomqtt.Client(
        "127.0.0.1",
        port,
        identifier=IDENTIFIER,
        protocol=aiomqtt.ProtocolVersion.V5,
        clean_start=False,
        properties=properties,
        queue_type=lambda maxsize: queue,
    )
    taken, batches, started, cpu_started = 0, 0, time.monotonic(), time.process_time()
    async with client:
        if not messages:
            await client.subscribe(TOPIC.decode(), qos=1)
        while taken < messages:
            await asyncio.sleep(PAUSE_S)
            batches += 1
            while not queue.empty():
                queue.get_nowait()
                taken += 1
        seconds, cpu_s = time.monotonic() - started, time.process_time() - cpu_started
    return {"messages": taken, "seconds": seconds, "cpu_s": cpu_s, "batches": batches}


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.bare_client")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--messages", type=int, required=True)
    options = parser.parse_args()
    print(json.dumps(asyncio.run(drain(options.port, options.messages))))


if __name__ == "__main__":
    main()
