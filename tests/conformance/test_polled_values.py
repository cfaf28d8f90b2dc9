"""Rows of equal values in a table that is polled: the lag is kept among them, and each counts once."""

from __future__ import annotations

import itertools
from datetime import timedelta

import msgspec
import psycopg
import pytest
from psycopg import sql

from millpy import PolledTable, milliseconds
from millpy.ingest.protocol import FixedBound
from millpy.limits import Limits
from millpy.sources.postgres import table_copy
from millpy.sources.postgres.polled_position import PolledPosition
from millpy.sources.postgres.polled_rows import late_rows
from millpy.sources.postgres.polled_thread import look_at_polled_table
from millpy.sources.postgres.table_copy import KeyRange, pieces
from tests.conformance.table_reading import reader_of, table_of

_secrets = itertools.count(1)


@pytest.fixture
def secret() -> str:
    return f"polled {next(_secrets)}"


async def test_row_that_commits_within_the_lag_behind_a_greater_key_of_its_value_is_read(
    database_url: str, secret: str
) -> None:
    source = PolledTable("t", column="day", lag=milliseconds(300), every=milliseconds(10))
    with table_of(database_url, "id text PRIMARY KEY, day date") as connection:
        connection.execute("INSERT INTO t VALUES ('m', '2026-11-28')")
        with psycopg.connect(database_url) as slow:
            async with reader_of(source, database_url, secret=secret) as found:
                read = [row["id"] for row in await found.records(1)]
                slow.execute("INSERT INTO public.t VALUES ('a', '2026-11-28')")
                connection.execute("INSERT INTO t VALUES ('z', '2026-11-28')")
                slow.commit()
                read += [row["id"] for row in await found.records(2)]
            connection.execute("INSERT INTO t VALUES ('b', '2026-11-28')")
        async with reader_of(source, database_url, found.position, secret=secret) as again:
            read += [row["id"] for row in await again.records(1)]
            connection.execute("INSERT INTO t VALUES ('c', '2026-11-28'), ('d', '2026-11-29')")
            read += [row["id"] for row in await again.records(2)]
            connection.execute("INSERT INTO t VALUES ('0', '2026-11-29'), ('e', '2026-11-29')")
            read += [row["id"] for row in await again.records(2)]

    assert read[:1] + sorted(read[1:3]) + read[3:] == ["m", "a", "z", "b", "c", "d", *sorted(read[6:])]
    assert sorted(read[6:]) == ["0", "e"]


async def test_lag_holds_back_the_rows_behind_the_bound_that_have_its_value(database_url: str, secret: str) -> None:
    """The bound is the row that was the last one `lag` ago; another one of its value has not had its lag yet."""
    source = PolledTable("t", column="n", lag=timedelta(hours=1), every=milliseconds(10))
    with table_of(database_url, "id int PRIMARY KEY, n int") as connection:
        connection.execute("INSERT INTO t SELECT i, 1 FROM generate_series(1, 5) AS i")
        facts = look_at_polled_table(connection, source)
        table = sql.Identifier("public", "t")
        found = list(pieces(connection, table, facts, KeyRange(upto=("1", "3")), rows_max=10, bytes_max=1_000))

    assert [key for piece in found for key in piece.keys] == [("1", "1"), ("1", "2"), ("1", "3")]


async def test_numbers_that_are_equal_and_written_differently_are_read_once(database_url: str, secret: str) -> None:
    source = PolledTable("t", column="n", lag=timedelta(0), every=milliseconds(10))
    with table_of(database_url, "id int PRIMARY KEY, n numeric") as connection:
        connection.execute("INSERT INTO t VALUES (1, 1.0), (2, 1.00), (3, 1), (5, 1.0)")
        async with reader_of(source, database_url, secret=secret, limits=Limits(bundle_records_max=2)) as found:
            read = [row["id"] for row in await found.records(4)]
            for number in (6, 7, 8):
                connection.execute("INSERT INTO t VALUES (%s, 1)", [number])
                read += [row["id"] for row in await found.records(1)]
            connection.execute("INSERT INTO t VALUES (9, 2)")
            read += [row["id"] for row in await found.records(1)]

    assert read == [1, 2, 3, 5, 6, 7, 8, 9]


