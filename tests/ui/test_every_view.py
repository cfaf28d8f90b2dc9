"""What holds for every view: no error in the browser, usable with a screen reader, on a phone, in the dark."""

from __future__ import annotations

import pytest
from playwright.sync_api import Browser

from tests.ui.browser import SCHEMES, WIDTHS, Visitor
from tests.ui.views import VIEWS, View
from tests.ui.world import World
from tests.waiting import await_true

SLUGS = [view.slug for view in VIEWS]
FIRST_PAINT_MS_MAX = 1_500
PAINTED = "(performance.getEntriesByName('first-contentful-paint')[0] || {startTime: 0}).startTime"


@pytest.mark.parametrize("view", VIEWS, ids=SLUGS)
def test_a_view_is_accessible_and_fits(operator: Visitor, view: View) -> None:
    page = operator.open(view.path)
    for width, (across, down) in WIDTHS.items():
        page.set_viewport_size({"width": across, "height": down})
        for scheme in SCHEMES:
            page.emulate_media(color_scheme=scheme)
            page.wait_for_timeout(500)  # charts, and the graph's layout, are drawn again
            operator.screenshot(f"{view.slug}-{width}-{scheme}")

            assert operator.overflow() <= 0, width
            assert operator.violations() == [], (width, scheme)
    assert page.locator("main h1").count() == 1
    assert page.locator("nav a[aria-current=page]").count() == 1


@pytest.mark.parametrize("view", VIEWS, ids=SLUGS)
def test_a_view_is_painted_soon(viewer: Visitor, view: View) -> None:
    painted_ms = []
    for _ in range(3):  # the machine may be busy
        page = viewer.open(view.path)
        painted_ms.append(await_true(lambda page=page: page.evaluate(PAINTED), "the first paint"))  # type: ignore[misc]

    assert min(painted_ms) < FIRST_PAINT_MS_MAX


@pytest.mark.parametrize("view", VIEWS, ids=SLUGS)
def test_a_view_has_nothing_to_act_for_a_viewer(viewer: Visitor, view: View) -> None:
    page = viewer.open(view.path)

    assert page.locator("main [data-action], main form[method=post]").count() == 0


def test_without_a_session_every_view_leads_to_the_login(world: World, browser: Browser) -> None:
    visitor = Visitor(browser, world.api.url)
    try:
        for view in VIEWS:
            visitor.page.goto(world.api.url + view.path)
            assert "/login" in visitor.page.url
    finally:
        visitor.close()


def test_the_login_is_accessible(world: World, browser: Browser) -> None:
    for width, size in WIDTHS.items():
        for scheme in SCHEMES:
            visitor = Visitor(browser, world.api.url, scheme=scheme, size=size)
            try:
                visitor.page.goto(f"{world.api.url}/login")
                visitor.screenshot(f"login-{width}-{scheme}")
                assert (visitor.violations(), visitor.overflow(), visitor.errors) == ([], 0, [])
            finally:
                visitor.close()
