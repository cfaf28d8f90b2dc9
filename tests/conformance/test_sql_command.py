"""`millpy sql` as the owner of everything: whatever is asked, nothing changes."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psycopg
import pytest
from psycopg import sql

from millpy.admin.queries import Admin, Row
from millpy.admin.sql import ACTING, HARMLESS, functions_in, names_in
from millpy.embedded import EmbeddedPostgres
from millpy.errors import UsageError
from millpy.store.postgres.deployment.migrate import migrate
from tests.databases import fresh_database

MADE = """
CREATE TABLE kept (n integer);
INSERT INTO kept VALUES (1);
CREATE TABLE target (n integer);
CREATE SEQUENCE counted;
CREATE FUNCTION acts() RETURNS integer LANGUAGE plpgsql AS $$ BEGIN PERFORM lo_export(0, 'FILE'); RETURN 1; END $$;
CREATE FUNCTION "Acts (too)"() RETURNS integer LANGUAGE plpgsql
  AS $$ BEGIN PERFORM pg_advisory_lock(7); RETURN 1; END $$;
CREATE FUNCTION looks() RETURNS bigint LANGUAGE sql STABLE AS $$ SELECT count(*) FROM public.kept $$;
CREATE VIEW hidden AS SELECT acts() AS n;
CREATE VIEW hidden_behind AS SELECT n FROM kept LIMIT acts();
CREATE VIEW "Hidden further" AS SELECT * FROM hidden_behind;
CREATE FUNCTION acts(kept) RETURNS integer LANGUAGE sql VOLATILE AS $$ SELECT public.acts() $$;
CREATE PROCEDURE leaves() LANGUAGE plpgsql AS $$ BEGIN COMMIT; INSERT INTO kept VALUES (2); COMMIT; END $$;
"""
WRITES = [
    "INSERT INTO kept VALUES (2)",
    "CREATE TABLE left_over (n integer)",
    "COPY (SELECT 1) TO PROGRAM 'touch FILE'",
    "SELECT lo_export(lo_from_bytea(0, 'x'), 'FILE')",
]
LEAVES = ["COMMIT", "ROLLBACK", "END", "ABORT", "SET TRANSACTION READ WRITE", "SET transaction_read_only = off",
          "RESET transaction_read_only", "SELECT set_config('transaction_read_only', 'off', true)", "DISCARD ALL",
          "SELECT 1", "/* SELECT */", ""]  # fmt: skip
JOINTS = [";", " ; ", "; --\n", ";/**/"]
TRICKS = [
    *(f"{leave}{joint}{write}" for leave, joint, write in itertools.product(LEAVES, JOINTS, WRITES)),
    *WRITES,
    "DO $$ BEGIN COMMIT; INSERT INTO kept VALUES (2); COMMIT; END $$",
    "DO $$ BEGIN SET TRANSACTION READ WRITE; INSERT INTO kept VALUES (2); COMMIT; END $$",
    "DO $$ BEGIN PERFORM set_config('transaction_read_only', 'off', false); INSERT INTO kept VALUES (2); END $$",
    "DO $$ BEGIN COPY (SELECT 1) TO PROGRAM 'touch FILE'; END $$",
    "CALL leaves()",
    "/* SELECT */ DO $$ BEGIN COPY (SELECT 1) TO PROGRAM 'touch FILE'; END $$",
    "COPY kept TO 'FILE'",
    "COPY (SELECT 1) TO 'FILE'",
    "COPY target FROM PROGRAM 'touch FILE; echo 1'",
    "WITH written AS (INSERT INTO kept VALUES (2) RETURNING n) SELECT * FROM written",
    "SELECT 3 AS n INTO left_over",
    "CREATE TABLE left_over AS SELECT 1",
    "EXPLAIN ANALYZE INSERT INTO kept VALUES (2)",
    "EXPLAIN (ANALYZE) SELECT acts()",
    "EXPLAIN /* */ (VERBOSE, analyze true) SELECT acts()",
    "SELECT acts()",
    "SELECT 1 WHERE (SELECT acts()) = 1",
    "SELECT * FROM acts()",
    "SELECT * FROM hidden",
    'SELECT "Acts (too)"()',
    "SELECT public . acts ( )",
    "SELECT s.\"a'\" || acts() || s.\"b'\" FROM (SELECT 'x' AS \"a'\", 'y' AS \"b'\" OFFSET 0) AS s",
    r"SELECT E'\'' || acts()",
    "SELECT CASE WHEN acts() = 1 THEN 1 END",
    "SELECT n FROM kept ORDER BY acts()",
    "VALUES (acts())",
    "TABLE hidden",
    "SELECT sum(n) FILTER (WHERE acts() = 1) FROM kept",
    # What the server does not print in a plan.
    *(
        f"SELECT n FROM kept {limit}"
        for limit in (
            "LIMIT acts()",
            "OFFSET acts()",
            "FETCH FIRST (acts()) ROWS ONLY",
            "ORDER BY n FETCH FIRST acts() ROWS WITH TIES",
        )
    ),
    *(
        f"SELECT {made}"
        for made in (
            "ARRAY(SELECT 1 LIMIT acts())",
            "EXISTS (SELECT n FROM kept OFFSET acts())",
            "sum(n) OVER (ORDER BY n ROWS BETWEEN acts() PRECEDING AND CURRENT ROW) FROM kept",
            "* FROM kept AS k, LATERAL (SELECT 1 LIMIT acts()) AS s",
            "* FROM kept AS k, LATERAL (VALUES (1), (k.acts)) AS s",
            "* FROM (VALUES (1), (acts())) AS s",
        )
    ),
    "VALUES (1), (acts())",
    "SELECT * FROM hidden_behind",
    'TABLE "Hidden further"',
    *(
        f"SELECT 1 LIMIT {call}"
        for call in (
            '"acts"()',
            "ACTS /* ' */ ()",
            "acts -- '\n ()",
            "(public . acts)(NULL)",
            "length($q$'$q$ || acts())",
            "length('' || $$'$$ || acts()) + length('')",
            "pg_advisory_lock(7) IS NULL",
            "1 + /* /* */ ' */ acts() + length('')",
            r"length(E'\\''' || acts() || '''')",
        )
    ),
    r'SELECT 1 LIMIT U&"\0061cts"()',
    r'EXPLAIN (U&"\0061nalyze") SELECT acts()',
    """EXPLAIN (u&"!0061nalyze" UESCAPE '!', VERBOSE) SELECT acts()""",
    "SELECT nextval('public.counted')",
    "SELECT setval('public.counted', 7)",
    "SELECT set_config('role', 'none', true), pg_advisory_lock(7)",
    "SELECT pg_advisory_lock(7)",
    "SELECT pg_terminate_backend(OTHER)",
    "SELECT pg_cancel_backend(OTHER)",
    "SELECT pg_reload_conf()",
    "SELECT pg_switch_wal()",
    "SELECT pg_stat_reset()",
    "SELECT pg_create_physical_replication_slot('left_over')",
    "SELECT pg_logical_emit_message(false, 'a', 'b')",
    "SELECT pg_notify('a', 'b')",
    "SELECT lo_create(77)",
    "SELECT query_to_xml('SELECT pg_advisory_lock(7)', true, true, '')",
    "SELECT * FROM kept FOR UPDATE",
    "LOCK TABLE kept IN ACCESS EXCLUSIVE MODE",
    "NOTIFY a",
    "TRUNCATE kept",
    "VACUUM",
    "ALTER SYSTEM SET work_mem = '1GB'",
    "CREATE DATABASE left_over_too",
    "ALTER ROLE millpy SET work_mem = '1GB'",
    "PREPARE later AS INSERT INTO kept VALUES (2)",
    "REFRESH MATERIALIZED VIEW nothing",
    "COMMENT ON TABLE kept IS 'changed'",
]


@dataclass(frozen=True)
class Database:
    """One with MADE in it.

    Attributes:
        named: a file of the server's, as the server names it.
        file: the same, as we do.
        admin: asks; keeps its connection, and so what a question leaves there.
        other: somebody else's connection.
    """

    url: str
    named: str
    file: Path
    admin: Admin
    other: psycopg.Connection

    def read(self, question: str) -> list[Row]:
        return self.admin.read(qualified(question))


@pytest.fixture(scope="module")
def database(postgres: EmbeddedPostgres) -> Iterator[Database]:
    with fresh_database(postgres, "template1") as name:
        with psycopg.connect(postgres.url(name), autocommit=True) as connection:
            ((data,),) = connection.execute("SHOW data_directory").fetchall()
            url, admin = postgres.url(name), Admin(postgres.url(name), statement_s_max=5)
            made = Database(url, f"{data}/written", postgres.data / "written", admin, connection)
            connection.execute(MADE.replace("FILE", made.named))  # type: ignore[call-overload]
            yield made


def qualified(text: str) -> str:
    """Return the name with its schema, because commands ignore a user's search_path."""
    return re.sub(
        r"""(?<![\w."'])(?<!\. )(kept|target|hidden|counted|leaves|left_over|(?:acts|looks)(?= ?\()|"Acts)\b""",
        r"public.\1",
        text,
    )


