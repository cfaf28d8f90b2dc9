"""Audited hours: remembered once, and one event for each difference, however often an audit is repeated."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from threading import Timer
from typing import Any

import psycopg
import pytest
from psycopg import sql
from psycopg.conninfo import make_conninfo

from millpy.admin.audits import HOUR_US, closed_hours, record_hours
from millpy.admin.diagnosis import read_facts
from millpy.admin.queries import Admin
from millpy.cli.auditor import reason_of
from millpy.cli.graph_audit import GraphAudit
from millpy.clock import SystemClock
from millpy.embedded import EmbeddedPostgres
from millpy.errors import ConfigError, MillError, TableSwitchedError, UsageError
from millpy.model.deployment import GraphSpec
from millpy.process.exit import EXIT_FAILED
from millpy.store.postgres.store import PostgresStore
from tests.conformance.store_builders import a_graph

FALSE = {"kind": "changed", "row": {"device": "dev-1"}, "expected": {"n": 1}, "stored": {"n": 2}}
OTHER = FALSE | {"row": {"device": "dev-2"}}


def hour(number: int, *examples: dict[str, Any]) -> dict[str, Any]:
    return {"hour": number * HOUR_US, "rows": 9, "differences": len(examples), "uncertain": 0, "examples": examples}


def test_a_difference_is_one_event_until_it_is_repaired_or_another_one(database_url: str) -> None:
    admin = Admin(database_url)
    with psycopg.connect(database_url, autocommit=True) as connection:
        connection.execute("INSERT INTO mill.graphs (name, family, generation, description) VALUES ('a', 'a', 1, '{}')")

        def events(*hours: dict[str, Any]) -> list[tuple[int, int]]:
            """Record these hours from four auditors at once; return the events that are new."""
            before = connection.execute("SELECT coalesce(max(event_id), 0) FROM mill.events").fetchone()
            record = partial(record_hours, admin, "a", "sums", hours, engine="native", by_service=True)
            with ThreadPoolExecutor(4) as pool:
                assert [found.result() for found in [pool.submit(record) for _ in range(4)]] == [len(hours)] * 4
            return connection.execute(
                "SELECT (detail->'differences')::int, (detail->'hours')::int FROM mill.events"
                " WHERE event_id > %s AND kind = 'audit_differs'",
                before,
            ).fetchall()

        assert events(hour(1), hour(2)) == []
        assert events(hour(1), hour(2, FALSE), hour(3, FALSE, OTHER)) == [(3, 2)]
        assert events(hour(2, FALSE), hour(3, FALSE, OTHER)) == []
        assert events(hour(2, OTHER), hour(3, FALSE, OTHER)) == [(1, 1)]
        assert events(hour(2), hour(3)) == []
        assert events(hour(2, OTHER)) == [(1, 1)]
        remembered = connection.execute("SELECT hour, differences FROM mill.audits ORDER BY hour").fetchall()

    assert remembered == [(HOUR_US, 0), (2 * HOUR_US, 1), (3 * HOUR_US, 0)]


def test_only_a_service_is_behind_with_its_audits(database_url: str) -> None:
    asyncio.run(deploy(database_url, a_graph()))
    with psycopg.connect(database_url, autocommit=True) as connection:
        connection.execute("UPDATE mill.intervals SET low_watermark = %s", [10 * HOUR_US])

    def behind(number: int, *, by_service: bool) -> float | None:
        record_hours(Admin(database_url), "factory", "sums_1m", [hour(number)], engine="native", by_service=by_service)
        (row,) = read_facts(database_url, SystemClock()).audits
        return row["behind_s"]  # type: ignore[no-any-return]

    lateness_s = a_graph().tables[0].allowed_lateness_us / 1e6
    assert behind(2, by_service=False) is None
    assert behind(3, by_service=True) == 6 * 3_600 - lateness_s
    assert behind(5, by_service=False) == 6 * 3_600 - lateness_s


def test_an_auditor_begins_where_the_archive_does(database_url: str) -> None:
    minute, spec = 60_000_000, a_graph()
    asyncio.run(deploy(database_url, spec))
    with psycopg.connect(database_url, autocommit=True) as connection:

        def store(window_end: int) -> None:
            connection.execute(
                "INSERT INTO factory.sums_1m SELECT 'd', to_timestamp(%s), to_timestamp(%s), 1, 'x', 0, 'on_time', 0,"
                " now(), 0, 0",
                [window_end / 1e6 - 60, window_end / 1e6],
            )

        def span() -> tuple[float, ...] | None:
            found = closed_hours(Admin(database_url), "factory", spec.tables[0], reach_us=minute, archives=["sums"])
            return found and tuple(at / HOUR_US for at in found)

        connection.execute("UPDATE mill.intervals SET low_watermark = %s", [13 * HOUR_US + 1])
        connection.execute(
            "INSERT INTO mill.archive_files (interval_id, bundle, path, records, bytes, event_time_lo, event_time_hi,"
            " partitions) SELECT min(interval_id), 1, 'p', 1, 1, %s, %s, '{}' FROM mill.intervals",
            [10 * HOUR_US, 12 * HOUR_US],
        )
        assert span() == (10, 13)
        store(10 * HOUR_US + minute)
        assert span() == (10, 13)
        store(9 * HOUR_US)  # from before there was an archive, or its retention has deleted the records
        assert span() == (11, 13)


def test_an_auditor_reports_the_same_error_in_the_same_words() -> None:
    def written(at: str) -> str:
        error = json.dumps({"error": {"kind": "ConfigError", "message": "there is no table a.sums", "hint": "deploy"}})
        return f"26/11/24 {at} WARN TaskSetManager: Lost task 0.0\n{error}\n"

    first, second = (reason_of(written(at)) for at in ("01:10:17", "01:10:47"))

    assert str(first) == str(second)
    assert (first.message, first.hint) == ("there is no table a.sums", "deploy")
    assert reason_of("Killed").message == "Killed"
    assert reason_of('{"error": 1}').message == '{"error": 1}'
    assert reason_of("").message == "the audit was killed"


def test_an_audit_ends_with_the_auditor_that_started_it() -> None:
    code = "import time; from millpy.cli.auditor import end_with_auditor; end_with_auditor(); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE) as audit:
        with pytest.raises(subprocess.TimeoutExpired):
            audit.wait(1.5)
        assert audit.stdin is not None
        audit.stdin.close()

        assert audit.wait(20) == EXIT_FAILED


async def deploy(url: str, spec: GraphSpec) -> None:
    async with PostgresStore(url) as store:
        await store.deploy(spec)


def test_an_audit_that_would_find_what_is_no_difference_is_refused(
    database_url: str, postgres: EmbeddedPostgres
) -> None:
    spec = a_graph()
    sums, _ = spec.tables
    asyncio.run(deploy(database_url, spec))
    with (
        psycopg.connect(database_url, autocommit=True) as connection,
        psycopg.connect(postgres.url(), autocommit=True) as other,
    ):
        name = sql.Identifier(connection.info.dbname)

        def refusal(spec: GraphSpec, *statements: str, options: str = "") -> str:
            """Run statements while tables are audited; return why the audit is refused."""
            try:
                with GraphAudit(Admin(make_conninfo(database_url, options=options)), spec).unchanged([sums]):
                    for statement in statements:
                        connection.execute(statement)
            except (ConfigError, TableSwitchedError, UsageError) as error:
                return f"{type(error).__name__}: {error.message}"
            return ""

        def allow(connections: bool) -> None:
            other.execute(sql.SQL("ALTER DATABASE {} ALLOW_CONNECTIONS {}").format(name, connections))

        assert refusal(spec) == ""
        assert refusal(replace(spec, tables=(sums,))) == ""  # a file that lacks what a live change has added
        otherwise = replace(spec.subscriptions[0], key_fields=("room",))
        found = refusal(replace(spec, subscriptions=(otherwise, *spec.subscriptions[1:])))
        assert found.startswith("UsageError: factory is not deployed as in the file: sums: the key of readings changed")
        renamed, back = "ALTER TABLE factory.{} RENAME TO {}".format, "CREATE TABLE factory.sums_1m (LIKE factory.old)"
        gone = "TableSwitchedError: factory.sums_1m was switched to another table, or dropped, while it was audited"
        assert refusal(spec, renamed("sums_1m", "old"), back) == gone
        assert refusal(spec, "DROP TABLE factory.sums_1m") == gone
        assert refusal(spec) == "ConfigError: there is no table factory.sums_1m"
        connection.execute(renamed("old", "sums_1m"))
        connection.execute("ALTER TABLE factory.sums_1m RENAME total TO sum")
        assert refusal(spec) == "ConfigError: factory.sums_1m has no column total"
        connection.execute("ALTER TABLE factory.sums_1m RENAME sum TO total")
        partial_role = f"audits_{connection.info.backend_pid}"
        connection.execute(
            f"CREATE ROLE {partial_role}; GRANT pg_read_all_data TO {partial_role};"
            " ALTER TABLE factory.sums_1m ENABLE ROW LEVEL SECURITY"
        )
        found = refusal(spec, options=f"-c role={partial_role}")
        connection.execute(f"DROP ROLE {partial_role}")
        assert found == "ConfigError: row-level security hides rows of factory.sums_1m from this role"

        with GraphAudit(Admin(database_url), spec).unchanged([sums]):
            allow(False)
            with pytest.raises(MillError):
                Admin(database_url).graphs()
            Timer(0.5, allow, [True]).start()  # a server that restarts: what was compared is not lost
        assert Admin(database_url).graphs() == ["factory"]
