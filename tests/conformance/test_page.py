"""The page without a browser: the login, the frame of every view, errors, files, and hostile text."""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections.abc import Iterator
from urllib.parse import quote
from uuid import uuid4

import psycopg
import pytest

from millpy.admin.queries import Admin
from millpy.admin.tokens import Role, create
from millpy.api.database import STATEMENT_S_MAX
from millpy.config.escape import visible
from millpy.embedded import EmbeddedPostgres
from millpy.ui.asset_files import PLACE
from millpy.ui.values import NONE
from millpy.ui.views import ROWS_MAX, VIEWS, link
from tests.api_server import ApiServer, running_api
from tests.conformance.test_api import HOSTILE, a_worker, forget_workers, ran
from tests.databases import fresh_database
from tests.page_client import Page, PageClient, figure
from tests.waiting import await_true

PATHS = [link(view, "plant") for view in VIEWS]
COUNTS = ("injected", "accepted", "duplicate", "produced", "added", "consumed", "late", "parked", "pending")


@pytest.fixture(scope="module")
def api(postgres: EmbeddedPostgres, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    with fresh_database(postgres) as name:
        url = postgres.url(name)
        ran(tmp_path_factory.mktemp("page") / "plant", url)
        proxied = {"MILLPY_API_PROXIES": "127.0.0.1/32", "MILLPY_API_IDENTITY_HEADER": "X-Forwarded-User"}
        with running_api(url, **proxied) as server:
            yield server


def client_of(api: ApiServer, name: str, role: Role = Role.VIEWER) -> PageClient:
    client = PageClient(api)
    assert client.log_in(api.token(name, role)).status == 303
    return client


@pytest.fixture(scope="module")
def viewer(api: ApiServer) -> PageClient:
    return client_of(api, "vera")


@pytest.mark.parametrize("path", ["/", *PATHS, "/graphs/plant/state?key=%22a%22"])
def test_unknown_users_come_to_the_login_and_back(api: ApiServer, path: str) -> None:
    client = PageClient(api)
    answer = client.send("GET", path)

    assert answer.status == 303
    back = client.log_in(api.token(f"back to {path}"), answer.headers["Location"])
    assert (back.status, back.headers["Location"]) == (303, path)
    assert client.get(path).status == 200


@pytest.mark.parametrize(
    "next_", ["//evil.example/", "https://evil.example/", "/\\evil.example", "javascript:alert(1)", ""]
)
def test_the_login_leads_nowhere_else(api: ApiServer, next_: str) -> None:
    answer = PageClient(api).log_in(api.token(f"to {next_!r}"), f"/login?next={quote(next_)}")

    assert (answer.status, answer.headers["Location"]) == (303, "/")


def test_a_login_needs_the_form_of_this_page(api: ApiServer) -> None:
    token = api.token("forged")
    client = PageClient(api)

    assert client.send("POST", "/login", {"token": token}).status == 403
    client.cookies.clear()
    client.get("/login")
    assert client.send("POST", "/login", {"token": token, "csrf": "0" * 64}).status == 403
    assert client.send("POST", "/login", {"token": token, "csrf": ""}).status == 403
    assert "millpy_session" not in client.cookies


def test_a_wrong_token_is_refused_and_not_shown(api: ApiServer) -> None:
    answer = PageClient(api).log_in("millpy_wrong")

    assert answer.status == 401
    assert b"the token is not valid" in answer.body and b"millpy_wrong" not in answer.body


def test_a_log_out_ends_the_session(api: ApiServer) -> None:
    client = client_of(api, "leaving")
    csrf = client.csrf
    before = dict(client.cookies)

    assert client.send("POST", "/logout", {"csrf": "wrong"}).status == 403
    assert client.send("POST", "/logout", {"csrf": csrf}).status == 303
    client.cookies = before
    assert client.send("GET", "/").status == 303


def test_an_identity_of_a_proxy_reads_and_opens_a_session(api: ApiServer) -> None:
    api.token("lea@example.com", Role.OPERATOR, identity=True)
    client = PageClient(api)
    known = {"X_Forwarded_User": "lea@example.com"}

    shown = client.get("/", **known)
    assert "lea@example.com" in shown.text and not shown.root.all("form")
    (form,) = client.get("/login", **known).root.all("form")
    fields = {one.attributes["name"]: one.attributes.get("value", "") for one in form.all("input")}
    assert client.send("POST", "/login", {**fields, "csrf": "x"}, **known).status == 403
    assert client.send("POST", "/login", fields, **known).status == 303
    assert "(operator)" in client.get("/").text


def test_a_session_that_has_ended_hides_no_identity_and_its_cookie_is_deleted(api: ApiServer) -> None:
    api.token("cleo@example.com", Role.OPERATOR, identity=True)
    known = {"X_Forwarded_User": "cleo@example.com"}
    client = PageClient(api)
    client.cookies["millpy_session"] = "dead"

    assert "cleo@example.com" in client.get("/", **known).text
    assert "You are cleo@example.com" in client.get("/login", **known).text
    assert client.send("POST", "/logout", {"csrf": "x"}, **known).status == 303
    assert "millpy_session" not in client.cookies
    client.cookies["millpy_session"] = "dead"
    assert client.send("GET", "/").status == 303
    assert "millpy_session" not in client.cookies


@pytest.mark.parametrize("path", ["/", *PATHS])
def test_every_view_has_landmarks_and_the_menu(viewer: PageClient, path: str) -> None:
    shown = viewer.get(path)

    assert shown.status == 200, shown.text
    assert (len(shown.root.all("h1")), len(shown.root.all("main", id="main"))) == (1, 1)
    assert shown.root.all("a", href="#main")
    if path != "/":
        menu = [one.attributes["href"] for one in shown.root.all("nav")[0].all("a")]
        assert menu == PATHS
        (current,) = [one for one in shown.root.all("a") if "aria-current" in one.attributes]
        assert current.attributes["href"] == path
    identifiers = re.findall(r'\bid="([^"]+)"', shown.html)
    assert len(identifiers) == len(set(identifiers))
    for table in shown.root.all("table"):
        assert table.all("caption") and all("scope" in cell.attributes for cell in table.all("th"))
    labels = {one.attributes["for"] for one in shown.root.all("label")}
    for tag in ("input", "select", "textarea"):
        for one in shown.root.all(tag):
            named = one.attributes.get("id") in labels or "aria-label" in one.attributes
            assert named or one.attributes.get("type") == "hidden", one


@pytest.mark.parametrize("path", ["/", "/login", *PATHS])
def test_no_page_has_inline_script_or_style_or_loads_from_elsewhere(viewer: PageClient, path: str) -> None:
    shown = viewer.get(path)

    assert "script-src 'self'" in shown.headers["Content-Security-Policy"]
    assert not re.search(r"<style|\sstyle=|\son\w+=|javascript:|hx-on", shown.html)
    assert all(one.attributes["src"].startswith("/assets/") for one in shown.root.all("script"))
    assert all(one.attributes["href"].startswith("/assets/") for one in shown.root.all("link"))


@pytest.mark.parametrize("path", PATHS)
def test_a_viewer_has_no_action(viewer: PageClient, path: str) -> None:
    posts = [one.attributes["action"] for one in viewer.get(path).root.all("form", method="post")]

    assert posts == ["/logout"]
    assert "hx-post" not in viewer.get(path).html


@pytest.mark.parametrize("path", PATHS[:-1])
def test_a_graph_that_is_not_deployed_is_a_page(viewer: PageClient, path: str) -> None:
    name = quote("<script>alert(1)<\u202e", safe="")
    shown = viewer.get(path.replace("plant", name))

    assert shown.status == 404
    assert "is deployed" in shown.text and "\\u202e" in shown.text
    assert "<script>alert" not in shown.html and "\u202e" not in shown.html


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/graphs/plant/nothing", 404), ("/graphs/plant/accounting?after=x", 400),
        ("/graphs/plant/accounting?balanced=maybe", 422), ("/graphs/plant/accounting?stream=%00", 422),
        (f"/graphs/{'x' * 201}", 422),
    ],
)  # fmt: skip
def test_errors_are_pages(viewer: PageClient, path: str, status: int) -> None:
    shown = viewer.get(path)

    assert (shown.status, shown.headers.get_content_type()) == (status, "text/html")
    assert shown.main.all("div", role="alert")


