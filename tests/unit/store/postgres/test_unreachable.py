"""Why a database cannot be reached, from the messages of libpq and the server."""

from __future__ import annotations

import pytest

from millpy.errors import ConfigError, StoreUnavailableError
from millpy.store.postgres.unreachable import unreachable_error

SERVER = 'connection failed: connection to server at "10.0.0.1", port 5432 failed: '


@pytest.mark.parametrize(
    "detail",
    [
        'connection is bad: invalid sslmode value: "bogus"',
        'connection is bad: invalid "ssl_min_protocol_version" value: "x"',
        'connection is bad: invalid port number: "99999"',
        'connection is bad: invalid integer value "abc" for connection option "port"',
        'connection is bad: definition of service "plant" not found',
        'connection is bad: weak sslmode "prefer" may not be used with sslrootcert=system (use "verify-full")',
        SERVER + 'root certificate file "/etc/ours/ca.pem" does not exist\nEither provide the file, or change sslmode',
        SERVER + 'FATAL:  unrecognized configuration parameter "nosuch"',
        SERVER + 'FATAL:  invalid value for parameter "statement_timeout": "x"',
    ],
)
def test_wrong_option_is_a_mistake_that_nothing_waits_for(detail: str) -> None:
    error = unreachable_error(detail)

    assert isinstance(error, ConfigError)
    assert error.message.startswith("the database cannot be reached with these options: ")
    assert error.message.rpartition("options: ")[2] in detail
    assert "MILLPY_DATABASE_URL" in error.hint


@pytest.mark.parametrize(
    ("name", "quoted"), [("plant", "plant"), ("my-db", '"my-db"'), ("Plant", '"Plant"'), ('a"b', '"a""b"')]
)
def test_statement_of_a_hint_quotes_names(name: str, quoted: str) -> None:
    missing = unreachable_error(f'{SERVER}FATAL:  database "{name}" does not exist')
    refused = unreachable_error(f'{SERVER}FATAL:  permission denied for database "{name}"\nDETAIL:  no CONNECT')

    assert missing.message == f"there is no database {name!r} at 10.0.0.1:5432"
    assert missing.hint.endswith(f"CREATE DATABASE {quoted}")
    assert refused.hint.startswith(f"as the database's owner: GRANT CONNECT ON DATABASE {quoted} TO")


@pytest.mark.parametrize(
    "said",
    [
        "sorry, too many clients already",
        'too many connections for role "millpy_worker"',
        "remaining connection slots are reserved for roles with the SUPERUSER attribute",
    ],
)
def test_server_without_a_free_connection_is_an_outage_with_its_remedy(said: str) -> None:
    error = unreachable_error(f"{SERVER}FATAL:  {said}")

    assert isinstance(error, StoreUnavailableError)
    assert said.removeprefix("sorry, ") in error.message
    assert "max_connections" in error.hint
