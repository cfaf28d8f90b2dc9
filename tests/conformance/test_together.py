"""Statements of one transaction of `Admin`: under one role whatever fails, and nothing of it stays."""

from __future__ import annotations

from collections.abc import Iterator

import psycopg
import pytest

from millpy.admin.queries import Admin
from millpy.errors import MillError

ROLE = "of_together"
ASKED = (
    "SELECT current_user::text AS role, pg_backend_pid() AS pid, now() AS began, current_setting('timezone') AS zone"
)


@pytest.fixture
def admin(database_url: str) -> Iterator[Admin]:
    with psycopg.connect(database_url, autocommit=True) as connection:
        connection.execute(f"CREATE ROLE {ROLE}")
        made = Admin(database_url, statement_s_max=5.0, connections_max=1)
        try:
            yield made
        finally:
            made.close()
            connection.execute(f"DROP ROLE {ROLE}")


def test_statements_share_a_transaction_and_its_role(admin: Admin) -> None:
    with admin.acting_as(ROLE).together() as connected:
        first, second = connected.ask(ASKED)[0], connected.ask(ASKED)[0]

    assert first == second and (first["role"], first["zone"]) == (ROLE, "UTC")


def test_an_error_ends_the_transaction_and_not_the_role(admin: Admin) -> None:
    with admin.acting_as(ROLE).together() as connected:
        before = connected.ask(ASKED)[0]
        for _ in range(2):
            with pytest.raises(MillError):
                connected.ask("SELECT 1 / 0")
        after = connected.ask(ASKED)[0]

    assert (after["role"], after["pid"], after["zone"]) == (ROLE, before["pid"], "UTC")
    assert after["began"] > before["began"]


@pytest.mark.parametrize("statement", [ASKED, "SELECT 1 / 0"])
def test_the_connection_is_the_logins_again(admin: Admin, statement: str) -> None:
    login = admin.ask(ASKED)[0]
    try:
        with admin.acting_as(ROLE).together() as connected:
            pid = connected.ask("SELECT pg_backend_pid() AS pid")[0]["pid"]
            connected.ask(statement)
    except MillError:
        pass
    with admin.together() as connected:
        shared = connected.ask(ASKED)[0]

    assert pid == shared["pid"] == admin.ask(ASKED)[0]["pid"] == login["pid"]
    assert shared["role"] == admin.ask(ASKED)[0]["role"] == login["role"] != ROLE


def test_nothing_that_a_statement_changes_stays(admin: Admin) -> None:
    with admin.together() as connected:
        connected.ask("INSERT INTO mill.schemas (encoded, digest) VALUES ('', 'of a test') RETURNING 1 AS n")
        with pytest.raises(AssertionError):
            connected.change("SELECT 1 AS n")
        with pytest.raises(AssertionError):
            connected.acting_as(ROLE)

    assert admin.ask("SELECT FROM mill.schemas WHERE digest = 'of a test'") == []


def test_a_role_that_does_not_exist_reads_nothing(admin: Admin) -> None:
    with admin.acting_as("nobody_at_all").together() as connected:
        for _ in range(2):
            with pytest.raises(MillError):
                connected.ask(ASKED)


def test_a_lost_connection_is_an_error_once(admin: Admin, database_url: str) -> None:
    with admin.together() as connected:
        pid = connected.ask(ASKED)[0]["pid"]
        with psycopg.connect(database_url, autocommit=True) as other:
            other.execute("SELECT pg_terminate_backend(%s, 10000)", [pid])
        with pytest.raises(MillError):
            connected.ask(ASKED)
    with admin.together() as connected:
        assert connected.ask(ASKED)[0]["pid"] != pid
