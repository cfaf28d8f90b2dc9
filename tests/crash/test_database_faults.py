"""A database that ends sessions, is not there, or has no room or time: tried again until it has."""

from __future__ import annotations

import pytest

from tests.crash.cases import find
from tests.crash.conftest import Survives


def test_sessions_terminated_at_random(survives: Survives) -> None:
    survives(find("pg_terminate_backend at random", "two workers"))


def test_worker_started_while_the_database_is_down_waits_for_it(survives: Survives) -> None:
    survives(find("worker started while PostgreSQL is down"))


@pytest.mark.parametrize("what", ["tables", "tables and WAL"])
def test_disk_full(survives: Survives, what: str) -> None:
    survives(find("disk full", what))


def test_statement_timeout(survives: Survives) -> None:
    survives(find("statement timeout", "headers locked"))


def test_deadlock(survives: Survives) -> None:
    survives(find("deadlock"))
