"""Live updates: bounded connections whatever the number of viewers, slow readers, and an API that dies."""

from __future__ import annotations

import asyncio
import http.client
import json
import resource
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import psutil
import psycopg
import pytest

from millpy.admin.tokens import Role
from millpy.api.failures import FAILURES_MAX, WITHIN_S
from millpy.api.live import BUFFER_BYTES_MAX, CROWD, ViewerStream
from millpy.api.protocol import HEAD_S_MAX
from millpy.api.server import CONNECTIONS_MAX
from millpy.embedded import EmbeddedPostgres
from tests.api_server import ApiServer, running_api
from tests.conformance.test_api import a_worker, forget_workers, ran
from tests.databases import fresh_database

VIEWERS = 200
WRONG = 1_000
DATABASE_CONNECTIONS_MAX = 7
"""Four that read, one each that authenticates, acts and listens."""


@pytest.fixture(scope="module")
def database(postgres: EmbeddedPostgres, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with fresh_database(postgres) as name:
        url = postgres.url(name)
        ran(tmp_path_factory.mktemp("live") / "plant", url)
        yield url


@pytest.fixture
def api(database: str) -> Iterator[ApiServer]:
    with running_api(database) as server:
        yield server
    with psycopg.connect(database, autocommit=True) as connection:
        connection.execute("DELETE FROM mill.tokens")


class Reader:
    """A viewer: an open stream, whose events can be awaited."""

    def __init__(self, api: ApiServer, token: str) -> None:
        self.taken = socket.create_connection((api.host, api.port), timeout=15)
        head = f"GET /v1/live HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {token}\r\n\r\n"
        self.taken.sendall(head.encode())
        self._bytes = b""

    def until(self, words: bytes) -> bytes:
        """Read until some words have come; return all that has."""
        while words not in self._bytes:
            part = self.taken.recv(65_536)
            assert part, self._bytes
            self._bytes += part
        return self._bytes

    def close(self) -> None:
        self.taken.close()


def note(url: str, word: str) -> None:
    """Record an event, and notify, as a worker does."""
    with psycopg.connect(url, autocommit=True, application_name="noting") as connection:
        connection.execute(
            "INSERT INTO mill.events (graph_id, kind, detail)"
            " SELECT graph_id, 'noted', jsonb_build_object('word', %s::text) FROM mill.graphs", [word]
        )  # fmt: skip
        connection.execute("SELECT pg_notify(channel, 'x') FROM millpy.descriptions")


class ConnectionCount(threading.Thread):
    """Counts the connections of others, again and again."""

    def __init__(self, url: str) -> None:
        super().__init__()
        self._url = url
        self._ended = threading.Event()
        self.most = 0
        self.last: list[tuple[Any, ...]] = []

    def run(self) -> None:
        with psycopg.connect(self._url, autocommit=True) as connection:
            while not self._ended.wait(0.02):
                self.last = connection.execute(
                    "SELECT state, now() - xact_start FROM pg_stat_activity"
                    " WHERE datname = current_database() AND pid <> pg_backend_pid()"
                    " AND backend_type = 'client backend' AND application_name <> 'noting'"
                ).fetchall()
                self.most = max(self.most, len(self.last))

    def end(self) -> None:
        self._ended.set()
        self.join()


def test_viewers_share_few_connections_and_see_news_within_two_seconds(api: ApiServer) -> None:
    token = api.token("viewers")
    assert api.get("/v1/graphs", token).status == 200
    counting = ConnectionCount(api.database_url)
    counting.start()
    readers = [Reader(api, token) for _ in range(VIEWERS)]
    try:
        for reader in readers:
            reader.until(b"event: progress")
            reader.until(b"event: workers")
        asked = [threading.Thread(target=api.get, args=("/v1/graphs/plant/accounting", token)) for _ in range(50)]
        for one in asked:
            one.start()
        for one in asked:
            one.join()
        took_s = [seen_after_s(api, readers, name) for name in ("first", "second", "third")]  # the machine may be busy
        threading.Event().wait(0.2)
    finally:
        counting.end()
        for reader in readers:
            reader.close()

    assert min(took_s) < 2
    assert 2 < counting.most <= DATABASE_CONNECTIONS_MAX, "one listens, one looks, and the lists share what they can"
    assert [state for state, _ in counting.last if state.startswith("idle in transaction")] == []


def test_an_action_shows_at_once_however_many_look(api: ApiServer) -> None:
    token = api.token("crowd", Role.OPERATOR)
    live = a_worker(api, "1 hour")

    def requested() -> bool:
        (row,) = api.get("/v1/graphs/plant/workers", token).rows
        return row["drain_requested_at"] is not None

    readers = [Reader(api, token) for _ in range(CROWD + 1)]
    try:
        for reader in readers:
            reader.until(b"event: progress")
        before = [requested() for _ in range(6)]
        done = api.post(f"/v1/graphs/plant/workers/{live}/drain", token)
        after = requested()
    finally:
        for reader in readers:
            reader.close()
        forget_workers(api)

    assert done.status == 200 and before == [False] * 6
    assert after


def seen_after_s(api: ApiServer, readers: list[Reader], name: str) -> float:
    """Seconds until all readers have seen an event."""
    noted_at = time.monotonic()
    note(api.database_url, name)
    for reader in readers:
        reader.until(f'"{name}"'.encode())
    return time.monotonic() - noted_at


def test_connections_beyond_the_limit_are_closed_and_leave_room_for_others(api: ApiServer) -> None:
    token = api.token("patient")
    assert api.get("/v1/graphs", token).status == 200
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    try:
        settled = any(is_settled(api) for _ in range(3))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

    assert settled
    assert api.get("/v1/graphs", token).status == 200


def is_settled(api: ApiServer) -> bool:
    """Whether the API closes idle connections beyond those that it may have, before one has waited too long."""
    ended_at, closed = time.monotonic() + HEAD_S_MAX - 0.5, 0
    idle = [socket.create_connection((api.host, api.port), timeout=20) for _ in range(CONNECTIONS_MAX + 200)]
    try:
        while time.monotonic() < ended_at and closed < 150:
            threading.Event().wait(0.2)
            closed = sum(is_closed(one) for one in idle)
    finally:
        for one in idle:
            one.close()
    return closed >= 150


def is_closed(one: socket.socket) -> bool:
    one.setblocking(False)
    try:
        return one.recv(1) == b""
    except BlockingIOError:
        return False
    except ConnectionError:
        return True


def test_wrong_tokens_cost_no_memory_and_no_query(api: ApiServer) -> None:
    good = api.token("good")
    assert api.get("/v1/graphs", good).status == 200
    process = psutil.Process(api.process.pid)
    began_at = time.monotonic()
    answered = [wrong_tokens(api, 0)]
    before = process.memory_info().rss
    answered += [wrong_tokens(api, number) for number in range(1, 10)]
    grown = process.memory_info().rss - before
    periods = 1 + int((time.monotonic() - began_at) / WITHIN_S)

    asked = sum(found.count(b" 401 ") for found in answered)
    assert FAILURES_MAX <= asked <= periods * FAILURES_MAX
    assert asked + sum(found.count(b" 429 ") for found in answered) == 10 * WRONG
    assert grown < 20_000_000
    assert api.get("/v1/graphs", good).status == 200


def wrong_tokens(api: ApiServer, number: int) -> bytes:
    """Send WRONG requests, each with another wrong token, on one connection; return the answers."""
    found = b""
    with socket.create_connection((api.host, api.port), timeout=60) as client:
        for place in range(WRONG):
            last = "Connection: close\r\n" if place == WRONG - 1 else ""
            head = f"GET /v1/graphs HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer no-{number}-{place}\r\n{last}\r\n"
            client.sendall(head.encode())
            if place % 50 == 49:  # so that neither side waits for the other to read
                while found.count(b"HTTP/1.1 ") <= place - 50:
                    found += client.recv(65_536)
        return found + b"".join(iter(lambda: client.recv(65_536), b""))


def test_a_revoked_token_ends_its_stream(api: ApiServer) -> None:
    reader = Reader(api, api.token("short lived"))
    reader.until(b"event: progress")
    with psycopg.connect(api.database_url, autocommit=True) as connection:
        connection.execute("UPDATE mill.tokens SET revoked_at = now()")

    ended_at = time.monotonic() + 30
    while time.monotonic() < ended_at and reader.taken.recv(65_536):
        note(api.database_url, "more")

    assert time.monotonic() < ended_at
    reader.close()


async def test_a_viewer_that_does_not_read_is_dropped() -> None:
    stream = ViewerStream()
    chunk = b"x" * 100_000
    for _ in range(BUFFER_BYTES_MAX // len(chunk) + 1):
        stream.put(chunk)

    assert stream.ended
    async with asyncio.timeout(5):
        assert [part async for part in stream.chunks(b"first")] == [b"first"]


LOCKED = {
    "the record": "SELECT FROM mill.dead_letters WHERE state = 'open' FOR UPDATE",
    "the events": "LOCK TABLE mill.events IN SHARE ROW EXCLUSIVE MODE",
}
"""What the action waits for, in the middle of its transaction."""


@pytest.mark.parametrize("what", LOCKED)
def test_an_api_that_is_killed_leaves_nothing_behind(database: str, what: str) -> None:
    with running_api(database) as api:
        by = f"killed at {what}"
        token = api.token(by, Role.OPERATOR)
        number = open_letter(api, token)
        with psycopg.connect(database) as holder:
            holder.execute(LOCKED[what].encode())
            body = {"ids": [number]}
            path = "/v1/graphs/plant/dead-letters/discard"

            def ask() -> None:
                with suppress(OSError, http.client.HTTPException):
                    api.post(path, token, body)

            waiting = threading.Thread(target=ask)
            waiting.start()
            await_locks(database, waiting=True)
            api.process.send_signal(signal.SIGKILL)
            api.process.wait()
            waiting.join()
    with psycopg.connect(database) as connection:
        state = connection.execute("SELECT state FROM mill.dead_letters WHERE dead_letter_id = %s", [number]).fetchone()
        noted = connection.execute("SELECT count(*) FROM mill.events WHERE detail ->> 'by' = %s", [by]).fetchone()

    # The server may not have noticed the death before the lock was free: then both happened.
    assert (state, noted) in [(("open",), (0,)), (("discarded",), (1,))]


def test_an_api_that_hangs_in_an_action_gives_its_locks_back_and_has_done_nothing(database: str) -> None:
    answers: list[int] = []
    with running_api(database) as api:
        token = api.token("frozen", Role.OPERATOR)
        number = open_letter(api, token)
        with waiting_discard(api, token, number, answers) as waiting:
            api.process.send_signal(signal.SIGSTOP)
        try:
            await_locks(database, waiting=False)  # its statement has the row: the engine must not overtake it
            with psycopg.connect(database) as engine:
                engine.execute("SET LOCAL lock_timeout = '20s'")
                engine.execute("SELECT FROM mill.dead_letters WHERE dead_letter_id = %s FOR UPDATE", [number])
        finally:
            api.process.send_signal(signal.SIGCONT)
        waiting.join()
    with psycopg.connect(database) as connection:
        state = connection.execute("SELECT state FROM mill.dead_letters WHERE dead_letter_id = %s", [number]).fetchone()
        noted = connection.execute("SELECT count(*) FROM mill.events WHERE detail ->> 'by' = 'frozen'").fetchone()

    assert (answers, state, noted) == ([503], ("open",), (0,))


def test_a_switch_that_waits_holds_up_no_action_and_no_sigterm(database: str) -> None:
    statuses: list[int] = []
    with running_api(database) as api:
        admin, operator = api.token("switching", Role.ADMIN), api.token("beside", Role.OPERATOR)

        def ask() -> None:
            with suppress(OSError, http.client.HTTPException):
                statuses.append(api.post("/v1/graphs/plant/switch", admin, {"generation": 2}).status)

        waiting = threading.Thread(target=ask)
        with psycopg.connect(database) as holder:
            holder.execute("SELECT FROM mill.graphs FOR NO KEY UPDATE")  # as a deployment does
            waiting.start()
            await_locks(database, waiting=True)
            done = api.post("/v1/graphs/plant/dead-letters/discard", operator, {"ids": [2**40]})
            began_at = time.monotonic()
            api.process.terminate()
            api.process.wait(60)
            took_s = time.monotonic() - began_at
            waiting.join()

    assert done.json == {"discarded": 0}
    assert took_s < 12
    assert 200 not in statuses


def test_the_doctor_examines_while_an_action_waits(database: str) -> None:
    answers: list[int] = []
    with running_api(database) as api:
        token = api.token("waiting", Role.OPERATOR)
        number = open_letter(api, token)
        with waiting_discard(api, token, number, answers) as waiting:
            examined = api.get("/v1/doctor", token)
            assert answers == []
        waiting.join()

    assert examined.status == 200
    assert answers == [200]


@contextmanager
def waiting_discard(api: ApiServer, token: str, number: int, answers: list[int]) -> Iterator[threading.Thread]:
    """An action that waits for a lock as long as this lasts; its status is then appended to `answers`."""
    path = "/v1/graphs/plant/dead-letters/discard"
    waiting = threading.Thread(target=lambda: answers.append(api.post(path, token, {"ids": [number]}).status))
    with psycopg.connect(api.database_url) as holder:
        holder.execute("SELECT FROM mill.dead_letters WHERE dead_letter_id = %s FOR UPDATE", [number])
        waiting.start()
        await_locks(api.database_url, waiting=True)
        yield waiting


def open_letter(api: ApiServer, token: str) -> int:
    return int(api.get("/v1/graphs/plant/dead-letters", token, state="open").rows[0]["dead_letter_id"])


def await_locks(url: str, *, waiting: bool) -> None:
    """Wait until a statement waits for a lock, or until none does."""
    ended_at = time.monotonic() + 20
    while time.monotonic() < ended_at:
        with psycopg.connect(url) as connection:
            found = connection.execute(
                "SELECT 1 FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
            ).fetchone()
        if (found is not None) == waiting:
            return
    raise AssertionError("the action does not wait" if waiting else "the action waits")


LATENT_WORKER = """
INSERT INTO mill.workers (worker_id, graph_id, graph_version, computations, host, pid, lease_deadline, lease_s,
                          turn_p50_s, turn_p99_s, commit_p50_s, commit_p99_s)
SELECT gen_random_uuid(), graph_id, version, '{}', 'here', 1, clock_timestamp() + s.lease, 3600, s.p50, s.p99,
       s.p50 / 2, s.p99 / 2
  FROM mill.graphs,
       (VALUES (interval '1 hour', 0.004, 0.5), ('1 hour', 0.02, 0.1), ('-1 hour', 9, 9)) AS s (lease, p50, p99)
"""


def test_the_series_have_rates_lags_and_latencies(api: ApiServer) -> None:
    token = api.token("series")
    with psycopg.connect(api.database_url, autocommit=True) as connection:
        connection.execute(LATENT_WORKER)
    api.get("/v1/graphs", token)
    ended_at = time.monotonic() + 20
    found: dict[str, Any] = {"ages_s": []}
    while len(found["ages_s"]) < 2 and time.monotonic() < ended_at:
        found = api.get("/v1/graphs/plant/series", token).json
    with psycopg.connect(api.database_url, autocommit=True) as connection:
        connection.execute("DELETE FROM mill.workers")

    assert [one["stream"] for one in found["records"]] == ["readings", "readings"]
    assert found["records"][0]["rate"][:2] == [None, 0]
    assert json.dumps(found["lag_s"]).startswith('{"readings"')
    assert {name: values[-1] for name, values in found["latency_s"].items()} == {
        "turn_p50": 0.02,
        "turn_p99": 0.5,
        "commit_p50": 0.01,
        "commit_p99": 0.25,
    }
