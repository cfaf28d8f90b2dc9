"""The file by which `millpy ui` opens a browser: it logs in, although another program's page leads to the link."""

from __future__ import annotations

from pathlib import Path

from playwright.sync_api import Browser, expect

from millpy.cli.ui import OPENED
from tests.conformance.test_page_command import link_of, started


def test_the_file_that_a_browser_is_given_logs_in(browser: Browser, database_url: str, tmp_path: Path) -> None:
    with started(["ui"], database_url, tmp_path) as process:
        file = tmp_path / "open.html"
        file.write_text(OPENED.format(link=link_of(process)))
        context = browser.new_context()
        try:
            page = context.new_page()
            page.goto(file.as_uri())
            expect(page).to_have_title("Graphs · millpy")
        finally:
            context.close()
