"""The first copy of a table goes along any primary key, in the order of its types."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest
from psycopg import sql

from millpy import PolledTable, milliseconds
from millpy.embedded import EmbeddedPostgres
from millpy.errors import ConfigError
from millpy.limits import Limits
from millpy.sources.postgres.table_checks import TableFacts, look_at_key
from millpy.sources.postgres.table_copy import QUERY_ROWS_MAX, KeyRange, begin_snapshot, pieces
from millpy.store.postgres.session import connect
from tests.conformance.table_reading import reader, reader_of, table_of

_secrets = itertools.count(1)


@pytest.fixture(scope="module")
def foreign_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Debian's server, which has ICU and contrib: the wheel's has neither."""
    directory = tmp_path_factory.mktemp("foreign")
    with EmbeddedPostgres(directory, version="system15") as server:
        with psycopg.connect(server.url(), autocommit=True) as connection:
            connection.execute("CREATE EXTENSION citext; CREATE TYPE mood AS ENUM ('wild', 'calm', 'so so')")
            connection.execute("CREATE DOMAIN nick AS citext")
        yield server.url()


@pytest.fixture
def secret() -> str:
    return f"keys {next(_secrets)}"


KEYS: dict[str, list[tuple[Any, ...]]] = {
    "a citext PRIMARY KEY": [("b",), ("A",), ("D",), ("c",), ("e",), ("F",), ("ä",)],
    'a text COLLATE "und-x-icu" PRIMARY KEY': [("b",), ("A",), ("D",), ("c",), ("e",), ("F",), ("ä",)],
    "a nick, b int, PRIMARY KEY (b, a)": [("x", 2), ("B", 1), ("a", 1), ("Y", 2), ("c", 1), ("D", 1)],
    "a citext, b citext, PRIMARY KEY (a, b)": [("x", "b"), ("X", "A"), ("x", "C"), ("A", "b"), ("a", "A"), ("z", "Z")],
    "a mood, b uuid, PRIMARY KEY (a, b)": [
        (mood, f"00000000-0000-0000-0000-00000000000{n}") for mood in ("calm", "wild", "so so") for n in (2, 1)
    ],
    "a timestamptz PRIMARY KEY": [("infinity",), ("2026-01-02",), ("-infinity",), ("0044-01-01 BC",), ("2025-01-01",)],
    "a float8 PRIMARY KEY": [("NaN",), ("-0.1",), ("0.30000000000000004",), ("0.3",), ("Infinity",), ("1e300",)],
    "a numeric, b char(3), PRIMARY KEY (a, b)": [("1.50", "b"), ("1.5", "a"), ("NaN", "a"), ("-2", "c"), ("1e30", "")],
    'a "char", b name, c oid, PRIMARY KEY (a, b, c)': [
        ("z", "b", 3),
        ("Z", "B", 1),
        ("Z", "a", 4000000000),
        ("a", "", 2),
    ],
    "a int[] PRIMARY KEY": [("{2}",), ("{1,2}",), ("{1}",), ("{}",), ("{1,NULL}",)],
    "a bytea, b interval, PRIMARY KEY (a, b)": [
        ("\\xff", "1 day"),
        ("\\x00", "25 h"),
        ("\\x00", "1 day"),
        ("\\x", "1 s"),
    ],
    "a bit(2), b bit varying(3), PRIMARY KEY (a, b)": [("10", "1"), ("01", "10"), ("10", "0"), ("00", "111")],
    "a inet, b boolean, PRIMARY KEY (a, b)": [("10.0.0.2", True), ("9.0.0.1", True), ("9.0.0.1", False), ("::1", True)],
}


