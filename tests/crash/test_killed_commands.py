"""Commands that are killed halfway leave nothing behind, and succeed when repeated."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from millpy.embedded import EmbeddedPostgres
from tests.commands import millpy as run
from tests.crash.graph_files import DEVICES, END, GRAPH, consumed, done, drop, one, rows
from tests.crash.harness import Worker, await_true
from tests.databases import fresh_database
from tests.forked import fork_millpy

WAITS = """
SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND cardinality(pg_blocking_pids(pid)) > 0
"""
RELATIONS = """
SELECT n.nspname, c.relname, c.relacl::text FROM pg_class AS c JOIN pg_namespace AS n ON n.oid = c.relnamespace
 WHERE n.nspname !~ '^pg_' AND n.nspname <> 'information_schema' ORDER BY 1, 2
"""
SCHEMAS = "SELECT nspname, nspowner::regrole::text FROM pg_namespace ORDER BY 1"
ROLES = "SELECT rolname FROM pg_roles WHERE rolname LIKE 'killed%' ORDER BY 1"
FOUND = (RELATIONS, SCHEMAS, ROLES)


def found(url: str, *more: str) -> list[object]:
    return [rows(url, query) for query in (*FOUND, *more)]


def killed_while(url: str, place: Path, held: str, *arguments: str) -> None:
    """Kill a command while it waits for an uncommitted change of another session."""
    with psycopg.connect(url) as holding:
        holding.execute(held)
        process = fork_millpy(place, *arguments, "--database", url)
        await_true(lambda: one(url, WAITS) == 1, "it is in the middle")
        process.kill()
        done(process)
        holding.rollback()
    others = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"
    await_true(lambda: one(url, others) == 0, "the server has noticed")


def test_killed_migration_leaves_no_tables(tmp_path: Path, empty_database_url: str) -> None:
    before = found(empty_database_url)
    killed_while(empty_database_url, tmp_path, "CREATE SCHEMA millpy", "migrate")

    assert found(empty_database_url) == before
    assert "up to date" in run("migrate", "--database", empty_database_url)


@pytest.fixture
def without_roles(postgres: EmbeddedPostgres) -> Iterator[str]:
    """A database whose roles are taken away with it: they are the server's."""
    with fresh_database(postgres) as name:
        yield postgres.url(name)
    with psycopg.connect(postgres.url(), autocommit=True) as connection:
        connection.execute("DROP ROLE IF EXISTS killed_owner, killed_worker, killed_reader")


def test_killed_roles_command_leaves_no_roles(tmp_path: Path, without_roles: str) -> None:
    command = ("migrate", "--roles", "--role-prefix", "killed")
    before = found(without_roles)
    killed_while(without_roles, tmp_path, "CREATE ROLE killed_reader", *command)

    assert found(without_roles) == before
    assert "killed_owner migrates and deploys" in run(*command, "--database", without_roles)


def test_killed_drop_leaves_the_graph_complete(
    tmp_path: Path, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "feed").mkdir()
    (tmp_path / "old.py").write_text(GRAPH)
    monkeypatch.chdir(tmp_path)
    drop(tmp_path, 0, END)
    with Worker(tmp_path, database_url, tmp_path, graph=tmp_path / "old.py") as worker:
        worker.await_while_running(consumed(database_url, END * DEVICES), "the feed")
        worker.drain()
        worker.await_finished()
    stored = ("SELECT * FROM factory.minutes ORDER BY 1, 2", "SELECT * FROM mill.cursors ORDER BY 1, 2")
    before = found(database_url, *stored)
    killed_while(database_url, tmp_path, "SELECT FROM mill.cursors FOR UPDATE", "drop", "factory", "--yes")

    assert found(database_url, *stored) == before
    assert run("drop", "factory", "--yes", "--database", database_url).endswith("dropped\n")
    assert rows(database_url, "SELECT * FROM mill.cursors") == []
    assert one(database_url, "SELECT count(*) FROM pg_namespace WHERE nspname = 'factory'") == 0
