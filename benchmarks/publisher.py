"""Publishes pings at a steady rate with QoS 1, in a process of its own.

    python -m benchmarks.publisher --port 1883 --rate 1000 --seconds 60

Writes the MQTT 3.1.1 packets itself: a client library would take a core at 5,000 records/s, and the machine has two.
Each payload carries `sent_ns`, the machine's monotonic clock at the moment of sending. SIGTERM ends it early. Prints
one JSON object: records published and acknowledged by the broker, and how far behind its schedule it ever was.
"""

from __future__ import annotations

import argparse
import json
import signal
import socket
import struct
import threading
import time

TOPIC = b"bench/ping"
PUBACK_BYTES = 4
SLEEP_S_MIN = 0.0002
DRAIN_S_MAX = 30.0


class Publisher:
    """One connection to the broker."""

    def __init__(self, host: str, port: int) -> None:
        self._socket = socket.create_connection((host, port))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        identity = b"bench-%d" % time.monotonic_ns()
        body = b"\x00\x04MQTT\x04\x02\x00\x00" + struct.pack(">H", len(identity)) + identity
        self._socket.sendall(b"\x10" + _length(len(body)) + body)
        answer = self._socket.recv(4)
        assert answer[:1] == b"\x20" and answer[3] == 0, answer
        self.sent = 0
        self._acknowledged_bytes = 0
        self._stopping = False
        threading.Thread(target=self._count, daemon=True).start()

    @property
    def acknowledged(self) -> int:
        """The number of PUBACKs so far."""
        return self._acknowledged_bytes // PUBACK_BYTES

    def stop(self, *_: object) -> None:
        """End `run` early."""
        self._stopping = True

    def publish(self, payloads: list[bytes]) -> None:
        """Send records to the broker in one write."""
        packets = []
        for payload in payloads:
            self.sent += 1
            identity = 1 + (self.sent - 1) % 65_535
            body = struct.pack(">H", len(TOPIC)) + TOPIC + struct.pack(">H", identity) + payload
            packets.append(b"\x32" + _length(len(body)) + body)
        self._socket.sendall(b"".join(packets))

    def run(self, rate: float, seconds: float, devices: int, first: int) -> float:
        """Publish on schedule; return the largest delay in seconds."""
        started = time.monotonic()
        total, done, behind = int(rate * seconds), 0, 0.0
        while done < total and not self._stopping:
            now = time.monotonic()
            due = min(total, int((now - started) * rate) + 1)
            if due > done:
                behind = max(behind, now - started - done / rate)
                self.publish([ping(first + number, devices) for number in range(done, due)])
                done = due
            wait_s = started + done / rate - time.monotonic()
            if wait_s > 0:
                time.sleep(max(SLEEP_S_MIN, wait_s))
        return behind

    def drain(self) -> None:
        """Wait until the broker has acknowledged everything."""
        deadline = time.monotonic() + DRAIN_S_MAX
        while self.acknowledged < self.sent and time.monotonic() < deadline:
            time.sleep(0.01)

    def _count(self) -> None:
        while block := self._socket.recv(65_536):
            self._acknowledged_bytes += len(block)


def ping(seq: int, devices: int) -> bytes:
    """Return a payload, stamped with the present time."""
    return b'{"device":"dev-%04d","event_us":%d,"sent_ns":%d,"seq":%d}' % (
        seq * 7919 % devices,
        time.time_ns() // 1000,
        time.monotonic_ns(),
        seq,
    )


def _length(number: int) -> bytes:
    encoded = bytearray()
    while True:
        number, digit = divmod(number, 128)
        encoded.append(digit | (0x80 if number else 0))
        if not number:
            return bytes(encoded)


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.publisher")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--rate", type=float, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--devices", type=int, default=1_000)
    parser.add_argument("--first", type=int, default=0)
    options = parser.parse_args()
    publisher = Publisher(options.host, options.port)
    signal.signal(signal.SIGTERM, publisher.stop)
    behind = publisher.run(options.rate, options.seconds, options.devices, options.first)
    publisher.drain()
    print(json.dumps({"published": publisher.sent, "acknowledged": publisher.acknowledged, "behind_s_max": behind}))


if __name__ == "__main__":
    main()
