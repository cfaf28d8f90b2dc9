"""Rows of equal values in a table that is polled: the lag is kept among them, and each counts once."""

from __future__ import annotations

import itertools
import random
from datetime import timedelta
from typing import Any

import psycopg
import pytest
from psycopg import sql

from millpy import PolledTable, milliseconds
from millpy.limits import Limits
from millpy.sources.postgres import polled_position
from millpy.sources.postgres.polled_position import Key, PolledPosition
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


def read_behind(position: PolledPosition, rows: list[Key], upto: Key) -> list[tuple[str, list[Key]]]:
    """Return what a reader gets of a table with these rows, as SQL would: the late rows, and those that follow."""
    late = [
        row
        for row in rows
        if position.key and row[0] == position.key[0] and row <= position.key and row > (position.floor or ())
    ]
    following = [row for row in rows if position.key < row <= upto]
    return [("late", [late[row] for row in position.unread(late)]), ("following", following)]


@pytest.mark.parametrize("keys_max", [4, 1_000])
@pytest.mark.parametrize("seed", range(20))
def test_each_row_that_commits_within_the_lag_is_read_once(
    seed: int, keys_max: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model: transactions take a value that grows slowly and any key, and commit within the lag; readers crash."""
    monkeypatch.setattr(polled_position, "KEYS_MAX", keys_max)
    rng, lag = random.Random(seed), 10
    position = PolledPosition((), ())
    stored = position
    open_: list[tuple[int, Key]] = []
    rows: list[Key] = []
    tops: list[tuple[int, Key]] = []
    committed: list[Key] = []
    read: list[Key] = []
    for now in range(1_000):
        if now < 900 and rng.random() < 0.7:
            value = now // 25
            open_.append((now + rng.randrange(lag), (f"{value:04}", f"{rng.randrange(10**9):09}")))
        committed += [key for due, key in open_ if due <= now]
        open_ = [(due, key) for due, key in open_ if due > now]
        rows = sorted(committed)
        if rows and (not tops or tops[-1][1] != rows[-1]):
            tops.append((now, rows[-1]))
        safe: Any = None
        while tops and tops[0][0] < now - lag:
            safe = tops.pop(0)[1]
        if safe is not None:
            for kind, found in read_behind(position, rows, safe):
                while found:
                    count = rng.randint(1, 5)
                    position = (position.advance_late if kind == "late" else position.advance)(found[:count])
                    read += found[:count]
                    found = found[count:]
            stored = position
        elif rng.random() < 0.05:  # a crash; the next reader has the stored position, and notes anew
            position, tops = stored, []

    assert len(read) == len(set(read)), "a row was read twice"
    if keys_max == 1_000:
        assert set(read) == set(committed)
    assert len(position.read) + len(position.late) <= keys_max
