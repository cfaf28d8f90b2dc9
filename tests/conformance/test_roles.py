"""Owner, worker and reader: what each may do on a real server, and that what users grant on their tables stays."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import psycopg
import pytest
from typer.testing import CliRunner

from millpy import Count, EventTime, File, FixedWindows, Graph, days, seconds
from millpy.admin import tokens
from millpy.admin.queries import Admin
from millpy.cli.app import app
from millpy.embedded import EmbeddedPostgres
from millpy.errors import ConfigError, UsageError
from millpy.limits import Limits
from millpy.process.assembly import run_worker
from millpy.store.postgres.deployment.migrate import migrate
from millpy.store.postgres.deployment.roles import Roles
from millpy.store.postgres.results import COPY_ROWS_MIN
from millpy.store.postgres.store import PostgresStore
from tests.conformance.store_builders import a_graph
from tests.databases import fresh_database
from tests.waiting import await_true

DEVICES = COPY_ROWS_MIN + 20
WINDOWS = 5
COUNTED = "SELECT device, sum(n)::int FROM plant.counts GROUP BY 1"


class Reading(msgspec.Struct):
    device: str
    at: datetime


def plant(path: Path) -> Graph:
    """Counts per device and window; every window has enough devices for COPY."""
    graph = Graph("plant")
    readings = graph.inject("readings", File(path), schema=Reading, event_time=EventTime("at", max_disorder=seconds(1)))
    windows = readings.key_by("device").window(FixedWindows(seconds(10)), name="windows")
    windows.aggregate(n=Count()).to_table("counts", retention=days(90))
    return graph


@pytest.fixture
def feed(tmp_path: Path) -> Path:
    path = tmp_path / "readings.ndjson"
    moments = [datetime.fromtimestamp(1_700_000_000 + 10 * window, UTC).isoformat() for window in range(WINDOWS)]
    lines = [json.dumps({"device": f"d{n}", "at": moment}) for moment in moments for n in range(DEVICES)]
    path.write_text("".join(line + "\n" for line in lines))
    return path


@pytest.fixture
def roles(database_url: str) -> str:
    """URL of a migrated database that has its roles, as superuser."""
    migrate(database_url, "millpy")
    return database_url


@pytest.fixture
def analyst(database_url: str) -> Iterator[str]:
    """A role of the user's own."""
    run(database_url, "CREATE ROLE analyst LOGIN")
    yield "analyst"
    run(database_url, "DROP OWNED BY analyst CASCADE", "DROP ROLE analyst")


def as_role(url: str, role: str) -> str:
    return url.replace("//millpy@", f"//{role}@")


def run(url: str, *statements: str) -> None:
    with psycopg.connect(url, autocommit=True) as connection:
        for statement in statements:
            connection.execute(statement)  # type: ignore[call-overload]


def fetch(url: str, query: str) -> list[tuple[Any, ...]]:
    with psycopg.connect(url, autocommit=True) as connection:
        return connection.execute(query).fetchall()  # type: ignore[call-overload, no-any-return]


async def deploy(url: str, graph: Graph) -> None:
    async with PostgresStore(url) as store:
        await store.deploy(graph.spec())


async def work(url: str, graph: Graph) -> None:
    """Run two workers, one of them with the source, so that records pass through the database."""
    limits = Limits(fold_every_s=0.2, epoch_s=0.1)
    parts = (("readings",), ("windows",))
    await asyncio.gather(*(run_worker(graph, url, limits=limits, only=part) for part in parts))


async def test_a_graph_runs_under_the_worker_role_and_frees_slots(roles: str, feed: Path) -> None:
    worker = as_role(roles, "millpy_worker")
    await deploy(as_role(roles, "millpy_owner"), plant(feed))

    await work(worker, plant(feed))
    async with PostgresStore(worker) as store:
        for _ in range(3):
            await store.turn_rings(epoch_s=0.0, epoch_bytes=0)

    assert dict(fetch(as_role(roles, "millpy_reader"), COUNTED)) == {f"d{n}": WINDOWS for n in range(DEVICES)}
    slots = dict(fetch(roles, "SELECT ring, slot FROM mill.epochs WHERE state = 'current'"))
    assert slots["segments"] > 0
    assert slots["deltas"] > 0
    assert fetch(roles, "SELECT count(*) FROM mill.epochs WHERE state = 'filled'") == [(0,)]
    assert fetch(roles, "SELECT count(*) FROM mill.segments") == [(0,)]


