"""Clients that post over HTTP and send again what was not answered, while workers are killed around their commits."""

from __future__ import annotations

import http.client
import json
import os
import socket
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import psycopg

from millpy.embedded import free_port
from tests.crash.harness import Worker, await_true

GRAPH = Path(__file__).with_name("http_graph.py")
CLIENTS = 6
REQUESTS = int(os.environ.get("HTTP_REQUESTS", "25"))
"""Requests of each client, of ten records."""
START = 1_700_000_000
ATTEMPT_S_MAX = 3.0
WITHIN_S = 120.0


class Client(threading.Thread):
    """Posts its requests in order; sends each again, with the same key, until it is answered with success."""

    def __init__(self, port: int, name: str, requests: list[list[dict[str, Any]]]) -> None:
        super().__init__(name=name, daemon=True)
        self.port, self.requests = port, requests
        self.answers: Counter[object] = Counter()
        self.done = 0

    def run(self) -> None:
        for number, records in enumerate(self.requests):
            deadline = time.monotonic() + WITHIN_S
            while not self.post(f"{self.name}-{number}", records):
                if time.monotonic() > deadline:
                    return
                time.sleep(0.02)
            self.done += 1

    def post(self, key: str, records: list[dict[str, Any]]) -> bool:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=ATTEMPT_S_MAX)
        try:
            headers = {"Content-Type": "application/json", "Idempotency-Key": key}
            connection.request("POST", "/readings", json.dumps(records), headers)
            answer = connection.getresponse()
            answer.read()
            self.answers[answer.status] += 1
            assert answer.status in (200, 429, 503), answer.status
            return answer.status == 200
        except (OSError, http.client.HTTPException) as error:
            self.answers[type(error).__name__] += 1
            return False
        finally:
            connection.close()


def reading(client: int, number: int) -> dict[str, Any]:
    return {"device": f"d{number % 7}", "at": START + number // 10, "value": client * 1_000 + number}


def feeds() -> list[list[list[dict[str, Any]]]]:
    """client -> its requests."""
    return [
        [[reading(client, request * 10 + n) for n in range(10)] for request in range(REQUESTS)]
        for client in range(CLIENTS)
    ]


def expected() -> dict[tuple[str, int], tuple[int, int]]:
    found: dict[tuple[str, int], tuple[int, int]] = {}
    for record in (record for requests in feeds() for records in requests for record in records):
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


def test_each_record_counts_once_through_kills_with_clients_that_send_again(tmp_path: Path, database_url: str) -> None:
    port = free_port()
    environment = {"HTTP_URL": f"http://127.0.0.1:{port}"}

    def worker(failpoint: str = "") -> Worker:
        return Worker(tmp_path, database_url, tmp_path, graph=GRAPH, failpoint=failpoint, environment=environment)

    with worker("after_commit:12:kill") as first, worker("before_commit:18:kill") as second:
        first.await_while_running(lambda: listens(port), "listens")
        clients = [Client(port, f"c{number}", requests) for number, requests in enumerate(feeds())]
        for client in clients:
            client.start()
        first.await_killed()
        second.await_killed()
        with worker("after_fence:9:kill") as third, worker() as fourth:
            third.await_killed()
            fourth.await_while_running(
                lambda: not any(client.is_alive() for client in clients), "all are answered", WITHIN_S
            )
            last = Client(port, "last", [[{"device": "last", "at": START + 86_400, "value": 0}]] * 8)
            last.run()  # keys of both partitions, which close the windows
            await_true(lambda: len(windows(database_url)) >= len(expected()), "windows close")
            fourth.drain()
            fourth.await_finished()

    assert [client.done for client in [*clients, last]] == [REQUESTS] * CLIENTS + [8]
    assert windows(database_url) == expected()
    answers = sum((client.answers for client in clients), Counter())
    assert answers[200] == CLIENTS * REQUESTS
    assert answers.total() > answers[200], "no attempt failed"
    with psycopg.connect(database_url) as connection:
        (counts,) = connection.execute(
            "SELECT sum(accepted)::int, sum(dead_lettered)::int, bool_and(balanced), sum(duplicate) > 0"
            " FROM millpy.accounting WHERE source_partition IS NOT NULL"
        ).fetchall()
    assert counts == (CLIENTS * REQUESTS * 10 + 8, 0, True, True)
