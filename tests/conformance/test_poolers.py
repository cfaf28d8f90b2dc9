"""Workers, queries and `millpy doctor` behind a real pgbouncer, in each of its modes."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from typer.testing import CliRunner

from millpy.admin.diagnosis import read_facts
from millpy.admin.doctor import examine
from millpy.admin.queries import Admin
from millpy.cli.app import app
from millpy.clock import SystemClock
from millpy.embedded import EmbeddedPostgres
from millpy.errors import ConfigError, StoreUnavailableError
from millpy.limits import Limits
from millpy.model.finding import Severity
from millpy.store.postgres import pooler_check as pooling
from millpy.store.postgres.connection import ConnectionSettings
from millpy.store.postgres.store import PostgresStore
from tests.databases import fresh_database
from tests.pgbouncer import Pgbouncer, program

pytestmark = pytest.mark.skipif(program() is None, reason="pgbouncer is not installed")
Pooled = Callable[..., str]
GRAPH = """
import msgspec
from datetime import datetime
from millpy import Count, EventTime, File, FixedWindows, Graph, seconds

class Reading(msgspec.Struct):
    device: str
    at: datetime

graph = Graph("plant")
event_time = EventTime("at", max_disorder=seconds(2))
readings = graph.inject("readings", File("readings.ndjson"), schema=Reading, event_time=event_time)
readings.key_by("device").window(FixedWindows(seconds(10))).aggregate(n=Count()).to_table("counts")
"""


@pytest.fixture
def pooled(postgres: EmbeddedPostgres, tmp_path: Path) -> Iterator[Pooled]:
    """Yield the URL of a fresh, migrated database behind a pool with a mode and a size."""
    with ExitStack() as stack:

        def made(mode: str, size: int = 20) -> str:
            database = stack.enter_context(fresh_database(postgres))
            pool = Pgbouncer(tmp_path / "pool", postgres.tcp_url(), mode, size)
            return stack.enter_context(pool).url(database)

        yield made


@pytest.fixture
def graph(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """File of a graph whose source ends."""
    lines = [{"device": f"d{n % 3}", "at": f"2026-11-21T08:{n // 60:02}:{n % 60:02}Z"} for n in range(600)]
    (tmp_path / "readings.ndjson").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "plant.py").write_text(GRAPH)
    monkeypatch.chdir(tmp_path)
    return "plant.py"


def pooler(url: str) -> tuple[Severity, str]:
    (found,) = [f for f in examine(read_facts(url, SystemClock()), Limits()) if f.check == "pooler"]
    return found.severity, found.found


@pytest.mark.parametrize(("mode", "size"), [("transaction", 20), ("transaction", 1), ("statement", 20)])
async def test_a_worker_refuses_a_pool_that_shares_its_connections(pooled: Pooled, mode: str, size: int) -> None:
    # Its `synchronous_commit = off` of one lane would be that of the next one's commit.
    with pytest.raises(ConfigError, match="shares a worker's connections") as refused:
        async with PostgresStore(pooled(mode, size)):
            pass

    assert "session mode" in refused.value.hint


@pytest.mark.parametrize(("mode", "size"), [("transaction", 20), ("transaction", 1), ("statement", 20)])
def test_the_doctor_detects_a_shared_pool_with_one_connection(pooled: Pooled, mode: str, size: int) -> None:
    severity, found = pooler(pooled(mode, size))

    assert severity is Severity.ERROR
    assert "transaction" in found


def test_queries_work_repeatedly_through_a_transaction_pool(pooled: Pooled) -> None:
    url = pooled("transaction", 2)
    admin = Admin(url, statement_s_max=5)

    for _ in range(8):  # psycopg would prepare a statement after five
        assert admin.graphs() == []
    (settings,) = admin.ask("SELECT current_setting('timezone') AS zone, current_setting('statement_timeout') AS most")
    result = CliRunner().invoke(app, ["status", "--json", "--database", url])

    assert settings == {"zone": "UTC", "most": "5s"}
    assert result.exit_code == 0, result.output


def test_a_statement_pool_is_refused_with_a_hint(pooled: Pooled) -> None:
    result = CliRunner().invoke(app, ["status", "--database", pooled("statement")])

    assert result.exit_code == 2
    assert "behind a pooler in statement mode" in result.output


def test_a_graph_finishes_behind_a_session_pool(pooled: Pooled, graph: str) -> None:
    url = pooled("session")

    result = CliRunner().invoke(app, ["run", graph, "--database", url])

    assert result.exit_code == 0, result.output
    ((total,),) = [row.values() for row in Admin(url).ask("SELECT sum(n) AS n FROM plant.counts")]
    assert total == 600
    assert pooler(url)[0] is Severity.NOTE


def test_the_doctor_reports_a_pool_too_small_for_a_worker(pooled: Pooled, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pooling, "ANSWER_S", 1.0)

    severity, found = pooler(pooled("session", 3))

    assert severity is Severity.WARNING
    assert "gave only 3 connections" in found


async def test_an_exhausted_pool_is_named_as_a_possible_reason(pooled: Pooled, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pooling, "ANSWER_S", 0.2)
    settings = ConnectionSettings(statement_s=0.5)

    async with PostgresStore(pooled("session", 1), settings=settings) as store:
        with pytest.raises(StoreUnavailableError, match="accepted the connection but does not answer") as unanswered:
            await store.now_us()

    assert "pool" in unanswered.value.hint


def test_a_parameter_that_a_pool_rejects_is_named(pooled: Pooled, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PGOPTIONS", "-c geqo=off")

    result = CliRunner().invoke(app, ["status", "--database", pooled("session")])

    assert result.exit_code == 2
    assert "does not accept the parameter 'options'" in result.output