def test_a_part_of_a_page_that_may_not_be_seen_any_more_leads_to_the_login(api: ApiServer) -> None:
    answer = PageClient(api).send("GET", "/graphs/plant/accounting", HX_Request="true")

    assert (answer.status, answer.headers["HX-Redirect"]) == (401, "/login?next=%2Fgraphs%2Fplant%2Faccounting")


def test_an_address_with_any_characters_leads_back_to_itself(api: ApiServer) -> None:
    client, path = PageClient(api), "/graphs/a%20%C3%A9%3F%23/events?kind=%C3%A9+%26"
    answer = client.send("GET", path)
    back = client.log_in(api.token("any characters"), answer.headers["Location"])

    assert back.headers["Location"] == path
    assert "no graph 'a é?#' is deployed" in client.get(path).text


def test_assets_are_kept_by_their_hash(viewer: PageClient) -> None:
    (found,) = viewer.get("/").root.all("link", rel="stylesheet")
    path = found.attributes["href"]
    answer = viewer.send("GET", path)

    assert "immutable" in answer.headers["Cache-Control"]
    assert answer.headers["Content-Type"] == "text/css; charset=utf-8"
    assert viewer.send("GET", path, If_None_Match=answer.headers["ETag"]).status == 304
    old = viewer.send("GET", "/assets/0/millpy.css")
    assert (old.status, old.headers["Cache-Control"]) == (200, "no-cache")