async def test_equal_values_of_different_text_are_one_value(database_url: str, secret: str) -> None:
    source = PolledTable("t", column="took", lag=timedelta(0), every=milliseconds(10))
    with table_of(database_url, "id int PRIMARY KEY, took interval") as connection:
        connection.execute("INSERT INTO t VALUES (4, '1 mon')")
        async with reader_of(source, database_url, secret=secret) as found:
            read = [row["id"] for row in await found.records(1)]
            for number, took in ((6, "30 days"), (8, "720:00:00")):
                connection.execute("INSERT INTO t VALUES (%s, %s)", [number, took])
                read += [row["id"] for row in await found.records(1)]
            connection.execute("INSERT INTO t VALUES (3, '720:00:00'), (5, '1 mon'), (7, '1 mon'), (9, '30 days')")
            read += [row["id"] for row in await found.records(4)]
            connection.execute("INSERT INTO t VALUES (1, '2 mon')")
            read += [row["id"] for row in await found.records(1)]

    assert read == [4, 6, 8, 3, 5, 7, 9, 1]


async def test_reader_that_restarts_after_each_partial_take_reads_each_late_row_once(
    database_url: str, secret: str
) -> None:
    source = PolledTable("t", column="day", lag=timedelta(0), every=milliseconds(10))
    limits, bound = Limits(bundle_records_max=1_500), FixedBound(700, 10**6)
    insert = "INSERT INTO t SELECT md5(i::text), '2026-11-28' FROM generate_series(%s::int, %s) AS i"
    with table_of(database_url, "id text PRIMARY KEY, day date") as connection:
        connection.execute("CREATE INDEX ON t (day, id)")
        connection.execute(insert, [1, 800])
        async with reader_of(source, database_url, secret=secret) as found:
            read = [row["id"] for row in await found.records(800)]
        connection.execute(insert, [801, 10_000])
        position = found.position
        while len(read) < 10_000:
            async with reader_of(source, database_url, position, secret=secret, limits=limits, bound=bound) as found:
                for _ in range(3):
                    read += [row["id"] for row in await found.take()] if len(read) < 10_000 else []
            position = found.position
        connection.execute("INSERT INTO t VALUES ('z', '2026-11-28')")
        async with reader_of(source, database_url, position, secret=secret) as found:
            read += [row["id"] for row in await found.records(1)]

    assert len(read) == len(set(read)) == 10_001
    assert read[-1] == "z"


async def test_row_with_fewer_than_the_remembered_rows_behind_it_is_read_after_many_late_ones(
    database_url: str, secret: str
) -> None:
    source = PolledTable("t", column="day", lag=timedelta(0), every=milliseconds(10))
    with table_of(database_url, "id int PRIMARY KEY, day date") as connection:
        connection.execute("INSERT INTO t SELECT 10000 + 10 * i, '2026-11-28' FROM generate_series(1, 600) AS i")
        async with reader_of(source, database_url, secret=secret) as found:
            read = await found.records(600)
            connection.execute(
                "INSERT INTO t SELECT i, '2026-11-28' FROM generate_series(1, 600) AS i;"
                " INSERT INTO t VALUES (16001, '2026-11-28')"
            )
            read += await found.records(601)
            connection.execute("INSERT INTO t VALUES (0, '2026-11-28'), (9000, '2026-11-28'), (15995, '2026-11-28')")
            connection.execute("INSERT INTO t VALUES (16002, '2026-11-28')")
            late = [row["id"] for row in await found.records(3)]

    assert len(read) == 1_201
    assert late == [9_000, 15_995, 16_002], "0 has more rows behind it than a position remembers"


async def test_position_of_a_version_that_did_not_read_late_rows_reads_none_again(
    database_url: str, secret: str
) -> None:
    source = PolledTable("t", column="day", lag=timedelta(0), every=milliseconds(10))
    with table_of(database_url, "id int PRIMARY KEY, day date") as connection:
        connection.execute("INSERT INTO t SELECT i, '2026-11-28' FROM generate_series(1, 600) AS i")
        facts = look_at_polled_table(connection, source)
        old = msgspec.json.encode({"key": ["2026-11-28", "600"], "order": facts.order})
        async with reader_of(source, database_url, old, secret=secret) as found:
            connection.execute("INSERT INTO t VALUES (700, '2026-11-28')")
            read = [row["id"] for row in await found.records(1)]
            connection.execute("INSERT INTO t VALUES (650, '2026-11-28'), (701, '2026-11-28')")
            read += [row["id"] for row in await found.records(2)]

    assert read == [700, 650, 701]


