"""The simulated fleet without an end, for the compose stack: publish to MILLPY_MQTT_URL until stopped.

A broker may lose readings that it has acknowledged but not yet saved, so this program does what a gateway in a plant
does: it keeps its last minute, and publishes it again after a lost connection. The readings have ids, and millpy drops
the duplicates.
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections import deque

import paho.mqtt.client as mqtt

from examples.fleet import TICK_S, payloads
from millpy.sources.mqtt.address import url_of_environment

KEPT_S = 60.0
ROUND_S = 3_600.0


class Gateway:
    """Publishes readings, and publishes the last minute again after a lost connection."""

    def __init__(self) -> None:
        self.kept: deque[tuple[float, str, str]] = deque()
        self._connected_before = False
        url = url_of_environment()
        self.client = mqtt.Client(mqtt.CallbackAPIVersion.VERSION2, client_id="fleet", protocol=mqtt.MQTTv5)
        self.client.username_pw_set(url.username, url.password)
        self.client.on_connect = self._on_connect
        self.client.connect_async(url.host, url.port or 1883)
        self.client.loop_start()

    def publish(self, topic: str, payload: str) -> None:
        """Publish a reading, and keep it for a minute."""
        now = time.monotonic()
        self.kept.append((now, topic, payload))
        while self.kept[0][0] < now - KEPT_S:
            self.kept.popleft()
        self.client.publish(topic, payload, qos=1)

    def _on_connect(self, *_: object) -> None:
        if self._connected_before:
            print(f"connected again: the last {len(self.kept)} readings once more", flush=True)
            for _, topic, payload in list(self.kept):
                self.client.publish(topic, payload, qos=1)
        self._connected_before = True


def main() -> int:
    """Publish until interrupted."""
    gateway, rng, rounds = Gateway(), random.Random(), 0
    while True:
        started, epoch_s, rounds = time.monotonic(), time.time(), rounds + 1
        for at, device, reading in payloads(rng, ROUND_S, epoch_s):
            ahead = at - (time.monotonic() - started)
            if ahead > TICK_S:
                time.sleep(ahead)
            reading["id"] = f"{epoch_s:.0f}/{reading['id']}"
            gateway.publish(f"sensors/{device}/reading", json.dumps(reading))


if __name__ == "__main__":
    sys.exit(main())
