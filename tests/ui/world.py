"""A live world to look at: two workers on a real database, a feed over a real broker, an API, and hostile data."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import psycopg
from paho.mqtt.client import Client
from paho.mqtt.enums import CallbackAPIVersion
from psycopg.rows import dict_row

from millpy.embedded import EmbeddedBroker
from millpy.process.launcher import worker_command
from tests.api_server import ApiServer, running_api
from tests.waiting import await_true

ROOT = Path(__file__).resolve().parents[2]
GRAPH = Path(__file__).with_name("works_graph.py")
LEASE_S = 2.0
SITES = ("oslo", "rome", "lima")
DEVICES = 4
PERIOD_S = 0.25
HOSTILE = "<img src=x onerror=alert(1)>'\"; DROP TABLE mill.graphs; --\u202egnp"
"""Of a device, as part of a topic, which can have no control character."""
HOSTILE_NOTE = "<script>alert('note')</script>\x1b[31mred\u202e\x07 {{ 7 * 7 }} ${1}"
"""In payloads, and in the text of an error."""
SILENT = "silent-1"
FAULTY = "faulty-1"


class Feed(threading.Thread):
    """Publishes a reading of one device after another, until it is stopped; and single ones on request."""

    def __init__(self, port: int) -> None:
        super().__init__(name="feed")
        self._client = Client(CallbackAPIVersion.VERSION2, client_id="feed")
        self._client.connect("127.0.0.1", port)
        self._client.loop_start()
        self._stopped = threading.Event()
        self._sending = threading.Lock()
        self._number = 0

    def send(self, site: str, device: str, value: float, *, age_s: float = 0, note: str = "") -> int:
        """Publish a reading that is some seconds old; return its event time in milliseconds."""
        at = int((time.time() - age_s) * 1000)
        with self._sending:
            self._number += 1
            reading = {"at": at, "id": self._number, "value": value, "note": note}
        self.send_bytes(site, device, json.dumps(reading).encode())
        return at

    def send_bytes(self, site: str, device: str, payload: bytes) -> None:
        """Publish any payload."""
        self._client.publish(f"works/{site}/{device}", payload, qos=1).wait_for_publish(10)

    def run(self) -> None:
        """Publish until stopped."""
        turn = 0
        while not self._stopped.wait(PERIOD_S):
            for site in SITES:
                value = 20 + 5 * SITES.index(site) + turn % 7
                self.send(site, f"sensor-{turn % DEVICES}", value)
            turn += 1

    def stop(self) -> None:
        """End the feed."""
        self._stopped.set()
        self.join()
        self._client.disconnect()
        self._client.loop_stop()


class World:
    """The live world; `api` is its API, `feed` its feed, and `url` its database.

    Args:
        url: a fresh, migrated database.
        broker: a broker.
        directory: where the logs go.
    """

    graph = "works"

    def __init__(self, url: str, broker: EmbeddedBroker, directory: Path) -> None:
        self.url = url
        self.broker = broker
        self.directory = directory
        self.feed = Feed(broker.port)
        self.workers: list[subprocess.Popen[bytes]] = []
        self.api: ApiServer

    def rows(self, statement: str, *parameters: Any) -> list[dict[str, Any]]:
        """Return the rows of a query of the database."""
        with psycopg.connect(self.url, autocommit=True, row_factory=dict_row) as connection:
            return connection.execute(statement, parameters).fetchall()

    def add_worker(self) -> subprocess.Popen[bytes]:
        """Start another worker, which ends when this process does."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith("MILLPY_")}
        own = {
            "PYTHONPATH": str(ROOT),
            "MILLPY_DATABASE_URL": self.url,
            "MILLPY_LEASE_S": f"{LEASE_S:g}",
            "WORKS_PORT": str(self.broker.port),
        }
        with (self.directory / f"worker-{len(self.workers)}.log").open("wb") as log:
            worker = subprocess.Popen(
                worker_command(str(GRAPH)), stdin=subprocess.PIPE, stdout=log, stderr=log, env={**kept, **own},
                cwd=self.directory,
            )  # fmt: skip
        self.workers.append(worker)
        return worker

    def kill_a_worker(self) -> int:
        """Kill a worker that owns intervals; return its process id."""
        owners = self.rows("SELECT pid FROM millpy.workers WHERE live AND intervals > 0 ORDER BY intervals DESC")
        worker = next(one for owner in owners for one in self.workers if one.pid == owner["pid"])
        worker.send_signal(signal.SIGKILL)
        worker.wait()
        return worker.pid

    def fill(self) -> None:
        """Wait for windows, and send what every view has to show."""
        windows = "SELECT count(*) AS n FROM works.temperature_5s_status WHERE is_final IS NOT NULL"
        await_true(lambda: self.counts(windows) > len(SITES), "the first windows")
        self.feed.send("oslo", SILENT, 1.0)
        self.feed.send("rome", HOSTILE, 2.0, note=HOSTILE_NOTE)
        self.feed.send("lima", FAULTY, 13_000.0, note=HOSTILE_NOTE)
        self.feed.send("lima", FAULTY, 7.0)
        self.feed.send("rome", HOSTILE, 150.0)
        self.feed.send("oslo", "sensor-0", 3.0, age_s=600, note=HOSTILE_NOTE)
        self.feed.send("oslo", "sensor-1", 4.0, age_s=20)
        self.feed.send_bytes("oslo", "broken", HOSTILE_NOTE.encode())
        self.feed.send_bytes("rome", HOSTILE, json.dumps({"at": HOSTILE_NOTE, "id": 1, "value": 2}).encode())
        self.feed.send_bytes("rome", "empty", b"\x00\xff\xfe")
        for statement, least in (
            ("SELECT count(*) AS n FROM millpy.dead_letters", 3),
            ("SELECT count(*) AS n FROM millpy.late_records", 1),
            ("SELECT count(*) AS n FROM millpy.parked", 1),
            ("SELECT count(*) AS n FROM works.temperature_5s WHERE late_count > 0", 1),
            ("SELECT count(*) AS n FROM works.alarms", 1),
        ):
            await_true(lambda s=statement, n=least: self.counts(s) >= n, statement)
        window = "SELECT 1 FROM works.temperature_5s WHERE device = %s"
        await_true(lambda: self.rows(window, HOSTILE), "a window with a hostile key")

    def counts(self, statement: str) -> int:
        """Return the number that a query counts; 0 while its table does not exist."""
        try:
            return int(self.rows(statement)[0]["n"])
        except psycopg.errors.UndefinedTable:
            return 0


@contextmanager
def living(url: str, directory: Path, kind: type[World] = World) -> Iterator[World]:
    """A world for a database, filled."""
    with ExitStack() as stack:
        broker = stack.enter_context(EmbeddedBroker(directory / "broker"))
        world = kind(url, broker, directory)
        stack.callback(_end, world.workers)
        for _ in range(2):
            world.add_worker()
        both = "SELECT count(*) AS n FROM millpy.workers WHERE live AND intervals > 0"
        await_true(lambda: world.counts(both) == 2, "two workers that own intervals")
        running = "SELECT count(*) AS n FROM millpy.sources WHERE state = 'running' AND connected"
        await_true(lambda: world.counts(running) == 1, "a connected source")
        world.feed.start()
        stack.callback(world.feed.stop)
        world.api = stack.enter_context(running_api(url))
        world.fill()
        yield world


def _end(workers: list[subprocess.Popen[bytes]]) -> None:
    for worker in workers:
        worker.kill()
        worker.wait()
        assert worker.stdin is not None
        worker.stdin.close()