FORBIDDEN = (
    "CREATE TABLE mill.mine ()",
    "CREATE SCHEMA mine",
    "TRUNCATE mill.deltas_3",
    "DELETE FROM mill.deltas",
    "UPDATE mill.segments SET seq = 0",
    "UPDATE mill.epochs SET state = 'free'",
    "INSERT INTO mill.graphs (name, family, generation, description) VALUES ('a', 'a', 1, '{}')",
    "UPDATE mill.alembic_version SET version_num = 'none'",
    "DROP TABLE factory.sums_1m",
    "ALTER TABLE factory.sums_1m ADD COLUMN mine text",
    "TRUNCATE factory.sums_1m",
)


async def test_the_worker_role_makes_changes_and_empties_no_table(roles: str) -> None:
    async with PostgresStore(as_role(roles, "millpy_owner")) as store:
        await store.deploy(a_graph())

    for statement in FORBIDDEN:
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            run(as_role(roles, "millpy_worker"), statement)


async def test_worker_role_cannot_run_an_undeployed_graph_and_gets_a_hint(roles: str) -> None:
    async with PostgresStore(as_role(roles, "millpy_worker")) as store:
        with pytest.raises(ConfigError, match="millpy_worker may not deploy") as refused:
            await store.deploy(a_graph())

    assert "millpy deploy" in refused.value.hint


NO_OWNERS = ("REASSIGN OWNED BY millpy_owner TO millpy",)
NO_GRANTS = (
    *(f"REVOKE ALL ON SCHEMA {name} FROM millpy_worker, millpy_reader" for name in ("mill", "millpy", "plant")),
    "REVOKE ALL ON ALL TABLES IN SCHEMA mill, millpy, plant FROM millpy_worker, millpy_reader",
)


@pytest.mark.parametrize("lost", [(), NO_OWNERS, NO_OWNERS + NO_GRANTS], ids=["", "no owners", "no owners and grants"])
async def test_roles_have_their_rights_again_in_a_restored_database(
    postgres: EmbeddedPostgres, roles: str, feed: Path, lost: tuple[str, ...]
) -> None:
    """A copy has what a dump has: the rights on the database are not in it."""
    await deploy(roles, plant(feed))
    with fresh_database(postgres, psycopg.conninfo.conninfo_to_dict(roles)["dbname"]) as name:
        copy = postgres.url(name)
        run(copy, *lost)
        with pytest.raises(ConfigError, match="permission denied") as refused:
            migrate(copy)
        assert "--roles" in refused.value.hint

        migrate(copy, "millpy")
        await deploy(as_role(copy, "millpy_owner"), plant(feed))
        await work(as_role(copy, "millpy_worker"), plant(feed))

        assert dict(fetch(as_role(copy, "millpy_reader"), COUNTED)) == {f"d{n}": WINDOWS for n in range(DEVICES)}


@pytest.fixture
def renamed(postgres: EmbeddedPostgres) -> Iterator[str]:
    """A database whose roles were renamed, from old_ to new_."""
    prefixes, kinds = ("old", "new"), ("owner", "worker", "reader")
    with fresh_database(postgres) as name:
        migrate(postgres.url(name), "old")
        run(postgres.url(name), *(f"ALTER ROLE old_{kind} RENAME TO new_{kind}" for kind in kinds))
        yield postgres.url(name)
    run(postgres.url(), *(f"DROP ROLE IF EXISTS {prefix}_{kind}" for prefix in prefixes for kind in kinds))


async def test_roles_may_be_renamed(renamed: str, feed: Path) -> None:
    owner, worker = as_role(renamed, "new_owner"), as_role(renamed, "new_worker")
    migrate(renamed)
    await deploy(owner, plant(feed))
    assert tokens.create(Admin(owner), "mine", tokens.Role.VIEWER)
    await work(worker, plant(feed))

    done = migrate(renamed, "new")

    assert done.roles == Roles.named("new")
    assert fetch(as_role(renamed, "new_reader"), "SELECT sum(n)::int FROM plant.counts") == [(DEVICES * WINDOWS,)]
    policy = "SELECT count(*) FROM pg_policies WHERE policyname = 'millpy_worker' AND 'new_worker' = ANY (roles)"
    assert fetch(renamed, policy) == [(1,)]


async def test_a_graph_with_a_new_source_partition_grows_under_the_worker_role(roles: str) -> None:
    async with PostgresStore(as_role(roles, "millpy_owner")) as store:
        await store.deploy(a_graph())
    async with PostgresStore(as_role(roles, "millpy_worker")) as store:
        deployed = await store.deploy(a_graph(partitions=("a", "b", "c")))

    assert [interval.partition for interval in deployed.intervals_of("readings")] == ["a", "b", "c"]


