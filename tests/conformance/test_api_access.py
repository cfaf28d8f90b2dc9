"""Who may use the API: tokens, sessions, identities, roles of the database, limits; and that no secret is shown."""

from __future__ import annotations

import hashlib
import http.client
import json
import socket
import threading
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import psycopg
import pytest
import trustme

from millpy.admin.queries import Admin
from millpy.admin.tokens import SESSIONS_MAX, Role, create, revoke
from millpy.api.authentication import KNOWN_S
from millpy.api.failures import FAILURES_MAX
from millpy.embedded import EmbeddedPostgres
from tests.api_server import Answer, ApiServer, running_api
from tests.commands import millpy, millpy_json, run_millpy
from tests.conformance.test_api import ran
from tests.databases import fresh_database

ROWS = "/v1/graphs/plant/tables/temperature_1m/rows"
ACTIONS = (
    ("POST", "/v1/graphs/plant/dead-letters/replay", {"ids": [1]}),
    ("POST", "/v1/graphs/plant/dead-letters/discard", {"ids": [1]}),
    ("POST", "/v1/graphs/plant/dead-letters/1/replay", {"payload_text": "x"}),
    ("POST", "/v1/graphs/plant/late-records/replay", {"ids": [1]}),
    ("POST", "/v1/graphs/plant/late-records/discard", {"ids": [1]}),
    ("POST", "/v1/graphs/plant/parked/release", {"computation": "temperature_1m"}),
    ("POST", "/v1/graphs/plant/sources/readings/resume", {}),
    ("POST", "/v1/graphs/plant/switch", {"generation": 1}),
)


