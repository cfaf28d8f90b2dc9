"""The page without a browser: the login, the frame of every view, errors, files, and hostile text."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from urllib.parse import quote

import psycopg
import pytest

from millpy.admin.tokens import Role
from millpy.embedded import EmbeddedPostgres
from millpy.ui.asset_files import PLACE
from millpy.ui.views import VIEWS, link
from tests.api_server import ApiServer, running_api
from tests.conformance.test_api import ran
from tests.databases import fresh_database
from tests.page_client import PageClient, figure

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