@pytest.mark.parametrize(
    "name", ["../site.py", "%2e%2e/site.py", "..%2fsite.py", "vendor/versions.json", "/etc/passwd", "vendor/", ""]
)
def test_no_other_file_is_sent(viewer: PageClient, name: str) -> None:
    assert viewer.send("GET", f"/assets/0/{name}").status == 404


def test_vendored_files_are_those_of_their_versions() -> None:
    vendor = PLACE / "vendor"
    expected = json.loads((vendor / "versions.json").read_text())
    files = {path.name: path for path in vendor.iterdir() if path.name != "versions.json"}

    assert {name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in files.items()} == {
        name: found["sha256"] for name, found in expected.items()
    }


def test_accounting_shows_the_figures_of_sql(api: ApiServer, viewer: PageClient) -> None:
    shown = viewer.get("/graphs/plant/accounting")
    rows = shown.table("Every record that came in, and where it went")
    with psycopg.connect(api.database_url) as connection:
        (expected,) = connection.execute(
            f"SELECT {', '.join(f'sum({name})' for name in COUNTS)} FROM millpy.accounting"
        ).fetchall()
        (accounts,) = connection.execute("SELECT count(*) FROM millpy.accounting").fetchone() or ()

    found = [[count for row in rows if (count := figure(row[name])) is not None] for name in COUNTS]
    assert [sum(counts) if counts else None for counts in found] == list(expected)
    assert len(rows) == accounts and f"all {accounts} accounts are balanced" in shown.text
    assert viewer.get("/graphs/plant/accounting?balanced=false").main.all("p", **{"class": "empty"})


def test_the_graph_shows_nodes_and_edges_with_the_figures_of_sql(api: ApiServer, viewer: PageClient) -> None:
    shown = viewer.get("/graphs/plant")
    nodes, edges = shown.table("Nodes"), shown.table("Edges")
    with psycopg.connect(api.database_url) as connection:
        intervals = dict(
            connection.execute("SELECT computation, count(*) FROM millpy.watermarks GROUP BY computation").fetchall()
        )
        (backlog,) = connection.execute("SELECT records FROM millpy.backlog").fetchone() or ()

    assert [(row["Name"], row["Kind"]) for row in nodes] == [
        ("readings", "source: files"), ("temperature_1m", "step: window"), ("temperature_1m", "table: windowed")
    ]  # fmt: skip
    assert [figure(row["Intervals"]) for row in nodes[:2]] == [intervals["readings"], intervals["temperature_1m"]]
    assert [row["Watermark"] for row in nodes[:2]] == ["the end", "the end"]
    assert [(row["Stream"], row["To"], row["Backlog"]) for row in edges] == [
        ("readings", "temperature_1m", str(backlog)), ("temperature_1m", "table temperature_1m", NONE)
    ]  # fmt: skip
    assert "Nothing: all input has ended." in shown.text