def world(connection: psycopg.Connection) -> object:
    """All that a trick might change."""
    queries = [
        "SELECT array_agg(n) FROM kept", "SELECT array_agg(relname::text ORDER BY 1) FROM pg_class WHERE oid > 16000",
        "SELECT count(*) FROM target", "SELECT is_called, last_value FROM counted",
        "SELECT count(*) FROM pg_largeobject_metadata", "SELECT count(*) FROM pg_replication_slots",
        "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory'", "SELECT array_agg(datname) FROM pg_database",
        "SELECT count(*) FROM pg_db_role_setting", "SELECT count(*) FROM pg_description WHERE objoid > 16000",
        "SELECT pg_conf_load_time(), current_setting('work_mem')", "SELECT stats_reset FROM pg_stat_database"
        " WHERE datname = current_database()",
    ]  # fmt: skip
    return [connection.execute(sql.SQL(qualified(query))).fetchall() for query in queries]  # type: ignore[arg-type]


@pytest.mark.parametrize("trick", TRICKS)
def test_no_question_changes_the_database(database: Database, trick: str) -> None:
    before = world(database.other)

    with pytest.raises(UsageError):
        database.read(trick.replace("FILE", database.named).replace("OTHER", str(database.other.info.backend_pid)))

    assert world(database.other) == before
    assert not database.file.exists()


