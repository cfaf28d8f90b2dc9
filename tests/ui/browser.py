"""A real browser: Chromium of the system, driven by Playwright, that notes every error of a page."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, BrowserContext, Page, expect, sync_playwright

ROOT = Path(__file__).resolve().parents[2]
SCREENSHOTS = ROOT / "build" / "ui"
PROGRAMS = ("chromium", "chromium-browser", "google-chrome")
ARGUMENTS = ("--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu")
WITHIN_MS = 20_000
WIDTHS = {"wide": (1280, 900), "phone": (390, 844)}
SCHEMES = ("light", "dark")
SERIOUS = ("serious", "critical")
expect.set_options(timeout=WITHIN_MS)


def chromium() -> str | None:
    """Return the program of the browser; None if it is not installed."""
    return next((found for program in PROGRAMS if (found := shutil.which(program))), None)


@contextmanager
def running_browser() -> Iterator[Browser]:
    """Run the browser."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium(), args=list(ARGUMENTS))
        try:
            yield browser
        finally:
            browser.close()


class Visitor:
    """A user with a page: logged in with a token, and with a list of all that went wrong in the browser.

    Args:
        browser: the browser.
        url: the address of the page.
        scheme: "light" or "dark".
        size: the size of the window.
    """

    def __init__(
        self, browser: Browser, url: str, *, scheme: str = "light", size: tuple[int, int] = (1280, 900)
    ) -> None:
        self.url = url
        self.errors: list[str] = []
        self.loads = 0
        self._question = ""
        width, height = size
        self.context: BrowserContext = browser.new_context(
            viewport={"width": width, "height": height}, color_scheme=scheme, reduced_motion="reduce",  # type: ignore[arg-type]
            accept_downloads=True,
        )  # fmt: skip
        self.context.set_default_timeout(WITHIN_MS)
        self.page: Page = self.context.new_page()
        self.page.on("console", self._note)
        self.page.on("pageerror", lambda error: self.errors.append(f"error: {error}"))
        self.page.on("dialog", self._answer)
        self.page.on("request", self._see)
        self.page.on("load", self._count)

    def log_in(self, token: str) -> None:
        """Open a session by the form."""
        self.page.goto(f"{self.url}/login")
        self.page.get_by_label("Token").fill(token)
        self.page.get_by_role("button", name="Log in").click()
        self.page.wait_for_url(lambda url: "/login" not in url)

    def open(self, path: str) -> Page:
        """Open a view, and wait until it has been laid out."""
        answer = self.page.goto(self.url + path)
        assert answer is not None and answer.status == 200, (path, answer and answer.status, self.page.content()[:2000])
        self.page.evaluate("document.fonts.ready.then(() => true)")  # wait_for_function needs eval
        return self.page

    def agree_to(self, question: str) -> None:
        """Accept one dialog that begins like this; every other one is an error."""
        self._question = question

    def violations(self) -> list[str]:
        """Return what axe-core finds serious or critical, with the elements."""
        found = Axe().run(self.page).response["violations"]
        return [
            f"{one['id']} ({one['impact']}): {one['help']}: {[node['html'][:200] for node in one['nodes'][:5]]}"
            for one in found if one["impact"] in SERIOUS
        ]  # fmt: skip

    def overflow(self) -> int:
        """Return by how many pixels the page is wider than its window."""
        return int(self.page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth"))

    def screenshot(self, name: str) -> Path:
        """Write a picture of the whole page to build/ui/."""
        SCREENSHOTS.mkdir(parents=True, exist_ok=True)
        path = SCREENSHOTS / f"{name}.png"
        self.page.screenshot(path=path, full_page=True)
        return path

    def close(self) -> None:
        """Close the window."""
        self.context.close()

    def _note(self, message: Any) -> None:
        if message.type in ("error", "warning"):
            self.errors.append(f"{message.type}: {message.text}")

    def _answer(self, dialog: Any) -> None:
        if self._question and dialog.message.startswith(self._question):
            self._question = ""
            dialog.accept()
            return
        self.errors.append(f"dialog: {dialog.message}")
        dialog.dismiss()

    def _see(self, request: Any) -> None:
        if not request.url.startswith((self.url, "data:", "blob:")):
            self.errors.append(f"a request elsewhere: {request.url}")

    def _count(self, _: Any) -> None:
        self.loads += 1
