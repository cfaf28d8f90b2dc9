"""Limits of commands: statements are cancelled, and their connection serves others; no transaction waits for long."""

from __future__ import annotations

import time

import psycopg
import pytest
from sqlalchemy import text

from millpy.admin import tokens
from millpy.admin.queries import Admin
from millpy.errors import SlowQueryError, StoreUnavailableError
from millpy.store.postgres.deployment.migrate import migrate
from millpy.store.postgres.engine import make_engine

LIMIT = "SELECT setting::int AS limit FROM pg_settings WHERE name = 'idle_in_transaction_session_timeout'"


def test_a_statement_is_cancelled_within_its_time_and_the_next_has_the_limit_again(database_url: str) -> None:
    admin = Admin(database_url, statement_s_max=60, connections_max=1)
    began = time.monotonic()
    with pytest.raises(SlowQueryError) as refused:
        admin.limit_to(0.2).ask("SELECT pg_sleep(30)")
    took_s = time.monotonic() - began

    assert refused.value.message == "the query takes too long"
    assert took_s < 20
    assert admin.ask("SHOW statement_timeout") == [{"statement_timeout": "1min"}]
    assert admin.ask("SELECT CAST(pg_sleep(0.5) AS text) AS slept") == [{"slept": ""}]
    admin.close()


def test_no_command_may_idle_in_a_transaction_for_long(database_url: str) -> None:
    # `millpy token create` that was suspended, or whose machine was gone, held its lock against all others for ever.
    migrating = make_engine(database_url)
    with Admin(database_url).transaction() as run, migrating.begin() as connection:
        limits = [run(LIMIT)[0]["limit"], connection.scalar(text(LIMIT))]
    migrating.dispose()

    assert all(0 < limit <= 60_000 for limit in limits), limits


def test_a_lock_that_any_login_can_take_keeps_no_token_from_being_made(database_url: str) -> None:
    admin = Admin(database_url, statement_s_max=10)
    with Admin(database_url).transaction() as run:
        run("SELECT CAST(pg_advisory_xact_lock(hashtext('mill.tokens')) AS text)")
        tokens.create(admin, "mine", tokens.Role.VIEWER)
        assert tokens.revoke(admin, "mine")["name"] == "mine"
    admin.close()


def test_migration_that_was_suspended_for_too_long_says_so(database_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def suspend(
        connection: psycopg.Connection[object],
    ) -> None:  # as the server ends an idle transaction, whose message a closed socket may lose
        connection.execute("DO $$ BEGIN RAISE EXCEPTION 'idle for too long' USING ERRCODE = '25P03'; END $$")

    monkeypatch.setattr("millpy.store.postgres.deployment.migrate._refuse_others", suspend)
    with pytest.raises(StoreUnavailableError, match="was suspended for too long") as refused:
        migrate(database_url)

    assert refused.value.hint == "run `millpy migrate` again"


def test_statements_have_a_time_together(database_url: str) -> None:
    admin = Admin(database_url, statement_s_max=60, connections_max=1)
    with admin.together() as connected:
        limited = connected.limit_to(1.5)
        assert limited.ask("SELECT CAST(pg_sleep(0.2) AS text) AS slept") == [{"slept": ""}]
        began = time.monotonic()
        with pytest.raises(SlowQueryError):
            limited.ask("SELECT pg_sleep(1.4)")
        took_s = time.monotonic() - began
        with pytest.raises(SlowQueryError):
            limited.ask("SELECT pg_sleep(0.2)")

    assert took_s < 1.4
    admin.close()
