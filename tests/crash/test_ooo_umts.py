"""A real feed with real disorder through a real broker, workers killed meanwhile: the published tables, exactly."""

from __future__ import annotations

import csv
import gzip
import json
import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import psycopg
import pyarrow.parquet as pq
import pytest
from paho.mqtt import client as mqtt

from millpy.embedded import EmbeddedBroker, mosquitto_program
from tests.crash.checks import Observer
from tests.crash.harness import ROOT, Worker, await_true

DATA = ROOT.parent / "shared" / "data" / "ooo_umts"
GRAPH = Path(__file__).with_name("ooo_graph.py")
SESSIONS = ("d-1", "d-2", "d-3", "d-4", "d-5")
HOUR_MS = 3_600_000
LATE = {
    "late_250_0": "late_w1s_bound250ms_lateness0ms",
    "late_250_1000": "late_w1s_bound250ms_lateness1000ms",
    "late_2000_0": "late_w1s_bound2000ms_lateness0ms",
}
GENTLE = {"bundle_records_max": 5_000, "fold_every_s": 2, "epoch_s": 10, "progress_every_s": 0.1}
MS = "(extract(epoch FROM {}) * 1000)::bigint"

pytestmark = pytest.mark.skipif(not DATA.exists(), reason="the recorded feeds are not here")


def name_of(session: str) -> str:
    return session.replace("-", "_")


def messages() -> dict[str, list[bytes]]:
    """Session -> payloads in order of arrival, and one a day later that closes every window."""
    found: dict[str, list[bytes]] = defaultdict(list)
    newest: dict[str, int] = defaultdict(int)
    with gzip.open(DATA / "events.csv.gz", "rt", newline="") as lines:
        for row in sorted(csv.DictReader(lines), key=lambda row: int(row["arrival_seq"])):
            event_ms = int(row["event_ms"])
            message = {
                "device": row["device"],
                "seq": int(row["seq"]),
                "event_ms": event_ms,
                "rtt_ms": float(row["rtt_ms"]),
            }
            found[row["session"]].append(json.dumps(message).encode())
            newest[row["session"]] = max(newest[row["session"]], event_ms)
    for session in found:
        last = {"device": "the end", "seq": 0, "event_ms": newest[session] + 24 * HOUR_MS, "rtt_ms": 0.0}
        found[session].append(json.dumps(last).encode())
    return {session: found[session] for session in SESSIONS}


class Publisher:
    """Publishes with QoS 1, the sessions side by side, each in its order."""

    def __init__(self, broker: EmbeddedBroker) -> None:
        self.client = mqtt.Client(mqtt.CallbackAPIVersion.VERSION2, protocol=mqtt.MQTTv5)
        self.client.max_inflight_messages_set(500)
        self.client.connect(broker.host, broker.port)
        self.client.loop_start()
        self.sent = 0

    def __enter__(self) -> Publisher:
        return self

    def __exit__(self, *_: object) -> None:
        self.client.disconnect()
        self.client.loop_stop()

    def say_hello(self, topics: list[str]) -> None:
        """Something that is no record: it ends as a dead letter of everyone who listens."""
        for topic in topics:
            self.client.publish(topic, b"hello", qos=1).wait_for_publish(5)

    def publish(self, feeds: dict[str, list[bytes]], go_on: list[tuple[int, threading.Event]]) -> None:
        """Publish all; at each mark wait until a worker has been killed."""
        queues = {f"ooo/{name_of(session)}": iter(payloads) for session, payloads in feeds.items()}
        while queues:
            for topic in list(queues):
                payload = next(queues[topic], None)
                if payload is None:
                    del queues[topic]
                    continue
                last = self.client.publish(topic, payload, qos=1)
                self.sent += 1
                if self.sent % 1000 == 0:
                    last.wait_for_publish(30)
            while go_on and self.sent >= go_on[0][0]:
                assert go_on.pop(0)[1].wait(60)
        last.wait_for_publish(30)


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[EmbeddedBroker]:
    """It is not killed here, so it need not save its sessions at every message."""
    if mosquitto_program() is None:
        pytest.skip("mosquitto is not installed")
    with EmbeddedBroker(tmp_path / "broker") as running:
        yield running


