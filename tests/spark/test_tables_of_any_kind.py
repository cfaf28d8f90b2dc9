"""Tables with whatever PostgreSQL can hold, and readers with few rights: the same rows as SQL, or words that help."""

from __future__ import annotations

import datetime as dt
import decimal
import json
import math
import random
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest
from psycopg import sql
from pyspark.errors import AnalysisException
from pyspark.sql import SparkSession

from millpy.embedded import EmbeddedPostgres
from millpy.errors import ConfigError
from millpy.spark import read_table
from millpy.spark.connection import RefusedError
from millpy.spark.pieces import Bounds, plan, read
from millpy.spark.spark_errors import readable_error
from millpy.spark.tables import FIRST_DAY, LAST_DAY, Condition, SparkTable, as_text, describe

Rows = list[tuple[Any, ...]]
PARTS = [
    "",
    "a",
    "A",
    "a'b",
    "\\",
    "%",
    "_",
    "';--",
    'x"y',
    "ü",
    "u\u0308",
    "𝔘😀",
    "\n",
    "\t",
    "NULL",
    "None",
    "\\N",
    " ",
]
UTC = dt.UTC
MAKE: dict[str, Callable[[random.Random], Any]] = {
    "text": lambda rng: "".join(rng.choices(PARTS, k=3)),
    "bigint": lambda rng: rng.choice([0, -1, 2**63 - 1, -(2**63), rng.randrange(1000)]),
    "double precision": lambda rng: rng.choice([0.0, 5e-324, 0.1 + 0.2, math.inf, -math.inf, math.nan, rng.random()]),
    "numeric": lambda rng: rng.choice([decimal.Decimal("NaN"), decimal.Decimal(rng.randrange(10**9)) / 1000]),
    "boolean": lambda rng: rng.random() < 0.5,
    "bytea": lambda rng: rng.choice([b"", b"\x00\\", b"'", rng.randbytes(3)]),
    "timestamptz": lambda rng: rng.choice(
        [FIRST_DAY, LAST_DAY, dt.datetime(1969, 12, 31, tzinfo=UTC) + dt.timedelta(microseconds=rng.getrandbits(55))]
    ),
    "uuid": lambda rng: uuid.UUID(int=rng.getrandbits(128)),
    "jsonb": lambda rng: rng.choice(["null", '{"b": 1, "a": [null, "ü\'\\n"]}', json.dumps(rng.choice(PARTS))]),
    "character(3)": lambda rng: rng.choice(["a", "ab", "abc", "abd"]),
    "date": lambda rng: dt.date(2026, 1, 1) + dt.timedelta(rng.randrange(400)),
    "text[]": lambda rng: rng.choices(PARTS, k=2),
}  # fmt: skip
NAMES = ["k", "K", "key one", 'q"x', "select", "t", "ü", "setseed"]


@pytest.fixture(scope="module")
def url(postgres: EmbeddedPostgres) -> Iterator[str]:
    with psycopg.connect(postgres.url(), autocommit=True) as connection:
        connection.execute("CREATE ROLE odd_reader LOGIN")
        connection.execute("CREATE DATABASE odd")
        for setting in ("datestyle = 'SQL, DMY'", "timezone = 'Asia/Tokyo'", "extra_float_digits = -5"):
            connection.execute(f"ALTER DATABASE odd SET {setting}")
    yield postgres.url("odd")
    with psycopg.connect(postgres.url(), autocommit=True) as connection:
        connection.execute("DROP DATABASE odd WITH (FORCE)")
        connection.execute("DROP ROLE odd_reader")


def execute(url: str, *statements: str) -> None:
    with psycopg.connect(url, autocommit=True) as connection:
        for statement in statements:
            connection.execute(statement)


def rows_of(url: str, query: sql.Composed | str, given: Any = None) -> Rows:
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("SET timezone = 'UTC'; SET datestyle = 'ISO'; SET extra_float_digits = 1")
        return connection.execute(query, given).fetchall()  # type: ignore[arg-type]


def alike(rows: Rows) -> list[str]:
    """In one order, and NaN as itself."""
    return sorted(repr([one.isoformat() if isinstance(one, dt.datetime) else one for one in row]) for row in rows)


def found_in(url: str, table: SparkTable, names: list[str], bounds: Bounds = (None, None), **limits: Any) -> Rows:
    conditions = limits.pop("conditions", ())
    schema = table.arrow_schema(names)
    batches = list(read(url, table, schema, conditions, bounds, **{"batch_rows": 1000, **limits}))
    assert all(batch.schema == schema for batch in batches)
    return [row for batch in batches for row in zip(*(column.to_pylist() for column in batch.columns), strict=True)]


