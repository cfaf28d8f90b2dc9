"""Pieces of a table: none comes from another table, none exceeds its bytes."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import psycopg
import pytest
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from millpy.embedded import EmbeddedPostgres
from millpy.errors import TableSwitchedError
from millpy.spark import read_table
from millpy.spark.connection import connected
from millpy.spark.pieces import PIECE_BYTES, plan, read
from millpy.spark.spark_errors import readable_error
from millpy.spark.tables import SparkTable, describe
from tests.pgbouncer import Pgbouncer, program

GENERATIONS = """
CREATE SCHEMA mill; CREATE SCHEMA mill_next;
CREATE TABLE mill.hourly AS SELECT i::bigint, 'old' AS made FROM generate_series(1, 3000) AS i;
CREATE TABLE mill_next.hourly AS SELECT i::bigint, 'new' AS made FROM generate_series(1, 3000) AS i;
ALTER TABLE mill.hourly ADD PRIMARY KEY (i);
ALTER TABLE mill_next.hourly ADD PRIMARY KEY (i);
"""
SWITCH = """
BEGIN; ALTER SCHEMA mill RENAME TO mill_before; ALTER SCHEMA mill_next RENAME TO mill; COMMIT
"""


@pytest.fixture
def url(postgres: EmbeddedPostgres) -> Iterator[str]:
    with psycopg.connect(postgres.url(), autocommit=True) as connection:
        connection.execute("DROP DATABASE IF EXISTS pieces WITH (FORCE)")
        connection.execute("CREATE DATABASE pieces")
    yield postgres.url("pieces")


def execute(url: str, statements: str) -> None:
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(statements)


def everything(url: str, table: SparkTable) -> Iterator[list[str]]:
    for batch in read(url, table, table.arrow_schema(["made"]), (), (None, None), batch_rows=500):
        yield batch.column("made").to_pylist()


def test_a_table_that_is_switched_while_it_is_read_is_not_mixed_with_the_next(url: str) -> None:
    execute(url, GENERATIONS)
    table = describe(url, "mill", "hourly")
    pieces = everything(url, table)
    assert set(next(pieces)) == {"old"}

    execute(url, SWITCH)

    with pytest.raises(TableSwitchedError, match=r"mill\.hourly was switched") as raised:
        next(pieces)
    assert raised.value.hint == "read it again"
    with pytest.raises(TableSwitchedError):
        next(everything(url, table))
    assert {made for piece in everything(url, describe(url, "mill", "hourly")) for made in piece} == {"new"}


def test_a_table_that_is_dropped_or_recreated_while_it_is_read_stops_the_read(url: str) -> None:
    execute(url, GENERATIONS)
    table = describe(url, "mill", "hourly")
    pieces = everything(url, table)
    next(pieces)

    execute(url, "DROP TABLE mill.hourly")

    with pytest.raises(TableSwitchedError):
        next(pieces)
    execute(url, "CREATE TABLE mill.hourly AS TABLE mill_next.hourly")
    with pytest.raises(TableSwitchedError):
        next(everything(url, table))
    execute(url, "DROP SCHEMA mill CASCADE")
    with pytest.raises(TableSwitchedError):
        next(everything(url, table))


def test_spark_reports_that_a_table_was_switched(spark: SparkSession, url: str) -> None:
    execute(url, GENERATIONS)
    frame = read_table(spark, "mill.hourly", database_url=url)
    before = frame.where("made = 'old'").count()

    execute(url, SWITCH)

    assert before == 3000
    with pytest.raises(PySparkException, match="was switched to another table") as raised:
        frame.count()
    assert readable_error(str(raised.value)).startswith("mill.hourly was switched to another table")
    assert read_table(spark, "mill.hourly", database_url=url).where("made = 'new'").count() == 3000


WIDE = """
CREATE TABLE wide AS
SELECT i::bigint, repeat('x', CASE WHEN i % 1000 < 10 THEN 200000 WHEN i > 25000 THEN 10000 ELSE 10 END) AS text
  FROM generate_series(1, 30000) AS i;
ALTER TABLE wide ADD PRIMARY KEY (i);
ANALYZE wide;
"""


def test_a_piece_of_wide_rows_has_fewer_of_them(url: str) -> None:
    execute(url, WIDE)
    table = describe(url, "public", "wide")

    partitions = plan(url, table, ["i", "text"], (), partitions=2, batch_rows=20_000)
    narrow = plan(url, table, ["i"], (), partitions=2, batch_rows=20_000)

    lower = [int(bound[0]) for bounds in partitions for bound in bounds if bound is not None]
    with psycopg.connect(url) as connection:
        sizes = [
            connection.execute("SELECT sum(length(text)) FROM wide WHERE i > %s AND i <= %s", piece).fetchone()[0]  # type: ignore[index]
            for piece in pairwise([0, *sorted(set(lower)), 30_000])
        ]
    assert sum(sizes) > 3 * PIECE_BYTES
    assert max(sizes) < 1.5 * PIECE_BYTES
    assert [len(bounds) for bounds in narrow] == [2, 2]


def test_a_piece_that_turns_out_too_large_is_read_in_smaller_ones(url: str) -> None:
    execute(url, WIDE)
    table = describe(url, "public", "wide")
    schema = table.arrow_schema(["text", "i"])
    limit = 1 << 20

    batches = list(read(url, table, schema, (), (("500",), ("4500",)), batch_rows=20_000, piece_bytes_max=limit))

    assert [i for batch in batches for i in batch.column("i").to_pylist()] == list(range(501, 4501))
    assert max(batch.nbytes for batch in batches) < 3 * limit


def test_an_answer_stops_at_the_byte_limit_and_the_next_is_complete(url: str) -> None:
    execute(url, WIDE)
    with connected(url) as connection:
        some, complete = connection.batches("SELECT text FROM public.wide WHERE i > 25000", bytes_max=2_000_000)

        assert not complete
        assert 2_000_000 < sum(batch.nbytes for batch in some) < 6_000_000
        assert connection.rows("SELECT count(*) FROM public.wide") == [(30_000,)]
        assert connection.batches("SELECT 1", bytes_max=2_000_000)[1]


@pytest.mark.skipif(program() is None, reason="pgbouncer is not installed")
def test_settings_of_the_reader_do_not_leak_into_a_pool(url: str, postgres: EmbeddedPostgres, tmp_path: Path) -> None:
    execute(url, "ALTER DATABASE pieces SET statement_timeout = '77s'")
    asked = "SELECT current_setting('statement_timeout'), current_setting('TimeZone'), pg_backend_pid()"
    with Pgbouncer(tmp_path / "pool", postgres.tcp_url(), "transaction", 1) as pool:
        with connected(pool.url("pieces")) as reader, connected(pool.url("pieces"), 1.5) as another:
            (given,) = reader.rows(asked)
            (others,) = another.rows(asked)
        with psycopg.connect(pool.url("pieces"), autocommit=True) as somebody:
            left = somebody.execute(asked).fetchone()

    assert given[:2] == ("5s", "UTC")
    assert others == ("1500ms", "UTC", given[2])
    assert left is not None
    assert (left[0], left[2]) == ("77s", given[2])