async def test_tables_of_a_later_deployment_belong_to_the_owner_and_are_open_to_worker_and_reader(
    roles: str, feed: Path
) -> None:
    await deploy(roles, plant(feed))  # a superuser: a member of every role

    owned = "SELECT DISTINCT tableowner::text FROM pg_tables WHERE schemaname = 'plant'"
    assert fetch(roles, owned) == [("millpy_owner",)]
    run(as_role(roles, "millpy_worker"), "DELETE FROM plant.counts")
    assert fetch(as_role(roles, "millpy_reader"), "SELECT * FROM plant.counts_status") == []
    with pytest.raises(psycopg.errors.InsufficientPrivilege):
        run(as_role(roles, "millpy_reader"), "DELETE FROM plant.counts")


async def test_the_reader_role_reads_every_view_and_no_internal_table(roles: str, feed: Path) -> None:
    await deploy(roles, plant(feed))
    await work(as_role(roles, "millpy_worker"), plant(feed))
    reader = as_role(roles, "millpy_reader")

    views = [name for (name,) in fetch(reader, "SELECT viewname::text FROM pg_views WHERE schemaname = 'millpy'")]
    for view in views:
        fetch(reader, f"SELECT count(*) FROM (SELECT v::text FROM millpy.{view} AS v) AS every")
    admin = Admin(reader)

    assert {"state", "fleet", "sources", "accounting", "watermarks", "dead_letters", "parked"} <= set(views)
    assert admin.graphs() == ["plant"]
    assert admin.explain_watermark("windows")[-1]["held_by"] == "nothing"
    assert fetch(reader, "SELECT count(*) FROM plant.counts_status WHERE is_final") == [(DEVICES * WINDOWS,)]
    with pytest.raises(psycopg.errors.InsufficientPrivilege):
        fetch(reader, "SELECT * FROM mill.graphs")
    with pytest.raises(ConfigError, match="missing rights"):
        admin.resume_source("plant", "readings")


async def test_row_security_and_column_grants_of_users_outlive_restarts_migrations_and_deployments(
    roles: str, feed: Path, analyst: str
) -> None:
    worker = as_role(roles, "millpy_worker")
    await deploy(roles, plant(feed))
    run(
        roles,
        f"GRANT USAGE ON SCHEMA plant TO {analyst}",
        f"GRANT SELECT (device, n) ON plant.counts TO {analyst}",
        f"CREATE POLICY own ON plant.counts FOR SELECT TO {analyst} USING (device = 'd7')",
        "ALTER TABLE plant.counts ENABLE ROW LEVEL SECURITY",
        "REVOKE SELECT ON plant.counts FROM millpy_reader",
    )

    await work(worker, plant(feed))
    migrate(roles, "millpy")
    await deploy(roles, plant(feed))
    await work(worker, plant(feed))

    assert fetch(worker, "SELECT count(*) FROM plant.counts") == [(DEVICES * WINDOWS,)]
    assert fetch(as_role(roles, analyst), COUNTED) == [("d7", WINDOWS)]
    with pytest.raises(psycopg.errors.InsufficientPrivilege):
        fetch(as_role(roles, analyst), "SELECT bundle FROM plant.counts")
    with pytest.raises(psycopg.errors.InsufficientPrivilege):
        fetch(as_role(roles, "millpy_reader"), COUNTED)
    # Also by the view beside it.
    run(roles, f"GRANT SELECT ON plant.counts, plant.counts_status TO {analyst}")
    seen = fetch(as_role(roles, analyst), "SELECT DISTINCT device, is_final FROM plant.counts_status")
    assert seen == [("d7", True)]


async def test_roles_are_created_for_a_used_database_and_only_once(database_url: str, feed: Path) -> None:
    await deploy(database_url, plant(feed))
    before = fetch(database_url, "SELECT tableowner::text FROM pg_tables WHERE schemaname = 'plant'")

    for _ in range(2):
        result = CliRunner().invoke(app, ["migrate", "--roles", "--database", database_url])
        assert result.exit_code == 0, result.output
    await work(as_role(database_url, "millpy_worker"), plant(feed))

    assert before == [("millpy",)]
    assert fetch(database_url, "SELECT tableowner::text FROM pg_tables WHERE schemaname = 'plant'") == [
        ("millpy_owner",)
    ]
    assert len(fetch(as_role(database_url, "millpy_reader"), COUNTED)) == DEVICES


def test_other_roles_for_the_same_database_are_refused(roles: str) -> None:
    with pytest.raises(ConfigError, match="millpy_owner, millpy_worker, millpy_reader"):
        migrate(roles, "other")


