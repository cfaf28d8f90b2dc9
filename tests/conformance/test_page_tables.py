"""The views of windows, devices, dead letters and state without a browser: their figures are those of SQL."""

from __future__ import annotations

import csv
import io
import json
import time
from collections.abc import Iterator
from urllib.parse import quote

import psycopg
import pyarrow.parquet as pq
import pytest

from millpy.admin.pages import RowPage, encoded
from millpy.admin.queries import Admin
from millpy.admin.results import DeployedTable, result_tables
from millpy.admin.tokens import Role
from millpy.api.database import STATEMENT_S_MAX
from millpy.embedded import EmbeddedPostgres
from millpy.ui import windows
from millpy.ui.downloads import PAGE_ROWS, ROWS_MAX, WRITERS
from millpy.ui.payload_diff import PIECES_MAX, difference
from millpy.ui.tables import STATES
from tests.api_server import ApiServer, running_api
from tests.conformance.test_api import HOSTILE, ran
from tests.databases import fresh_database
from tests.page_client import Page, PageClient, figure

WINDOWS = "/graphs/plant/windows"
LEFT_OUT = "/graphs/plant/set-aside"
INVISIBLE = '{"unit": "20\u00a0°C\u202e\u200d"}'


@pytest.fixture(scope="module")
def api(postgres: EmbeddedPostgres, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    with fresh_database(postgres) as name:
        url = postgres.url(name)
        ran(tmp_path_factory.mktemp("tables") / "plant", url)
        with running_api(url) as server:
            yield server


def client_of(api: ApiServer, name: str, role: Role) -> PageClient:
    client = PageClient(api)
    assert client.log_in(api.token(name, role)).status == 303
    return client


@pytest.fixture(scope="module")
def viewer(api: ApiServer) -> PageClient:
    return client_of(api, "vera", Role.VIEWER)


@pytest.fixture(scope="module")
def operator(api: ApiServer) -> PageClient:
    return client_of(api, "olga", Role.OPERATOR)


def sql(api: ApiServer, statement: str, *parameters: object) -> list[tuple[object, ...]]:
    with psycopg.connect(api.database_url, autocommit=True) as connection:
        return connection.execute(statement, parameters).fetchall()


def rows_of(page: Page) -> list[dict[str, str]]:
    return page.table("temperature_1m, the newest first")


def test_rows_are_those_of_sql(api: ApiServer, viewer: PageClient) -> None:
    rows = rows_of(viewer.get(WINDOWS))
    stored = sql(
        api,
        "SELECT to_char(window_start AT TIME ZONE 'UTC', 'YYYY-MM-DD HH24:MI:SS') || ' UTC', device, n, late_count"
        " FROM plant.temperature_1m_status ORDER BY window_start DESC, device LIMIT 100",
    )

    assert [(row["Window"], row["device"], figure(row["n"]), figure(row["Late"])) for row in rows] == stored
    assert {row["State"].removesuffix(", final") for row in rows} <= set(STATES.values())


def test_open_windows_that_are_too_many_to_read_are_left_out_in_words(api: ApiServer, viewer: PageClient) -> None:
    whole = viewer.get(WINDOWS)
    with psycopg.connect(api.database_url, autocommit=True) as connection:
        connection.execute("ALTER VIEW plant.temperature_1m_live RENAME TO kept_live")
        connection.execute("CREATE VIEW plant.temperature_1m_live AS SELECT v.* FROM plant.kept_live v, pg_sleep(30)")
        try:
            with running_api(api.database_url) as other:  # it does not try to read them again soon
                client = PageClient(other)
                client.log_in(api.token("reads too many"))
                began = time.monotonic()
                found, again = client.get(WINDOWS), client.get(WINDOWS)
                took_s = time.monotonic() - began
        finally:
            connection.execute("DROP VIEW plant.temperature_1m_live")
            connection.execute("ALTER VIEW plant.kept_live RENAME TO temperature_1m_live")

    assert "Not all open windows are here" in found.text and "Not all open windows are here" not in whole.text
    assert [row for row in rows_of(whole) if not row["State"].startswith("open")] == rows_of(found) == rows_of(again)
    assert took_s < 2 * STATEMENT_S_MAX


def test_a_tenant_sees_its_windows_and_no_figure_that_is_not_its_own(api: ApiServer) -> None:
    with psycopg.connect(api.database_url, autocommit=True) as connection:
        (device,) = connection.execute("SELECT min(device) FROM plant.temperature_1m").fetchone() or ("",)
        connection.execute("CREATE ROLE windows_tenant")
        connection.execute("GRANT USAGE ON SCHEMA plant TO windows_tenant")
        connection.execute("GRANT SELECT ON plant.temperature_1m, plant.temperature_1m_status TO windows_tenant")
        connection.execute("ALTER TABLE plant.temperature_1m ENABLE ROW LEVEL SECURITY")
        own = psycopg.sql.SQL("CREATE POLICY own ON plant.temperature_1m TO windows_tenant USING (device = {})")
        connection.execute(own.format(device))
    try:
        client = PageClient(api)
        assert client.log_in(api.token("tenant", database_role="windows_tenant")).status == 303
        found = client.get(WINDOWS)
        assert found.status == 200, found.text
        window = client.get(link_of(found))
    finally:
        with psycopg.connect(api.database_url, autocommit=True) as connection:
            connection.execute("ALTER TABLE plant.temperature_1m DISABLE ROW LEVEL SECURITY")
            connection.execute("DROP OWNED BY windows_tenant")
            connection.execute("DROP ROLE windows_tenant")

    rows = rows_of(found)
    assert {row["device"] for row in rows} == {device} and {row["Too late"] for row in rows} == {"–"}
    assert "Not all open windows are here" in found.text and "data-follows" not in found.root.all("body")[0].attributes
    assert window.status == 200 and len(window.table("Panes, as they were emitted")) == 1


def link_of(page: Page) -> str:
    """The address behind the `Panes` of the first row."""
    return next(link.attributes["href"] for link in page.main.all("a") if "windows/row" in link.attributes["href"])


def test_windows_that_begin_in_parts_of_a_second_or_overlap_lead_to_their_panes(
    api: ApiServer, viewer: PageClient
) -> None:
    with psycopg.connect(api.database_url, autocommit=True) as connection:
        connection.execute(
            "INSERT INTO plant.temperature_1m SELECT (jsonb_populate_record(NULL::plant.temperature_1m, to_jsonb(t) ||"
            " jsonb_build_object('device', 'overlap', 'window_start', at, 'window_end', at + interval '1 hour'))).*"
            " FROM (SELECT * FROM plant.temperature_1m LIMIT 1) AS t, generate_series("
            " timestamptz '2020-01-01 00:00:00.25+00', '2020-01-01 00:10:00+00', '2.5 s') AS at"
        )
        try:
            found = viewer.get(f"{WINDOWS}?key.device=overlap&to=2020-01-01T00:00:02Z")
            window = viewer.get(link_of(found))
        finally:
            connection.execute("DELETE FROM plant.temperature_1m WHERE device = 'overlap'")

    assert [row["Window"] for row in rows_of(found)] == ["2020-01-01 00:00:00.25 UTC"]
    assert window.status == 200 and len(window.table("Panes, as they were emitted")) == 1


def test_rows_are_chosen_by_key_and_time(api: ApiServer, viewer: PageClient) -> None:
    one = rows_of(viewer.get(WINDOWS))[5]
    start = one["Window"].removesuffix(" UTC").replace(" ", "T")

    by_form = rows_of(viewer.get(f"{WINDOWS}?table=temperature_1m&key.device={one['device']}&from={start}&to="))
    by_link = rows_of(viewer.get(f"{WINDOWS}?where=device%3D{one['device']}&from={quote(start + '+00:00')}"))

    assert by_form == by_link
    assert one in by_form
    assert {row["device"] for row in by_form} == {one["device"]}
    assert min(row["Window"] for row in by_form) == one["Window"]


def test_pages_lose_no_row_and_show_none_twice(
    api: ApiServer, viewer: PageClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(windows, "ROWS_MAX", 10)
    admin = Admin(api.database_url)
    (table,) = [one for one in result_tables(admin) if one.name == "temperature_1m"]
    choice = windows.Choice(table, {}, "", "", "", "")
    seen, after = [], ""
    for _ in range(100):
        found, _ = windows._rows(admin, choice, after)
        assert len(found.rows) <= 10
        seen += [(str(row["window_start"]), row["device"]) for row in found.rows]
        if found.next is None:
            break
        after = str(encoded(found.next))
    stored = admin.ask("SELECT window_start, device FROM plant.temperature_1m_status")
    admin.close()

    assert len(seen) == len(set(seen)) > 20
    assert {(str(row["window_start"]), row["device"]) for row in stored} <= set(seen)


@pytest.mark.parametrize(
    "query", ["from=yesterday", "where=nope%3D1", "where=device", "table=nope", "key.n=x", "after=x", "from=0001-01-01"]
)
def test_an_address_that_makes_no_sense_is_refused_in_words(viewer: PageClient, query: str) -> None:
    page = viewer.get(f"{WINDOWS}?{query}")

    assert page.status in (200, 400, 404)
    assert (page.status == 200) == query.startswith("from=0001")
    assert page.root.all("h1")


def test_a_window_that_begins_at_the_last_instant_is_not_found(viewer: PageClient) -> None:
    last = "9999-12-31T23:59:59.999999Z"

    page = viewer.get(f"{WINDOWS}/row?table=temperature_1m&from={last}&to={last}")

    assert page.status == 404 and "there is no such window" in page.text


@pytest.mark.parametrize("form", ["csv", "parquet"])
def test_a_download_has_the_rows_of_the_view(api: ApiServer, viewer: PageClient, form: str) -> None:
    answer = viewer.send("GET", f"{WINDOWS}.{form}?table=temperature_1m")
    stored = sql(
        api, "SELECT device, n, mean FROM plant.temperature_1m_status ORDER BY window_start DESC, window_end, device"
    )
    stored = sorted(stored, key=str)

    assert answer.status == 200
    assert answer.headers["Content-Disposition"] == f'attachment; filename="plant.temperature_1m.{form}"'
    if form == "csv":
        found = list(csv.DictReader(io.StringIO(answer.body.decode())))
        rows = [(row["device"], int(row["n"]), float(row["mean"])) for row in found]
    else:
        table = pq.read_table(io.BytesIO(answer.body))
        assert str(table.schema.field("window_start").type) == "timestamp[us, tz=UTC]"
        rows = [(row["device"], row["n"], row["mean"]) for row in table.to_pylist()]
    assert sorted(rows, key=str) == stored


@pytest.mark.parametrize("form", ["csv", "parquet"])
async def test_a_download_reads_page_by_page_up_to_its_bound(form: str) -> None:
    table = DeployedTable("g", "t", "records", "c", {}, {"value": "bigint", "note": "text"})
    row = dict.fromkeys(table.columns, 1) | {
        "note": '=1,"2"\n',
        "event_time": None,
        "emitted_at": None,
        "is_final": True,
    }
    asked: list[tuple[list[str], int]] = []

    async def read(after: list[str], limit: int) -> RowPage:
        asked.append((list(after), limit))
        return RowPage([row] * limit, [str(len(asked))])

    chunks = [chunk async for chunk in WRITERS[form](table, read)]
    body = b"".join(chunks)

    assert sum(limit for _, limit in asked) == ROWS_MAX
    assert asked[:2] == [([], PAGE_ROWS), (["1"], PAGE_ROWS)]
    assert len([chunk for chunk in chunks if chunk]) > ROWS_MAX / PAGE_ROWS / 2
    if form == "csv":
        rows = list(csv.DictReader(io.StringIO(body.decode(), newline="")))
    else:
        rows = pq.read_table(io.BytesIO(body)).slice(0, ROWS_MAX).to_pylist()
    assert len(rows) == ROWS_MAX
    apostrophe = "'" if form == "csv" else ""  # a spreadsheet would compute it
    assert {str(one["note"]) for one in rows} == {apostrophe + row["note"]}


def test_a_window_shows_its_panes(api: ApiServer, viewer: PageClient) -> None:
    page = viewer.get(WINDOWS)
    address = link_of(page)
    window = viewer.get(address)

    assert window.status == 200
    assert figure(window.table("Panes, as they were emitted")[0]["n"]) == figure(rows_of(page)[0]["n"])
    assert viewer.get(address.replace("device%3D", "device%3Dnot-")).status == 404


def test_devices_are_those_of_sql(api: ApiServer, viewer: PageClient) -> None:
    page = viewer.get("/graphs/plant/fleet?sort=key&span=7+days")
    (table,) = [one for one in page.root.all("table")]
    names = [one.text for one in table.all("th", scope="row")]
    records = [figure(row.all("td")[7].text) for row in table.all("tr")[1:]]
    stored = sql(
        api, 'SELECT device, sum(records)::int FROM millpy.fleet GROUP BY device, key ORDER BY key COLLATE "C"'
    )

    assert list(zip(names, records, strict=True)) == stored
    assert len(table.all("svg")) >= len(names)


def test_a_site_is_a_part_of_a_key_and_never_a_query(viewer: PageClient) -> None:
    everything = viewer.get("/graphs/plant/fleet?sort=key").root.all("th", scope="row")
    first = everything[0].text

    assert [one.text for one in viewer.get(f"/graphs/plant/fleet?site={first}").root.all("th", scope="row")] == [first]
    for site in ("' OR true --", "%", '"'):
        page = viewer.get(f"/graphs/plant/fleet?site={quote(site)}")
        assert (page.status, page.root.all("th", scope="row")) == (200, [])


def test_groups_of_dead_letters_are_those_of_sql(api: ApiServer, viewer: PageClient) -> None:
    groups = viewer.get(LEFT_OUT).table("By reason, the largest first")
    stored = sql(
        api,
        "SELECT reason, computation, stream, state, count(*)::int FROM millpy.dead_letters"
        " GROUP BY 1, 2, 3, 4 ORDER BY 5 DESC, 2, 3, 1, 4",
    )

    assert [
        (row["Reason"], row["Computation"], row["Stream"], row["State"], figure(row["Records"])) for row in groups
    ] == stored


def test_hostile_payloads_are_text(api: ApiServer, viewer: PageClient) -> None:
    ((number,),) = sql(api, "SELECT dead_letter_id FROM millpy.dead_letters WHERE payload_text LIKE '%%<script>%%'")
    for path in (LEFT_OUT, f"{LEFT_OUT}/dead-letters/{number}"):
        page = viewer.get(path)

        assert "<script>alert(1)</script>" in page.main.text
        assert page.main.all("script") == []
        assert not {"\x1b", "\u202e"} & set(page.html)


@pytest.mark.parametrize("path", [LEFT_OUT, f"{LEFT_OUT}?kind=parked", f"{LEFT_OUT}/dead-letters/1", WINDOWS])
def test_a_viewer_has_no_action(viewer: PageClient, path: str) -> None:
    assert [form for form in viewer.get(path).main.all("form") if form.attributes["method"] == "post"] == []


@pytest.mark.parametrize(
    "path", ["dead-letters/replay", "dead-letters/discard", "late-records/replay", "parked", "dead-letters/1/compare",
             "dead-letters/1/replay"]
)  # fmt: skip
def test_no_action_without_the_role_and_the_token_of_the_form(
    viewer: PageClient, operator: PageClient, path: str
) -> None:
    fields = {"ids": "1", "computation": "x", "key": "y", "payload": "z"}

    assert viewer.send("POST", f"{LEFT_OUT}/{path}", {**fields, "csrf": viewer.csrf}).status == 403
    assert operator.send("POST", f"{LEFT_OUT}/{path}", fields).status == 403
    assert operator.send("POST", f"{LEFT_OUT}/{path}", {**fields, "csrf": viewer.csrf}).status == 403


@pytest.mark.parametrize("ids", [[], ["x"], ["-1"], ["1" * 19], ["١"]])
def test_records_have_to_be_numbers(operator: PageClient, ids: list[str]) -> None:
    answer = operator.send("POST", f"{LEFT_OUT}/dead-letters/replay", {"ids": ids, "csrf": operator.csrf})

    assert answer.status == 422


def test_an_action_without_script_leads_back(api: ApiServer, operator: PageClient) -> None:
    ((number,), *_) = sql(api, "SELECT dead_letter_id FROM millpy.dead_letters WHERE state = 'open' ORDER BY 1")
    fields = {"ids": [number], "csrf": operator.csrf, "why": HOSTILE}
    done = [Page(operator.send("POST", f"{LEFT_OUT}/dead-letters/replay", fields)) for _ in range(2)]

    assert "1 of 1 dead letters requested for replay." in done[0].main.text
    assert "0 of 1 dead letters requested for replay. The others were not open." in done[1].main.text
    assert done[0].main.all("a")[-1].attributes["href"] == f"{LEFT_OUT}?kind=dead-letters"
    ((by, why),) = sql(api, "SELECT requested_by, why FROM millpy.dead_letters WHERE dead_letter_id = %s", number)
    assert (by, why) == ("olga", HOSTILE)


def edited_in(page: Page) -> str:
    """The payload in the field of a page, as a browser sends it back."""
    (field,) = page.main.all("textarea")
    return "".join(part for part in field.children if isinstance(part, str)).removeprefix("\n")


def test_a_corrected_payload_is_stored_byte_for_byte(api: ApiServer, operator: PageClient) -> None:
    numbers = [one for (one,) in sql(api, "SELECT dead_letter_id FROM millpy.dead_letters WHERE state = 'open'")]
    path = f"{LEFT_OUT}/dead-letters/{numbers[0]}"
    page = operator.get(path)
    (encoding,) = [one for one in page.main.all("option") if "selected" in one.attributes]
    text = edited_in(page)
    fields = {"payload": text, "encoding": encoding.text, "csrf": operator.csrf}

    same = Page(operator.send("POST", f"{path}/compare", fields))
    other = Page(operator.send("POST", f"{path}/compare", {**fields, "payload": "{\r\n}", "encoding": "text"}))

    assert "The payload is the same." in same.main.text
    assert other.main.all("del")
    invisible = Page(operator.send("POST", f"{path}/compare", {**fields, "payload": INVISIBLE, "encoding": "text"}))
    assert edited_in(invisible) == INVISIBLE, "what is replayed next is what was compared"
    bad = operator.send("POST", f"{path}/compare", {**fields, "payload": "?", "encoding": "base64"})
    assert bad.status == 422
    done = operator.send("POST", f"{path}/replay", {**fields, "payload": "{\r\n}", "encoding": "text"})
    assert done.status == 200
    assert sql(
        api, "SELECT convert_from(corrected, 'UTF8') FROM mill.dead_letters WHERE dead_letter_id = %s", numbers[0]
    ) == [("{\n}",)]


def test_stored_windows_are_those_of_sql(api: ApiServer, viewer: PageClient) -> None:
    page = viewer.get("/graphs/plant/state?computation=temperature_1m")
    device = sql(api, "SELECT device FROM plant.temperature_1m ORDER BY 1 LIMIT 1")[0][0]
    of_key = viewer.get(f"/graphs/plant/state?computation=temperature_1m&key={quote(json.dumps(device))}")
    panes = of_key.table("The newest panes of this key in temperature_1m")
    stored = sql(
        api, "SELECT n FROM plant.temperature_1m WHERE device = %s ORDER BY window_start DESC LIMIT 50", device
    )

    assert page.status == 200
    assert [(figure(row["n"]),) for row in panes] == stored
    assert viewer.get("/graphs/plant/state?computation=nope").status == 400


def test_differences_are_exact_and_bounded() -> None:
    assert difference("a b c", "a x c") == [("same", "a "), ("removed", "b"), ("added", "x"), ("same", " c")]
    lines = "\n".join(f"{n} {n} {n}" for n in range(PIECES_MAX - 1))
    assert difference(lines, lines + "\nmore") is not None
    assert difference(lines * 2, "x") is None
