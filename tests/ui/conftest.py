"""One live world and one browser for all tests of the page."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from playwright.sync_api import Browser

from millpy.admin.tokens import Role
from millpy.embedded import EmbeddedPostgres
from tests.databases import fresh_database
from tests.ui.browser import Visitor, chromium, running_browser
from tests.ui.world import World, living


@pytest.fixture(scope="session")
def world(postgres: EmbeddedPostgres, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with fresh_database(postgres) as name, living(postgres.url(name), tmp_path_factory.mktemp("works")) as found:
        yield found


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    if chromium() is None:
        pytest.skip("chromium is not installed")
    with running_browser() as found:
        yield found


@pytest.fixture(scope="session")
def viewer_token(world: World) -> str:
    return world.api.token("vera")


@pytest.fixture(scope="session")
def operator_token(world: World) -> str:
    return world.api.token("olga", Role.OPERATOR)


@pytest.fixture
def visit(world: World, browser: Browser) -> Iterator[Callable[..., Visitor]]:
    """Opens windows with a session; in the end nothing has gone wrong in any of them."""
    opened: list[Visitor] = []

    def begin(token: str, **more: object) -> Visitor:
        visitor = Visitor(browser, world.api.url, **more)
        opened.append(visitor)
        visitor.log_in(token)
        return visitor

    yield begin
    errors = [error for visitor in opened for error in visitor.errors]
    for visitor in opened:
        visitor.close()
    assert not errors, errors


@pytest.fixture
def viewer(visit: Callable[..., Visitor], viewer_token: str) -> Visitor:
    return visit(viewer_token)


@pytest.fixture
def operator(visit: Callable[..., Visitor], operator_token: str) -> Visitor:
    return visit(operator_token)