def fill(url: str, rng: random.Random, name: str) -> dict[str, str]:
    """A table of random columns and rows, some null; its columns and their types. The first two are the key."""
    types = dict(zip(rng.sample(NAMES, 6), rng.sample([*MAKE], 6), strict=True))
    columns = sql.SQL(", ").join(
        sql.SQL("{} " + kind).format(sql.Identifier(column))  # type: ignore[arg-type]
        for column, kind in types.items()
    )
    key = sql.SQL(", ").join(map(sql.Identifier, [*types][:2]))
    place = sql.Identifier("Odd Place", name)
    values = sql.SQL(", ").join(sql.SQL("%s::" + kind) for kind in types.values())  # type: ignore[arg-type]
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute('CREATE SCHEMA IF NOT EXISTS "Odd Place"')
        connection.execute(sql.SQL("CREATE TABLE {} ({}, PRIMARY KEY ({}))").format(place, columns, key))
        connection.cursor().executemany(
            sql.SQL("INSERT INTO {} VALUES ({}) ON CONFLICT DO NOTHING").format(place, values),
            [
                [None if at > 1 and rng.random() < 0.2 else MAKE[kind](rng) for at, kind in enumerate(types.values())]
                for _ in range(80)
            ],
        )
    return types


@pytest.mark.parametrize("seed", range(8))
def test_any_columns_and_keys_in_any_pieces_equal_those_of_sql(url: str, seed: int) -> None:
    rng = random.Random(seed)
    types = fill(url, rng, f"Table {seed}")
    place = sql.Identifier("Odd Place", f"Table {seed}")
    table = describe(url, "Odd Place", f"Table {seed}")
    names = {name: sql.Identifier(name) for name in types}
    native = ("text", "bigint", "double precision", "boolean", "bytea", "timestamptz")
    shown = {name: sql.SQL("{}" if types[name] in native else "{}::text").format(names[name]) for name in types}
    first, second = (names[name] for name in table.key)
    keys = rows_of(
        url, sql.SQL("SELECT {0}::text, {1}::text FROM {2} AS a ORDER BY a.{0}, a.{1}").format(first, second, place)
    )

    for limits in ({"batch_rows": 7}, {"piece_bytes_max": 1}, {}):
        wanted = rng.sample([*types], rng.randrange(1, 6))
        cuts = sorted(rng.sample(range(len(keys)), min(len(keys), rng.choice([0, 2, 9]))))
        by = rng.choice([name for name in types if types[name] != "text[]"])
        values = [MAKE[types[by]](rng) for _ in range(4)]
        some = rng.random() < 0.5
        conditions = [Condition(by, "= ANY", tuple(map(as_text, values)))] if some else []
        bounds = (None, *(keys[cut] for cut in cuts), None)
        found = found_in(url, table, wanted, bounds, conditions=conditions, **limits)

        each = sql.SQL("%s::" + types[by])  # type: ignore[arg-type]
        where = sql.SQL("WHERE {} IN ({})").format(names[by], sql.SQL(", ").join([each] * len(values)))
        columns = sql.SQL(", ").join(shown[name] for name in wanted)
        query = sql.SQL("SELECT {} FROM {} {}").format(columns, place, where if some else sql.SQL(""))
        expected = rows_of(url, query, values if some else None)
        assert alike(found) == alike(expected)


def test_a_table_with_a_column_named_like_a_function_is_read_in_pieces(url: str) -> None:
    execute(
        url,
        "CREATE TABLE seeds (setseed bigint PRIMARY KEY, v text)",
        "INSERT INTO seeds SELECT i, 'v' FROM generate_series(1, 21000) AS i; ANALYZE seeds",
    )
    table = describe(url, "public", "seeds")
    condition = [Condition("setseed", "= ANY", ("5",))]

    assert len(plan(url, table, ["v"], (), partitions=3, batch_rows=50_000)) == 3
    assert plan(url, table, ["v"], condition, partitions=3, batch_rows=50_000) == [(None, None)]


def test_a_table_whose_long_texts_were_deleted_is_empty(url: str) -> None:
    execute(
        url,
        "CREATE TABLE emptied (k bigint PRIMARY KEY, v text); ALTER TABLE emptied ALTER v SET STORAGE EXTERNAL",
        "INSERT INTO emptied SELECT i, repeat('x', 1000000) FROM generate_series(1, 40) AS i; DELETE FROM emptied",
        "VACUUM (PROCESS_TOAST false) emptied",
    )
    table = describe(url, "public", "emptied")

    assert plan(url, table, ["v"], (), partitions=4, batch_rows=1000) == [(None, None)]
    assert found_in(url, table, ["v"]) == []


