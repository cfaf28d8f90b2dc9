"""No name in millpy's SQL resolves to a foreign object, whatever PUBLIC may create and whatever the path."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
from typer.testing import CliRunner

from millpy.admin.diagnosis import read_facts
from millpy.cli.app import app
from millpy.clock import SystemClock
from millpy.embedded import EmbeddedPostgres
from millpy.graph.loader import load_graph
from millpy.limits import Limits
from millpy.process.assembly import run_worker
from millpy.store.postgres.session import connect
from tests.commands import logging_as_it_was
from tests.databases import fresh_database

ROOT = Path(__file__).resolve().parents[2]
GRAPH = """
import msgspec
from datetime import datetime
from millpy import Count, EventTime, File, FixedWindows, Graph, seconds

class Reading(msgspec.Struct):
    device: str
    at: datetime

graph = Graph("plant")
event_time = EventTime("at", max_disorder=seconds(2))
readings = graph.inject("readings", File("readings.ndjson"), schema=Reading, event_time=event_time)
readings.key_by("device").window(FixedWindows(seconds(10))).aggregate(n=Count()).to_table("counts")
"""


def test_every_function_pins_its_path(database_url: str) -> None:
    # One with a parsed body has no names left in it.
    with psycopg.connect(database_url) as connection:
        loose = connection.execute(
            "SELECT p.oid::regprocedure::text FROM pg_proc AS p JOIN pg_namespace AS n ON n.oid = p.pronamespace"
            " WHERE n.nspname IN ('mill', 'millpy') AND p.prosqlbody IS NULL"
            " AND NOT coalesce('search_path=pg_catalog, pg_temp' = ANY (p.proconfig), false)"
        ).fetchall()

    assert loose == []


# What stands in public is a copy of every function and operator that our SQL names, with the same arguments, that notes
# who called it and calls the original.
TRAPS = """
CREATE TABLE public.trapped (what text, as_role text);
GRANT ALL ON public.trapped TO PUBLIC;
DO $do$
DECLARE
    found record;
BEGIN
    FOR found IN
        SELECT p.proname AS name, p.prorettype::regtype::text AS returns,
               array_to_string(ARRAY(SELECT format_type(t, NULL) FROM unnest(p.proargtypes::oid[]) AS t), ',') AS given,
               array_to_string(ARRAY(SELECT '$' || n FROM generate_series(1, p.pronargs) AS n), ', ') AS places
          FROM pg_catalog.pg_proc AS p
         WHERE p.pronamespace = 'pg_catalog'::regnamespace AND p.proname = ANY (%(names)s) AND p.prokind = 'f'
           AND NOT p.proretset AND p.provariadic = 0 AND NOT EXISTS (
               SELECT FROM unnest(p.proargtypes::oid[] || p.prorettype) AS t JOIN pg_catalog.pg_type AS y ON y.oid = t
                WHERE y.typtype = 'p' AND y.typname <> 'void')
    LOOP
        EXECUTE format('CREATE FUNCTION public.%%I(%%s) RETURNS %%s LANGUAGE plpgsql AS $f$ BEGIN'
            ' INSERT INTO public.trapped VALUES (%%L, current_user);%%s END $f$',
            found.name, found.given, found.returns, found.name,
            CASE found.returns WHEN 'void' THEN format(' PERFORM pg_catalog.%%I(%%s);', found.name, found.places)
                 ELSE format(' RETURN pg_catalog.%%I(%%s);', found.name, found.places) END);
    END LOOP;
    FOR found IN
        SELECT o.oprname AS name, o.oid::text AS oid, o.oprleft::regtype::text AS lefts,
               o.oprright::regtype::text AS rights, o.oprresult::regtype::text AS returns
          FROM pg_catalog.pg_operator AS o
         WHERE o.oprnamespace = 'pg_catalog'::regnamespace AND o.oprleft <> 0 AND NOT EXISTS (
               SELECT FROM pg_catalog.pg_type AS y
                WHERE y.oid IN (o.oprleft, o.oprright, o.oprresult) AND y.typtype = 'p')
           AND o.oprleft::regtype::text = ANY (%(types)s) AND o.oprright::regtype::text = ANY (%(types)s)
    LOOP
        EXECUTE format('CREATE FUNCTION public.%%I(%%s, %%s) RETURNS %%s LANGUAGE plpgsql AS $f$ BEGIN'
            ' INSERT INTO public.trapped VALUES (%%L, current_user); RETURN $1 OPERATOR(pg_catalog.%%s) $2; END $f$',
            'trap_' || found.oid, found.lefts, found.rights, found.returns, found.name, found.name);
        EXECUTE format('CREATE OPERATOR public.%%s (FUNCTION = public.%%I, LEFTARG = %%s, RIGHTARG = %%s)',
            found.name, 'trap_' || found.oid, found.lefts, found.rights);
    END LOOP;
