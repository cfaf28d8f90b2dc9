"""Each setting of a DBA by itself, for the database and for the role; a server with other messages and few locks.

The short form takes some of the settings; FOREIGN_SETTINGS=whole (`make foreign-settings`) all of them.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import psycopg
import pytest
from psycopg import sql

from millpy.embedded import EmbeddedPostgres
from millpy.errors import ConfigError, TransientError
from millpy.store.postgres.deployment.migrate import migrate
from millpy.store.postgres.store import PostgresStore
from tests.commands import millpy
from tests.conformance.foreign_database import SINGLY, known_settings, live
from tests.conformance.store_builders import a_graph

WHOLE = os.environ.get("FOREIGN_SETTINGS") == "whole"
SHORT = ("statement_timeout", "default_tablespace")
PARTS = [SINGLY[at::4] for at in range(4)] if WHOLE else [[one for one in SINGLY if one[0] in SHORT]]
LEVELS = {"database": "ALTER DATABASE {0} ", "role in a database": "ALTER ROLE millpy IN DATABASE {0} "}
PATIENCE = 3
"""How often a worker would try again, at least."""
GERMAN = "de_DE.UTF-8"


async def trouble(url: str, graph: str) -> str:
    """Run a graph from deployment to end, with a worker's retries; return the error, or an empty text."""
    error = ""
    for attempt in range(PATIENCE):
        try:
            await live(url, f"{graph}_{attempt}")
        except TransientError as busy:  # the machine was too busy even for the statement that lifts a limit
            error = repr(busy)
        except Exception as wrong:
            return repr(wrong)
        else:
            return ""
    return error


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("settings", PARTS, ids=lambda part: f"{len(part)} settings")
async def test_no_setting_of_a_database_administrator_changes_results(
    database_url: str, settings: list[tuple[str, str]], level: str
) -> None:
    as_was = "-c default_transaction_read_only=off -c statement_timeout=0"
    with psycopg.connect(database_url, autocommit=True, options=as_was) as connection:
        altered = sql.SQL(LEVELS[level]).format(sql.Identifier(connection.info.dbname))
        known, failed = known_settings(connection), {}
        for place, (name, value) in enumerate(settings):
            if name not in known:
                continue
            values = sql.SQL(", ").join(map(sql.Literal, value.split(", ")))
            connection.execute(altered + sql.SQL("SET {} TO {}").format(sql.Identifier(name), values))
            if error := await trouble(database_url, f"g{place}"):
                failed[name, value] = error
            connection.execute(altered + sql.SQL("RESET ALL"))

    assert not failed, "\n".join(f"{setting}: {error}" for setting, error in failed.items())


@pytest.fixture
def german(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> EmbeddedPostgres:
    """Start Debian's PostgreSQL, which has translations (the wheel's has none), with a locale made for the test."""
    locales = tmp_path / "locales"
    locales.mkdir()
    tmp_path.chmod(0o755)
    made = subprocess.run(["localedef", "-i", "de_DE", "-f", "UTF-8", str(locales / GERMAN)], check=False)
    if made.returncode == 0:
        monkeypatch.setenv("LOCPATH", str(locales))
    return EmbeddedPostgres(
        tmp_path / "postgres",
        version="system15",
        settings={"max_locks_per_transaction": "12", "max_connections": "25"},
    )


async def test_results_are_right_on_a_server_with_other_messages_few_locks_and_row_security(
    german: EmbeddedPostgres,
) -> None:
    with german as server, psycopg.connect(server.url(), autocommit=True) as connection:
        german_is_there = True
        try:
            connection.execute(f"ALTER DATABASE postgres SET lc_messages TO '{GERMAN}'")
        except psycopg.errors.InvalidParameterValue:
            german_is_there = False  # a machine without sources of locales
        connection.execute(
            "CREATE TABLE public.told (tag text);"
            "CREATE FUNCTION public.tell() RETURNS event_trigger LANGUAGE plpgsql SECURITY DEFINER AS"
            " $$ BEGIN INSERT INTO public.told VALUES (tg_tag); END $$;"
            "CREATE EVENT TRIGGER tells ON ddl_command_end EXECUTE FUNCTION public.tell()"
        )
        migrate(server.url(), "millpy")
        async with PostgresStore(server.url()) as store:
            await store.deploy(a_graph())
        for table in ("sums_1m", "alarms"):
            for how in ("ENABLE", "FORCE"):
                connection.execute(f"ALTER TABLE factory.{table} {how} ROW LEVEL SECURITY")  # type: ignore[call-overload]
        await live(server.url().replace("//millpy@", "//millpy_worker@"), "factory")
        if german_is_there:
            with psycopg.connect(server.url()) as person, pytest.raises(psycopg.Error, match="existiert nicht"):
                person.execute("SELECT * FROM nowhere")
        assert connection.execute("SELECT count(*) FROM public.told").fetchone() != (0,)
        assert connection.execute("SELECT count(*) FROM factory.sums_1m").fetchone() == (2,)


async def test_refusal_of_an_event_trigger_is_no_broken_invariant(database_url: str) -> None:
    with psycopg.connect(database_url, autocommit=True) as connection:
        connection.execute(
            "CREATE FUNCTION public.refuse() RETURNS event_trigger LANGUAGE plpgsql AS"
            " $$ BEGIN RAISE EXCEPTION 'open a ticket first'; END $$;"
            "CREATE EVENT TRIGGER refuses ON ddl_command_start EXECUTE FUNCTION public.refuse()"
        )
    async with PostgresStore(database_url) as store:
        with pytest.raises(ConfigError) as refused:
            await store.deploy(a_graph())

    assert refused.value.message == "a trigger or function of yours refuses a statement: open a ticket first"


async def test_standby_is_named(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    with EmbeddedPostgres(tmp_path / "postgres") as server:
        migrate(server.url(), "millpy")
        server.kill()
        (server.data / "standby.signal").touch()
        os.chown(server.data / "standby.signal", server.data.stat().st_uid, server.data.stat().st_gid)
        server.restart()
        refusals = [millpy(name, "--database", server.url(), status=1) for name in ("status", "migrate")]
        async with PostgresStore(server.url()) as store:
            with pytest.raises(TransientError) as refused:
                await store.deploy(a_graph())

    for refusal in refusals:
        assert refusal.startswith("millpy: the database is a standby, which accepts no changes\n  hint: connect to the")
    assert refused.value.hint.startswith("connect to the primary")