def test_infinity_sorts_after_all_other_days(url: str) -> None:
    execute(
        url,
        "CREATE TABLE ends (k timestamptz PRIMARY KEY, v bigint)",
        "INSERT INTO ends VALUES ('infinity', 4), ('-infinity', 1), ('20000-01-01Z', 3), ('2026-01-01Z', 2)",
    )
    table = describe(url, "public", "ends")
    condition = [Condition("v", "= ANY", ("1", "2", "4"))]

    found = dict(found_in(url, table, ["v", "k"], conditions=condition))
    one_by_one = found_in(url, table, ["v"], batch_rows=1)

    assert found == {1: FIRST_DAY, 2: dt.datetime(2026, 1, 1, tzinfo=UTC), 4: LAST_DAY}
    assert one_by_one == [(1,), (2,), (3,), (4,)]


@pytest.fixture
def reader(url: str, postgres: EmbeddedPostgres) -> str:
    """Return the URL of a user who may read two columns of `part`, and no other table."""
    execute(
        url,
        "DROP TABLE IF EXISTS part; DROP SCHEMA IF EXISTS closed CASCADE; CREATE SCHEMA closed",
        "CREATE TABLE closed.t (k bigint PRIMARY KEY)",
        "CREATE TABLE part (k bigint PRIMARY KEY, open bigint, secret text)",
        "INSERT INTO part SELECT i, i, 's' FROM generate_series(1, 21000) AS i; ANALYZE part",
        "GRANT SELECT (k, open) ON part TO odd_reader",
    )
    return postgres.url("odd").replace("//millpy@", "//odd_reader@")


def test_missing_rights_are_reported_and_not_mistaken_for_a_switch(spark: SparkSession, url: str, reader: str) -> None:
    table = describe(reader, "public", "part")

    with pytest.raises(RefusedError, match=r"^missing rights: permission denied for table part") as refused:
        found_in(reader, table, ["k", "secret"])
    with pytest.raises(RefusedError, match="missing rights"):
        plan(reader, table, ["k", "secret"], (), partitions=2, batch_rows=1000)
    with pytest.raises(RefusedError, match="missing rights: permission denied for schema closed"):
        describe(reader, "closed", "t")
    with pytest.raises(AnalysisException) as raised:
        read_table(spark, "closed.t", database_url=reader)

    assert "name only columns" in refused.value.hint
    assert readable_error(str(raised.value)) == "missing rights: permission denied for schema closed"
    assert read_table(spark, "public.part", columns=["open"], database_url=reader).count() == 21_000
    execute(url, "ALTER TABLE part ENABLE ROW LEVEL SECURITY; CREATE POLICY few ON part USING (k > 20990)")
    assert read_table(spark, "public.part", columns=["open"], database_url=reader).count() == 10
    execute(url, "REVOKE ALL ON part FROM odd_reader")
    with pytest.raises(RefusedError, match="missing rights"):
        found_in(reader, table, ["open"])


def test_a_misfit_value_and_a_missing_column_are_not_mistaken_for_a_switch(url: str) -> None:
    execute(url, "DROP TABLE IF EXISTS changed; CREATE TABLE changed (k bigint PRIMARY KEY, v text, w text)")
    table = describe(url, "public", "changed")

    with pytest.raises(RefusedError, match=r'^the database refuses a value: invalid input .* bigint: "x"'):
        found_in(url, table, ["v"], conditions=[Condition("k", "= ANY", ("x",))])
    execute(url, "ALTER TABLE changed DROP COLUMN v")
    with pytest.raises(RefusedError, match=r"^the table has changed: column t\.v does not exist") as raised:
        found_in(url, table, ["v"])

    assert raised.value.hint == "load it again"


KEYS = """
CREATE TABLE keyed (k text PRIMARY KEY, raw bytea, at timestamptz);
INSERT INTO keyed VALUES ('None', '\\x616263', '2026-01-01Z'), ('o', NULL, NULL)
"""


def test_keys_match_exactly_the_given_values(spark: SparkSession, url: str) -> None:
    execute(url, "DROP TABLE IF EXISTS keyed", KEYS)

    def count(**keys: Any) -> int:
        return read_table(spark, "public.keyed", keys=keys, columns="at", key="k", database_url=url).count()

    assert count(k="None") == 1
    assert count(k=["o", "None"]) == 2
    assert count(raw=[b"abc"]) == 1
    assert count(at=[dt.datetime(2026, 1, 1, 1, tzinfo=dt.timezone(dt.timedelta(hours=1)))]) == 1
    with pytest.raises(AnalysisException, match="option keys asks for null in 'k'"):
        count(k=[None])
    with pytest.raises(ConfigError, match="without a zone"):
        count(at=[dt.datetime(2026, 1, 1)])  # noqa: DTZ001
