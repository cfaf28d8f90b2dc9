"""A local Spark session with the data source registered, and typed helpers."""

from __future__ import annotations

import datetime as dt
import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from pyspark.sql import DataFrame, SparkSession

from millpy.errors import ConfigError
from millpy.spark.java import java_home
from millpy.spark.source import MillpyDataSource
from millpy.spark.tables import as_text

T = TypeVar("T")
_LOG_SETTINGS = Path(__file__).with_name("log4j2.properties")


def session(
    *, database_url: str | None = None, name: str = "millpy", master: str = "local[*]", memory: str = "1g"
) -> SparkSession:
    """Start a Spark session on this machine that knows the format "millpy".

    Arguments:
        database_url: the database of `read_table` and `format("millpy")` when no option names one; default
            MILLPY_DATABASE_URL. It goes into this process's environment, never into Spark's configuration, which
            Spark shows.
        name: the name of the application.
        master: the Spark master; on a cluster every node needs millpy installed.
        memory: the memory of the driver, which here does all the work.

    Raises:
        ConfigError: no Java that Spark runs on is installed.
    """
    os.environ["JAVA_HOME"] = str(java_home())
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    if master.startswith("local"):
        os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")  # otherwise the machine's name must resolve
    if database_url is not None:
        os.environ["MILLPY_DATABASE_URL"] = database_url
    spark = (
        SparkSession.builder.master(master)
        .appName(name)
        .config("spark.driver.memory", memory)
        .config("spark.driver.extraJavaOptions", f"-Dlog4j2.configurationFile={_LOG_SETTINGS.as_uri()}")
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.sql.session.timeZone", "UTC")
        .config("spark.sql.shuffle.partitions", "8")
        .getOrCreate()
    )
    spark.dataSource.register(_source_of(os.environ.get("MILLPY_DATABASE_URL")))
    return spark


def register(spark: SparkSession) -> None:
    """Register the format "millpy" with a session that you made yourself."""
    spark.dataSource.register(MillpyDataSource)


def read_table(  # noqa: PLR0913 - keywords of the public interface
    spark: SparkSession,
    table: str,
    *,
    columns: Sequence[str] = (),
    keys: Mapping[str, Sequence[object]] | None = None,
    start: dt.datetime | None = None,
    end: dt.datetime | None = None,
    key: Sequence[str] = (),
    partitions: int | None = None,
    database_url: str | None = None,
    graph: str | Path | None = None,
) -> DataFrame:
    """Return a result table as a DataFrame.

    Arguments:
        spark: a session with the format registered.
        table: `schema.table`, where the schema is the graph's name.
        columns: the columns to read; fewer of them are much less to read; default all.
        keys: the values to read of some columns, e.g. `{"device": ["a", "b"]}`.
        start: the time, with a zone, at or after which windows start or records happen.
        end: the time before which they do.
        key: for a view, the columns that identify its rows, none of them ever null; a table has its primary key.
        partitions: the number of connections that read at the same time; default 4.
        database_url: a database other than the session's.
        graph: instead of it, the file of a graph, to read from the embedded database beside it.

    Raises:
        ConfigError: the table's name has no schema. Spark reports a table that does not exist when it loads it.
    """
    if table.count(".") != 1:
        raise ConfigError(f"{table!r} is not schema.table", hint="the schema is the graph's name: 'factory.windows'")
    reader = spark.read.format("millpy").option("table", table)
    if columns:
        reader = reader.option("columns", ",".join(_several(columns)))
    if key:
        reader = reader.option("key", ",".join(_several(key)))
    if keys:
        wanted = {name: [*_several(values)] for name, values in keys.items()}
        reader = reader.option("keys", json.dumps(wanted, default=_key_text))
    if start is not None:
        reader = reader.option("from", start.isoformat())
    if end is not None:
        reader = reader.option("to", end.isoformat())
    if partitions is not None:
        reader = reader.option("partitions", str(partitions))
    if graph is not None:
        # Python workers of Spark may be in another directory.
        reader = reader.option("graph", os.path.abspath(graph))
    # Spark does not show an option of this name in plans, logs and events.
    if url := database_url or (graph is None and os.environ.get("MILLPY_DATABASE_URL")):
        reader = reader.option("url", url)
    return reader.load()


def _source_of(url: str | None) -> type[MillpyDataSource]:
    """Return the format with its database: Java, and what it starts, keep the environment of the first session."""

    class OfSession(MillpyDataSource):
        database_url = url

    return OfSession


def _several(values: Sequence[T] | str) -> Sequence[T] | tuple[str]:
    """Return the values; a text is one value, not a sequence of letters."""
    return (values,) if isinstance(values, str) else values


def _key_text(value: object) -> str:
    """Convert a key that JSON lacks to text that PostgreSQL reads."""
    if isinstance(value, dt.datetime) and value.tzinfo is None:
        raise ConfigError(f"keys has {value} without a zone", hint="give it one: .replace(tzinfo=UTC) if it is UTC")
    return as_text(value)
