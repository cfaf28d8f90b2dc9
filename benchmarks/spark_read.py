"""Spark over a result table: our data source against Spark's JDBC reader, in one session, on the same table.

    python -m benchmarks.spark_read [--windows 3000] [--times 5] [--jar postgresql.jar]

The table is W1's, deployed from its graph: windows of 1,000 devices in the order of time, three million rows. A
measurement is one query, from the call to its answer, planning and connecting included, by TCP to a server whose cache
is warm. All readers take turns, after one turn that does not count; the median of each is its time. JDBC is the best of
one, two and four connections (by ranges of the window's start: it cannot cut by text), and fetches 10,000 rows at a
time. Two queries: all columns into Spark's sink that keeps nothing, and the mean of one column by device.

The driver is Debian's libpostgresql-jdbc-java, or the jar that --jar names; Spark brings none.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any
from urllib.parse import urlsplit

import psycopg
from psycopg.conninfo import conninfo_to_dict
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as fn

from benchmarks.harness import HERE, Bench, arguments
from millpy.graph.loader import load_graph
from millpy.spark import read_table, session
from millpy.spark.pieces import plan, read
from millpy.spark.source import BATCH_ROWS_DEFAULT
from millpy.spark.tables import describe
from millpy.store.postgres.store import PostgresStore

JAR = Path("/usr/share/java/postgresql.jar")
TABLE = "w1.temperature_10s"
DEVICES = 1000
PARTITIONS = 4
JDBC_CONNECTIONS = (1, 2, 4)
FETCH_ROWS = 10_000
EPOCH_S = 1_700_000_000
WINDOW_S = 10
FILL = """
INSERT INTO w1.temperature_10s
SELECT 'device-' || lpad(device::text, 4, '0'), to_timestamp(%(epoch)s + place * %(window)s),
       to_timestamp(%(epoch)s + (place + 1) * %(window)s), 100 + device %% 7, 20 + random() * 5, 10 + random(),
       30 + random(), 0, 'on_time', 0, now(), 1 + device %% 4, place
  FROM generate_series(0, %(windows)s - 1) AS place, generate_series(0, %(devices)s - 1) AS device
"""


async def deploy(url: str) -> None:
    """Deploy W1's graph, which creates its table."""
    os.environ["BENCH_FILE"] = "unread.ndjson"
    async with PostgresStore(url) as store:
        await store.deploy(load_graph(str(HERE / "graphs" / "windows.py")).spec())


def fill(url: str, windows: int) -> int:
    """Write the rows; return their number."""
    with psycopg.connect(url, autocommit=True) as connection:
        given = {"epoch": EPOCH_S, "window": WINDOW_S, "windows": windows, "devices": DEVICES}
        connection.execute(FILL, given)
        connection.execute("VACUUM ANALYZE w1.temperature_10s")
    return windows * DEVICES


def ours(spark: SparkSession, url: str, *columns: str) -> DataFrame:
    """Read the table, or some of its columns, by our data source."""
    return read_table(spark, TABLE, columns=columns, partitions=PARTITIONS, database_url=url)


def by_jdbc(spark: SparkSession, url: str, connections: int, windows: int) -> DataFrame:
    """Read the table by Spark's JDBC reader."""
    login = urlsplit(url)
    reader = spark.read.format("jdbc").options(
        url=f"jdbc:postgresql://{login.hostname}:{login.port}{login.path}", user=login.username,
        password=login.password, dbtable=TABLE, fetchsize=FETCH_ROWS, driver="org.postgresql.Driver",
    )  # fmt: skip
    if connections > 1:
        first, last = (
            time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(EPOCH_S + seconds)) for seconds in (0, windows * WINDOW_S)
        )
        reader = reader.options(
            partitionColumn="window_start", lowerBound=first, upperBound=last, numPartitions=connections
        )
    return reader.load()


def whole(frame: DataFrame) -> None:
    """Read everything into a sink that keeps nothing."""
    frame.write.format("noop").mode("overwrite").save()


