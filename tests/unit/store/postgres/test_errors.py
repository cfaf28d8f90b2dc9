"""Each SQLSTATE has one meaning (design: the table of the commit)."""

from __future__ import annotations

import psycopg
import pytest
from psycopg.pq import DiagnosticField

from millpy.errors import (
    CommitUnknownError,
    ConfigError,
    CorruptionError,
    PoisonError,
    ResultTableError,
    StoreUnavailableError,
    TransientError,
)
from millpy.store.postgres.errors import translate, translate_commit


def an_error(sqlstate: str) -> psycopg.Error:
    return psycopg.errors.lookup(sqlstate)("something happened")


LOST = psycopg.OperationalError(
    "server closed the connection unexpectedly\n\tThis probably means the server terminated"
)


@pytest.mark.parametrize(
    ("sqlstate", "expected"),
    [
        ("40001", TransientError),
        ("40P01", TransientError),
        ("55P03", TransientError),
        ("57014", TransientError),
        ("25P03", TransientError),
        ("53100", StoreUnavailableError),
        ("53300", StoreUnavailableError),
        ("57P01", StoreUnavailableError),
        ("08006", StoreUnavailableError),
        ("58030", StoreUnavailableError),
        ("42501", ConfigError),
        ("42P01", ConfigError),
        ("3D000", ConfigError),
        ("28P01", ConfigError),
        ("XX000", CorruptionError),
    ],
)
def test_sqlstate_decides_the_reaction(sqlstate: str, expected: type[Exception]) -> None:
    assert type(translate(an_error(sqlstate))) is expected


@pytest.mark.parametrize(
    ("sqlstate", "message"),
    [
        ("42P01", "a name is missing in the database"),
        ("42703", "a name is missing in the database"),
        ("42883", "a name is missing in the database"),
        ("3F000", "a name is missing in the database"),
        ("42P07", "another object already has this name"),
        ("42710", "another object already has this name"),
        ("42701", "another object already has this name"),
        ("42501", "missing rights"),
        ("42601", "the database rejects a statement"),
        ("42804", "the database rejects a statement"),
        ("3D000", "the database refuses these connection settings"),
        ("28P01", "the database refuses these connection settings"),
    ],
)
def test_wrong_setting_is_named_with_a_hint(sqlstate: str, message: str) -> None:
    translated = translate(an_error(sqlstate))
    assert type(translated) is ConfigError
    assert translated.message == f"{message}: something happened"
    assert translated.hint


@pytest.mark.parametrize("error", [LOST, an_error("57P01"), an_error("55P03")], ids=["lost", "ended", "locked"])
def test_deploy_cancelled_by_the_server_ends_in_one_line_with_a_hint(error: psycopg.Error) -> None:
    translated = translate(error)
    assert isinstance(translated, TransientError)
    assert (len(translated.message.splitlines()), "\t" in translated.message, bool(translated.hint)) == (1, False, True)


@pytest.mark.parametrize(
    "sqlstate",
    [
        *("22003", "22021", "22P02", "54000", "P0001", "P0004", "23505"),
        "21000",  # a subquery with two rows
        "27000",  # a row that its own trigger has changed
        "42601",  # to_tsquery('a b')
        "XX000",  # PostGIS: a geometry that cannot be read
    ],
)
def test_refused_value_in_a_commit_is_poison(sqlstate: str) -> None:
    error = translate_commit(an_error(sqlstate), commit_sent=True, users=True)

    assert isinstance(error, PoisonError)
    assert error.sqlstate == sqlstate


@pytest.mark.parametrize(("sqlstate", "expected"), [("HV00N", ResultTableError), ("XX001", CorruptionError)])
def test_foreign_server_that_is_away_and_damage_are_no_fault_of_a_row(sqlstate: str, expected: type[Exception]) -> None:
    assert type(translate_commit(an_error(sqlstate), commit_sent=False, users=True)) is expected


@pytest.mark.parametrize("lost", [LOST, an_error("57P01"), an_error("57P02"), an_error("08003")])
def test_lost_connection_is_unknown_only_once_commit_was_sent(lost: psycopg.Error) -> None:
    assert type(translate_commit(lost, commit_sent=True)) is CommitUnknownError
    assert type(translate_commit(lost, commit_sent=False)) is StoreUnavailableError


@pytest.mark.parametrize("sqlstate", ["40001", "57014", "53100", "25P03"])
def test_error_reported_by_the_server_is_not_an_unknown_outcome(sqlstate: str) -> None:
    error = translate_commit(an_error(sqlstate), commit_sent=True)

    assert isinstance(error, TransientError)
    assert not isinstance(error, CommitUnknownError)


@pytest.mark.parametrize("state", ["08000", "08001", "08006"])
def test_a_foreign_server_that_is_away_is_not_the_database(state: str) -> None:
    """As postgres_fdw and dblink report it; the end of our own connection is FATAL."""

    def error_of(severity: bytes) -> psycopg.Error:
        return psycopg.errors.lookup(state)("away", info={DiagnosticField.SEVERITY_NONLOCALIZED: severity})

    assert isinstance(translate_commit(error_of(b"ERROR"), commit_sent=False, users=True), ResultTableError)
    assert isinstance(translate_commit(error_of(b"FATAL"), commit_sent=False, users=True), StoreUnavailableError)
    for severity in (b"ERROR", b"FATAL"):  # a pooler may say the first one when the server has gone
        assert isinstance(translate_commit(error_of(severity), commit_sent=True, users=True), CommitUnknownError)
    assert isinstance(translate_commit(error_of(b"ERROR"), commit_sent=True), CommitUnknownError)
