"""All devices of the plant in one process: publishes tick after tick with QoS 1, through any outage of the broker.

    python -m tests.plant.publisher PORT OPTIONS        reads "TICK" or "close" from standard input, a line each

Prints "TICK MESSAGES" when the broker has acknowledged all of a tick. Nothing of a tick is sent before that of the one
before is acknowledged, so what the client library sends again after an outage is out of order by one tick at most.
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Sequence

from paho.mqtt import client as mqtt
from paho.mqtt.enums import CallbackAPIVersion

from tests.plant.dialects import messages
from tests.plant.fleet import Options, Reading, closers, schedule

IN_FLIGHT_MAX = 500
CLOSE = "close"


class Publisher:
    """A client that knows what the broker has acknowledged."""

    def __init__(self, port: int) -> None:
        self._acknowledged, self.sent = 0, 0
        self._changed = threading.Condition()
        self.client = mqtt.Client(CallbackAPIVersion.VERSION2, protocol=mqtt.MQTTv5)
        self.client.reconnect_delay_set(1, 1)
        self.client.max_inflight_messages_set(IN_FLIGHT_MAX)
        self.client.on_publish = self._published
        self.client.connect("127.0.0.1", port)
        self.client.loop_start()

    def _published(self, *_: object) -> None:
        with self._changed:
            self._acknowledged += 1
            self._changed.notify()

    def publish(self, readings: Sequence[Reading]) -> None:
        """Publish readings, and wait until the broker has acknowledged all."""
        for topic, payload in messages(readings):
            with self._changed:
                self._changed.wait_for(lambda: self.sent - self._acknowledged < IN_FLIGHT_MAX)
            self.client.publish(topic, payload, qos=1)
            self.sent += 1
        with self._changed:
            self._changed.wait_for(lambda: self._acknowledged >= self.sent)


def main(port: str, text: str) -> None:
    """Publish as the lines of standard input say."""
    options = Options(**json.loads(text))
    ticks = schedule(options)
    publisher = Publisher(int(port))
    for line in sys.stdin:
        what = line.strip()
        publisher.publish(closers(options) if what == CLOSE else ticks[int(what)])
        print(what, publisher.sent, flush=True)
    publisher.client.disconnect()
    publisher.client.loop_stop()


if __name__ == "__main__":
    main(*sys.argv[1:3])
