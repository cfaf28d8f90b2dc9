"""Pages that users share: one for all that may see the same, each with the name and the token of its user."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, cast

import pytest
from fastapi import Request

from millpy.admin.queries import Admin
from millpy.admin.tokens import Principal, Role
from millpy.api.authentication import Caller, csrf_of
from millpy.api.database import ConnectionLane
from millpy.ui.rendering import shared_page
from millpy.ui.values import shown as shown_text

EMPTY: Mapping[str, Any] = {
    "rows": [], "next": None, "accounts": 0, "unbalanced": 0, "counts": (), "stream": "", "balanced": "", "after": "",
}  # fmt: skip
NAMES = ("vera", "olga", "otto", "lea", "tess", "tim", '<b>"o\'neill" & sons</b>')


class Database:
    """Stands for the database: it only knows under which role it is asked."""

    def __init__(self, role: str | None = None) -> None:
        self.role = role

    def acting_as(self, role: str | None) -> Database:
        return Database(role)

    @contextmanager
    def together(self) -> Iterator[Database]:
        yield self

    def close(self) -> None: ...


@pytest.fixture
async def lane() -> AsyncIterator[ConnectionLane]:
    made = ConnectionLane(cast("Admin", Database()), 1, "test")
    yield made
    made.close()


def request_of(lane: ConnectionLane, query: str = "") -> Request:
    app = SimpleNamespace(state=SimpleNamespace(databases=SimpleNamespace(reading=lane)))
    scope = {
        "type": "http",
        "path": "/graphs/plant/accounting",
        "query_string": query.encode(),
        "headers": [],
        "app": app,
    }
    return Request(scope)


async def shown(lane: ConnectionLane, caller: Caller, find: Callable[[Any], Mapping[str, Any]], apart: str = "") -> str:
    request = request_of(lane)
    page = await shared_page(request, caller, find, "accounting.html", view="accounting", graph="plant", apart=apart)
    return bytes(page.body).decode()


def callers() -> list[Caller]:
    return [
        Caller(Principal(1, NAMES[0], Role.VIEWER, None), "of vera"),
        Caller(Principal(2, NAMES[1], Role.OPERATOR, None), "of olga"),
        Caller(Principal(3, NAMES[2], Role.OPERATOR, None), "of otto"),
        Caller(Principal(4, NAMES[3], Role.VIEWER, None)),
        Caller(Principal(5, NAMES[4], Role.VIEWER, "tenant_a"), "of tess"),
        Caller(Principal(6, NAMES[5], Role.VIEWER, "tenant_b"), "of tim"),
        Caller(Principal(7, NAMES[6], Role.VIEWER, None), "of oneill"),
    ]


async def made_while_all_wait(lane: ConnectionLane, asking: Callable[[Caller], Any]) -> list[str]:
    """Return the page of each caller; the lane's only thread is held until all have asked."""
    opened, held = threading.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()

    def hold(_: Admin) -> None:
        loop.call_soon_threadsafe(held.set)
        assert opened.wait(30)

    holding = asyncio.create_task(lane.run(hold, None))
    await held.wait()
    waiting = [asyncio.create_task(asking(caller)) for caller in callers()]
    await asyncio.sleep(0)
    opened.set()
    found = await asyncio.gather(*waiting)
    await holding
    return found


async def test_users_share_a_page_only_if_they_may_see_and_do_the_same(lane: ConnectionLane) -> None:
    roles: list[str | None] = []

    def find(admin: Any) -> Mapping[str, Any]:
        roles.append(admin.role)
        return {**EMPTY, "stream": f"read {len(roles)} as {admin.role}"}

    pages = await made_while_all_wait(lane, lambda caller: shown(lane, caller, find))
    read = [page.partition('value="read ')[2].partition('"')[0] for page in pages]

    assert read == ["1 as None", "2 as None", "2 as None", "3 as None", "4 as tenant_a", "5 as tenant_b", "1 as None"]


async def test_each_user_has_its_own_name_and_token_and_nobody_elses(lane: ConnectionLane) -> None:
    pages = await made_while_all_wait(lane, lambda caller: shown(lane, caller, lambda _: EMPTY))
    tokens = [csrf_of(caller.session) if caller.session else "" for caller in callers()]

    for place, page in enumerate(pages):
        assert str(shown_text(NAMES[place])) in page
        assert page.count(f'content="{tokens[place]}"') == 1
        assert ('action="/logout"' in page) == bool(tokens[place])
        for other, name in enumerate(NAMES):
            assert other == place or str(shown_text(name)) not in page
            assert other == place or not tokens[other] or tokens[other] not in page


async def test_a_page_is_no_older_than_its_request(lane: ConnectionLane) -> None:
    began, opened, reads = asyncio.Event(), threading.Event(), list[int]()
    loop = asyncio.get_running_loop()

    def find(_: Any) -> Mapping[str, Any]:
        reads.append(len(reads) + 1)
        loop.call_soon_threadsafe(began.set)
        assert opened.wait(30)
        return {**EMPTY, "stream": f"read {reads[-1]}"}

    caller = callers()[0]
    first = asyncio.create_task(shown(lane, caller, find))
    await began.wait()
    later = [asyncio.create_task(shown(lane, caller, find)) for _ in range(3)]
    await asyncio.sleep(0)
    opened.set()

    assert "read 1" in await first
    assert ["read 2" in page for page in await asyncio.gather(*later)] == [True] * 3


async def test_what_was_read_for_a_request_before_is_not_anothers(lane: ConnectionLane) -> None:
    places = iter("aab")
    pages = await made_while_all_wait(lane, lambda _: _of_tables(lane, callers()[0], next(places, "c")))

    assert pages == ["a", "a", "b", "c", "c", "c", "c"]


async def _of_tables(lane: ConnectionLane, caller: Caller, tables: str) -> str:
    page = await shown(lane, caller, lambda _: {**EMPTY, "stream": f"tables {tables}"}, tables)
    return page.partition('value="tables ')[2][:1]