@pytest.mark.parametrize("key", KEYS)
async def test_copy_that_is_interrupted_within_any_kind_of_key_has_each_change_once(
    foreign_url: str, secret: str, key: str
) -> None:
    rows = KEYS[key]
    with table_of(foreign_url, f"n int NOT NULL, {key}") as connection:
        places = ", ".join(["%s"] * len(rows[0]))
        connection.cursor().executemany(f"INSERT INTO t VALUES (0, {places})", rows)
        position: bytes | None = None
        read: list[dict[str, Any]] = []
        for _ in range(len(rows) // 2):
            async with reader(
                foreign_url, position, secret=secret, database=foreign_url, limits=Limits(bundle_records_max=2)
            ) as found:
                read += await found.records(2)
                position = found.position
            connection.execute("UPDATE t SET n = n + 1")
        async with reader(foreign_url, position, secret=secret, database=foreign_url) as found:
            while sum(record["operation"] == "snapshot" for record in read) < len(rows):
                read += await found.take()
            connection.execute("UPDATE t SET n = -n")
            while sum((record["n"] or 1) < 0 for record in read) < len(rows):
                read += await found.take()
        names = [column.name for column in connection.execute("SELECT * FROM t").description or ()][1:]

    last: dict[str, int] = {}
    for record in read:
        of = repr([record[name] for name in names])
        if record["operation"] == "snapshot":
            assert of not in last
        else:
            assert record["n"] in (last[of] + 1, -last[of])
        last[of] = record["n"]
    assert sorted(last.values()) == [-(len(rows) // 2)] * len(rows)


async def test_polling_goes_along_a_key_of_an_extension_and_a_column_without_a_greatest_value(
    foreign_url: str, secret: str
) -> None:
    source = PolledTable("t", column="v", lag=milliseconds(1), every=milliseconds(10))
    with table_of(foreign_url, "a citext PRIMARY KEY, v uuid") as connection:
        uuid = "00000000-0000-0000-0000-00000000000"
        rows = [(a, f"{uuid}{n}") for a, n in (("b", 1), ("A", 1), ("D", 1), ("c", 1), ("e", 2))]
        connection.cursor().executemany("INSERT INTO t VALUES (%s, %s)", rows)
        async with reader_of(source, foreign_url, secret=secret, limits=Limits(bundle_records_max=1)) as found:
            assert [record["a"] for record in await found.records(5)] == ["A", "b", "c", "D", "e"]
        connection.execute("ALTER TABLE t DROP CONSTRAINT t_pkey, ADD UNIQUE (a), ADD PRIMARY KEY (v, a)")
        with pytest.raises(ConfigError, match=r"the primary key of table public\.t was changed"):
            async with reader_of(source, foreign_url, found.position, secret=secret) as stopped:
                await stopped.take()


async def test_copy_reads_the_rows_of_the_table_alone_by_its_key_alone(foreign_url: str, secret: str) -> None:
    with table_of(foreign_url, "a int, b int, PRIMARY KEY (a) INCLUDE (b)") as connection:
        connection.execute("DROP TABLE IF EXISTS heir; CREATE TABLE heir () INHERITS (t)")
        connection.execute(
            "INSERT INTO heir VALUES (9, 9); INSERT INTO t SELECT i, NULL FROM generate_series(1, 5) AS i"
        )
        limits = Limits(bundle_records_max=2)
        async with reader(foreign_url, secret=secret, database=foreign_url, limits=limits) as found:
            read = await found.records(5)
            connection.execute("INSERT INTO heir VALUES (10, 10); INSERT INTO t VALUES (6, 6)")
            read += await found.records(1)
        connection.execute("DROP TABLE heir")

    assert [record["a"] for record in read] == [1, 2, 3, 4, 5, 6]


def test_table_is_locked_before_the_snapshot_that_copies_it(foreign_url: str) -> None:
    with table_of(foreign_url, "a int PRIMARY KEY") as connection, connect(foreign_url) as copying:
        begin_snapshot(copying, sql.Identifier("public", "t"), is_partitioned=False)
        connection.execute("SET lock_timeout TO '50ms'")
        with pytest.raises(psycopg.errors.LockNotAvailable):
            connection.execute("ALTER TABLE t ALTER a TYPE bigint")  # which rewrites all rows


async def test_copy_fails_where_row_security_would_hide_rows(foreign_url: str, secret: str) -> None:
    with table_of(foreign_url, "a int PRIMARY KEY") as connection:
        connection.execute("INSERT INTO t VALUES (1), (2); ALTER TABLE t ENABLE ROW LEVEL SECURITY")
        connection.execute("CREATE POLICY most ON t USING (a > 1); CREATE ROLE tenant LOGIN REPLICATION")
        connection.execute("GRANT SELECT ON t TO tenant; CREATE PUBLICATION millpy_public_t FOR TABLE t")
        url = foreign_url.replace("//millpy@", "//tenant@")
        try:
            with pytest.raises(ConfigError, match="row-level security"):
                async with reader(url, secret=secret, database=url) as found:
                    await found.take()
        finally:
            connection.execute("DROP OWNED BY tenant; DROP ROLE tenant")


@pytest.mark.parametrize(
    ("rest_of_table", "index", "changed"),
    [
        ("", "CREATE UNIQUE INDEX t_b ON t (b)", "t"),
        (
            ") PARTITION BY RANGE (a",
            "CREATE TABLE t_1 PARTITION OF t DEFAULT; CREATE UNIQUE INDEX t_b ON t_1 (b)",
            "t_1",
        ),
    ],
    ids=["of the table", "of a partition"],
)
async def test_changes_without_the_primary_key_stop_a_reader_whose_copy_was_interrupted(
    foreign_url: str, secret: str, rest_of_table: str, index: str, changed: str
) -> None:
    with table_of(foreign_url, f"a int PRIMARY KEY, b int NOT NULL{rest_of_table}") as connection:
        connection.execute(f"{index}; INSERT INTO t SELECT i, i FROM generate_series(1, 6) AS i")
        limits = Limits(bundle_records_max=2)
        async with reader(foreign_url, secret=secret, database=foreign_url, limits=limits) as found:
            await found.records(2)
        connection.execute(f"ALTER TABLE {changed} REPLICA IDENTITY USING INDEX t_b; DELETE FROM t WHERE a = 1")
        with pytest.raises(
            ConfigError, match="replica identity of table t, or of a partition of it, lacks the primary key"
        ):
            async with reader(foreign_url, found.position, secret=secret, database=foreign_url) as again:
                await again.records(5)


async def test_update_of_a_copied_row_whose_key_is_stored_out_of_line_is_an_update(
    foreign_url: str, secret: str
) -> None:
    with table_of(foreign_url, "a text PRIMARY KEY, n int") as connection:
        connection.execute("ALTER TABLE t ALTER a SET STORAGE EXTERNAL")
        connection.execute("INSERT INTO t SELECT repeat(chr(96 + i), 2400), 0 FROM generate_series(1, 4) AS i")
        limits = Limits(bundle_records_max=2)
        async with reader(foreign_url, secret=secret, database=foreign_url, limits=limits) as found:
            await found.records(2)
        connection.execute("UPDATE t SET n = 1 WHERE a < 'c'")
        async with reader(foreign_url, found.position, secret=secret, database=foreign_url) as again:
            read = [record for record in await again.records(4) if record["operation"] != "snapshot"]

    assert [(record["operation"], record["a"][0], record["n"]) for record in read] == [
        ("update", "a", 1),
        ("update", "b", 1),
    ]


async def test_copy_has_the_columns_that_a_publication_has(foreign_url: str, secret: str) -> None:
    with table_of(foreign_url, "a int PRIMARY KEY, b int, c int") as connection:
        connection.execute("CREATE PUBLICATION millpy_public_t FOR TABLE t (a, c)")
        connection.execute("INSERT INTO t VALUES (1, 2, 3)")
        async with reader(foreign_url, secret=secret, database=foreign_url) as found:
            read = await found.records(1)
            connection.execute("INSERT INTO t VALUES (4, 5, 6)")
            read += await found.records(1)
        connection.execute("ALTER PUBLICATION millpy_public_t SET (publish = 'insert')")
        with pytest.raises(ConfigError, match="lacks each update and delete and truncate of table"):
            async with reader(foreign_url, found.position, secret=secret, database=foreign_url) as stopped:
                await stopped.take()

    assert [(record["a"], record.get("b"), record["c"]) for record in read] == [(1, None, 3), (4, None, 6)]


def test_pieces_of_a_copy_are_bounded_when_rows_get_a_thousand_times_larger(foreign_url: str) -> None:
    with table_of(foreign_url, "a int PRIMARY KEY, b text") as connection:
        connection.execute(
            "INSERT INTO t SELECT i, CASE WHEN i > 10000 THEN repeat('x', 10000) END FROM generate_series(1, 14000) i"
        )
        facts = TableFacts(look_at_key(connection, "public", "t"), ("a", "b"))
        table = sql.Identifier("public", "t")
        found = list(pieces(connection, table, facts, KeyRange(), rows_max=65_536, bytes_max=500_000))

    sizes = [sum(len(value or b"") for row in piece.rows for value in row) for piece in found]
    assert [key for piece in found for (key,) in piece.keys] == [str(a) for a in range(1, 14001)]
    assert max(sizes) < 500_000 + QUERY_ROWS_MAX * 10_004 < 4_000 * 10_004
    assert sum(size > 510_000 for size in sizes) <= 1