@pytest.fixture(scope="module")
def database(postgres: EmbeddedPostgres, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with fresh_database(postgres) as name:
        url = postgres.url(name)
        ran(tmp_path_factory.mktemp("access") / "plant", url)
        yield url


@pytest.fixture(scope="module")
def api(database: str) -> Iterator[ApiServer]:
    proxied = {"MILLPY_API_PROXIES": "127.0.0.2/32", "MILLPY_API_IDENTITY_HEADER": "X-Forwarded-User"}
    with running_api(database, **proxied) as server:
        yield server


def session(api: ApiServer, token: str) -> tuple[dict[str, str], str]:
    """The headers of a session, without and with the CSRF token."""
    answer = api.post("/v1/session", body={"token": token})
    assert answer.status == 200, answer.body
    cookie = answer.headers["Set-Cookie"]
    assert "HttpOnly" in cookie and "SameSite=strict" in cookie and "Secure" not in cookie
    return {"Cookie": cookie.partition(";")[0]}, answer.json["csrf_token"]


def test_a_token_is_printed_once_and_stored_as_a_hash(database: str) -> None:
    made = millpy_json("token", "create", "tom", "--role", "operator", "--for", "1h", "--database", database)
    with psycopg.connect(database) as connection:
        (stored,) = connection.execute("SELECT hash FROM mill.tokens WHERE name = 'tom'").fetchone() or ()
        dumped = "".join(map(str, connection.execute("SELECT * FROM mill.tokens").fetchall()))

    assert stored == hashlib.sha256(made["token"].encode()).digest()
    assert made["token"] not in dumped
    listed = millpy("token", "list", "--database", database)
    assert "tom" in listed and made["token"] not in listed
    assert run_millpy("token", "create", "tom", "--database", database)[0] == 2
    assert "revoked tom" in millpy("token", "revoke", "tom", "--database", database)


@pytest.mark.parametrize("path", ["/v1/graphs", ROWS, "/v1/doctor", "/v1/live", "/v1/session"])
def test_nothing_is_shown_without_a_token(api: ApiServer, path: str) -> None:
    answer = api.get(path)

    assert (answer.status, answer.headers["WWW-Authenticate"]) == (401, "Bearer")


@pytest.mark.parametrize(("method", "path", "body"), ACTIONS)
def test_no_action_with_a_viewers_token_or_without_the_csrf_token(
    api: ApiServer, method: str, path: str, body: object
) -> None:
    name = f"of {path}"
    viewer, admin = api.token(f"viewer {name}"), api.token(f"admin {name}", Role.ADMIN)
    cookie, csrf = session(api, admin)

    assert api.send(method, path, viewer, body).status == 403
    assert api.send(method, path, body=body, headers=cookie).status == 403
    assert api.send(method, path, body=body, headers={**cookie, "X-CSRF-Token": "0" * 64}).status == 403
    assert api.send(method, path, body=body, headers={**cookie, "X-CSRF-Token": csrf}).status == 200


def test_a_session_reads_and_ends(api: ApiServer) -> None:
    cookie, csrf = session(api, api.token("sam"))

    shown = api.send("GET", "/v1/session", headers=cookie).json
    assert (shown["name"], shown["role"], shown["csrf_token"]) == ("sam", "viewer", csrf)
    assert api.send("DELETE", "/v1/session", headers={**cookie, "X-CSRF-Token": csrf}).status == 204
    assert api.send("GET", "/v1/session", headers=cookie).status == 401


def test_a_token_has_a_bounded_number_of_sessions(api: ApiServer) -> None:
    token = api.token("many")
    cookies = [session(api, token)[0] for _ in range(SESSIONS_MAX + 1)]
    with psycopg.connect(api.database_url) as connection:
        counted = connection.execute(
            "SELECT count(*) FROM mill.sessions JOIN mill.tokens USING (token_id) WHERE name = 'many'"
        ).fetchone()

    assert counted == (SESSIONS_MAX,)
    assert api.send("GET", "/v1/session", headers=cookies[0]).status == 401
    assert api.send("GET", "/v1/session", headers=cookies[-1]).status == 200


def test_revoked_and_expired_tokens_and_their_sessions_end(api: ApiServer) -> None:
    token = api.token("gone")
    short = api.token("short", kept=timedelta(seconds=1))
    cookie, _ = session(api, token)
    assert api.get("/v1/graphs", token).status == api.get("/v1/graphs", short).status == 200

    revoke(Admin(api.database_url), "gone")
    threading.Event().wait(KNOWN_S + 1)  # what the API believes without asking again, and what `short` lasts

    assert [api.get("/v1/graphs", one).status for one in (token, short)] == [401, 401]
    assert api.send("GET", "/v1/graphs", headers=cookie).status == 401


def test_wrong_tokens_are_limited_by_address_and_lock_out_nobody_else(database: str) -> None:
    with running_api(database) as api:
        good = create(Admin(database), "still in", Role.VIEWER)[1]
        assert api.get("/v1/graphs", good).status == 200
        statuses = [api.get("/v1/graphs", f"wrong {number}").status for number in range(2_000)]

        assert statuses[:10] == [401] * 10
        assert set(statuses[10:]) == {429}
        assert api.get("/v1/graphs", good).status == 200
        threading.Event().wait(KNOWN_S + 0.2)
        assert api.get("/v1/graphs", good).status == 200


def test_an_identity_comes_only_from_a_proxy_and_acts_only_with_a_session(api: ApiServer) -> None:
    create(Admin(api.database_url), "lea@example.com", Role.OPERATOR, identity=True)
    headers = {"X-Forwarded-User": "lea@example.com"}

    assert api.send("GET", "/v1/graphs", headers=headers).status == 401
    assert through_proxy(api, "GET", "/v1/session", headers).json["name"] == "lea@example.com"
    assert through_proxy(api, "GET", "/v1/session", {"X-Forwarded-User": "eve"}).status == 401
    assert through_proxy(api, "POST", ACTIONS[0][1], headers, ACTIONS[0][2]).status == 403
    opened = through_proxy(api, "POST", "/v1/session", {**headers, "X-Forwarded-Proto": "https"}, {})
    assert "Secure" in opened.headers["Set-Cookie"]
    both = {"Cookie": opened.headers["Set-Cookie"].partition(";")[0], "X-CSRF-Token": opened.json["csrf_token"]}
    assert through_proxy(api, "POST", ACTIONS[0][1], {**headers, **both}, ACTIONS[0][2]).status == 200


def test_a_proxy_without_a_header_of_the_identity_is_believed_the_rest(database: str) -> None:
    with running_api(database, MILLPY_API_PROXIES="127.0.0.2/32") as api:
        create(Admin(database), "una@example.com", Role.VIEWER, identity=True)
        token = create(Admin(database), "behind", Role.VIEWER)[1]
        named = {"X-Forwarded-User": "una@example.com"}
        opened = through_proxy(api, "POST", "/v1/session", {"X-Forwarded-Proto": "https"}, {"token": token})

        assert "Secure" in opened.headers["Set-Cookie"]
        assert through_proxy(api, "GET", "/v1/graphs", named).status == 401
        wrong = [("Authorization", "Bearer wrong"), ("X-Forwarded-For", "203.0.113.9")]
        assert {repeated(api, wrong).status for _ in range(FAILURES_MAX + 1)} == {401, 429}
        assert repeated(api, [*wrong[:1], ("X-Forwarded-For", "203.0.113.10")]).status == 401


def test_a_session_counts_only_for_the_user_whom_the_proxy_names(api: ApiServer) -> None:
    for name, role in (("ann@example.com", Role.OPERATOR), ("bob@example.com", Role.VIEWER)):
        create(Admin(api.database_url), name, role, identity=True)
    ann, bob = ({"X-Forwarded-User": f"{name}@example.com"} for name in ("ann", "bob"))
    opened = through_proxy(api, "POST", "/v1/session", ann, {})
    of_ann = {"Cookie": opened.headers["Set-Cookie"].partition(";")[0], "X-CSRF-Token": opened.json["csrf_token"]}

    assert through_proxy(api, "GET", "/v1/session", {**bob, **of_ann}).json["name"] == "bob@example.com"
    assert through_proxy(api, "POST", ACTIONS[0][1], {**bob, **of_ann}, ACTIONS[0][2]).status == 401
    assert through_proxy(api, "POST", ACTIONS[0][1], {**ann, **of_ann}, ACTIONS[0][2]).status == 200
    refused = through_proxy(api, "POST", "/v1/session", bob, {"token": api.token("ann's", Role.ADMIN)})
    assert refused.status == 401 and "another user" in refused.json["detail"]
    eve = {"X-Forwarded-User": "eve", **of_ann}
    assert through_proxy(api, "GET", "/v1/session", eve).status == 401


def test_a_session_that_has_ended_locks_nobody_out_whom_the_proxy_names(api: ApiServer) -> None:
    create(Admin(api.database_url), "cleo@example.com", Role.VIEWER, identity=True)
    headers = {
        "X-Forwarded-User": "cleo@example.com",
        "X-Forwarded-For": "203.0.113.77",
        "Cookie": "millpy_session=dead",
    }

    statuses = [through_proxy(api, "GET", "/v1/session", headers).status for _ in range(2 * FAILURES_MAX)]
    assert set(statuses) == {200}
    assert through_proxy(api, "POST", ACTIONS[0][1], headers, ACTIONS[0][2]).status == 401


def test_of_repeated_headers_the_one_that_the_proxy_added_counts(api: ApiServer) -> None:
    create(Admin(api.database_url), "lou@example.com", Role.VIEWER, identity=True)
    wrong = [("Authorization", "Bearer wrong"), ("X-Forwarded-For", "203.0.113.9")]
    statuses = [
        repeated(api, [("X-Forwarded-For", f"198.51.100.{number}"), *wrong]).status
        for number in range(FAILURES_MAX + 1)
    ]
    twice = [("X-Forwarded-User", "lou@example.com")] * 2
    token = api.token("twice")

    assert statuses == [401] * FAILURES_MAX + [429]
    assert repeated(api, twice[:1]).status == 200
    assert repeated(api, twice).status == 401
    assert repeated(api, [("Authorization", f"Bearer {token}"), ("Authorization", "Bearer x")]).status == 401
    assert repeated(api, [("Authorization", "Bearer x"), ("Authorization", f"Bearer {token}")]).status == 401


def repeated(api: ApiServer, headers: list[tuple[str, str]]) -> Answer:
    """A request from the reverse proxy, with headers that may be there several times."""
    connection = http.client.HTTPConnection(api.host, api.port, timeout=30, source_address=("127.0.0.2", 0))
    connection.putrequest("GET", "/v1/graphs")
    for name, value in headers:
        connection.putheader(name, value)
    connection.endheaders()
    answer = connection.getresponse()
    found = Answer(answer.status, answer.headers, answer.read())
    connection.close()
    return found


def through_proxy(api: ApiServer, method: str, path: str, headers: dict[str, str], body: object = None) -> Answer:
    """A request from 127.0.0.2, which is a reverse proxy."""
    connection = http.client.HTTPConnection(api.host, api.port, timeout=30, source_address=("127.0.0.2", 0))
    data = None if body is None else json.dumps(body).encode()
    connection.request(method, path, data, {**headers, "Content-Type": "application/json"})
    answer = connection.getresponse()
    found = Answer(answer.status, answer.headers, answer.read())
    connection.close()
    return found


def test_row_level_security_holds_for_a_token_with_a_role_of_the_database(api: ApiServer) -> None:
    with psycopg.connect(api.database_url, autocommit=True) as connection:
        device = (connection.execute("SELECT min(device) FROM plant.temperature_1m").fetchone() or ("",))[0]
        connection.execute("CREATE ROLE tenant_a")
        connection.execute("GRANT USAGE ON SCHEMA plant TO tenant_a")
        connection.execute("GRANT SELECT ON plant.temperature_1m, plant.temperature_1m_status TO tenant_a")
        connection.execute("ALTER TABLE plant.temperature_1m ENABLE ROW LEVEL SECURITY")
        connection.execute(
            psycopg.sql.SQL(
                "CREATE POLICY tenant_a ON plant.temperature_1m FOR SELECT TO tenant_a USING (device = {})"
            ).format(device)
        )
    try:
        token = api.token("tenant", database_role="tenant_a")

        assert {row["device"] for row in api.get(ROWS, token, limit=1000).rows} == {device}
        assert [row["graph"] for row in api.get("/v1/graphs", token).rows] == ["plant"]
        assert [row["name"] for row in api.get("/v1/graphs/plant/tables", token).rows] == ["temperature_1m"]
        for path in ("dead-letters", "events", "workers", "computations/temperature_1m/state", "series", "fleet"):
            assert api.get(f"/v1/graphs/plant/{path}", token).status == 403, path
        assert api.get("/v1/doctor", token).status == api.get("/v1/live", token).status == 403
        assert len({row["device"] for row in api.get(ROWS, api.token("all"), limit=1000).rows}) > 1
    finally:
        with psycopg.connect(api.database_url, autocommit=True) as connection:
            connection.execute("ALTER TABLE plant.temperature_1m DISABLE ROW LEVEL SECURITY")
            connection.execute("DROP OWNED BY tenant_a")
            connection.execute("DROP ROLE tenant_a")
    for path in ("/v1/graphs", "/v1/graphs/plant/tables/temperature_1m/rows", "/v1/graphs/plant/events"):
        gone = api.get(path, token, after="", limit=7)
        assert (gone.status, gone.json["detail"]) == (403, 'role "tenant_a" does not exist'), path


def test_answers_have_headers_that_keep_browsers_safe(api: ApiServer) -> None:
    for answer in (api.get("/v1/graphs"), api.get("/nowhere"), api.get("/live")):
        policy = answer.headers["Content-Security-Policy"]
        assert "default-src 'none'" in policy and "unsafe" not in policy
        assert answer.headers["X-Content-Type-Options"] == "nosniff"
        assert answer.headers["Cache-Control"] == "no-store"
        assert "Access-Control-Allow-Origin" not in answer.headers
        assert "Server" not in answer.headers


@pytest.mark.parametrize(
    "path",
    ["/v1/../../etc/passwd", "/v1/graphs/..%2f..%2fetc", "/v1/graphs/%00", "/v1/graphs/x%00y/events", "/v1/graphs/"],
)
def test_odd_paths_are_not_found(api: ApiServer, path: str) -> None:
    assert api.get(path, api.token(f"odd {hash(path)}")).status in (404, 422)


def test_oversized_requests_are_refused(api: ApiServer) -> None:
    assert status_of_large(api, "POST", ACTIONS[0][1], b"x" * 2_000_001) in (413, None)
    assert status_of_large(api, "GET", "/v1/graphs/" + "x" * 200_000) in (400, None)
    operator = api.token("large", Role.OPERATOR)
    assert api.post(ACTIONS[0][1], operator, {"ids": list(range(1, 10_002))}).status == 422
    assert api.get("/v1/graphs/plant/events", operator, limit=1_001).status == 422


@pytest.mark.parametrize("head", ["Content-Length: 1\r\n\r\nx", "Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n"])
@pytest.mark.parametrize("method", ["GET", "HEAD"])
def test_a_request_that_only_reads_has_no_body(api: ApiServer, method: str, head: str) -> None:
    with socket.create_connection((api.host, api.port), timeout=20) as one:
        one.sendall(f"{method} /live HTTP/1.1\r\nHost: x\r\n{head}".encode())

        assert b" 400 " in received(one)
    assert api.send(method, "/live", headers={"Content-Length": "0"}).status in (200, 405)


def status_of_large(api: ApiServer, method: str, path: str, body: bytes | None = None) -> int | None:
    """The status; None if the connection was closed before all was sent."""
    try:
        return api.send(method, path, body=body).status
    except ConnectionError:
        return None


def test_slow_clients_are_disconnected(api: ApiServer) -> None:
    heads = [
        b"",
        b"GET /live HTTP/1.1\r\nHost: x\r\n",
        b"POST /v1/session HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n{",
    ]
    taken = [socket.create_connection((api.host, api.port), timeout=20) for _ in heads]
    for one, head in zip(taken, heads, strict=True):
        one.sendall(head)

    ends = [b"".join(iter(lambda one=one: received(one), b"")) for one in taken]
    for one in taken:
        one.close()

    assert ends[:2] == [b"", b""]
    assert b" 408 " in ends[2]


def received(one: socket.socket) -> bytes:
    try:
        return one.recv(65_536)
    except ConnectionResetError:
        return b""


def test_no_secret_is_in_any_answer_or_in_the_log(database: str) -> None:
    with_password = f"{database} password=hunter22" if "://" not in database else database
    with running_api(with_password) as api:
        token = create(Admin(database), "secretive", Role.VIEWER)[1]
        answers = [api.get("/v1/graphs", token), api.get("/v1/session", token), api.get("/v1/graphs", f"{token}x")]
        answers += [api.post("/v1/session", body={"token": [token]}), api.get("/v1/doctor", token)]
    shown = b"".join(answer.body for answer in answers).decode() + "".join(api.lines)

    assert token not in shown
    assert "hunter22" not in shown


def test_tls_encrypts_and_cookies_are_secure(database: str, tmp_path: Path) -> None:
    authority = trustme.CA()
    issued = authority.issue_cert("127.0.0.1")
    certificate, key = tmp_path / "certificate.pem", tmp_path / "key.pem"
    issued.cert_chain_pems[0].write_to_path(certificate)
    issued.private_key_pem.write_to_path(key)
    with running_api(database, MILLPY_API_CERTIFICATE=str(certificate), MILLPY_API_KEY=str(key)) as api:
        token = create(Admin(database), "encrypted", Role.VIEWER)[1]
        opened = api.post("/v1/session", body={"token": token})

        assert api.url.startswith("https://")
        assert "Secure" in opened.headers["Set-Cookie"]
        assert "max-age" in opened.headers["Strict-Transport-Security"]
