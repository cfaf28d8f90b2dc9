"""The page in a real browser, on large tables: when a view is painted, and when all of it is there.

    python -m benchmarks.page [--devices 100000] [--rows 10000000] [--times 3]

`api.large` makes the database. Then Chromium opens each view of the page, plain and with the filters that an operator
uses, `--times` times, each in a new tab. A page has all of its parts when it is loaded; the first live updates, which
come at once, show each part again. The last line has the slowest of the times: `first_paint_ms`, `slowest_view_ms` of
the slowest view, `slowest_update_ms` until a page was shown again, these three of each view in `views`, and
`api_rss_mb`, the peak memory of the API.
"""

from __future__ import annotations

import argparse
import time
from typing import Any
from urllib.parse import quote

from playwright.sync_api import Page

from benchmarks.api import Api, large
from benchmarks.harness import Bench, arguments
from tests.ui.browser import Visitor, running_browser

GRAPH = "/graphs/late"
DEVICE = "dev-000100"
VIEWS = {
    "Graph": "",
    "Graph, explained": "?explain=by_minute",
    "Windows": "/windows",
    "Windows of a device": f"/windows?table=by_minute&key.device={DEVICE}",
    "Windows of a time": "/windows?table=by_minute&from={middle}&to=2027-01-01T00:00:00Z",
    "Windows of a device and a time": f"/windows?table=by_minute&key.device={DEVICE}&from={{middle}}",
    "Windows that may change": "/windows?table=by_minute&final=false",
    "Windows that are final": "/windows?table=by_minute&final=true",
    "Fleet": "/fleet",
    "Fleet by lag": "/fleet?sort=lag",
    "Fleet by name": "/fleet?sort=key",
    "Fleet of a site": f"/fleet?site={DEVICE}",
    "Fleet of a device": f"/fleet?device={DEVICE}",
    "Fleet of seven days": "/fleet?span=7+days",
    "Dead letters": "/set-aside",
    "Late records": "/set-aside?kind=late-records",
    "Parked keys": "/set-aside?kind=parked",
    "Workers": "/workers",
    "Workers of a computation": "/workers?computation=by_minute",
    "State": "/state?computation=by_minute",
    "State of a key": f"/state?computation=by_minute&key={DEVICE}",
    "Events": "/events",
    "Events of a time": "/events?from={middle}",
    "Accounting": "/accounting",
    "Doctor": "/doctor?graph=late",
}
PARTS_S_MAX = 30.0
NOTE_PARTS = """
addEventListener("htmx:afterSettle", (event) => {
  const part = event.target.closest?.("[data-live]");
  if (part) (window.shownAgain ??= {})[part.id] = performance.now();
});
"""
PAINTED = "(performance.getEntriesByName('first-contentful-paint')[0] || {startTime: 0}).startTime"
LOADED = "performance.getEntriesByType('navigation')[0].loadEventEnd"
PARTS = (
    "[...document.querySelectorAll('[data-live]:not([data-live=events])')]"  # those wait for news
    ".map((part) => (window.shownAgain || {})[part.id] || 0)"
)


def opened(visitor: Visitor, path: str) -> dict[str, float]:
    """Open a view in a new tab; return the milliseconds until it is painted, loaded, and shown again."""
    page = visitor.context.new_page()
    try:
        page.add_init_script(NOTE_PARTS)
        answer = page.goto(visitor.url + path, timeout=60_000)
        if answer is None or answer.status != 200:
            raise SystemExit(f"{path}: {answer and answer.status}: {page.locator('main').inner_text()[:500]}")
        painted_ms, loaded_ms = _awaited(page, PAINTED), _awaited(page, LOADED)
        _awaited(page, f"{PARTS}.every((at) => at)")
        shown_ms = page.evaluate(f"Math.max(0, ...{PARTS})")
        return {"paint_ms": painted_ms, "view_ms": loaded_ms, "update_ms": max(loaded_ms, shown_ms)}
    finally:
        page.close()


def _awaited(page: Page, expression: str) -> float:
    deadline = time.monotonic() + PARTS_S_MAX
    while not (found := page.evaluate(expression)):
        if time.monotonic() > deadline:
            raise SystemExit(f"{page.url}: waited {PARTS_S_MAX:g} s in vain for {expression}")
        page.wait_for_timeout(20)
    return float(found)


def main(options: argparse.Namespace) -> None:
    with Bench("page", options, server={"max_wal_size": "8GB"}) as bench:
        url, rows, middle = large(bench, options)
        api = Api(url)
        views: dict[str, Any] = {}
        with running_browser() as browser:
            visitor = Visitor(browser, api.url)
            visitor.log_in(api.token)
            for name, path in VIEWS.items():
                address = ("" if path.startswith("/doctor") else GRAPH) + path.replace("{middle}", quote(middle))
                found = [opened(visitor, address) for _ in range(options.times)]
                views[name] = {what: round(max(one[what] for one in found)) for what in found[0]}
                bench.show(name, views[name])
            errors = list(visitor.errors)
            visitor.close()
        slowest = max(views, key=lambda name: views[name]["view_ms"])
        bench.finish(
            first_paint_ms=max(view["paint_ms"] for view in views.values()),
            slowest_view=slowest,
            slowest_view_ms=views[slowest]["view_ms"],
            slowest_update_ms=max(view["update_ms"] for view in views.values()),
            views=views,
            errors=len(errors),
            api_rss_mb=api.end(),
            rows=rows,
            devices=options.devices,
        )


if __name__ == "__main__":
    main(arguments(__doc__, "errors<=0", devices=100_000, rows=10_000_000, times=3).parse_args())