def test_an_explanation_is_one_click_away(viewer: PageClient) -> None:
    links = [one.attributes["href"] for one in viewer.get("/graphs/plant").main.all("a") if one.text.startswith("Why")]

    assert links == ["/graphs/plant?explain=readings", "/graphs/plant?explain=temperature_1m"]
    assert "all input has ended" in viewer.get(links[1]).text
    unknown = viewer.get("/graphs/plant?explain=%3Cb%3E")
    assert unknown.status == 200 and "graph plant has no computation <b>" in unknown.text


def test_workers_show_owners_and_takeovers_of_sql(api: ApiServer, viewer: PageClient) -> None:
    shown = viewer.get("/graphs/plant/workers")
    with psycopg.connect(api.database_url) as connection:
        expected = connection.execute(
            "SELECT computation, part, bundle FROM millpy.watermarks ORDER BY computation, interval_id"
        ).fetchall()
        ((claimed,),) = connection.execute("SELECT count(*) FROM millpy.events WHERE kind = 'claimed'").fetchall()

    rows = shown.table("Intervals and their owners")
    assert [(row["Computation"], row["Part"], figure(row["Bundle"])) for row in rows] == expected
    assert {row["Owner"] for row in rows} == {"none"}
    assert len(shown.table("The newest takeovers")) == claimed == 1
    assert len(shown.root.all("svg")) == 1 and "No worker runs this graph." in shown.text
    of_one = viewer.get("/graphs/plant/workers?computation=readings").table("Intervals and their owners")
    assert {row["Computation"] for row in of_one} == {"readings"}


def test_workers_show_what_they_report(api: ApiServer, viewer: PageClient) -> None:
    a_worker(api, "1 hour")
    figures = "memory_bytes = 123456789, turn_p50_s = 0.000423, turn_p99_s = 1.23, commit_p99_s = 0.0179"
    with psycopg.connect(api.database_url, autocommit=True) as connection:
        connection.execute(f"UPDATE mill.workers SET {figures}".encode())
    (row,) = viewer.get("/graphs/plant/workers").table("Workers, the newest first")
    forget_workers(api)

    shown = [row[name] for name in ("Memory", "Turn p50", "Turn p99", "Commit p50", "Commit p99")]
    assert shown == ["123 MB", "0.42 ms", "1200 ms", NONE, "18 ms"]
    assert "Drain" not in row


def test_an_operator_drains_a_worker(api: ApiServer, viewer: PageClient) -> None:
    live, dead = a_worker(api, "1 hour"), a_worker(api, "-1 hour")
    client, path = client_of(api, "drainer", Role.OPERATOR), "/graphs/plant/workers"
    before = client.get(path)
    forms = [one for one in before.main.all("form") if one.attributes["method"] == "post"]
    fields = {one.attributes["name"]: one.attributes.get("value", "") for one in forms[0].all("input")}
    refused = [
        viewer.send("POST", f"{path}/{live}/drain", {"csrf": viewer.csrf}).status,
        client.send("POST", f"{path}/{live}/drain", {}).status,
        client.send("POST", f"{path}/{dead}/drain", fields).status,
        client.send("POST", f"{path}/{uuid4()}/drain", fields).status,
    ]
    said = [Page(client.send("POST", forms[0].attributes["action"], fields)).main.text for _ in range(2)]
    after = client.get(path)
    states = {row["Worker"]: row["State"] for row in after.table("Workers, the newest first")}
    more = [a_worker(api, "1 hour") for _ in range(2)]
    asked = [
        form.attributes["hx-confirm"] for form in client.get(path).main.all("form") if "hx-confirm" in form.attributes
    ]
    forget_workers(api)

    assert (
        forms[0]
        .attributes["hx-confirm"]
        .endswith("No other live worker runs this graph: its input waits until one starts.")
    )
    assert sorted(asked) == sorted(f"Drain worker {one[:8]}? Its process ends." for one in more)
    assert [form.attributes["action"] for form in forms] == [f"{path}/{live}/drain"]
    assert refused == [403, 403, 409, 404]
    assert "drains: its intervals go to other workers." in said[0] and "drains already." in said[1]
    assert [form for form in after.main.all("form") if form.attributes["method"] == "post"] == []
    assert states[live[:8]] == "draining" and "lease expired" in states[dead[:8]]
    assert "drainer requested that worker" in after.text and "◆" in after.text


