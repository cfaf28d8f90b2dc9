"""Tokens and sessions of the API: create, list, revoke, and find the user of a secret.

A token is 32 random bytes. The database has its SHA-256, so that a copy of the database opens nothing. A plain hash
suffices: slow hashes with a salt protect passwords, which are easy to guess; 32 random bytes are not.
"""

from __future__ import annotations

import hashlib
import secrets
from dataclasses import dataclass
from datetime import timedelta
from enum import IntEnum
from typing import Any

from millpy.admin.queries import Admin, Row
from millpy.errors import UsageError

TOKEN_BYTES = 32
PREFIX = "millpy_"
"""Begins every token, so that scanners of repositories recognize one."""
NAME_CHARACTERS_MAX = 200
TOKENS_MAX = 10_000
SESSIONS_MAX = 20
"""Sessions of one token: a newer one ends the oldest."""
_LOCK = "LOCK TABLE mill.tokens IN SHARE ROW EXCLUSIVE MODE"
_AS_OWNER = """
SELECT set_config('role', r.owner, true)
  FROM mill.roles AS r JOIN pg_roles AS o ON o.rolname = r.owner
 WHERE o.rolname <> current_user AND pg_has_role(o.oid, 'MEMBER')
"""
_FORGET = """
DELETE FROM mill.tokens WHERE least(revoked_at, expires_at) < now() - interval '90 days' RETURNING 1
"""
_COUNT = "SELECT count(*) AS n FROM mill.tokens"
_NAMED = "SELECT 1 FROM mill.tokens WHERE name = :name AND revoked_at IS NULL"
_ROLE = """
SELECT pg_has_role(r.reader, p.rolname, 'MEMBER') AS may, r.reader,
       format('GRANT %I TO %I', p.rolname, r.reader)
           || CASE WHEN current_setting('server_version_num')::int < 160000 THEN ''
                   ELSE ' WITH INHERIT FALSE, SET TRUE' END AS wanted
  FROM pg_roles AS p
 CROSS JOIN (SELECT coalesce((SELECT reader FROM mill.roles WHERE reader IN (SELECT rolname FROM pg_roles)),
                             session_user) AS reader) AS r
 WHERE p.rolname = :database_role
"""
_CREATE = """
INSERT INTO mill.tokens (name, hash, role, database_role, expires_at, created_by)
VALUES (:name, CAST(:hash AS bytea), :role, CAST(:database_role AS text), now() + CAST(:kept AS interval), session_user)
RETURNING token_id, name, role, database_role, expires_at
"""
_LIST = """
SELECT token_id, name, CASE WHEN hash IS NULL THEN 'identity' ELSE 'token' END AS kind, role, database_role,
       CASE WHEN revoked_at IS NOT NULL THEN 'revoked'
            WHEN expires_at <= now() THEN 'expired' ELSE 'valid' END AS state,
       created_at, created_by, expires_at, revoked_at, used_on
  FROM mill.tokens ORDER BY token_id
"""
_REVOKE = """
WITH gone AS (
    UPDATE mill.tokens SET revoked_at = now() WHERE name = :name AND revoked_at IS NULL RETURNING token_id, name
), ended AS (
    DELETE FROM mill.sessions WHERE token_id IN (SELECT token_id FROM gone)
)
SELECT token_id, name FROM gone
"""
# The day is written once a day, so that reading with a token costs no write.
_FIND = """
WITH found AS (
    SELECT t.token_id, t.name, t.role, t.database_role, t.used_on FROM mill.tokens AS t
     WHERE {condition} AND t.revoked_at IS NULL AND (t.expires_at IS NULL OR t.expires_at > now())
), used AS (
    UPDATE mill.tokens AS t SET used_on = (now() AT TIME ZONE 'UTC')::date FROM found AS f
     WHERE t.token_id = f.token_id AND f.used_on IS DISTINCT FROM (now() AT TIME ZONE 'UTC')::date
)
SELECT token_id, name, role, database_role FROM found
"""
_OF_TOKEN = _FIND.format(condition="t.hash = :hash")
_OF_IDENTITY = _FIND.format(condition="t.name = :name AND t.hash IS NULL")
_OF_SESSION = _FIND.format(
    condition="t.token_id = (SELECT s.token_id FROM mill.sessions AS s WHERE s.hash = :hash AND s.expires_at > now())"
)
_OPEN = """
WITH expired AS (
    DELETE FROM mill.sessions WHERE expires_at <= now()
        OR hash IN (SELECT hash FROM mill.sessions WHERE token_id = :token_id ORDER BY created_at DESC OFFSET :others)
)
INSERT INTO mill.sessions (hash, token_id, expires_at)
SELECT CAST(:hash AS bytea), token_id,
       least(now() + make_interval(secs => :kept_s), coalesce(expires_at, now() + make_interval(secs => :kept_s)))
  FROM mill.tokens WHERE token_id = :token_id
RETURNING expires_at
"""


