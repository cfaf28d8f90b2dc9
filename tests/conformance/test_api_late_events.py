"""Events whose transactions commit late come to viewers, each once, and to those that connect again, too."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Iterator

import psycopg
import pytest

from millpy.admin.queries import Admin
from millpy.api import new_events
from millpy.api.new_events import NewEvents
from millpy.store.postgres.store import PostgresStore
from tests.api_server import ApiServer, running_api
from tests.conformance.store_builders import a_graph

NOTE = (
    "INSERT INTO mill.events (graph_id, kind, detail) SELECT graph_id, 'noted', jsonb_build_object('word', %s::text)"
    " FROM mill.graphs"
)


@pytest.fixture
def admin(database_url: str) -> Iterator[Admin]:
    async def deploy() -> None:
        async with PostgresStore(database_url) as store:
            await store.deploy(a_graph())

    asyncio.run(deploy())
    found = Admin(database_url)
    yield found
    found.close()


def note(url: str, *words: str) -> None:
    with psycopg.connect(url, autocommit=True) as connection:
        for word in words:
            connection.execute(NOTE.encode(), [word])


def told(events: NewEvents, admin: Admin, rows_max: int = 100) -> list[str]:
    found = events.read(admin, rows_max)
    events.passed()
    return [row["detail"]["word"] for row in found]


def test_an_event_that_commits_late_is_told_once(admin: Admin, database_url: str) -> None:
    events = NewEvents()
    note(database_url, "before")
    with psycopg.connect(database_url) as late, psycopg.connect(database_url) as aborted:
        late.execute(NOTE.encode(), ["late"])
        assert told(events, admin) == []
        aborted.execute(NOTE.encode(), ["aborted"])
        note(database_url, "a", "b")
        assert told(events, admin) == ["a", "b"]
        note(database_url, "c")
        assert told(events, admin) == ["c"]
        assert [told(events, admin) for _ in range(4)] == [[]] * 4
        late.commit()
        aborted.rollback()
        assert told(events, admin) == ["late"]
    note(database_url, "d")
    assert told(events, admin) == ["d"]
    assert [told(events, admin) for _ in range(4)] == [[]] * 4


def test_an_event_of_a_transaction_younger_than_the_last_that_ended_is_told(admin: Admin, database_url: str) -> None:
    events = NewEvents()
    told(events, admin)
    with psycopg.connect(database_url) as older, psycopg.connect(database_url) as younger:
        older.execute("SELECT pg_current_xact_id()")
        younger.execute(NOTE.encode(), ["late"])
        older.execute(NOTE.encode(), ["early"])
        older.commit()  # no snapshot names the younger one
        assert told(events, admin) == ["early"]
        assert [told(events, admin) for _ in range(4)] == [[]] * 4
        younger.commit()

    assert told(events, admin) == ["late"]


def test_what_is_settled_is_not_looked_at_again(admin: Admin, database_url: str) -> None:
    events = NewEvents()
    told(events, admin)
    note(database_url, *"abc")
    (newest,) = admin.ask("SELECT max(event_id) AS id FROM millpy.events")
    deadline = threading.Event()
    for _ in range(600):  # transactions of other databases of the server count, too
        told(events, admin)
        if events.settled == newest["id"]:
            break
        deadline.wait(0.1)

    assert events.settled == newest["id"]
    assert not events._seen


def test_a_transaction_that_stays_open_does_not_make_looks_grow(
    admin: Admin, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(new_events, "SEEN_MAX", 5)
    events = NewEvents()
    told(events, admin)
    with psycopg.connect(database_url) as stays:
        stays.execute(NOTE.encode(), ["stays"])
        for word in "abcdefghij":
            note(database_url, word)
            assert told(events, admin) == [word]
        assert events._seen is not None
        assert len(events._seen) <= 5
        assert [told(events, admin) for _ in range(20)] == [[]] * 20
        assert len(events._looks) <= 5
        stays.commit()

    for _ in range(4):
        assert set(told(events, admin)) <= {"stays"}, "what was told is not told again"


def test_an_error_skips_no_event(admin: Admin, database_url: str) -> None:
    events = NewEvents()
    told(events, admin)
    note(database_url, "a")
    assert len(events.read(admin, 100)) == 1  # and what was read could not be told

    assert told(events, admin) == ["a"]


def test_of_many_events_the_newest_are_told(admin: Admin, database_url: str) -> None:
    events = NewEvents()
    told(events, admin)
    note(database_url, *"abcde")

    assert told(events, admin, rows_max=2) == ["d", "e"]
    assert told(events, admin, rows_max=2) == []


def read_until(api: ApiServer, token: str, words: bytes, *headers: str) -> bytes:
    """Open a stream of live updates, and read until some words have come."""
    head = "\r\n".join(["GET /v1/live HTTP/1.1", "Host: x", f"Authorization: Bearer {token}", *headers, "\r\n"])
    found = b""
    with socket.create_connection((api.host, api.port), timeout=60) as client:
        client.sendall(head.encode())
        while words not in found:
            part = client.recv(65_536)
            assert part, found
            found += part
    return found


def test_a_viewer_that_connects_again_gets_the_events_in_between(admin: Admin, database_url: str) -> None:
    note(database_url, "first", "second")
    (newest,) = admin.ask("SELECT max(event_id) AS id FROM millpy.events")
    with running_api(database_url) as api:
        token = api.token("again")
        found = read_until(api, token, b'"word second"}]\n\n', f"Last-Event-ID: {newest['id'] - 1}")
        read_until(api, token, b"event: progress", "Last-Event-ID: x")  # what is no number is passed over

        ended = threading.Event()

        def go_on() -> None:
            while not ended.wait(0.3):
                note(database_url, "more")

        noting = threading.Thread(target=go_on)
        noting.start()
        try:
            live = read_until(api, token, b'"more"')
        finally:
            ended.set()
            noting.join()

    (data,) = [line for line in found.splitlines() if b'"second"' in line]
    assert [row["event_id"] for row in json.loads(data.removeprefix(b"data: "))] == [newest["id"]]
    assert b"event: events\nid: " in live
