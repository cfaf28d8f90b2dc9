"""The harness itself: what it must notice, it notices."""

from __future__ import annotations

from playwright.sync_api import Browser

from tests.ui.browser import Visitor
from tests.ui.world import HOSTILE, World


def test_the_world_has_what_the_views_show(world: World) -> None:
    assert len(world.rows("SELECT 1 FROM millpy.workers WHERE live AND intervals > 0")) == 2
    letters = world.rows("SELECT payload_text, detail FROM millpy.dead_letters")
    parked = world.rows("SELECT key, detail FROM millpy.parked")
    devices = {row["device"] for row in world.rows("SELECT device FROM works.temperature_5s")}

    assert any("<script>" in letter["payload_text"] for letter in letters)
    assert any("<script>" in letter["detail"] for letter in letters)
    assert ["<script>" in row["detail"] for row in parked] == [True]
    assert HOSTILE in devices


def test_an_error_in_a_page_is_noticed(browser: Browser) -> None:
    visitor = Visitor(browser, "http://127.0.0.1:1")
    try:
        visitor.page.set_content("<main><h1>Nothing</h1><input></main>")
        visitor.page.evaluate("console.error('bad')")
        visitor.page.evaluate("setTimeout(() => { throw new Error('worse') })")
        visitor.page.evaluate("alert('a dialog')")
        visitor.page.wait_for_timeout(100)

        assert [error.partition(":")[0] for error in visitor.errors] == [
            "error", "error", "dialog"
        ], visitor.errors  # fmt: skip
        assert any("label" in found for found in visitor.violations())
    finally:
        visitor.close()
