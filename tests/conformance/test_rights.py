"""The rights of every role on every object of the catalog, against one table of expected rights.

An object that this table does not know fails: say here who may what with it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import psycopg
import pytest

from millpy.store.postgres.deployment.migrate import migrate
from millpy.store.postgres.store import PostgresStore
from tests.conformance.store_builders import a_graph

PRIVILEGES = {
    "S": "SELECT",
    "I": "INSERT",
    "U": "UPDATE",
    "D": "DELETE",
    "T": "TRUNCATE",
    "R": "REFERENCES",
    "G": "TRIGGER",
}
ALL = "SIUDTRG"
# Pattern of a relation -> what worker, reader and a stranger may with it, by the letters above. The owner may all.
RELATIONS = {
    r"mill\.(alembic_version|roles|computations|streams|subscriptions|result_tables|schemas|epochs|graphs|tokens)": (
        "S",
        "",
        "",
    ),
    r"mill\.partitions": ("S", "", ""),
    r"mill\.(segments|deltas|dedupe_runs)(_\d+)?": ("SI", "", ""),
    r"mill\.(intervals|cursors|last_segments)": ("SIU", "", ""),
    r"mill\.(workers|keyed|dead_letters|late_records|pauses|source_states|releases|events|expired|lookups)": (
        "SIUD",
        "",
        "",
    ),
    r"mill\.(outbox|deliveries|refused_messages|source_connections|corrections|corrected_windows|expected_records)": (
        "SIUD",
        "",
        "",
    ),
    r"mill\.(injected_records|injection_readers|table_slots|drain_requests)": ("SIUD", "", ""),
    r"mill\.sessions": ("SIUD", "", ""),
    r"mill\.(audits|archive_\w+)": (
        "SIUD",
        "",
        "",
    ),
    r"mill\.(analytics|analytics_files|device_hours|device_anomalies)": ("SIUD", "", ""),
    r"mill\.(changes|counters|entries|lags|parked_entries|places|pending)": (
        "SIUD",
        "",
        "",
    ),  # views, none of which can be written to
    r"millpy\.input_watermarks": ("S", "S", "S"),
    r"millpy\.\w+": ("S", "S", ""),
    r"factory\.(sums_1m|alarms)(_status)?": ("SIUD", "S", ""),
}
COLUMNS = {
    "mill.graphs": ({"version", "description", "deployed_at"}, "UPDATE"),
    "mill.tokens": ({"used_on"}, "UPDATE"),
}
# Pattern of a function -> who may call it, besides the owner.
FUNCTIONS = {
    r"mill\.(moment|instant|readable)\(.*|mill\.alive\(p_deadline .*": {"worker", "reader", "stranger"},
    r"mill\.(account|devices|silent_devices|has_read)\(.*": {"worker", "reader"},
    r"millpy\.(as_of|history_of)\(.*": {"worker", "reader", "stranger"},  # they read with their caller's rights
    r"millpy\.trim_\w+\(.*": {"worker"},
    r"millpy\.(explain_watermark|windows_by_key)\(.*": {"worker", "reader"},
    r"mill\.\w+\(.*": {"worker"},
    r"millpy\.(replay|discard|release|resume|drain)_\w+\(.*": {"worker"},
    r"millpy\.(correct|inject)\(.*": {"worker"},
}
SCHEMAS = {  # USAGE; only the owner has CREATE
    "mill": {"worker"},
    "millpy": {"worker", "reader"},
    "factory": {"worker", "reader"},
}
KNOWN_FUNCTIONS = set(
    "actor alive check_isolation hold_grants check_slots refuse check_panes has_filter check_cursors check_outbox "
    "check_settled end_fold unneeded turn_ring free_slot moment instant readable account devices silent_devices "
    "oldest_entry request_release make_partitions drop_partitions partition_bound "
    "explain_source duration explain_watermark windows_by_key "
    "replay_dead_letters replay_dead_letter replay_late_records "
    "discard_dead_letters discard_late_records resume_source release_parked discard_parked as_of history_of "
    "drain_worker trim_history trim_piece correct correction has_zone replay_into_window inject "
    "has_read forget_injected".split()
)
SIGNATURE = "n.nspname || '.' || p.proname || '(' || pg_get_function_identity_arguments(p.oid) || ')'"
ROLES = {"owner": "millpy_owner", "worker": "millpy_worker", "reader": "millpy_reader", "stranger": "stranger"}


@pytest.fixture
def database(database_url: str) -> Iterator[str]:
    """A database with its roles, a graph, and a login that nothing was granted to; as superuser."""
    migrate(database_url, "millpy")
    with psycopg.connect(database_url, autocommit=True) as connection:
        connection.execute("CREATE ROLE stranger LOGIN")
    yield database_url
    with psycopg.connect(database_url, autocommit=True) as connection:
        connection.execute("DROP OWNED BY stranger CASCADE")
        connection.execute("DROP ROLE stranger")


def expected(table: dict[str, object], name: str) -> object:
    for pattern, rights in table.items():
        if re.fullmatch(pattern, name):
            return rights
    raise AssertionError(f"{name} is not in the table of rights: say who may what with it")


async def test_every_role_has_the_documented_rights_and_no_others(database: str) -> None:
    async with PostgresStore(database) as store:
        await store.deploy(a_graph())
    found, wanted = {}, {}
    with psycopg.connect(database) as connection:
        relations = connection.execute(
            "SELECT n.nspname || '.' || c.relname FROM pg_class AS c JOIN pg_namespace AS n ON n.oid = c.relnamespace"
            " WHERE n.nspname IN ('mill', 'millpy', 'factory') AND c.relkind IN ('r', 'p', 'v', 'm', 'f')"
        ).fetchall()
        for (name,) in relations:
            rights = (ALL, *expected(RELATIONS, name))  # type: ignore[misc]
            for role, may in zip(ROLES, rights, strict=True):
                wanted[name, role] = may
                found[name, role] = "".join(
                    letter
                    for letter, privilege in PRIVILEGES.items()
                    if connection.execute(
                        "SELECT has_table_privilege(%s, %s, %s)", [ROLES[role], name, privilege]
                    ).fetchone()
                    == (True,)
                )
        for name, (columns, privilege) in COLUMNS.items():
            allowed = connection.execute(
                "SELECT attname FROM pg_attribute WHERE attrelid = %s::regclass AND attnum > 0"
                " AND has_column_privilege('millpy_worker', attrelid, attnum, %s)",
                [name, privilege],
            ).fetchall()
            wanted[name, "columns"], found[name, "columns"] = columns, {column for (column,) in allowed}

    assert {key: may for key, may in found.items() if may != wanted[key]} == {}
    assert len(relations) > 80


async def test_rights_on_functions_schemas_and_sequences_are_the_documented_ones(database: str) -> None:
    async with PostgresStore(database) as store:
        await store.deploy(a_graph())
    differing = []
    with psycopg.connect(database) as connection:
        functions = connection.execute(
            f"SELECT {SIGNATURE}, p.oid,"
            " p.proname FROM pg_proc AS p JOIN pg_namespace AS n ON n.oid = p.pronamespace"
            " WHERE n.nspname IN ('mill', 'millpy', 'factory')"
        ).fetchall()
        for name, oid, short in functions:
            assert short in KNOWN_FUNCTIONS, f"{name} is not known: say who may call it"
            allowed = {"owner"} | expected(FUNCTIONS, name)  # type: ignore[operator]
            for role, login in ROLES.items():
                asked = connection.execute("SELECT has_function_privilege(%s, %s::oid, 'EXECUTE')", [login, oid])
                if asked.fetchone() != (role in allowed,):
                    differing.append((name, role))
        for name, users in SCHEMAS.items():
            for role, login in ROLES.items():
                asked = connection.execute(
                    "SELECT has_schema_privilege(%s, %s, 'USAGE'), has_schema_privilege(%s, %s, 'CREATE')",
                    [login, name, login, name],
                )
                if asked.fetchone() != (role in {"owner", *users}, role == "owner"):
                    differing.append((name, role))
        open_sequences = connection.execute(
            "SELECT c.oid::regclass::text, r.login FROM pg_class AS c JOIN pg_namespace AS n ON n.oid = c.relnamespace"
            " CROSS JOIN unnest(%s::text[]) AS r (login) WHERE n.nspname IN ('mill', 'millpy', 'factory')"
            " AND c.relkind = 'S' AND has_sequence_privilege(r.login, c.oid, 'USAGE, SELECT, UPDATE')",
            [[ROLES["worker"], ROLES["reader"], ROLES["stranger"]]],
        ).fetchall()

    assert differing == []
    assert open_sequences == []


def test_without_roles_a_function_needs_a_grant_too(database_url: str) -> None:
    with psycopg.connect(database_url) as connection:
        functions = connection.execute(
            f"SELECT {SIGNATURE},"
            " has_function_privilege('public', p.oid, 'EXECUTE')"
            " FROM pg_proc AS p JOIN pg_namespace AS n ON n.oid = p.pronamespace WHERE n.nspname IN ('mill', 'millpy')"
        ).fetchall()

    everybodys = {name for name, _ in functions if "stranger" in expected(FUNCTIONS, name)}  # type: ignore[operator]
    assert {name for name, is_open in functions if is_open} == everybodys


@pytest.mark.parametrize("role", ["worker", "reader", "stranger"])
async def test_only_the_owner_locks_a_table_against_reading(database: str, role: str) -> None:
    async with PostgresStore(database) as store:
        await store.deploy(a_graph())
    with psycopg.connect(database.replace("//millpy@", f"//{ROLES[role]}@")) as connection:
        relations = connection.execute(
            "SELECT n.nspname, c.relname FROM pg_class AS c JOIN pg_namespace AS n ON n.oid = c.relnamespace"
            " WHERE n.nspname IN ('mill', 'millpy', 'factory') AND c.relkind IN ('r', 'p', 'v')"
        ).fetchall()
        locked = {mode: set() for mode in ("ROW EXCLUSIVE", "SHARE", "ACCESS EXCLUSIVE")}  # type: ignore[var-annotated]
        for schema, relation in relations:
            for mode, names in locked.items():
                try:
                    with connection.transaction(force_rollback=True):
                        connection.execute(f"LOCK TABLE {schema}.{relation} IN {mode} MODE")
                    names.add(f"{schema}.{relation}")
                except psycopg.errors.InsufficientPrivilege:
                    pass

    if role == "worker":  # who may change rows may lock them all: this is what PostgreSQL gives with the right
        assert "mill.graphs" not in locked["ACCESS EXCLUSIVE"]
        assert {"mill.segments", "mill.epochs", "mill.result_tables"} & locked["SHARE"] == set()
    else:
        assert locked == {mode: set() for mode in locked}


RENAMES = (
    "UPDATE mill.graphs SET name = 'victim'",
    "UPDATE mill.graphs SET family = 'victim', name = 'victim'",
    "INSERT INTO mill.graphs (name, family, generation, description) VALUES ('v', 'v', 1, '{}')",
    "UPDATE mill.result_tables SET name = 'victim'",
)


async def test_foreign_schema_is_never_taken_over(database: str) -> None:
    async with PostgresStore(database) as store:
        await store.deploy(a_graph())
    with psycopg.connect(database, autocommit=True) as administrator:
        administrator.execute("CREATE SCHEMA victim AUTHORIZATION stranger; CREATE TABLE victim.sums_1m ()")
        for statement in RENAMES:
            with (
                psycopg.connect(database.replace("//millpy@", "//millpy_worker@")) as worker,
                pytest.raises(psycopg.errors.InsufficientPrivilege),
            ):
                worker.execute(statement)  # type: ignore[call-overload]
        for name in ("public", "pg_catalog"):  # by any writer
            administrator.execute("UPDATE mill.graphs SET name = %s, family = %s", [name, name])
            migrate(database, "millpy")
        administrator.execute("UPDATE mill.graphs SET name = 'factory', family = 'factory'")
        owners = dict(
            administrator.execute(
                "SELECT nspname, nspowner::regrole::text FROM pg_namespace"
                " WHERE nspname IN ('victim', 'public', 'pg_catalog', 'factory')"
            ).fetchall()
        )

    assert owners["victim"] == "stranger"
    assert owners["factory"] == "millpy_owner"
    assert "millpy_owner" not in (owners["public"], owners["pg_catalog"])
