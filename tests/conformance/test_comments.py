"""Everything that millpy makes in the database says what it is; result tables have an index on time."""

from __future__ import annotations

from typing import Any

import msgspec
import psycopg
import pytest

from millpy.graph import Graph
from millpy.ingest.settings import EventTime
from millpy.model.time import seconds
from millpy.store.postgres.store import PostgresStore
from millpy.windowing.aggregates.numeric import Count, Sum
from millpy.windowing.window import FixedWindows
from tests.feed import Feed

# The columns of a partition are those of its table.
WITHOUT = """
WITH relations AS (
    SELECT c.oid, c.oid::regclass::text AS name, c.relkind <> 'S' AND NOT c.relispartition AS has_columns
      FROM pg_class AS c
     WHERE c.relnamespace::regnamespace::text = ANY (%(schemas)s) AND c.relkind IN ('r', 'p', 'v', 'S')
       AND c.relname <> 'alembic_version'
)
SELECT nspname FROM pg_namespace WHERE nspname = ANY (%(schemas)s) AND obj_description(oid, 'pg_namespace') IS NULL
UNION ALL SELECT name FROM relations WHERE coalesce(obj_description(oid, 'pg_class'), '') = ''
UNION ALL
SELECT name || '.' || attname FROM relations JOIN pg_attribute ON attrelid = oid
 WHERE has_columns AND attnum > 0 AND NOT attisdropped AND coalesce(col_description(oid, attnum), '') = ''
UNION ALL
SELECT oid::regprocedure::text FROM pg_proc
 WHERE pronamespace::regnamespace::text = ANY (%(schemas)s) AND coalesce(obj_description(oid, 'pg_proc'), '') = ''
 ORDER BY 1
"""
INDEXES = """
SELECT c.relname, a.attname FROM pg_index AS i
  JOIN pg_class AS c ON c.oid = i.indrelid JOIN pg_attribute AS a ON a.attrelid = c.oid AND a.attnum = i.indkey[0]
 WHERE c.relnamespace = 'factory'::regnamespace AND NOT i.indisprimary AND a.attname <> 'emitted_at' ORDER BY 1
"""


class Reading(msgspec.Struct):
    device: str
    at: int


def fetch(url: str, query: str, **parameters: Any) -> list[tuple[Any, ...]]:
    with psycopg.connect(url, autocommit=True) as connection:
        return connection.execute(query, parameters).fetchall()  # type: ignore[call-overload, no-any-return]


def graph(**more: Sum) -> Graph:
    made = Graph("factory")
    event_time = EventTime("at", unit="s", max_disorder=seconds(1))
    readings = made.inject("readings", Feed(), schema=Reading, event_time=event_time)
    seen = readings.deduplicate(["device", "at"], seconds(60), name="unique")
    seen.to_table("raw")
    keyed = readings.key_by("device").window(FixedWindows(seconds(10)), name="w", pane_info=True)
    keyed.aggregate(n=Count(), **more).to_table("per_ten_s", history=True)
    return made


@pytest.mark.parametrize("schema", ["mill", "millpy"])
def test_everything_of_the_migrations_has_a_comment(database_url: str, schema: str) -> None:
    assert fetch(database_url, WITHOUT, schemas=[schema]) == []


async def test_result_tables_have_comments_and_an_index_on_time(database_url: str) -> None:
    async with PostgresStore(database_url) as store:
        await store.deploy(graph().spec())

    assert fetch(database_url, WITHOUT, schemas=["factory"]) == []
    assert fetch(database_url, INDEXES) == [("per_ten_s", "window_start"), ("raw", "event_time")]


async def test_views_keep_their_comments_when_a_column_is_taken_back(database_url: str) -> None:
    mine = "SELECT obj_description('factory.per_ten_s_live'::regclass)"
    async with PostgresStore(database_url) as store:
        await store.deploy(graph(total=Sum("at")).spec())
        with psycopg.connect(database_url, autocommit=True) as connection:
            connection.execute("COMMENT ON VIEW factory.per_ten_s_live IS 'mine'")

        await store.deploy(graph().spec(), on_purpose=True, back=True)

    assert fetch(database_url, WITHOUT, schemas=["factory"]) == []
    assert fetch(database_url, mine) == [("mine",)]
