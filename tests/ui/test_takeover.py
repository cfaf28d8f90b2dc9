"""A worker is killed, or drained, while its page is open: the page shows who took over, without a reload."""

from __future__ import annotations

import re
import time

from playwright.sync_api import Page, expect

from tests.ui.browser import Visitor
from tests.ui.world import LEASE_S, World
from tests.waiting import await_true, quickest_s

SHOWN_S_MAX = LEASE_S + 2.0


def test_a_takeover_is_shown_within_the_lease_plus_two_seconds(world: World, viewer: Visitor) -> None:
    page = viewer.open("/graphs/works/workers")
    loads = viewer.loads

    assert quickest_s(lambda: takeover_s(world, page), SHOWN_S_MAX) < SHOWN_S_MAX
    assert viewer.loads == loads


def takeover_s(world: World, page: Page) -> float:
    """Kill a worker, and return the seconds until the page shows it as gone, and all intervals with the other one."""
    page.wait_for_timeout(1_000)
    intervals = int(world.rows("SELECT sum(intervals) AS n FROM millpy.workers WHERE live")[0]["n"])
    killed = world.kill_a_worker()
    killed_at = time.monotonic()
    try:
        row = page.locator("main tr", has_text=str(killed)).first
        expect(row).not_to_contain_text("✓")
        survivor = page.locator("main tr", has_text="✓").filter(has_text=str(intervals))
        expect(survivor.first).to_be_visible()
        return time.monotonic() - killed_at
    finally:
        add_another(world)


def test_an_operator_drains_a_worker_by_keyboard(world: World, operator: Visitor) -> None:
    page = operator.open("/graphs/works/workers")
    page.wait_for_timeout(1_000)
    loads = operator.loads
    button = page.get_by_role("button", name=re.compile("^Drain [0-9a-f]{8}$")).first
    name = (button.text_content() or "").removeprefix("Drain ")
    (drained,) = world.rows("SELECT pid FROM millpy.workers WHERE worker_id::text LIKE %s", f"{name}%")
    process = next(one for one in world.workers if one.pid == drained["pid"])

    operator.agree_to(f"Drain worker {name}?")
    button.press("Enter")
    try:
        expect(page.locator("#note")).to_contain_text(f"Worker {name} drains")
        expect(page.locator(f"tr[id^=worker-{name}]")).to_have_count(0)
        expect(page.locator("main table").first).to_contain_text("✓ live")
        expect(page.locator("main")).to_contain_text(f"requested that worker {name} drains")
        assert process.wait(20) == 0
        assert operator.loads == loads
    finally:
        process.kill()
        add_another(world)


def add_another(world: World) -> None:
    """Start a worker in place of one that has gone."""
    world.add_worker()
    both = "SELECT 1 FROM millpy.workers WHERE live AND intervals > 0"
    await_true(lambda: len(world.rows(both)) == 2, "the new worker owns intervals")