async def test_known_rows_are_passed_by_their_keys(database_url: str) -> None:
    source = PolledTable("t", column="n", lag=timedelta(0))
    with table_of(database_url, "id int PRIMARY KEY, n int, more text") as connection:
        connection.execute("INSERT INTO t SELECT i, 1, repeat('x', 1000) FROM generate_series(1, 9) AS i")
        facts = look_at_polled_table(connection, source)
        position = PolledPosition(("1", "9"), facts.order, (), (("1",), ("2",), ("5",), ("9",))).begin_pass()
        table = sql.Identifier("public", "t")
        (found,) = late_rows(connection, table, facts, position, rows_max=10, bytes_max=100_000)

    assert [key for _, key in found.piece.keys] == ["3", "4", "6", "7", "8"]
    assert [key for _, key in found.seen] == [str(number) for number in range(1, 10)]
    assert found.behind == [3, 4, 6, 7, 8]


async def test_index_ends_a_range(database_url: str) -> None:
    """Otherwise, each range among the rows of a value would read all rows behind it."""
    source = PolledTable("t", column="n")
    with table_of(database_url, "id int PRIMARY KEY, n int") as connection:
        connection.execute("CREATE INDEX ON t (n, id)")
        connection.execute("INSERT INTO t SELECT i, 1 FROM generate_series(1, 5000) AS i")
        connection.execute("ANALYZE t; SET enable_seqscan TO off; SET enable_bitmapscan TO off")
        facts = look_at_polled_table(connection, source)
        query = table_copy._query(
            sql.Identifier("public", "t"), facts, KeyRange(("1", "10"), ("1", "20"), of_one_value=True), has_begun=True
        )
        bounds = {"bound0": "1", "bound1": "10", "upto0": "1", "upto1": "20", "count": 1_000}
        found = connection.execute(sql.SQL("EXPLAIN (ANALYZE) {}").format(query), bounds, prepare=False).fetchall()

    plan = "\n".join(line for (line,) in found)
    assert "Index" in plan
    assert "Removed by Filter" not in plan


async def test_value_with_more_rows_than_a_position_remembers_is_warned_of_once(
    database_url: str, secret: str, caplog: pytest.LogCaptureFixture
) -> None:
    source = PolledTable("t", column="n", lag=timedelta(0), every=milliseconds(10))
    with table_of(database_url, "id int PRIMARY KEY, n int") as connection:
        connection.execute("INSERT INTO t SELECT i, i % 2 FROM generate_series(1, 2200) AS i")
        async with reader_of(source, database_url, secret=secret) as found:
            read = await found.records(2_200)
            for number in range(2_201, 2_204):
                connection.execute("INSERT INTO t VALUES (%s, 1)", [number])
                read += await found.records(1)
            connection.execute("INSERT INTO t SELECT i, 2 FROM generate_series(3001, 4100) AS i")
            read += await found.records(1_100)
            connection.execute("INSERT INTO t VALUES (5000, 3)")
            read += await found.records(1)

    assert len(read) == 3_304
    warnings = [record.getMessage() for record in caplog.records if "than a position remembers" in record.message]
    assert [message.split(" than ")[0] for message in warnings] == [
        "table public.t has more rows with n = 1",
        "table public.t has more rows with n = 2",
    ]


def test_position_is_bounded_in_bytes() -> None:
    keys = [("1", f"{number:05}" + "x" * 4_000) for number in range(100)]
    position = PolledPosition((), (), ()).advance(keys, [0])

    assert 15 <= len(position.read) < 17
    assert position.floor == keys[-len(position.read) - 1]
    assert position.forgets
    longest = PolledPosition((), (), ()).advance([("1", "x" * 70_000)], [0])
    assert (longest.floor, longest.read) == (longest.key, ())