def test_events_are_sentences_by_kind_and_time(api: ApiServer, viewer: PageClient) -> None:
    with psycopg.connect(api.database_url) as connection:
        connection.execute(
            "INSERT INTO mill.events (graph_id, at, kind, detail)"
            " SELECT graph_id, '2026-01-01Z', 'strange', jsonb_build_object('by', %s::text) FROM mill.graphs",
            [HOSTILE],
        )
    shown = viewer.get("/graphs/plant/events?kind=strange")
    (row,) = shown.table("What happened, the newest first")

    assert (row["At"], row["Kind"]) == ("2026-01-01 00:00:00 UTC", "strange")
    assert row["What happened"] == f"by {visible(HOSTILE)}"
    assert "<script>alert" not in shown.html and "\u202e" not in shown.html and "\x1b" not in shown.html
    caption = "What happened, the newest first"
    before = viewer.get("/graphs/plant/events?from=2026-01-01T00:00Z&to=2026-01-02T00:00Z").table(caption)
    assert [one["Kind"] for one in before] == ["strange"]
    assert "No such event." in viewer.get("/graphs/plant/events?kind=&from=&to=2025-01-01T00:00Z").text
    assert viewer.get("/graphs/plant/events?from=yesterday").status == 422


def test_the_doctor_shows_its_findings_the_worst_first(api: ApiServer, viewer: PageClient) -> None:
    path = "/doctor?graph=plant"
    await_true(lambda: "still examining" not in viewer.get(path).text, "the findings")
    shown = viewer.get(path)
    rows = shown.table("What the doctor found in the database, the worst first; at most ten seconds old")
    findings = viewer.server.get("/v1/doctor", api.token("asks the doctor")).rows

    ranks = [("✗ error", "▲ warning", "• note", "✓ ok").index(row["Severity"]) for row in rows]
    assert ranks == sorted(ranks)
    # What grows meanwhile is not compared.
    assert sorted(row["Check"] for row in rows) == sorted(found["check"] for found in findings)
    assert ("accounting", "adds up") in [(row["Check"], row["Found"]) for row in rows]


def test_a_doctor_that_takes_long_does_not_hold_up_the_page(api: ApiServer) -> None:
    with running_api(api.database_url) as other, psycopg.connect(api.database_url) as connection:
        client = PageClient(other)
        client.log_in(api.token("in a hurry"))
        connection.execute("LOCK mill.late_records, mill.dead_letters IN ACCESS EXCLUSIVE MODE")
        began = time.monotonic()
        shown = client.get("/doctor")
        took_s = time.monotonic() - began
        connection.rollback()
        await_true(lambda: "still examining" not in client.get("/doctor").text, "the findings")
        after = client.get("/doctor")

    assert shown.status == 200 and "The doctor is still examining the database." in shown.text
    assert took_s < STATEMENT_S_MAX
    assert "accounting" in after.text


def test_a_role_of_the_database_gets_a_page_that_says_what_it_lacks(api: ApiServer) -> None:
    with psycopg.connect(api.database_url, autocommit=True) as connection:
        connection.execute("CREATE ROLE page_tenant")
    try:
        client = PageClient(api)
        token = create(Admin(api.database_url), "tenant", Role.VIEWER, database_role="page_tenant")[1]
        assert client.log_in(token).status == 303

        assert client.get("/doctor").status == 403
        assert client.get("/graphs/plant/accounting").status == 403
        assert "millpy" in client.get("/graphs/plant/accounting").text
    finally:
        with psycopg.connect(api.database_url, autocommit=True) as connection:
            connection.execute("DROP ROLE page_tenant")


