"""Publishes readings like a gateway in a plant, and computes the expected results without millpy."""

from __future__ import annotations

import json
import random
import threading
import time
from collections import deque
from datetime import UTC, datetime, timedelta

import paho.mqtt.client as mqtt
from paho.mqtt.enums import CallbackAPIVersion

DEVICES = 40
WINDOW_S = 10
DISORDER_S = 1.5
KEPT_S = 60.0
TICK_S = 0.01
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
Window = tuple[str, datetime]


class Gateway:
    """Numbers its readings, keeps the last minute, and publishes it again after a connection was lost.

    A broker acknowledges before it has saved, so one that is killed forgets what it has acknowledged.

    Attributes:
        expected: (device, start of the window) -> number, sum and maximum of all readings.
        again: how many messages were published again.
    """

    def __init__(self, port: int, username: str, password: str, seed: int) -> None:
        self.expected: dict[Window, tuple[int, int, int]] = {}
        self.again = 0
        self.published = 0
        self._rng = random.Random(seed)
        self._kept: deque[tuple[float, str, str]] = deque()
        self._lock = threading.Lock()
        self._sent = self._acknowledged = 0
        self._connections = 0
        self._client = mqtt.Client(CallbackAPIVersion.VERSION2, client_id="gateway", protocol=mqtt.MQTTv5)
        self._client.username_pw_set(username, password)
        self._client.max_inflight_messages_set(1_000)
        self._client.on_connect = self._on_connect
        self._client.on_publish = self._on_publish
        self._client.reconnect_delay_set(1, 2)
        self._client.connect_async("127.0.0.1", port)
        self._client.loop_start()

    def publish(self, count: int, per_second: float) -> None:
        """Publish readings at a rate."""
        started = time.monotonic()
        for number in range(count):
            ahead = number / per_second - (time.monotonic() - started)
            if ahead > TICK_S:
                time.sleep(ahead)
            self._publish_one()

    def settle(self, within_s: float) -> bool:
        """Whether the broker has acknowledged everything in that time."""
        deadline = time.monotonic() + within_s
        while time.monotonic() < deadline:
            with self._lock:
                if self._acknowledged == self._sent:
                    return True
            time.sleep(0.1)
        return False

    def close(self) -> None:
        self._client.disconnect()
        self._client.loop_stop()

    def _publish_one(self) -> None:
        device, value = f"device-{self._rng.randrange(DEVICES):02}", self._rng.randrange(1_000)
        at = datetime.now(UTC) - timedelta(seconds=self._rng.uniform(0, DISORDER_S))
        start = at - (at - EPOCH) % timedelta(seconds=WINDOW_S)
        number, total, high = self.expected.get((device, start), (0, 0, -1))
        self.expected[device, start] = (number + 1, total + value, max(high, value))
        self.published += 1
        payload = json.dumps({"device": device, "at": at.isoformat(), "value": value, "id": self.published})
        topic, now = f"sensors/{device}/reading", time.monotonic()
        with self._lock:
            self._kept.append((now, topic, payload))
            while self._kept[0][0] < now - KEPT_S:
                self._kept.popleft()
            self._sent += 1
        self._client.publish(topic, payload, qos=1)

    def _on_connect(self, *_: object) -> None:
        self._connections += 1
        if self._connections == 1:
            return
        with self._lock:
            kept = list(self._kept)
            self._sent += len(kept)
        self.again += len(kept)
        for _, topic, payload in kept:
            self._client.publish(topic, payload, qos=1)

    def _on_publish(self, *_: object) -> None:
        with self._lock:
            self._acknowledged += 1
