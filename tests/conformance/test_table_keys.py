"""The first copy of a table goes along any primary key, in the order of its types."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest

from millpy import PolledTable, milliseconds
from millpy.embedded import EmbeddedPostgres
from millpy.limits import Limits
from tests.conformance.table_reading import reader, reader_of, table_of

_secrets = itertools.count(1)


@pytest.fixture(scope="module")
def foreign_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Debian's server, which has ICU and contrib: the wheel's has neither."""
    directory = tmp_path_factory.mktemp("foreign")
    with EmbeddedPostgres(directory, version="system15", settings={"wal_level": "logical"}) as server:
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
        rows = [("b", f"{uuid}1"), ("A", f"{uuid}1"), ("D", f"{uuid}1"), ("c", f"{uuid}1"), ("e", f"{uuid}2")]
        connection.cursor().executemany("INSERT INTO t VALUES (%s, %s)", rows)
        async with reader_of(source, foreign_url, secret=secret, limits=Limits(bundle_records_max=1)) as found:
            assert [record["a"] for record in await found.records(5)] == ["A", "b", "c", "D", "e"]
