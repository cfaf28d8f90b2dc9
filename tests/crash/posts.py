"""Clients that post over HTTP until they are answered with success: patient, hasty, and some that break off."""

from __future__ import annotations

import http.client
import json
import os
import random
import socket
import struct
import threading
import time
from collections import Counter
from contextlib import suppress
from typing import Any, Literal

import psycopg

Ids = Literal["request", "record"]
CLIENTS = 6
REQUESTS = int(os.environ.get("HTTP_REQUESTS", "25"))
"""Requests of each client, of ten records."""
START = 1_700_000_000
ATTEMPT_S_MAX = 3.0
WITHIN_S = 150.0
_CUT_OFF, _HASTY = 0.05, 0.15
"""Shares of the attempts that end in the middle of the body, and that wait for hardly any time."""


class Client(threading.Thread):
    """Posts its requests in order; sends each again, unchanged, until it is answered with success.

    It keeps its connection while it can. Some attempts break off, or do not wait for their answer.
    """

    def __init__(self, port: int, name: str, requests: list[list[dict[str, Any]]], ids: Ids) -> None:
        super().__init__(name=name, daemon=True)
        self.port, self.requests, self.ids = port, requests, ids
        self.answers: Counter[object] = Counter()
        self.surprises: list[str] = []
        self.done = 0
        self._rng = random.Random(name)
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=ATTEMPT_S_MAX)

    def run(self) -> None:
        for number, records in enumerate(self.requests):
            deadline = time.monotonic() + WITHIN_S
            while not self.post(f"{self.name}-{number}", json.dumps(records).encode()):
                if time.monotonic() > deadline:
                    return
                time.sleep(0.02)
            self.done += 1
        self._connection.close()

    def post(self, key: str, body: bytes) -> bool:
        headers = {"Content-Type": "application/json"}
        if self.ids == "request":
            headers["Idempotency-Key"] = key
        how = self._rng.random()
        if how < _CUT_OFF:
            return self._break_off(headers, body)
        self._connection.timeout = 0.02 if how < _CUT_OFF + _HASTY else ATTEMPT_S_MAX
        try:
            if self._connection.sock is not None:
                self._connection.sock.settimeout(self._connection.timeout)
            self._connection.request("POST", "/readings", body, headers)
            answer = self._connection.getresponse()
            content = answer.read()
        except (OSError, http.client.HTTPException) as error:
            self.answers[type(error).__name__] += 1
            self._connection.close()
            return False
        self.answers[answer.status] += 1
        if answer.status not in (200, 429, 503):
            self.surprises.append(f"{answer.status}: {content!r}")
        return answer.status == 200

    def _break_off(self, headers: dict[str, str], body: bytes) -> bool:
        """Send a half, and reset the connection."""
        lines = [f"{name}: {value}\r\n" for name, value in {**headers, "Content-Length": len(body)}.items()]
        head = f"POST /readings HTTP/1.1\r\nHost: x\r\n{''.join(lines)}\r\n".encode()
        with suppress(OSError), socket.create_connection(("127.0.0.1", self.port), ATTEMPT_S_MAX) as connection:
            connection.sendall(head + body[: len(body) // 2])
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.answers["cut off"] += 1
        return False


class Posts:
    """All clients, and what their records come to."""

    def __init__(self, port: int, ids: Ids) -> None:
        self.port, self.ids = port, ids
        self.clients = [Client(port, f"c{number}", requests, ids) for number, requests in enumerate(_feeds())]

    def begin(self) -> None:
        for client in self.clients:
            client.start()

    @property
    def done(self) -> int:
        """How many requests were answered with success."""
        return sum(client.done for client in self.clients)

    @property
    def share(self) -> float:
        """How much of all requests that is."""
        return self.done / (CLIENTS * REQUESTS)

    def are_over(self) -> bool:
        return not any(client.is_alive() for client in self.clients)

    def close_windows(self) -> None:
        """Post to both partitions what ends all windows."""
        ends = [[{"device": "last", "at": START + 86_400, "value": n, "id": f"last-{n}"}] for n in range(8)]
        last = Client(self.port, "last", ends, self.ids)
        last.run()
        self.clients.append(last)

    def faults(self, url: str) -> list[str]:
        """Say what was not answered, lost, doubled or miscounted."""
        records = CLIENTS * REQUESTS * 10 + 8
        found = [surprise for client in self.clients for surprise in client.surprises]
        if self.done != CLIENTS * REQUESTS + 8:
            found.append(f"only {self.done} requests were answered with success")
        if (wrong := windows(url)) != expected():
            found.append(f"windows differ: {sorted(set(wrong.items()) ^ set(expected().items()))[:6]}")
        answers = sum((client.answers for client in self.clients), Counter())
        if answers[200] != self.done or answers.total() == answers[200]:
            found.append(f"answers: {answers}")
        query = (
            "SELECT sum(accepted)::int, sum(dead_lettered)::int, bool_and(balanced), sum(duplicate) > 0"
            " FROM millpy.accounting WHERE source_partition IS NOT NULL"
        )
        with psycopg.connect(url) as connection:
            (counts,) = connection.execute(query).fetchall()
        if counts != (records, 0, True, True):
            found.append(f"accounting: {counts}, and not {records} records")
        return found


def _feeds() -> list[list[list[dict[str, Any]]]]:
    """client -> its requests."""
    return [
        [[_reading(client, request * 10 + n) for n in range(10)] for request in range(REQUESTS)]
        for client in range(CLIENTS)
    ]


def _reading(client: int, number: int) -> dict[str, Any]:
    value = client * 1_000 + number
    return {"device": f"d{number % 7}", "at": START + number // 10, "value": value, "id": f"{client}-{number}"}


def expected() -> dict[tuple[str, int], tuple[int, int]]:
    found: dict[tuple[str, int], tuple[int, int]] = {}
    for record in (record for requests in _feeds() for records in requests for record in records):
        name = (record["device"], record["at"] // 10 * 10)
        n, total = found.get(name, (0, 0))
        found[name] = (n + 1, total + record["value"])
    return found


def windows(url: str) -> dict[tuple[str, int], tuple[int, int]]:
    query = "SELECT device, extract(epoch FROM window_start)::int, n, total FROM posted.per_device_10s"
    with psycopg.connect(url) as connection:
        return {(device, start): (n, int(total)) for device, start, n, total in connection.execute(query).fetchall()}


def listens(port: int) -> bool:
    with socket.socket() as taken:
        return taken.connect_ex(("127.0.0.1", port)) == 0