def means(frame: DataFrame) -> list[Any]:
    """Return the mean of one column by device, rounded, because sums of floats depend on their order."""
    found = frame.groupBy("device").agg(fn.round(fn.avg("mean"), 6).alias("mean"))
    return [tuple(row) for row in found.orderBy("device").collect()]


def in_turn(readers: dict[str, Callable[[], object]], times: int) -> dict[str, float]:
    """Return the median seconds of each reader; a first turn does not count."""
    taken: dict[str, list[float]] = {name: [] for name in readers}
    for turn in range(times + 1):
        for name, query in readers.items():
            started = time.perf_counter()
            query()
            if turn:
                taken[name].append(time.perf_counter() - started)
    return {name: median(seconds) for name, seconds in taken.items()}


def alone(url: str) -> int:
    """Read the same pieces in this process, without Spark; return the number of rows."""
    schema, _, name = TABLE.partition(".")
    table = describe(url, schema, name)
    names = list(table.types)
    return sum(
        len(batch)
        for bounds in plan(url, table, names, (), partitions=PARTITIONS, batch_rows=BATCH_ROWS_DEFAULT)
        for batch in read(url, table, table.arrow_schema(names), (), bounds, batch_rows=BATCH_ROWS_DEFAULT)
    )


def main() -> int:
    """Measure; the last line has the figures."""
    parser = arguments(__doc__, windows=3000, times=5)
    parser.add_argument("--jar", type=Path, default=JAR, help=f"PostgreSQL's JDBC driver (default {JAR})")
    options = parser.parse_args()
    if not options.jar.exists():
        print(f"bench-spark: missing JDBC driver {options.jar}", file=sys.stderr)
        print("  hint: apt-get install libpostgresql-jdbc-java, or name a jar with --jar", file=sys.stderr)
        return 2
    os.environ["PYSPARK_SUBMIT_ARGS"] = f"--jars {options.jar} pyspark-shell"
    with Bench("spark", options, tcp=True) as bench:
        database = bench.database()
        asyncio.run(deploy(database))
        rows = fill(database, options.windows)
        url = bench.server.tcp_url(conninfo_to_dict(database)["dbname"])
        spark = session(name="bench", memory="2g")
        bench.settings |= {"spark": spark.version, "rows": rows, "partitions": PARTITIONS, "fetchsize": FETCH_ROWS}
        assert (rows_alone := alone(url)) == rows, rows_alone
        wholes: dict[str, Callable[[], object]] = {
            "ours": lambda: whole(ours(spark, url)),
            **{f"jdbc_{n}": lambda n=n: whole(by_jdbc(spark, url, n, options.windows)) for n in JDBC_CONNECTIONS},
        }
        some: dict[str, Callable[[], object]] = {
            "ours": lambda: means(ours(spark, url, "device", "mean")),
            **{f"jdbc_{n}": lambda n=n: means(by_jdbc(spark, url, n, options.windows)) for n in JDBC_CONNECTIONS},
        }
        assert means(ours(spark, url, "device", "mean")) == means(by_jdbc(spark, url, 1, options.windows))
        assert ours(spark, url).count() == rows
        seconds, means_seconds = in_turn(wholes, options.times), in_turn(some, options.times)
        bench.show("seconds, all columns", seconds)
        bench.show("seconds, mean by device", means_seconds)
        without = in_turn({"alone": lambda: alone(url)}, 2)["alone"]
        spark.stop()
        best, best_means = (min(t for name, t in each.items() if name != "ours") for each in (seconds, means_seconds))
        bench.finish(
            rows_per_s=rows / seconds["ours"],
            jdbc_ratio=best / seconds["ours"],
            jdbc_rows_per_s=rows / best,
            means_rows_per_s=rows / means_seconds["ours"],
            means_jdbc_ratio=best_means / means_seconds["ours"],
            without_spark_rows_per_s=rows / without,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