class Role(IntEnum):
    """What a user of the API may do; a greater role may all that a lesser one may."""

    VIEWER = 1
    OPERATOR = 2
    ADMIN = 3


@dataclass(frozen=True, slots=True)
class Principal:
    """The user of a token, a session or an identity.

    Attributes:
        database_role: the role of the database under which its queries run; None for the login of the API.
    """

    token_id: int
    name: str
    role: Role
    database_role: str | None


def create(
    admin: Admin,
    name: str,
    role: Role,
    *,
    kept: timedelta | None = None,
    database_role: str | None = None,
    identity: bool = False,
) -> tuple[Row, str]:
    """Create a token. Return its row, and the token itself, which is stored nowhere.

    Args:
        admin: the database, as its owner.
        name: who is to use it; the name is in events.
        role: what its user may do.
        kept: how long it is valid; None for no end.
        database_role: a role under which all of its queries run, so that row-level security holds.
        identity: whether it is an identity that a reverse proxy vouches for; the returned token is then empty.

    Raises:
        UsageError: the name is taken or too long, the role does not exist, or there are too many tokens.
    """
    _check_name(name)
    if database_role is not None and role is not Role.VIEWER:
        raise UsageError("only a viewer can have a role of the database", hint="omit --database-role, or --role")
    token = "" if identity else PREFIX + secrets.token_urlsafe(TOKEN_BYTES)
    with admin.transaction() as run:
        run(_AS_OWNER)
        run(_LOCK)
        run(_FORGET)
        if run(_NAMED, name=name):
            raise UsageError(f"there is a token named {name!r}", hint="revoke it first, or choose another name")
        if run(_COUNT)[0]["n"] >= TOKENS_MAX:
            raise UsageError(f"there are {TOKENS_MAX:,} tokens", hint="revoke some; they are deleted after 90 days")
        if database_role is not None:
            _check_role(run(_ROLE, database_role=database_role), database_role)
        (row,) = run(
            _CREATE,
            name=name,
            hash=digest(token) if token else None,
            role=role.name.lower(),
            database_role=database_role,
            kept=kept,
        )
    return row, token


def tokens(admin: Admin) -> list[Row]:
    """Return all tokens and identities, without their hashes."""
    return admin.ask(_LIST)


def revoke(admin: Admin, name: str) -> Row:
    """Revoke a token or identity, and end its sessions.

    Raises:
        UsageError: no valid token has the name.
    """
    with admin.transaction() as run:
        run(_AS_OWNER)
        run(_LOCK)
        gone = run(_REVOKE, name=name)
    if not gone:
        raise UsageError(f"there is no token named {name!r}", hint="`millpy token list` lists them")
    return gone[0]


def digest(secret: str) -> bytes:
    """Return the hash under which a token or a session is stored."""
    return hashlib.sha256(secret.encode(errors="surrogatepass")).digest()


def of_token(admin: Admin, hashed: bytes) -> Principal | None:
    """Return the user of a token; None if it is unknown, revoked or expired."""
    return _principal(admin.change(_OF_TOKEN, hash=hashed))


def of_identity(admin: Admin, name: str) -> Principal | None:
    """Return the principal of an identity; None if it is unknown, revoked or expired."""
    return _principal(admin.change(_OF_IDENTITY, name=name))


def of_session(admin: Admin, hashed: bytes) -> Principal | None:
    """Return the user of a session; None if it is unknown or has ended, or its token has."""
    return _principal(admin.change(_OF_SESSION, hash=hashed))


def open_session(admin: Admin, principal: Principal, kept_s: float) -> tuple[str, str]:
    """Create a session. Return its secret, and when it ends."""
    secret = secrets.token_urlsafe(TOKEN_BYTES)
    parameters: dict[str, Any] = {"token_id": principal.token_id, "others": SESSIONS_MAX - 1, "kept_s": kept_s}
    found = admin.change(_OPEN, hash=digest(secret), **parameters)
    if not found:
        raise UsageError("the token was revoked", hint="use another token")
    return secret, found[0]["expires_at"]


def end_session(admin: Admin, hashed: bytes) -> None:
    """End a session."""
    admin.change("DELETE FROM mill.sessions WHERE hash = :hash RETURNING 1", hash=hashed)


def _principal(found: list[Row]) -> Principal | None:
    if not found:
        return None
    (row,) = found
    return Principal(row["token_id"], row["name"], Role[row["role"].upper()], row["database_role"])


def _check_name(name: str) -> None:
    if not 0 < len(name) <= NAME_CHARACTERS_MAX or not name.isprintable() or name != name.strip():
        raise UsageError(f"{name!r} cannot name a token", hint=f"give 1 to {NAME_CHARACTERS_MAX} printable characters")


def _check_role(found: list[Row], database_role: str) -> None:
    if not found:
        raise UsageError(f"the database has no role {database_role!r}", hint="create it first")
    if not found[0]["may"]:
        raise UsageError(
            f"{found[0]['reader']} may not act as {database_role}",
            hint=found[0]["wanted"],
        )