@pytest.mark.parametrize(
    ("question", "first"),
    [
        ("SELECT n, '%:x' AS other FROM kept", {"n": 1, "other": "%:x"}),
        ("  -- a remark\n TABLE kept;", {"n": 1}),
        ("VALUES (1)", {"column1": 1}),
        ("(SELECT 1 AS n) UNION ALL (SELECT 2)", {"n": 1}),
        ("WITH RECURSIVE t AS (SELECT 1 AS n UNION ALL SELECT n + 1 FROM t WHERE n < 3) SELECT max(n) FROM t",
         {"max": 3}),
        ("SHOW timezone", {"TimeZone": "UTC"}),
        ("EXPLAIN (COSTS OFF) SELECT acts()", {"QUERY PLAN": "Result"}),
        ("SELECT looks()", {"looks": 1}),
        ("SELECT count(*) > 0 AS some FROM pg_stat_activity, pg_locks, pg_settings", {"some": True}),
        ("SELECT pg_total_relation_size('public.kept') >= 0 AS b, random() < 2 AS r, now() IS NULL AS n",
         {"b": True, "r": True, "n": False}),
        ("SELECT 'acts()' AS text, \"acts()\" AS quoted FROM (SELECT 1 AS \"acts()\") AS s",
         {"text": "acts()", "quoted": 1}),
        ("SELECT '{1,2}'::int[] AS a, NULL AS n, 1.50 AS d", None),
        ("SELECT 'LIMIT lo_put(1)' AS a, $a$lo_put()$a$ AS b /* acts( */ -- acts(",
         {"a": "LIMIT lo_put(1)", "b": "lo_put()"}),
        ("SELECT n FROM (VALUES (2), (abs(-1))) AS s (n) ORDER BY n LIMIT greatest(1, 0) OFFSET length('')", {"n": 1}),
        ("SELECT acts FROM (SELECT 1 AS acts) AS s", {"acts": 1}),
    ],
)  # fmt: skip
def test_a_question_is_answered(database: Database, question: str, first: dict[str, object] | None) -> None:
    found = database.read(question)

    assert first is None or dict(found[0]) == first


