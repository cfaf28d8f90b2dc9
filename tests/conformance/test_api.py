"""The API of a graph that has run: a real server, a real database."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import psycopg
import pytest

from millpy.admin.queries import Admin
from millpy.admin.tokens import Role, create
from millpy.embedded import EmbeddedPostgres
from tests.api_server import ApiServer, running_api
from tests.commands import millpy
from tests.databases import fresh_database

ROOT = Path(__file__).resolve().parents[2]
HOSTILE = "<script>alert(1)</script>'\"\x1b[31m\u202e; DROP TABLE mill.graphs; --"
PAGED = (
    "partitions", "workers", "watermarks", "accounting", "backlog", "sinks", "joins", "lookups", "archives", "audits",
    "sources", "silent-devices", "disorder", "site-watermarks", "injections", "fleet", "events", "dead-letters",
    "late-records", "parked", "refused-messages", "causes", "corrections", "tables/temperature_1m/rows",
    "computations/temperature_1m/open-windows", "computations/temperature_1m/state",
    "computations/temperature_1m/timers",
)  # fmt: skip


def ran(directory: Path, url: str) -> None:
    """Run the example project, with a hostile dead letter, into a database."""
    millpy("init", str(directory))
    feed = directory / "readings.ndjson"
    bad = json.dumps({"id": "x", "device": HOSTILE, "at": "yesterday", "temperature": 1})
    feed.write_text(feed.read_text() + f"{bad}\n")
    environment = {**os.environ, "MILLPY_DATABASE_URL": url, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "millpy", "run", "graph.py"]
    subprocess.run(command, cwd=directory, env=environment, check=True, capture_output=True)


@pytest.fixture(scope="module")
def api(postgres: EmbeddedPostgres, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    with fresh_database(postgres) as name:
        url = postgres.url(name)
        ran(tmp_path_factory.mktemp("api") / "plant", url)
        with running_api(url) as server:
            yield server


@pytest.fixture(scope="module")
def viewer(api: ApiServer) -> str:
    return api.token("vera")


@pytest.fixture(scope="module")
def operator(api: ApiServer) -> str:
    return api.token("olga", Role.OPERATOR)


def test_graphs_are_those_of_the_view(api: ApiServer, viewer: str) -> None:
    (graph,) = api.get("/v1/graphs", viewer).rows

    assert (graph["graph"], graph["generation"], graph["current"]) == ("plant", 1, True)


def test_a_graph_is_described_by_nodes_edges_and_types(api: ApiServer, viewer: str) -> None:
    found = api.get("/v1/graphs/plant", viewer).json

    assert [(node["id"], node["kind"]) for node in found["nodes"]] == [
        ("readings", "injector"), ("temperature_1m", "stage"), ("table:temperature_1m", "table")
    ]  # fmt: skip
    assert [(edge["from"], edge["to"]) for edge in found["edges"]] == [
        ("readings", "temperature_1m"), ("temperature_1m", "table:temperature_1m")
    ]  # fmt: skip
    assert ["temperature", "float"] in found["streams"]["readings"]["fields"]


@pytest.mark.parametrize("path", PAGED)
def test_every_list_answers_in_pages(api: ApiServer, viewer: str, path: str) -> None:
    rows = api.get(f"/v1/graphs/plant/{path}", viewer, limit=1000).rows
    seen, after = [], ""
    for _ in range(10):
        page = api.get(f"/v1/graphs/plant/{path}", viewer, limit=3, after=after).json
        seen += page["rows"]
        after = page["next"]
        if after is None:
            break

    moving = ("lag", "silent_for", "rate")
    assert [without(row, moving) for row in seen] == [without(row, moving) for row in rows[: len(seen)]]
    assert len(seen) == min(len(rows), 30)


def without(row: dict[str, object], names: tuple[str, ...]) -> dict[str, object]:
    return {name: value for name, value in row.items() if name not in names}


@pytest.mark.parametrize("path", PAGED)
def test_a_graph_that_is_not_deployed_is_not_found(api: ApiServer, viewer: str, path: str) -> None:
    answer = api.get(f"/v1/graphs/nope/{path}", viewer)

    assert (answer.status, answer.headers["Content-Type"]) == (404, "application/problem+json")


def test_figures_are_those_of_sql(api: ApiServer, viewer: str) -> None:
    accounts = api.get("/v1/graphs/plant/accounting", viewer).rows
    rows = api.get("/v1/graphs/plant/tables/temperature_1m/rows", viewer, limit=1000).rows
    with psycopg.connect(api.database_url) as connection:
        ((injected, balanced),) = connection.execute(
            "SELECT sum(injected), bool_and(balanced) FROM millpy.accounting"
        ).fetchall()
        ((count, total),) = connection.execute("SELECT count(*), sum(n) FROM plant.temperature_1m").fetchall()

    assert sum(row["injected"] or 0 for row in accounts) == injected == 373
    assert all(row["balanced"] for row in accounts) is balanced is True
    assert (len(rows), sum(row["n"] for row in rows)) == (count, total)
    assert [row["window_start"] for row in rows] == sorted((row["window_start"] for row in rows), reverse=True)


@pytest.mark.parametrize(
    ("watermark", "floor"),
    [("at", "-4611686018427387904"), ("-4611686018427387904", "at"), ("at - 3600000000", "at"), ("at", "at - 1")],
    ids=["watermark", "shorter lateness", "floor ahead", "watermark ahead"],
)
def test_final_rows_are_those_that_the_view_calls_final(
    api: ApiServer, viewer: str, watermark: str, floor: str
) -> None:
    """One interval has passed the middle of the table, or had before its lateness was changed; the others nothing."""
    with psycopg.connect(api.database_url, autocommit=True) as connection:
        connection.execute(
            "CREATE TEMP TABLE kept AS SELECT interval_id, input_watermark, horizon_floor FROM mill.intervals"
        )
        connection.execute("UPDATE mill.intervals SET input_watermark = -4611686018427387904")
        connection.execute(
            f"UPDATE mill.intervals SET input_watermark = {watermark}, horizon_floor = {floor}"
            " FROM (SELECT interval_id AS own, mill.instant(min(window_start)"
            "         + (max(window_end) - min(window_start)) / 2) AS at"
            "         FROM plant.temperature_1m GROUP BY interval_id ORDER BY count(*) DESC LIMIT 1) AS f"
            " WHERE interval_id = own"
        )
        found = api.get("/v1/graphs/plant/tables/temperature_1m/rows", viewer, final="true", limit=1_000).rows
        wanted = connection.execute("SELECT count(*) FROM plant.temperature_1m_status WHERE is_final").fetchone()
        connection.execute(
            "UPDATE mill.intervals AS i SET input_watermark = k.input_watermark, horizon_floor = k.horizon_floor"
            " FROM kept AS k WHERE k.interval_id = i.interval_id"
        )

    assert wanted is not None and 0 < wanted[0] < 1_000
    assert len(found) == wanted[0]


def test_rows_are_chosen_by_key_time_and_whether_they_are_final(api: ApiServer, viewer: str) -> None:
    path = "/v1/graphs/plant/tables/temperature_1m/rows"
    everything = api.get(path, viewer, limit=1000).rows
    one = everything[len(everything) // 2]

    found = api.get(path, viewer, where=f"device={one['device']}", from_=one["window_start"], to=one["window_end"]).rows

    assert found == [one]
    assert api.get(path, viewer, final="false").rows == [row for row in everything if not row["is_final"]][:100]
    assert api.get(path, viewer, where="nope=1").status == 400
    assert api.get(path, viewer, where="n=x").status == 400
    assert api.get(path, viewer, from_="2026-01-01T00:00:00+00:60").status == 400


def test_hostile_text_is_plain_json_text(api: ApiServer, viewer: str) -> None:
    letters = api.get("/v1/graphs/plant/dead-letters", viewer).rows
    (letter,) = [row for row in letters if "<script>" in row["payload_text"]]
    whole = api.get(f"/v1/graphs/plant/dead-letters/{letter['dead_letter_id']}", viewer)

    assert json.loads(letter["payload_text"])["device"] == HOSTILE
    assert whole.headers["Content-Type"] == "application/json"
    assert whole.headers["X-Content-Type-Options"] == "nosniff"
    assert not whole.body.translate(None, bytes(range(32, 127)))
    assert api.get("/v1/graphs/plant/dead-letters/by-reason", viewer).rows[0]["records"] >= 1


def test_a_watermark_is_explained(api: ApiServer, viewer: str) -> None:
    steps = api.get("/v1/graphs/plant/watermarks/temperature_1m/explanation", viewer).rows

    assert [step["step"] for step in steps] == list(range(1, len(steps) + 1))
    assert api.get("/v1/graphs/plant/watermarks/nope/explanation", viewer).status in (400, 404)


def test_events_are_sentences(api: ApiServer, viewer: str) -> None:
    kinds = {row["kind"]: row for row in api.get("/v1/graphs/plant/events", viewer).rows}

    assert kinds["claimed"]["happened"].startswith("worker ")
    assert {row["kind"] for row in api.get("/v1/graphs/plant/events", viewer, kind="claimed").rows} == {"claimed"}


def test_the_doctor_answers(api: ApiServer, viewer: str) -> None:
    found = {row["check"] for row in api.get("/v1/doctor", viewer).rows}

    assert "clocks" in found or len(found) > 5


def test_a_replay_and_a_discard_are_requested_once_and_noted(api: ApiServer, operator: str) -> None:
    path = "/v1/graphs/plant/dead-letters"
    number = api.get(path, operator, limit=1).rows[0]["dead_letter_id"]

    done = [api.post(f"{path}/replay", operator, {"ids": [number], "why": HOSTILE}).json for _ in range(2)]
    gone = api.post(f"{path}/discard", operator, {"ids": [number]}).json
    events = api.get("/v1/graphs/plant/events", operator, kind="requested").rows

    assert done == [{"requested": 1}, {"requested": 0}]
    assert gone == {"discarded": 1}
    assert [(row["detail"]["by"], row["detail"]["action"], row["detail"]["ids"]) for row in events] == [
        ("olga", "discard", [number]), ("olga", "replay", [number])
    ]  # fmt: skip
    letter = api.get(f"{path}/{number}", operator).json
    assert (letter["state"], letter["requested_by"]) == ("discarded", "olga")


def test_an_action_on_another_graph_finds_nothing(api: ApiServer, operator: str) -> None:
    assert api.post("/v1/graphs/nope/dead-letters/replay", operator, {"ids": [1]}).status == 404


def test_a_paused_source_is_resumed_and_noted(api: ApiServer, operator: str) -> None:
    with psycopg.connect(api.database_url, autocommit=True) as connection:
        connection.execute(
            "INSERT INTO mill.pauses (interval_id, bundle, reason)"
            " SELECT interval_id, 1, 'too much' FROM mill.places WHERE kind = 'injector'"
        )

    resumed = api.post("/v1/graphs/plant/sources/readings/resume", operator).json

    assert resumed == {"resumed": 1}
    assert api.get("/v1/graphs/plant/events", operator, kind="resumed").rows[0]["detail"]["by"] == "olga"


def test_a_live_worker_is_requested_to_drain_once_and_noted(api: ApiServer, operator: str, viewer: str) -> None:
    live, dead = a_worker(api, "1 hour"), a_worker(api, "-1 hour")
    path = "/v1/graphs/plant/workers"

    done = [api.post(f"{path}/{live}/drain", operator, {"why": HOSTILE}).json for _ in range(2)]
    late, unknown = api.post(f"{path}/{dead}/drain", operator), api.post(f"{path}/{uuid4()}/drain", operator)
    (event,) = api.get("/v1/graphs/plant/events", operator, kind="drain_requested").rows
    draining = {row["worker_id"]: row["drain_requested_at"] for row in api.get(path, viewer).rows}

    assert done == [{"requested": 1}, {"requested": 0}]
    assert (late.status, unknown.status) == (409, 404)
    assert "its lease has expired" in late.json["detail"]
    assert (event["detail"]["by"], event["detail"]["why"], event["detail"]["worker"]) == ("olga", HOSTILE, live)
    assert event["happened"] == f"olga requested that worker {live[:8]} drains: {HOSTILE}"
    assert draining[live] is not None and draining[dead] is None
    assert api.post(f"{path}/{live}/drain", viewer).status == 403
    assert api.post(f"{path}/x/drain", operator).status == 422
    assert api.post(f"/v1/graphs/nope/workers/{live}/drain", operator).status == 404
    forget_workers(api)


def test_a_query_of_spark_is_not_drained(api: ApiServer, operator: str) -> None:
    query = a_worker(api, "1 hour", "spark")

    answer = api.post(f"/v1/graphs/plant/workers/{query}/drain", operator)
    forget_workers(api)

    assert (answer.status, answer.json["hint"]) == (409, "stop the query")


def a_worker(api: ApiServer, lease: str, engine: str = "workers") -> str:
    """Register a worker of the graph whose lease ends in a while, or has ended."""
    with psycopg.connect(api.database_url, autocommit=True) as connection:
        (row,) = connection.execute(
            "INSERT INTO mill.workers (worker_id, graph_id, graph_version, computations, engine, host, pid,"
            " lease_deadline, lease_s) SELECT gen_random_uuid(), graph_id, version, '{}', %s, 'elsewhere', 1,"
            " clock_timestamp() + %s::interval, 3600 FROM mill.graphs RETURNING worker_id::text",
            [engine, lease],
        ).fetchall()
    return str(row[0])


def forget_workers(api: ApiServer) -> None:
    """Forget all workers, and that they were requested to drain."""
    with psycopg.connect(api.database_url, autocommit=True) as connection:
        connection.execute("DELETE FROM mill.workers")
        connection.execute("DELETE FROM mill.events WHERE kind = 'drain_requested'")


def test_a_switch_to_a_generation_that_does_not_exist_is_refused(api: ApiServer, operator: str) -> None:
    admin = create(Admin(api.database_url), "ada", Role.ADMIN)[1]

    assert api.post("/v1/graphs/plant/switch", operator, {"generation": 2}).status == 403
    assert api.post("/v1/graphs/plant/switch", admin, {"generation": 2}).status == 400
    assert api.post("/v1/graphs/plant/switch", admin, {"generation": 1}).json["switched"] is False


def test_a_switch_is_made_by_an_admin_and_noted(api: ApiServer) -> None:
    admin = api.token("Ada \\ L.", Role.ADMIN)
    with psycopg.connect(api.database_url, autocommit=True) as connection:
        connection.execute(
            "INSERT INTO mill.graphs (name, family, generation, description)"
            " SELECT 'plant_2', 'plant', 2, description FROM mill.graphs"
        )
    switched = api.post("/v1/graphs/plant/switch", admin, {"generation": 2, "anyway": True})
    back = api.post("/v1/graphs/plant/switch", admin, {"generation": 1, "anyway": True})
    noted = api.get("/v1/graphs/plant/events", admin, kind="switched").rows
    with psycopg.connect(api.database_url, autocommit=True) as connection:
        connection.execute("DELETE FROM mill.graphs WHERE generation = 2")

    assert (switched.status, switched.json["before"]) == (200, 1), switched.body
    assert (back.status, back.json["before"]) == (200, 2), back.body
    assert [(row["detail"]["to"], row["detail"]["by"]) for row in noted] == [(1, "Ada \\ L."), (2, "Ada \\ L.")]


def test_the_openapi_document_has_every_path_and_its_bounds(api: ApiServer) -> None:
    document = api.get("/v1/openapi.json").json

    assert len(document["paths"]) > 40
    for path, methods in document["paths"].items():
        for found in methods.values():
            for parameter in found.get("parameters", []):
                assert set(parameter["schema"]) - {"type", "title", "default"}, (path, parameter)
