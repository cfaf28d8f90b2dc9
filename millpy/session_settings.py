"""What every connection of ours sets for itself: defaults of a server, a database or a role are other people's.

`search_path` is pg_catalog alone: whatever anybody creates in a schema of theirs, no name of ours means it. Functions
of the database pin their own, because people call them from their own sessions.
"""

from __future__ import annotations

from collections.abc import Mapping

SEARCH_PATH = "pg_catalog, pg_temp"
ENCODING = "UTF8"
"""Given when the connection is made, too: psycopg encodes the settings themselves by it."""
PINNED: Mapping[str, str] = {
    "search_path": SEARCH_PATH,
    # How transactions see each other. READ COMMITTED: what is read after a lock was waited for is what is there then.
    "default_transaction_isolation": "read committed",
    "default_transaction_read_only": "off",
    "default_transaction_deferrable": "off",
    # How long things may take; who needs a limit says which.
    "statement_timeout": "0",
    "lock_timeout": "0",
    "idle_in_transaction_session_timeout": "0",
    "idle_session_timeout": "0",
    # How values are written and read.
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
    # What tables are made of, and who sees which rows: workers have a policy, and no right to pass by it.
    "row_security": "on",
    "default_table_access_method": "heap",
    # How statements are planned: each is written for an index.
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
"""Those that not every version has."""
_SET_LATER = (
    "(SELECT pg_catalog.max(pg_catalog.set_config(s.name, w.value, {scope})) FROM pg_catalog.pg_settings AS s"
    " JOIN (VALUES {later}) AS w (name, value) ON s.name OPERATOR(pg_catalog.=) w.name)"
)
_WORK_MEM_MIN = 4 << 20
REPLICATION_ROLE = "session_replication_role"


def settings_query(own: Mapping[str, str], *, local: bool) -> bytes:
    """One SELECT that sets everything: what is ours, and above it what the connection has of its own.

    Every name and operator in it says its schema: until it has run, the path is not ours. Its last column is
    `session_replication_role`, as it is.
    """
    scope = "true" if local else "false"
    values = {name: _quoted(value) for name, value in {**PINNED, **own}.items()}
    if "work_mem" not in own:  # more than the least is up to the administrator
        values["work_mem"] = (
            "pg_catalog.concat(GREATEST(pg_catalog.pg_size_bytes(pg_catalog.current_setting('work_mem')),"
            f" {_WORK_MEM_MIN}), 'B')"
        )
    given = [f"pg_catalog.set_config('{name}', {value}, {scope})" for name, value in values.items()]
    later = ", ".join(f"('{name}', {_quoted(value)})" for name, value in LATER.items())
    given.append(_SET_LATER.format(scope=scope, later=later))
    return f"SELECT {', '.join(given)}, pg_catalog.current_setting('{REPLICATION_ROLE}')".encode()


def _quoted(value: str) -> str:
    return "'" + value.replace("'", "''") + "'"