@pytest.mark.parametrize(
    ("question", "output"),
    [
        ("SELEC 1", 'syntax error at or near "SELEC"'),
        ("SELECT nope FROM kept", 'column "nope" does not exist'),
        ("SELECT 1; SELECT 2", "the text has several statements"),
        ("COMMIT; CREATE TABLE left_over ()", "this statement would change the database"),
        ("DELETE FROM kept", "this statement would change the database"),
        ("SELECT $1", 'bind message supplies 0 parameters, but prepared statement "" requires 1'),
        (" ", "the statement is empty"),
    ],
)
def test_statement_that_is_not_a_query_is_reported(database: Database, question: str, output: str) -> None:
    with pytest.raises(UsageError) as raised:
        database.read(question)

    assert raised.value.message == output


def test_an_answer_has_no_more_rows_than_memory_holds(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("millpy.admin.sql.ROWS_MAX", 3)
    assert len(database.read("SELECT * FROM generate_series(1, 3)")) == 3
    with pytest.raises(UsageError) as raised:
        database.read("SELECT * FROM generate_series(1, 4)")

    assert raised.value.message == "4 rows are too many to show"


def test_every_server_function_with_an_effect_is_refused(database: Database) -> None:
    # By their names: what a later version adds, and what changes something, has to be among the harmless to be asked.
    with psycopg.connect(database.url) as connection:
        names = [
            name
            for (name,) in connection.execute(
                "SELECT DISTINCT proname FROM pg_proc WHERE pronamespace = 'pg_catalog'::regnamespace AND"
                " proname ~ '^(lo_(?!get|tell|lseek|close|open)|lowrite|set_config|setval|nextval|query_to_xml$|ts_stat"
                "|pg_(terminate|cancel|reload|rotate|switch|create|drop|copy|promote|wal_replay|backup|advisory"
                "|try_advisory|notify$|logical_emit|replication_(slot|origin_(adv|create|drop))|stat_reset|file_|import"
                "|export|log_|restore|clear|sync|stop|read_))'"
            )
        ]

    assert len(names) > 50
    for name in names:
        given = {"called": [name], "named": [], "harmless": HARMLESS, "ours": []}
        assert database.other.execute(ACTING, given).fetchone() is not None, name


def test_views_of_the_server_and_of_millpy_can_be_queried(postgres: EmbeddedPostgres) -> None:
    with fresh_database(postgres, "template1") as name:
        migrate(postgres.url(name))
        asked = Admin(postgres.url(name), statement_s_max=60)
        views = asked.ask(
            "SELECT format('%I.%I', relnamespace::pg_catalog.regnamespace, relname) AS view FROM pg_catalog.pg_class"
            " WHERE relkind = 'v' AND relname <> 'pg_shmem_allocations_numa'"
        )
        refused = []
        for row in views:
            try:
                asked.read(f"SELECT * FROM {row['view']} LIMIT 1")
            except UsageError as error:
                refused.append((row["view"], error.message))

    assert len(views) > 150
    assert not refused


def test_names_in_a_statement_are_found_as_the_server_parses_them() -> None:
    text = (
        r"""SELECT A.b, "C ""d"(1), e /* f( /* */ g( */ (2) -- h(
        , 'i('' j(', $k$ l( $m$ $k$, n$o$(p), E'q(', é(), (r).s FROM """
        + "t" * 70
        + "(1)"
    )

    assert [name for name, called in names_in(text) if called] == ["b", 'C "d', "e", "n$o$", "é", "s", "t" * 63]
    assert dict(names_in("TABLE Kept")) == {"table": False, "kept": False}


def test_function_names_are_found_in_the_servers_output() -> None:
    text = r'''((s."a'(" || f(1)) || 'g('::text) || "H ""x"""(s."b'") || E'\'i(' || mill.j((2))'''

    assert list(functions_in(text)) == ["f", 'H "x"', "j"]
