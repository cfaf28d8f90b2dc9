"""The reason why a database cannot be reached, as one line and a hint; libpq's own messages have several lines.

A cause that only an operator can correct (a password, a name) is a `ConfigError`, so that nothing waits for it. A
server that is down may come back.
"""

from __future__ import annotations

import re

import psycopg

from millpy.errors import ConfigError, MillError, StoreUnavailableError

_URL = "MILLPY_DATABASE_URL (or --database)"
STANDBY_HINT = (
    f"connect to the primary: correct the host in {_URL}; with several hosts, add target_session_attrs=read-write"
)
_AWAY = "cannot reach the database: "
_SERVER = re.compile(r'server at "([^"]+)"(?: \([^)]*\))?, port (\d+)')
_SOCKET = re.compile(r'server on socket "([^"]+)"')
# A severity and two spaces begin what the server itself says: it listens, whatever its words are.
_ANSWER = re.compile(r"failed: \S+:  ")
_MISTAKES = {
    # libpq's message: our message, the hint. {0} is the first group of the pattern, {at} the server's address.
    r'password authentication failed for user "([^"]+)"': (
        "the database at {at} refuses the password of user {0!r}",
        f"correct it: {_URL}, MILLPY_DATABASE_PASSWORD or the file that MILLPY_DATABASE_PASSWORD_FILE names",
    ),
    r"no password supplied": (
        "the database at {at} requires a password",
        "set MILLPY_DATABASE_PASSWORD, or MILLPY_DATABASE_PASSWORD_FILE to the file that holds it",
    ),
    r"(certificate verify failed)": (
        "the certificate of the database at {at} is not trusted: {0}",
        "set sslrootcert=FILE in the URL to the certificate of its authority",
    ),
    r'server certificate for "([^"]+)".* does not match host name "([^"]+)"': (
        "the database at {at} has a certificate for {0!r}, not for {1!r}",
        "connect by a name in the certificate",
    ),
    r"(server does not support SSL)": (
        "the database at {at} does not support TLS, which is the default for another machine",
        "set ssl = on there; or, on a private network, set sslmode=disable in the URL",
    ),
    r'(invalid "?\w+"? value: "[^\n]*|invalid port number: [^\n]*|invalid integer value [^\n]*|weak sslmode [^\n]*'
    r"|definition of service [^\n]* not found|root certificate file [^\n]* does not exist"
    r"|unrecognized configuration parameter [^\n]*|invalid value for parameter [^\n]*)": (
        "the database cannot be reached with these options: {0}",
        f"correct {_URL}, or what libpq reads besides: PGSSLMODE, PGOPTIONS, a service file",
    ),
    r'role "(.+)" does not exist': ("the database at {at} has no role {0!r}", f"correct the user in {_URL}"),
    r'database "(.+)" does not exist': (
        "there is no database {0!r} at {at}",
        f"correct the name in {_URL}, or create it: CREATE DATABASE {{0}}",
    ),
    r"no pg_hba.conf entry for ([^\n]+)": (
        "the database at {at} rejects the connection: no pg_hba.conf entry for {0}",
        "add an entry to the server's pg_hba.conf",
    ),
    r'permission denied for database "(.+)"': (
        "the database at {at} denies this role access to {0!r}",
        "as the database's owner: GRANT CONNECT ON DATABASE {0} TO the role",
    ),
    r"(transaction blocks not allowed in statement pooling mode)": (
        "the database is behind a pooler in statement mode, which does not allow transactions",
        f"set {_URL} to the address of the server itself, or of a pooler in session mode",
    ),
    r"unsupported startup parameter: (\w+)": (
        "the pooler in front of the database does not accept the parameter {0!r}",
        f"remove it from {_URL} and PGOPTIONS, or add it to the pooler's ignore_startup_parameters",
    ),
}
_OUTAGES = {
    r"(?:failed to resolve host|could not translate host name) [\"']([^\"']+)[\"']": (
        "there is no host {0!r}",
        f"correct the host in {_URL}",
    ),
    r"Connection refused|No such file or directory": (
        "nothing listens at {at}",
        f"start the server, or correct host and port in {_URL}",
    ),
    r"timeout expired|timed out": ("{at} does not answer", f"check that it runs, and that {_URL} is right"),
}

_FULL = re.compile(r"(?:remaining connection slots|too many (?:clients|connections))[^\n]*")


def unreachable_error(detail: str) -> MillError:
    """Return the error for a failed attempt to connect. `detail` is libpq's message."""
    for pattern, (message, hint) in _MISTAKES.items():
        if found := re.search(pattern, detail):
            words = found.groups()
            quoted = hint.format(*map(_as_identifier, words))
            return ConfigError(message.format(*words, at=_place(detail)), hint=quoted)
    for pattern, (message, hint) in _OUTAGES.items():
        if not _ANSWER.search(detail) and (found := re.search(pattern, detail)):
            return StoreUnavailableError(_AWAY + message.format(*found.groups(), at=_place(detail)), hint=hint)
    if full := _FULL.search(detail):
        hint = "end idle sessions, or raise max_connections or the CONNECTION LIMIT; a worker needs seven connections"
        return StoreUnavailableError(f"the database at {_place(detail)} has no free connection: {full[0]}", hint=hint)
    return StoreUnavailableError(_AWAY + " ".join(detail.split()), hint=f"check that it runs, and that {_URL} is right")


def is_standby(error: psycopg.Error) -> bool:
    """Tell whether a server refuses a transaction that may write, as millpy begins all of them, or a change in one."""
    begins = error.sqlstate == "0A000" and error.diag.source_function == "call_bool_check_hook"
    return begins or error.sqlstate == "25006"


def standby_error() -> StoreUnavailableError:
    """Return the error for a database that is a standby."""
    return StoreUnavailableError("the database is a standby, which accepts no changes", hint=STANDBY_HINT)


def _as_identifier(name: str) -> str:
    """Return a name as SQL reads it."""
    return name if re.fullmatch(r"[a-z_][a-z0-9_]*", name) else '"' + name.replace('"', '""') + '"'


def _place(detail: str) -> str:
    if found := _SERVER.search(detail):
        return f"{found[1]}:{found[2]}"
    found = _SOCKET.search(detail)
    return found[1] if found else "the server"
