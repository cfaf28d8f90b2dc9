"""The API under requests made from its OpenAPI document: no 5xx, no hang, each answer as described, no secret in any.

`make api-fuzz` does it for FUZZ_MINUTES, and so does schemathesis then (`tests/fuzz/api_run.py`).
"""

from __future__ import annotations

import http.client
import json
import os
import random
import re
import socket
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from typing import Any

import psycopg
import pytest

from millpy.admin.tokens import Role, digest
from millpy.embedded import EmbeddedPostgres
from tests.api_server import ApiServer, running_api
from tests.conformance.test_api import HOSTILE, ran
from tests.databases import fresh_database
from tests.fuzz.api_requests import MadeRequest, RequestMaker

SECONDS = float(os.environ.get("FUZZ_MINUTES", "0")) * 60 or 8.0
STREAM = "/v1/live"
"""It never ends."""
ANSWER_S_MAX = 15.0
LOST_MAX = 3
"""Answers, one after another, that PostgreSQL has ended the session: a starved API is idle in its transaction."""
LOST = re.compile(
    "(the database cannot answer: terminating connection|cannot reach the database: .*connection)", re.DOTALL
)
ANSWERED_MIN = 20
"""Requests that are made at least, however slow the machine is: those that find something."""
NOT_DESCRIBED = (400, 404, 405, 413)
"""Of requests that reach no path."""
KNOWN: Mapping[str, Sequence[Any]] = {
    "graph": ("plant",), "computation": ("temperature_1m", "readings"), "table": ("temperature_1m",),
    "stream": ("readings",), "number": (1, 2, 3), "ids": (1, 2, 3), "key": ("pump-1", '"pump-1"', HOSTILE),
    "where": ("device=pump-1", "n=1"), "from": ("2026-11-01T00:00:00Z",), "to": ("2027-01-01T00:00:00+02:00",),
    "generation": (1, 2), "kind": ("claimed", "requested"), "after": ("",), "limit": (1, 3, 1_000),
    "silent_s": (0, 1.5), "payload_text": ('{"id": 1}', HOSTILE),
}  # fmt: skip


