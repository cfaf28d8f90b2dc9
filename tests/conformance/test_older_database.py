"""Commands, the API and the page over a database that another version of millpy has migrated: they say what to do."""

from __future__ import annotations

import psycopg
import pytest

from millpy.admin.queries import Admin
from millpy.api.configuration import ApiConfiguration
from millpy.api.database import check_databases
from millpy.errors import ConfigError
from millpy.store.revision import HEAD
from tests.api_server import running_api
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