def test_a_long_list_has_pages(api: ApiServer, viewer: PageClient) -> None:
    with psycopg.connect(api.database_url) as connection:
        connection.execute(
            "INSERT INTO mill.events (graph_id, at, kind, detail)"
            " SELECT graph_id, '2026-01-03Z', 'many', jsonb_build_object('number', n)"
            " FROM mill.graphs, generate_series(1, %s) AS n",
            [2 * ROWS_MAX + 1],
        )
    path, seen, caption = "/graphs/plant/events?kind=many", [], "What happened, the newest first"
    while path:
        shown = viewer.get(path)
        seen += [row["What happened"] for row in shown.table(caption)]
        path = next((one.attributes["href"] for one in shown.root.all("a", rel="next")), "")

    assert seen == [f"number {number}" for number in range(2 * ROWS_MAX + 1, 0, -1)]


def test_only_an_administrator_can_switch(api: ApiServer) -> None:
    admin, operator = client_of(api, "switches", Role.ADMIN), client_of(api, "cannot switch", Role.OPERATOR)
    path = "/graphs/plant/switch"

    assert operator.send("POST", path, {"csrf": operator.csrf, "generation": "1"}).status == 403
    assert admin.send("POST", path, {"generation": "1"}).status == 403
    assert admin.send("POST", path, {"csrf": operator.csrf, "generation": "1"}).status == 403
    assert admin.send("POST", path, {"csrf": admin.csrf, "generation": "one"}).status == 422
    answer = admin.send("POST", path, {"csrf": admin.csrf, "generation": "1"})
    assert answer.status == 200 and b"was the current one already" in answer.body
    header = {"X_CSRF_Token": admin.csrf, "HX_Request": "true"}
    note = admin.send("POST", path, {"generation": "1"}, **header)
    assert (note.status, note.headers["HX-Trigger"]) == (200, "refresh")
    assert b"<html" not in note.body
    refused = admin.send("POST", path, {"generation": "7"}, **header)
    assert refused.status == 400 and b'role="alert"' in refused.body and b"<html" not in refused.body


def test_a_form_is_bounded(api: ApiServer) -> None:
    admin = client_of(api, "many fields", Role.ADMIN)

    assert admin.send("POST", "/logout", [("csrf", admin.csrf)] + [("x", "1")] * 1_000).status == 400
    assert admin.send("POST", "/logout", {"csrf": admin.csrf, "x": "\0"}).status == 400


def test_generations_stand_side_by_side_and_are_switched(api: ApiServer, viewer: PageClient) -> None:
    with psycopg.connect(api.database_url) as connection:
        connection.execute(
            "INSERT INTO mill.graphs (name, family, generation, description)"
            " SELECT 'plant_2', family, 2, description FROM mill.graphs WHERE name = 'plant'"
        )
    try:
        admin = client_of(api, "switches generations", Role.ADMIN)
        shown = viewer.get("/graphs/plant")
        assert [one.text for one in shown.main.all("h2")][1:3] == ["Generation 1 (current)", "Generation 2: plant_2"]
        assert len([one for one in shown.root.all("table") if "data-nodes" in one.attributes]) == 2
        (form,) = admin.get("/graphs/plant").main.all("form", method="post")
        fields = {one.attributes["name"]: one.attributes["value"] for one in form.all("input")}
        assert admin.send("POST", form.attributes["action"], fields | {"csrf": "no"}).status == 403
        assert b"generation 1 was" in admin.send("POST", form.attributes["action"], fields).body
        (current,) = [row for row in viewer.server.get("/v1/graphs", api.token("reads graphs")).rows if row["current"]]
        assert current["generation"] == 2
    finally:
        api.post("/v1/graphs/plant/switch", api.token("switches back", Role.ADMIN), {"generation": 1, "anyway": True})
        with psycopg.connect(api.database_url) as connection:
            connection.execute("DELETE FROM mill.graphs WHERE generation = 2")
