"""Commands, the API and the page over a database that another version of millpy has migrated: they say what to do."""

from __future__ import annotations

from pathlib import Path

import psycopg
import pytest
from typer.testing import CliRunner

from millpy.admin.queries import Admin
from millpy.api.configuration import ApiConfiguration
from millpy.api.database import check_databases
from millpy.cli.app import app
from millpy.errors import ConfigError
from millpy.store.postgres.deployment.migrate import migrate
from millpy.store.postgres.statements import statement
from millpy.store.revision import HEAD, check_revision, digest_of
from tests.api_server import running_api
from tests.mistakes.examples import FILE, GRAPH
from tests.page_client import PageClient

WORKERS = "SELECT * FROM millpy.workers"
OLD, NEW = "0001", "9001"


def change(url: str, *statements: str) -> None:
    with psycopg.connect(url, autocommit=True) as connection:
        for statement in statements:
            connection.execute(statement.encode())


def lose_workers(url: str, revision: str = HEAD) -> None:
    """Make the database one whose migrations knew no view of workers."""
    change(url, "DROP VIEW millpy.workers CASCADE", f"UPDATE mill.alembic_version SET version_num = '{revision}'")


def error_of(url: str, statement: str = WORKERS) -> ConfigError:
    with pytest.raises(ConfigError) as found:
        Admin(url).ask(statement)
    return found.value


def test_an_empty_database_is_to_be_migrated(empty_database_url: str) -> None:
    error = error_of(empty_database_url)

    assert error.message == "the database has no tables of millpy"
    assert error.hint == "run `millpy migrate` first"


def test_older_tables_are_to_be_migrated(database_url: str) -> None:
    lose_workers(database_url, OLD)
    error = error_of(database_url)

    assert error.message == f"the database's tables (revision {OLD}) are older than this millpy (revision {HEAD})"
    assert error.hint == "run `millpy migrate` as the owner"


def test_newer_tables_need_a_newer_millpy(database_url: str) -> None:
    lose_workers(database_url, NEW)
    error = error_of(database_url)

    assert "are newer than this millpy" in error.message
    assert error.hint.startswith("install the millpy that migrated it")


@pytest.mark.parametrize(
    ("change_to", "statement", "lacking"),
    [
        ("DROP VIEW millpy.workers CASCADE", WORKERS, 'relation "millpy.workers" does not exist'),
        ("SELECT", "SELECT new_figure FROM millpy.workers", 'column "new_figure" does not exist'),
    ],
)
def test_what_is_missing_at_the_same_revision_is_named(
    database_url: str, change_to: str, statement: str, lacking: str
) -> None:
    change(database_url, change_to)
    error = error_of(database_url, statement)

    assert error.message == f"the database lacks what this millpy reads: {lacking}"
    assert error.hint.startswith("run `millpy migrate` as the owner; if that changes nothing")


def test_a_reader_that_may_not_know_the_revision_is_told_what_is_missing(database_url: str) -> None:
    lose_workers(database_url, OLD)
    change(database_url, "CREATE ROLE only_reads LOGIN", "GRANT USAGE ON SCHEMA millpy TO only_reads")
    try:
        error = error_of(psycopg.conninfo.make_conninfo(database_url, user="only_reads"))
    finally:
        change(database_url, "DROP OWNED BY only_reads", "DROP ROLE only_reads")

    assert error.message.startswith("the database lacks what this millpy reads") and "millpy migrate" in error.hint


@pytest.mark.parametrize("build", ["build = 'another'", None])
@pytest.mark.parametrize("command", ["migrate", "doctor", "run", "deploy"])
def test_tables_of_another_development_version_are_named_as_such(
    database_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str, build: str | None
) -> None:
    """Migrations are edited in place until the first release, and those of before stored no build."""
    change(
        database_url,
        f"UPDATE mill.alembic_version SET {build}" if build else "ALTER TABLE mill.alembic_version DROP build",
        "DROP FUNCTION mill.alive(timestamptz, double precision) CASCADE",
    )
    monkeypatch.chdir(tmp_path)
    Path("graph.py").write_text(GRAPH.replace("SOURCE", FILE))
    Path("readings.ndjson").touch()
    arguments = [command, *(["graph.py"] if command in ("run", "deploy") else []), "--database", database_url]
    done = CliRunner().invoke(app, arguments)

    said = " ".join(done.output.split())
    assert done.exit_code != 0, said
    assert "are those of another development version of millpy" in said
    assert "create a new database" in said


def test_a_database_that_migrations_have_just_made_is_of_this_version(empty_database_url: str) -> None:
    assert migrate(empty_database_url).applied
    assert not migrate(empty_database_url).applied

    with psycopg.connect(empty_database_url) as connection:
        check_revision(*connection.execute(statement("read_revision")).fetchall()[0])


def test_comments_and_spaces_of_a_migration_do_not_make_another_build(
    tmp_path: Path,
) -> None:
    (tmp_path / "versions").mkdir()

    def build(text: str, newer: str = "") -> str:
        (tmp_path / "versions" / "0001_tables.sql").write_text(text)
        (tmp_path / "versions" / "0002_functions.sql").write_text(newer)
        return digest_of(tmp_path, "0001")

    first = build("CREATE TABLE a (b int);  -- one\n")
    assert build("-- another\nCREATE TABLE a\n (b int);", newer="SELECT 1") == first
    assert build("CREATE TABLE a (b bigint);") != first


@pytest.mark.parametrize(("revision", "what"), [(OLD, "older"), (NEW, "newer")])
def test_the_api_does_not_start_over_tables_of_another_version(database_url: str, revision: str, what: str) -> None:
    change(database_url, f"UPDATE mill.alembic_version SET version_num = '{revision}'")
    own = ApiConfiguration(
        address=("127.0.0.1", 0), reader_url=database_url, operator_url=database_url, owner_url=database_url
    )

    with pytest.raises(ConfigError, match=f"are {what} than this millpy"):
        check_databases(own)


def test_a_page_over_an_older_database_says_what_to_do(database_url: str) -> None:
    with running_api(database_url) as api:
        client = PageClient(api)
        assert client.log_in(api.token("vera")).status == 303
        lose_workers(database_url, OLD)
        shown = client.get("/graphs/plant/workers")
        answer = api.get("/v1/graphs/plant/workers", api.token("victor"))

    assert (shown.status, answer.status) == (503, 503)
    for text in (shown.text, answer.json["detail"] + answer.json["hint"]):
        assert "are older than this millpy" in text and "run `millpy migrate` as the owner" in text
        assert "has no tables" not in text
