"""Audited hours: remembered once, and one event for each difference, however often an audit is repeated."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psycopg
import pytest

from millpy.admin.audits import HOUR_US, record_hours
from millpy.admin.queries import Admin
from millpy.process.exit import EXIT_FAILED

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
            with ThreadPoolExecutor(4) as pool:
                for _ in range(4):
                    pool.submit(record_hours, admin, "a", "sums", hours, engine="native", by_service=True)
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


def test_an_audit_ends_with_the_auditor_that_started_it() -> None:
    code = "import time; from millpy.cli.auditor import end_with_auditor; end_with_auditor(); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE) as audit:
        with pytest.raises(subprocess.TimeoutExpired):
            audit.wait(1.5)
        assert audit.stdin is not None
        audit.stdin.close()

        assert audit.wait(20) == EXIT_FAILED