@pytest.fixture
def tenant(postgres: EmbeddedPostgres) -> Iterator[str]:
    """URL of a login that owns its empty database and has no other rights."""
    run(postgres.url(), "CREATE ROLE tenant LOGIN")
    with fresh_database(postgres, "template1") as name:
        run(postgres.url(), f"ALTER DATABASE {name} OWNER TO tenant")
        yield as_role(postgres.url(name), "tenant")
    made = fetch(postgres.url(), "SELECT rolname::text FROM pg_roles WHERE rolname ~ '^t_'")
    run(postgres.url(), f"DROP ROLE {', '.join(['tenant', *(role for (role,) in made)])}")


def test_a_login_that_cannot_create_roles_gets_the_statements_for_an_administrator(
    tenant: str, postgres: EmbeddedPostgres
) -> None:
    migrate(tenant)
    with pytest.raises(ConfigError, match="login tenant may not create roles") as refused:
        migrate(tenant, "t")
    advice = refused.value.hint
    prepared = advice.removeprefix("as an administrator: ").removesuffix("; then retry").split("; ")

    run(postgres.url(), *prepared)

    assert migrate(tenant, "t").roles is not None
    assert fetch(as_role(tenant, "t_reader"), "SELECT * FROM millpy.graphs") == []


async def test_a_login_with_createrole_creates_the_roles_migrates_and_deploys(
    tenant: str, postgres: EmbeddedPostgres, feed: Path
) -> None:
    run(postgres.url(), "ALTER ROLE tenant CREATEROLE")

    migrate(tenant, "t")
    migrate(tenant)
    await deploy(tenant, plant(feed))
    await work(as_role(tenant, "t_worker"), plant(feed))

    assert len(fetch(as_role(tenant, "t_reader"), COUNTED)) == DEVICES


def test_role_of_a_token_that_needs_quotes_is_granted_as_the_hint_says(roles: str) -> None:
    run(roles, 'CREATE ROLE "Ana""lyst"')
    try:
        with pytest.raises(UsageError, match="millpy_reader may not act as") as refused:
            tokens.create(Admin(roles), "mine", tokens.Role.VIEWER, database_role='Ana"lyst')
        run(roles, refused.value.hint)

        row, _ = tokens.create(Admin(roles), "mine", tokens.Role.VIEWER, database_role='Ana"lyst')

        assert row["database_role"] == 'Ana"lyst'
    finally:
        run(roles, 'DROP ROLE "Ana""lyst"')


@pytest.fixture
def shared(postgres: EmbeddedPostgres) -> Iterator[str]:
    """A database whose roles another one of the server gets, too."""
    with fresh_database(postgres) as name:
        yield postgres.url(name)
    run(postgres.url(), *(f"DROP ROLE IF EXISTS shared_{kind}" for kind in ("owner", "worker", "reader")))


def test_roles_that_another_database_creates_meanwhile_are_used(shared: str) -> None:
    waiting = "SELECT 1 FROM pg_stat_activity WHERE datname = current_database() AND wait_event = 'transactionid'"
    with psycopg.connect(shared) as other, ThreadPoolExecutor(1) as pool:
        other.execute("CREATE ROLE shared_worker LOGIN")
        migrating = pool.submit(migrate, shared, "shared")
        await_true(lambda: fetch(shared, waiting), "the migration waits for the role")

        other.commit()

        assert migrating.result().roles == Roles.named("shared")


async def test_the_worker_role_may_not_migrate(roles: str) -> None:
    with pytest.raises(ConfigError, match="cannot migrate"):
        migrate(as_role(roles, "millpy_worker"))


def test_a_prefix_without_roles_is_refused(database_url: str) -> None:
    result = CliRunner().invoke(app, ["migrate", "--role-prefix", "x", "--database", database_url])

    assert result.exit_code == 2


def test_only_logins_of_workers_act_in_the_name_of_another(roles: str, analyst: str) -> None:
    asked = "SELECT set_config('millpy.actor', 'olga', false); SELECT mill.actor()"
    with psycopg.connect(roles, autocommit=True) as connection:
        connection.execute(
            f"GRANT USAGE ON SCHEMA mill TO {analyst}; GRANT EXECUTE ON FUNCTION mill.actor() TO {analyst}"
        )
        found = []
        for login in (analyst, "millpy_worker"):
            connection.execute(f"SET SESSION AUTHORIZATION {login}")
            cursor = connection.execute(asked)
            cursor.nextset()
            found.append(cursor.fetchone())
            connection.execute("RESET SESSION AUTHORIZATION")

    assert found == [(analyst,), ("olga",)]
