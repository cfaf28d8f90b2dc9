"""Settings that every connection sets for itself, because the defaults of a server, database or role may differ.

`search_path` is pg_catalog alone, so that a name in millpy's statements never refers to an object in a user's schema.
Functions in the database pin their own path, because users call them from their own sessions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypedDict

SEARCH_PATH = "pg_catalog, pg_temp"
ENCODING = "UTF8"
"""Also passed at connect, because psycopg encodes the settings themselves with it."""


class Keepalives(TypedDict):
    """Parameters of libpq by which a connection notices that the other side has gone without a word."""

    keepalives_idle: int
    keepalives_interval: int
    keepalives_count: int


KEEPALIVES: Keepalives = {"keepalives_idle": 5, "keepalives_interval": 2, "keepalives_count": 3}
"""Seconds, seconds and probes: a connection that carries nothing is lost after 11 s."""
PINNED: Mapping[str, str] = {
    "search_path": SEARCH_PATH,
    # Isolation. READ COMMITTED: a statement that has waited for a lock reads the rows as they are then.
    "default_transaction_isolation": "read committed",
    "default_transaction_read_only": "off",
    "default_transaction_deferrable": "off",
    # Time limits. A connection that needs one sets it.
    "statement_timeout": "0",
    "lock_timeout": "0",
    "idle_in_transaction_session_timeout": "0",
    "idle_session_timeout": "0",
    # Formats of values.
    "client_encoding": ENCODING,
    "timezone": "UTC",
    "datestyle": "ISO, MDY",
    "intervalstyle": "postgres",
    "bytea_output": "hex",
    "extra_float_digits": "1",
    "array_nulls": "on",
    "standard_conforming_strings": "on",
    "backslash_quote": "safe_encoding",
    "escape_string_warning": "on",
    "quote_all_identifiers": "off",
    "transform_null_equals": "off",
    "client_min_messages": "warning",
    # Storage and visibility of rows: workers have a policy, and no right to bypass row-level security.
    "row_security": "on",
    "default_table_access_method": "heap",
    # Planning: each statement is written for an index.
    "jit": "off",
    "plan_cache_mode": "auto",
    "constraint_exclusion": "partition",
    "from_collapse_limit": "8",
    "join_collapse_limit": "8",
    **dict.fromkeys(
        (
            "enable_bitmapscan",
            "enable_hashagg",
            "enable_hashjoin",
            "enable_incremental_sort",
            "enable_indexonlyscan",
            "enable_indexscan",
            "enable_material",
            "enable_memoize",
            "enable_mergejoin",
            "enable_nestloop",
            "enable_partition_pruning",
            "enable_seqscan",
            "enable_sort",
            "enable_tidscan",
        ),
        "on",
    ),
}
"""Setting -> value, in every supported version."""
LATER: Mapping[str, str] = {"transaction_timeout": "0", "restrict_nonsystem_relation_kind": ""}
"""Settings that only some supported versions have."""
_SET_LATER = (
    "CASE WHEN pg_catalog.current_setting('{name}', true) IS NOT NULL"
    " THEN pg_catalog.set_config('{name}', {value}, {scope}) END"
)
"""Asks for one setting: reading all of pg_settings would cost each transaction of a pooled connection a millisecond."""
_WORK_MEM_MIN = 4 << 20
REPLICATION_ROLE = "session_replication_role"


def settings_query(own: Mapping[str, str], *, local: bool) -> bytes:
    """Return one SELECT that applies the pinned settings, overridden by the connection's own.

    Every name and operator in it is qualified by its schema, because the path is not pinned until it has run. Its last
    column is the current `session_replication_role`.
    """
    scope = "true" if local else "false"
    values = {name: _quoted(value) for name, value in {**PINNED, **own}.items()}
    if "work_mem" not in own:  # the administrator may set more than the minimum
        values["work_mem"] = (
            "pg_catalog.concat(GREATEST(pg_catalog.pg_size_bytes(pg_catalog.current_setting('work_mem')),"
            f" {_WORK_MEM_MIN}), 'B')"
        )
    given = [f"pg_catalog.set_config('{name}', {value}, {scope})" for name, value in values.items()]
    given += [_SET_LATER.format(name=name, value=_quoted(value), scope=scope) for name, value in LATER.items()]
    return f"SELECT {', '.join(given)}, pg_catalog.current_setting('{REPLICATION_ROLE}')".encode()


_IDENTITY = ("session_authorization", "role")
"""Settings that say who the session is. The first also resets the second, so it is restored first."""


_RESTORED = (*_IDENTITY, REPLICATION_ROLE, "synchronous_commit", "work_mem", *PINNED, *LATER)


def state_query() -> bytes:
    """Return a SELECT of one row with one array: what `restore_query` needs."""
    values = ", ".join(f"pg_catalog.current_setting('{name}', true)" for name in _RESTORED)
    return f"SELECT ARRAY[{values}]".encode()


def restore_query(state: Sequence[str | None]) -> bytes:
    """Return a SELECT that restores role and settings as `state_query` has read them.

    Its first column tells whether all of them but `statement_timeout` were unchanged, which may have been set to let
    this query run; the last one, whether `session_replication_role` was. It is not restored, because only a superuser
    may.
    """
    wanted = {name: _quoted(value) for name, value in zip(_RESTORED, state, strict=True) if value is not None}
    current = {name: f"pg_catalog.current_setting('{name}')" for name in wanted}
    compared = [name for name in wanted if name != "statement_timeout"]
    is_same = (
        f"ARRAY[{', '.join(current[name] for name in compared)}]"
        f" OPERATOR(pg_catalog.=) ARRAY[{', '.join(wanted[name] for name in compared)}]::pg_catalog.text[]"
    )
    given = [
        f"CASE WHEN {current[name]} OPERATOR(pg_catalog.<>) {value}"
        f" THEN pg_catalog.set_config('{name}', {value}, false) END"
        for name, value in wanted.items()
        if name != REPLICATION_ROLE
    ]
    fires = f"{current[REPLICATION_ROLE]} OPERATOR(pg_catalog.=) {wanted[REPLICATION_ROLE]}"
    return f"SELECT {is_same}, {', '.join(given)}, {fires}".encode()


def _quoted(value: str) -> str:
    return "'" + value.replace("'", "''") + "'"
