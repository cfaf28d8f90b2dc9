"""The drawing of the graph: from the tables, kept up to date, one click from the explanation."""

from __future__ import annotations

import json
from collections.abc import Callable

from playwright.sync_api import expect

from tests.api_server import running_api
from tests.ui.browser import Visitor
from tests.ui.world import World

NODES = "[data-nodes] [data-node]"


def test_the_graph_is_drawn_from_its_tables(world: World, viewer: Visitor) -> None:
    page = viewer.open("/graphs/works")
    names = [one.inner_text() for one in page.locator(f"{NODES} th bdi").all()]
    computations = world.rows("SELECT DISTINCT computation FROM millpy.watermarks")

    expect(page.locator("svg g.node")).to_have_count(len(names))
    assert {row["computation"] for row in computations} <= set(names)
    drawn = [one.text_content() for one in page.locator("svg .line-0").all()]
    assert drawn == names
    expect(page.locator("svg g.edge")).to_have_count(page.locator("[data-edges] [data-from]").count())
    expect(page.locator("svg g.holds")).to_have_count(page.locator(f"{NODES}[data-holds]").count())
    expect(page.locator("#rates canvas")).to_be_visible()
    expect(page.locator("#lags canvas")).to_be_visible()
    expect(page.locator("#latencies canvas")).to_be_visible()


def test_a_node_leads_to_the_explanation(viewer: Visitor) -> None:
    page = viewer.open("/graphs/works")
    page.locator("svg a", has_text="temperature_5s").filter(has_text="step").click()

    page.wait_for_url("**/graphs/works?explain=temperature_5s")
    expect(page.locator("main")).to_contain_text("behind the clock")


def test_drawing_and_tables_follow_the_database_without_a_reload(world: World, viewer: Visitor) -> None:
    page = viewer.open("/graphs/works")
    loads, first = viewer.loads, page.locator("[data-node=readings] td time").inner_text()
    link = page.locator("svg a").first
    link.focus()

    expect(page.locator("[data-node=readings] td time")).not_to_have_text(first)
    expect(link).to_be_focused()
    assert viewer.loads == loads


def test_what_needs_somebody_is_marked_in_the_menu(viewer: Visitor) -> None:
    told = {
        "accounts": [{"graph": "works", "accounts": 5, "unbalanced": 2}, {"graph": "other", "unbalanced": 1}],
        "progress": [
            {"graph": "works", "intervals": 4, "live": 1, "low_watermark": "2026-11-20T08:00:00Z"},
            {"graph": "works", "intervals": 4, "live": 0, "low_watermark": "infinity"},
        ],
        "sources": [{"graph": "works", "state": "running", "partitions": 3}],
    }
    stream = "".join(f"event: {topic}\ndata: {json.dumps(rows)}\n\n" for topic, rows in told.items())
    viewer.page.route("**/v1/live", lambda route: route.fulfill(body=stream, content_type="text/event-stream"))
    menu = viewer.open("/graphs/works/events").get_by_role("navigation", name="Views")

    expect(menu.get_by_role("link", name="Accounting")).to_contain_text("2 account(s) not balanced")
    expect(menu.get_by_role("link", name="Workers")).to_contain_text("3 interval(s) without a live worker")
    assert menu.locator(".alert").count() == 2
    assert viewer.violations() == []


def test_a_parked_key_that_holds_the_watermark_is_one_click_away(viewer: Visitor) -> None:
    page = viewer.open("/graphs/works?explain=alarms")
    page.locator("#why + .summary").get_by_role("link", name="Parked keys").click()

    expect(page.locator("#left-out")).to_contain_text("faulty-1")


def test_what_is_open_stays_open(world: World, viewer: Visitor) -> None:
    page = viewer.open("/graphs/works/events")
    page.locator("details").first.locator("summary").click()
    opened = page.locator("details[open]")
    expect(opened).to_have_count(1)
    identifier = opened.get_attribute("id")
    graph = "(SELECT graph_id FROM mill.graphs WHERE name = 'works')"
    happened = f"INSERT INTO mill.events (graph_id, kind, detail) VALUES ({graph}, 'tested', '{{}}') RETURNING event_id"
    (event,) = world.rows(happened)

    expect(page.locator(f"#event-{event['event_id']}")).to_be_visible(timeout=10_000)
    assert page.locator("details[open]").get_attribute("id") == identifier


def test_a_lost_connection_is_said_and_made_again(
    world: World, visit: Callable[..., Visitor], viewer_token: str
) -> None:
    visitor = visit(viewer_token)
    with running_api(world.url) as api:
        page = visitor.page
        page.goto(f"{api.url}/graphs/works/accounting")
        status = page.locator("#live-status")
        expect(status).to_have_text("Live")
    expect(status).to_have_text("Connection lost. Trying again.")
    with running_api(world.url, MILLPY_API=f"127.0.0.1:{api.port}"):
        expect(status).to_have_text("Live", timeout=30_000)
        expect(page.locator(".as-of")).to_be_visible()
    visitor.errors.clear()  # the browser notes each failed request