@pytest.fixture
def environment(broker: EmbeddedBroker, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("OOO_HOST", broker.host)
    monkeypatch.setenv("OOO_PORT", str(broker.port))
    monkeypatch.setenv("OOO_SESSIONS", ",".join(map(name_of, SESSIONS)))
    yield


@pytest.mark.timeout(180)
def test_expected_tables_through_kills(
    tmp_path: Path, database_url: str, broker: EmbeddedBroker, environment: None
) -> None:
    feeds = messages()
    killed = [threading.Event(), threading.Event()]
    total = sum(map(len, feeds.values()))
    marks = [(total // 3, killed[0]), (2 * total // 3, killed[1])]

    def worker() -> Worker:
        return Worker(tmp_path, database_url, Path("none"), graph=GRAPH, **GENTLE)

    with Observer(database_url, every_s=0.25) as observer, Publisher(broker) as publisher:
        with ExitStack() as stack:
            workers = [stack.enter_context(worker()) for _ in range(2)]
            await_true(lambda: _all_listen(database_url, publisher), "all listen", 60)
            publishing = threading.Thread(target=publisher.publish, args=(feeds, list(marks)), daemon=True)
            publishing.start()
            for mark, event in marks:
                await_true(lambda mark=mark: publisher.sent >= mark, "published", 60)
                workers.pop(0).kill()
                observer.look_now()
                workers.append(stack.enter_context(worker()))
                event.set()
            publishing.join(60)
            await_true(lambda: _all_over(database_url), f"all is over; {workers[0].log[-2000:]}", 90)
            faults = _faults(database_url)
            for survivor in workers:
                survivor.drain()
                survivor.await_finished()

    assert faults == []
    assert observer.faults == []


def _all_listen(url: str, publisher: Publisher) -> bool:
    """Whether every injector has set a message aside that is no record: then its subscription stands."""
    publisher.say_hello([f"ooo/{name_of(session)}" for session in SESSIONS])
    with psycopg.connect(url, autocommit=True) as connection:
        row = connection.execute("SELECT count(DISTINCT stream) FROM mill.dead_letters").fetchone()
    return row is not None and row[0] == 2 * len(SESSIONS)


def _all_over(url: str) -> bool:
    """Whether every stage has seen the message of a day later."""
    with psycopg.connect(url, autocommit=True) as connection:
        rows = connection.execute(
            "SELECT c.name, min(i.low_watermark) FROM mill.intervals i JOIN mill.computations c USING (computation_id)"
            " WHERE c.kind = 'stage' GROUP BY 1"
        ).fetchall()
    ends = _ends()
    return all(watermark > ends[name[:3]] for name, watermark in rows)


def _ends() -> dict[str, int]:
    """Session's name -> an instant after all its windows, in µs."""
    table = pq.read_table(DATA / "expected" / "tumbling_10min.parquet", columns=["session", "window_end"])
    ends: dict[str, int] = defaultdict(int)
    for row in table.to_pylist():
        name = name_of(row["session"])
        ends[name] = max(ends[name], (row["window_end"] + 2 * HOUR_MS) * 1000)
    return ends


def _faults(url: str) -> list[str]:
    found = []
    with psycopg.connect(url, autocommit=True) as connection:
        for session in SESSIONS:
            for table, file in LATE.items():
                found += _late_faults(connection, session, f"{name_of(session)}_{table}", _expected(file, session))
            for size in ("10s", "10min"):
                rows = _expected(f"tumbling_{size}", session)
                found += _tumbling_faults(connection, f"{name_of(session)}_tumbling_{size}", rows)
    return found


def _expected(file: str, session: str) -> list[dict]:
    rows = pq.read_table(DATA / "expected" / f"{file}.parquet").to_pylist()
    return [row for row in rows if row["session"] == session]


def _late_faults(connection: psycopg.Connection, session: str, table: str, rows: list[dict]) -> list[str]:
    windows = connection.execute(
        f"SELECT device, {MS.format('window_start')}, n, late_count FROM ooo.{table} WHERE device <> 'the end'"
    ).fetchall()
    dropped = connection.execute(
        "SELECT key::jsonb #>> '{}', window_start / 1000, count(*) FROM mill.late_records WHERE computation = %s"
        " GROUP BY 1, 2",
        [table],
    ).fetchall()
    accepted = {
        (row["device"], row["window_start"]): (row["n_on_time"] + row["n_late_accepted"], row["n_late_accepted"])
        for row in rows
        if row["n_on_time"] + row["n_late_accepted"]
    }
    refused = {(row["device"], row["window_start"]): row["n_dropped"] for row in rows if row["n_dropped"]}
    found = []
    if {row[:2]: row[2:] for row in windows} != accepted:
        found.append(f"{table}: windows differ")
    if {row[:2]: row[2] for row in dropped} != refused:
        found.append(f"{table}: dropped records differ")
    return found


def _tumbling_faults(connection: psycopg.Connection, table: str, rows: list[dict]) -> list[str]:
    windows = connection.execute(
        f"SELECT device, {MS.format('window_start')}, n, n_values, total, low, high, mean FROM ooo.{table}"
        " WHERE device <> 'the end'"
    ).fetchall()
    wanted = {
        (row["device"], row["window_start"]): (
            row["n_rows"],
            row["n_values"],
            row["value_sum"],
            row["value_min"],
            row["value_max"],
            pytest.approx(row["value_mean"], rel=1e-9),
        )
        for row in rows
    }
    return [] if {row[:2]: row[2:] for row in windows} == wanted else [f"{table}: windows differ"]