@pytest.fixture(scope="module")
def api(postgres: EmbeddedPostgres, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    with fresh_database(postgres) as name:
        url = postgres.url(name)
        ran(tmp_path_factory.mktemp("fuzz") / "plant", url)
        with running_api(url) as server:
            yield server


@pytest.mark.timeout(SECONDS + 280)
@pytest.mark.parametrize("role", [Role.ADMIN, Role.VIEWER], ids=["admin", "viewer"])
def test_no_request_makes_the_api_fail(api: ApiServer, role: Role) -> None:
    token = api.token(f"fuzz {role.name}", role)
    document = api.get("/v1/openapi.json").json
    del document["paths"][STREAM]
    seed = random.randbytes(6).hex()
    maker = RequestMaker(document, KNOWN, seed)
    statuses: Counter[int] = Counter()
    ended_at = time.monotonic() + SECONDS / 2
    with closing(api.connect()) as connection:
        while time.monotonic() < ended_at or statuses[200] < ANSWERED_MIN:
            made = maker.request()
            for _ in range(1 + LOST_MAX):
                asked_at = time.monotonic()
                answer = asked(connection, made, token)
                took_s = time.monotonic() - asked_at
                if not is_of_a_lost_session(answer[0], answer[2]):
                    break
            statuses[answer[0]] += 1
            check(document, made, answer, [token, digest(token).hex()], f"seed {seed}, after {sum(statuses.values())}")
            assert took_s < ANSWER_S_MAX, (seed, made, took_s)

    assert not [line for line in api.lines if '"level":"error"' in line.replace(" ", "")]
    assert not [line for line in api.lines if token in line]
    with psycopg.connect(api.database_url) as database:
        assert database.execute("SELECT count(*) FROM millpy.accounting WHERE NOT balanced").fetchone() == (0,)
        if role is Role.VIEWER:
            by = database.execute("SELECT count(*) FROM millpy.events WHERE detail ->> 'by' = 'fuzz VIEWER'").fetchone()
            assert by == (0,)


def asked(connection: http.client.HTTPConnection, made: MadeRequest, token: str) -> tuple[int, Any, bytes]:
    headers = {"Authorization": f"Bearer {token}", **made.headers}
    try:
        connection.request(made.method, made.target, made.body, headers)
        answer = connection.getresponse()
    except (http.client.RemoteDisconnected, ConnectionError):  # closed after a request that was refused
        connection.close()
        connection.request(made.method, made.target, made.body, headers)
        answer = connection.getresponse()
    return answer.status, answer.headers, answer.read()


def is_of_a_lost_session(status: int, body: bytes) -> bool:
    """Whether the answer says that the connection to the database was lost, which is legal: try again."""
    return status == 503 and LOST.match(json.loads(body)["detail"]) is not None


@pytest.mark.parametrize(
    ("status", "detail", "is_lost"),
    [
        (503, "the database cannot answer: terminating connection due to idle-in-transaction timeout", True),
        (503, "cannot reach the database: server closed the connection unexpectedly", True),
        (503, "cannot reach the database: the connection is lost", True),
        (503, "too many requests wait", False),
        (503, "the database cannot answer: deadlock detected", False),
        (500, "the database cannot answer: terminating connection due to administrator command", False),
        (200, "cannot reach the database: the connection is lost", False),
    ],
)
def test_only_the_answer_of_a_lost_session_is_asked_for_again(status: int, detail: str, is_lost: bool) -> None:
    assert is_of_a_lost_session(status, json.dumps({"detail": detail}).encode()) is is_lost


def check(
    document: Mapping[str, Any], made: MadeRequest, answer: tuple[int, Any, bytes], secrets: Sequence[str], where: str
) -> None:
    status, headers, body = answer
    about = (where, made, status, body[:2_000])
    assert status < 500, about
    described = document["paths"][made.template].get(made.method.lower())
    # Another method may be that of another path: `dead-letters/discard` is also a `dead-letters/{number}`.
    assert described is None or str(status) in described["responses"] or status in NOT_DESCRIBED, about
    assert headers["X-Content-Type-Options"] == "nosniff", about
    assert not any(secret.encode() in body for secret in secrets), about
    if body:
        found = json.loads(body)
        assert headers["Content-Type"] == f"application/{'problem+json' if status >= 400 else 'json'}", about
        assert status < 400 or {"type", "title", "status", "detail"} <= set(found), about


HEADS = (
    b"\0" * 100, b"GET / HTTP/9.9\r\n\r\n", b"GET\r\n\r\n", b"\r\n" * 5_000, b"GET /v1/graphs HTTP/1.1\r\n\r\n",
    b"GET /v1/graphs HTTP/1.1\r\nHost: x\r\nA" + b"a" * 100_000, b"GET " + b"/" * 100_000 + b" HTTP/1.1\r\n\r\n",
    b"GET /v1/graphs HTTP/1.1\r\nHost: x\r\nHost: y\r\n\r\n",
    b"POST /v1/session HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\n{}",
    b"POST /v1/session HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n{}",
    b"POST /v1/session HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999999999999999\r\n\r\n{}",
    b"POST /v1/session HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    b"POST /v1/session HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nFFFFFFFFFFFFFFFFFFFF\r\n",
    b"POST /v1/session HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
    b"POST /v1/session HTTP/1.1\r\nHost: x\r\nContent-Type: application/json; charset=x\r\nContent-Length: 2\r\n\r\n{}",
    b"GET /v1/graphs HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer \xff\xfe\r\n\r\n",
    b"GET /v1/graphs HTTP/1.1\r\nHost: x\r\nCookie: millpy_session=\xff; ;;=;\r\n\r\n",
    b"GET /v1/graphs HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"CONNECT x:1 HTTP/1.1\r\nHost: x\r\n\r\n",
    b"OPTIONS * HTTP/1.1\r\nHost: x\r\n\r\n",
    b"GET http://x/v1/graphs HTTP/1.1\r\nHost: x\r\n\r\n", b"GET /v1/graphs?%ff=%ff HTTP/1.1\r\nHost: x\r\n\r\n",
)  # fmt: skip


@pytest.mark.parametrize("head", HEADS, ids=range(len(HEADS)))
def test_no_head_makes_the_api_fail(api: ApiServer, head: bytes) -> None:
    with socket.create_connection((api.host, api.port), timeout=20) as client:
        try:
            client.sendall(head)
            client.shutdown(socket.SHUT_WR)
            answered = b"".join(iter(lambda: client.recv(65_536), b""))
        except ConnectionError:
            answered = b""

    assert not answered or answered.startswith((b"HTTP/1.1 4", b"HTTP/1.1 303 ")), answered  # the login of the page
    assert api.get("/live").status == 200


def test_a_body_cannot_smuggle_a_request(api: ApiServer) -> None:
    token = api.token("smuggling", Role.OPERATOR)
    inner = f"POST /v1/graphs/plant/dead-letters/discard HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {token}\r\n"
    inner += 'Content-Type: application/json\r\nContent-Length: 11\r\n\r\n{"ids":[1]}'
    outer = (
        "POST /v1/session HTTP/1.1\r\nHost: x\r\n"
        f"Content-Length: {5 + len(inner)}\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n{inner}"
    )
    with socket.create_connection((api.host, api.port), timeout=20) as client:
        client.sendall(outer.encode())
        client.shutdown(socket.SHUT_WR)
        answered = b"".join(iter(lambda: client.recv(65_536), b""))

    assert answered.count(b"HTTP/1.1 ") == 1, answered
    assert b"discarded" not in answered
