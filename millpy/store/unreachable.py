"""Why a database cannot be reached, in one line and another: libpq's own words have several.

What only a person can mend (a password, a name) is a `ConfigError`, so that nothing waits for it; a server that is
away may come back.
"""

from __future__ import annotations

import re

from millpy.errors import ConfigError, MillError, StoreUnavailableError

_URL = "MILLPY_DATABASE_URL (or --database)"
_AWAY = "cannot reach the database: "
_SERVER = re.compile(r'server at "([^"]+)"(?: \([^)]*\))?, port (\d+)')
_SOCKET = re.compile(r'server on socket "([^"]+)"')
_MISTAKES = {
    # What libpq says: our message, what to do. {0} is what the pattern found, {at} where.
    r'password authentication failed for user "([^"]+)"': (
        "the database at {at} refuses the password of user {0!r}",
        f"correct it: {_URL}, MILLPY_DATABASE_PASSWORD or the file that MILLPY_DATABASE_PASSWORD_FILE names",
    ),
    r"no password supplied": (
        "the database at {at} wants a password",
        "set MILLPY_DATABASE_PASSWORD, or MILLPY_DATABASE_PASSWORD_FILE to the file that holds it",
    ),
    r"(certificate verify failed)": (
        "the certificate of the database at {at} is not to be trusted: {0}",
        "name the file of the authority that vouches for it: sslrootcert=FILE in the URL",
    ),
    r'server certificate for "([^"]+)".* does not match host name "([^"]+)"': (
        "the database at {at} shows a certificate for {0!r}, not for {1!r}",
        "connect to it by a name in its certificate",
    ),
    r"(server does not support SSL)": (
        "the database at {at} does not speak TLS, which is the default to another machine",
        "set ssl = on there; or say sslmode=disable in the URL, where nobody can listen",
    ),
    r'role "([^"]+)" does not exist': ("the database at {at} has no role {0!r}", f"correct the user in {_URL}"),
    r'database "([^"]+)" does not exist': (
        "there is no database {0!r} at {at}",
        f"correct the name in {_URL}, or make it: CREATE DATABASE {{0}}",
    ),
    r"no pg_hba.conf entry for ([^\n]+)": (
        "the database at {at} does not let us in: no pg_hba.conf entry for {0}",
        "allow it in the server's pg_hba.conf",
    ),
    r'permission denied for database "([^"]+)"': (
        "the database at {at} does not let this role into {0!r}",
        "GRANT CONNECT ON DATABASE, as its owner",
    ),
    r"(transaction blocks not allowed in statement pooling mode)": (
        "a pool in statement mode stands before the database: it takes no transactions",
        f"give the address of the server itself, or of a pool in session mode: {_URL}",
    ),
    r"unsupported startup parameter: (\w+)": (
        "the pool before the database does not take the parameter {0!r}",
        f"leave it out of {_URL} and of PGOPTIONS, or name it in the pool's ignore_startup_parameters",
    ),
}
_OUTAGES = {
    r"(?:failed to resolve host|could not translate host name) [\"']([^\"']+)[\"']": (
        "there is no host {0!r}",
        f"correct the host in {_URL}",
    ),
    r"Connection refused|No such file or directory": (
        "nothing listens at {at}",
        f"start it, or correct host and port in {_URL}",
    ),
    r"timeout expired|timed out": ("{at} does not answer", f"is it running, and is {_URL} right?"),
}


def unreachable(detail: str) -> MillError:
    """What a failed attempt to connect means; `detail` is what libpq said."""
    for pattern, (message, hint) in _MISTAKES.items():
        if found := re.search(pattern, detail):
            words = found.groups()
            return ConfigError(message.format(*words, at=_place(detail)), hint=hint.format(*words))
    for pattern, (message, hint) in _OUTAGES.items():
        if found := re.search(pattern, detail):
            return StoreUnavailableError(_AWAY + message.format(*found.groups(), at=_place(detail)), hint=hint)
    return StoreUnavailableError(_AWAY + " ".join(detail.split()), hint=f"is it running, and is {_URL} right?")


def _place(detail: str) -> str:
    if found := _SERVER.search(detail):
        return f"{found[1]}:{found[2]}"
    found = _SOCKET.search(detail)
    return found[1] if found else "the server"
