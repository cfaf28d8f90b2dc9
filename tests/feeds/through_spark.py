"""The whole feeds through `millpy.spark.run` and `millpy.spark.stream`: against the tables computed without us.

    python -m tests.feeds.through_spark [FEED ...]        (make feeds-spark)

Each graph runs unchanged, as a batch and as a streaming query. Its tables go into an empty PostgreSQL, where the same
queries check them as those of workers. The last line is JSON: tables, rows, differences. Exit status 0 only when there
are none.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from pathlib import Path

import psycopg
import pyarrow as pa
from adbc_driver_postgresql import dbapi
from pyspark.sql import DataFrame, SparkSession

from millpy.embedded import EmbeddedPostgres
from millpy.spark import StreamPlaces, read_results, run, session, stream
from tests.feeds.feed import DATA, FEEDS, Feed

Checked = dict[str, tuple[int, int]]
"""Table -> (expected rows, differences)."""


def as_batch(spark: SparkSession, feed: Feed, server: EmbeddedPostgres) -> Checked:
    """One feed, whose files are in FEED_FILES, as a batch."""
    with run(spark, feed.graph) as result:
        return checked(feed, server, result.tables, result.late_records)


def as_stream(spark: SparkSession, feed: Feed, server: EmbeddedPostgres) -> Checked:
    """The same as a streaming query."""
    with tempfile.TemporaryDirectory(prefix="millpy-stream-") as place:
        places = StreamPlaces(f"{place}/checkpoint", f"{place}/output")
        stream(spark, feed.graph, places=places).wait()
        found = read_results(spark, places.output)
        late = found.pop("late_records")
        del found["dead_letters"]
        return checked(feed, server, found, late)


def checked(feed: Feed, server: EmbeddedPostgres, tables: dict[str, DataFrame], late: DataFrame) -> Checked:
    """Load the tables, and check them."""
    with psycopg.connect(server.url(), autocommit=True) as connection:
        connection.execute(f"DROP SCHEMA IF EXISTS mill CASCADE; DROP SCHEMA IF EXISTS {feed.name} CASCADE")
        connection.execute(f"CREATE SCHEMA mill; CREATE SCHEMA {feed.name}")
    for name, frame in tables.items():
        _load(server.url(), feed.name, name, frame)
    windows = ("unix_micros(window_start) window_start", "unix_micros(window_end) window_end")
    _load(server.url(), "mill", "late_records", late.selectExpr("key", "computation", *windows))
    return feed.check(server.url())


def _load(url: str, schema: str, name: str, frame: DataFrame) -> None:
    rows: pa.Table = frame.toArrow()
    wide = [of.name for of in rows.schema if pa.types.is_decimal(of.type)]
    for column in wide:
        rows = rows.set_column(rows.schema.get_field_index(column), column, rows[column].cast(pa.int64()))
    with dbapi.connect(url) as connection, connection.cursor() as cursor:
        cursor.adbc_ingest(name, rows, mode="create", db_schema_name=schema)
        connection.commit()


def main(names: list[str]) -> int:
    """Run some feeds, or all."""
    if not DATA.exists():
        print(f"the recorded feeds are not in {DATA}", file=sys.stderr)
        return 2
    tables = rows = differences = 0
    print(f"{'feed':20} {'expected':42} {'rows':>9} {'differences':>12}")
    with (
        tempfile.TemporaryDirectory(prefix="millpy-feeds-") as place,
        EmbeddedPostgres(Path(place) / "postgres") as server,
    ):
        os.environ["FEED_FILES"] = place  # before Spark starts: its Python workers have this environment
        os.environ.pop("FEED_BROKER", None)
        spark = session(master="local[2,4]", memory="3g", name="feeds")
        for feed in (FEEDS[name] for name in names or FEEDS):
            feed.write_files(Path(place))
            for way in (as_batch, as_stream):
                began = time.monotonic()
                for table, (count, wrong) in way(spark, feed, server).items():
                    print(f"{feed.name:20} {table:42} {count:>9,} {wrong:>12,}", flush=True)
                    tables, rows, differences = tables + 1, rows + count, differences + wrong
                print(f"{feed.name} {way.__name__}: {time.monotonic() - began:.0f} s", file=sys.stderr)
        spark.stop()
    print(json.dumps({"tables": tables, "rows": rows, "differences": differences}))
    return int(differences > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
