"""A simulated fleet: publishes readings over MQTT and keeps its own list of what it published.

    python -m examples.fleet PORT PROTOCOL SECONDS LIST

Readings come out of order (up to 1.5 s), some late (4 to 8 s) and a few too late (35 to 40 s); one in twenty is
published twice; some devices fall quiet, others start late; one sends through a slow link, and two measure wrongly for
a while, which the report at the end should find. LIST gets every payload in the order of publishing, one JSON object a
line: a recomputation needs nothing from millpy.
"""

from __future__ import annotations

import heapq
import itertools
import json
import random
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import paho.mqtt.client as mqtt

DEVICES = 40
RATE = 200
TICK_S = 0.02
ACKNOWLEDGED_S_MAX = 30
SLOW_LINK = "sensor-22"
WRONG = {"sensor-17": 15.0, "sensor-30": -15.0}
"""The error of a device's readings in degrees, for a part of the time."""
WRONG_FROM, WRONG_UNTIL = 0.8, 0.92


@dataclass(frozen=True)
class Plan:
    """The time in which a device publishes, as shares of the whole time."""

    device: str
    starts: float
    ends: float

    def speaks(self, share: float) -> bool:
        return self.starts <= share < self.ends


def plans() -> list[Plan]:
    """Return plans: most devices publish all the time; every eighth falls quiet half way, every ninth starts late."""
    return [
        Plan(f"sensor-{number:02}", starts=0.4 if number % 9 == 4 else 0.0, ends=0.5 if number % 8 == 3 else 1.0)
        for number in range(DEVICES)
    ]


def delay(rng: random.Random, device: str, elapsed_s: float) -> float:
    """Return the seconds from event to publishing."""
    dice = rng.random() * (0.1 if device == SLOW_LINK else 1.0)
    if dice < 0.003 and elapsed_s > 45:
        return rng.uniform(35, 40)
    if dice < 0.02 and elapsed_s > 10:
        return rng.uniform(4, 8)
    return rng.uniform(0.2, 1.5) if dice < 0.4 else rng.uniform(0, 0.2)


def payloads(rng: random.Random, duration_s: float, epoch_s: float) -> Iterator[tuple[float, str, dict[str, object]]]:
    """Yield (second to publish at, device, reading), in order of publishing, duplicates included."""
    fleet, numbers = plans(), itertools.count(1)
    again: list[tuple[float, int, str, dict[str, object]]] = []
    for index in range(int(duration_s * RATE)):
        at = index / RATE
        while again and again[0][0] <= at:
            when, _, device, reading = heapq.heappop(again)
            yield when, device, reading
        speaking = [plan for plan in fleet if plan.speaks(at / duration_s)]
        device, number = rng.choice(speaking).device, next(numbers)
        happened = datetime.fromtimestamp(epoch_s + at - delay(rng, device, at), UTC)
        wrong = WRONG.get(device, 0.0) if WRONG_FROM <= at / duration_s < WRONG_UNTIL else 0.0
        temperature = round(rng.gauss(21, 3) + wrong, 3)
        reading = {"device": device, "at": happened.isoformat(), "temperature": temperature, "id": f"{device}/{number}"}
        yield at, device, reading
        if rng.random() < 0.05:
            heapq.heappush(again, (at + rng.uniform(0, 5), number, device, reading))
    for when, _, device, reading in sorted(again):
        yield min(when, duration_s), device, reading


def connect(port: int, protocol: str) -> mqtt.Client:
    """Return a connected client whose queue holds everything: the publisher drops nothing."""
    version = mqtt.MQTTv5 if protocol == "5" else mqtt.MQTTv311
    client = mqtt.Client(mqtt.CallbackAPIVersion.VERSION2, client_id="fleet", protocol=version)
    client.max_inflight_messages_set(100)
    client.connect("127.0.0.1", port)
    client.loop_start()
    return client


def main() -> int:
    """Publish for SECONDS; return 0 if the broker has acknowledged everything."""
    port, protocol, duration_s, out = int(sys.argv[1]), sys.argv[2], float(sys.argv[3]), Path(sys.argv[4])
    client = connect(port, protocol)
    started, epoch_s = time.monotonic(), time.time()
    last = None
    with out.open("w") as own_list:
        for at, device, reading in payloads(random.Random(7), duration_s, epoch_s):
            ahead = at - (time.monotonic() - started)
            if ahead > TICK_S:
                own_list.flush()
                time.sleep(ahead)
            payload = json.dumps(reading)
            own_list.write(payload + "\n")
            last = client.publish(f"sensors/{device}/reading", payload, qos=1)
    assert last is not None
    last.wait_for_publish(ACKNOWLEDGED_S_MAX)
    client.disconnect()
    client.loop_stop()
    return 0 if last.is_published() else 1


if __name__ == "__main__":
    sys.exit(main())