END $do$;
"""
TYPES = (
    "text", "name", "bigint", "integer", "smallint", "boolean", "oid", "uuid", "jsonb", "json", "bytea", "numeric",
    "double precision", "timestamp with time zone", "interval", '"char"', "text[]", "oid[]", "bigint[]",
)  # fmt: skip


def called_names() -> set[str]:
    """Names before a bracket in our SQL and in what makes SQL."""
    files = [*(ROOT / "millpy" / "store").rglob("*.sql"), *(ROOT / "millpy" / "store").rglob("*.py")]
    files += (ROOT / "migrations" / "versions").glob("*.sql")
    return {name for path in files for name in re.findall(r"\b([a-z_0-9]+)\(", path.read_text())} | {
        "current_schema",
        "version",
        "now",
    }


@pytest.fixture
def trapped_url(postgres: EmbeddedPostgres) -> Iterator[str]:
    """An empty database whose path begins with public, where a login without rights has set its traps."""
    with fresh_database(postgres, "template1") as name:
        url = postgres.url(name)
        with connect(url) as administrator:
            administrator.execute("CREATE ROLE mallory LOGIN")
            administrator.execute("GRANT CREATE, USAGE ON SCHEMA public TO PUBLIC")
        try:
            with connect(url.replace("//millpy@", "//mallory@")) as mallory:
                mallory.execute(
                    psycopg.ClientCursor(mallory).mogrify(TRAPS, {"names": list(called_names()), "types": list(TYPES)})
                )
                (traps,) = mallory.execute("SELECT count(*) FROM pg_proc WHERE proname ~ '^trap_'").fetchone() or (0,)
                assert traps > 150
            with connect(url) as administrator:
                administrator.execute(f"ALTER DATABASE {name} SET search_path = public, pg_catalog")
            yield url
        finally:
            with connect(url) as administrator:
                administrator.execute("DROP OWNED BY mallory CASCADE")
                administrator.execute("DROP ROLE mallory")


def traps_of(url: str) -> set[tuple[str, str]]:
    with connect(url) as connection:
        return {(what, who) for what, who in connection.execute("SELECT what, as_role FROM public.trapped").fetchall()}


def test_traps_catch_an_unpinned_path(trapped_url: str) -> None:
    with psycopg.connect(trapped_url, autocommit=True) as connection:
        connection.execute("SELECT now(), 'a'::text = 'b'::text")

    assert traps_of(trapped_url) == {("now", "millpy"), ("=", "millpy")}


def test_millpy_calls_no_function_that_others_put_on_the_path(
    trapped_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = [{"device": f"d{n % 300}", "at": f"2026-11-21T08:{n // 60 % 60:02}:{n % 60:02}Z"} for n in range(3_000)]
    (tmp_path / "readings.ndjson").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "plant.py").write_text(GRAPH)
    monkeypatch.chdir(tmp_path)

    def done(*words: str, status: int = 0) -> None:
        with logging_as_it_was():
            result = CliRunner().invoke(app, [*words, "--database", trapped_url])
        assert result.exit_code == status, result.output

    done("migrate")
    done("migrate", "--roles")
    done("deploy", "plant.py")
    limits = Limits(fold_every_s=0.05, epoch_s=0.05, progress_every_s=0.01)
    asyncio.run(run_worker(load_graph("plant.py"), trapped_url, limits=limits))
    done("migrate", "--roles")
    for words in ("status", "watermarks", "dead-letters list", "parked list", "sources list", "fleet"):
        done(*words.split())
    done("sources", "resume", "readings", "plant", status=2)  # none is paused
    facts = read_facts(trapped_url, SystemClock())
    done("drop", "plant", "--yes")

    assert facts.revision is not None
    assert traps_of(trapped_url) == set()
