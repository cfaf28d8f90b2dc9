"""Keeps SQL tables and Parquet about the devices of a graph's tables current: what `millpy analytics` runs.

In each round, every table of windows that has new panes is a Structured Streaming query over all that is committed, one
table after the other: memory is that of one batch, and a table that fails does not hold up another. Rounds look tables
up anew, so a graph may be deployed later, get another table, or be switched to another generation.

    DIRECTORY/GRAPH.TABLE-ID/query.json     the name of the query, which the rows in PostgreSQL bear
    DIRECTORY/GRAPH.TABLE-ID/checkpoint/    Spark's own
    DIRECTORY/GRAPH.TABLE-ID/windows/ …     Parquet (`analytics_files`)
"""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from millpy.clock import Clock, random_id
from millpy.errors import ConfigError, CorruptionError, MillError, OwnershipError
from millpy.spark.analytics_files import AnalyticsFiles
from millpy.spark.device_analytics import AnalyticsSettings, DeviceAnalytics
from millpy.spark.report import NOT_VALUES, NUMBERS
from millpy.spark.spark_errors import readable_error
from millpy.spark.statistics import Columns
from millpy.spark.tables import describe, windowed
from millpy.store.postgres.analytics import AnalyticsOwner, AnalyticsTables, AnalyzedTable

log = logging.getLogger(__name__)
BATCH_ROWS_MAX = 200_000
"""The panes of one batch; a larger bundle is a batch of its own."""
_DECIMALS = ("double precision", "real", "numeric")
# Batches are small and their plans are large: to compile and to plan anew takes several times as long as to compute.
_SESSION = {
    "spark.sql.adaptive.enabled": "false",
    "spark.sql.codegen.factoryMode": "NO_CODEGEN",
    "spark.sql.codegen.wholeStage": "false",
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.shuffle.partitions": "2",
    "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",
    "spark.sql.parquet.datetimeRebaseModeInWrite": "CORRECTED",
    "spark.sql.parquet.datetimeRebaseModeInRead": "CORRECTED",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class AnalyticsPlan:
    """What to analyze, and where the results are kept.

    Attributes:
        graph: the graph's name; of its generations, the one that has the name.
        directory: the directory of checkpoints and Parquet.
        database_url: the database; the role writes the analytics.
        reader_url: the same database, as the role that reads the panes.
        values: table -> the column to analyze; default: the first one with decimals, else the first number.
        settings: history and retention.
        batch_rows: the panes of one batch.
    """

    graph: str
    directory: Path
    database_url: str
    reader_url: str
    values: Mapping[str, str] = field(default_factory=dict)
    settings: AnalyticsSettings = field(default_factory=AnalyticsSettings)
    batch_rows: int = BATCH_ROWS_MAX


class GraphAnalytics:
    """The rounds over a graph's tables. A table that cannot be analyzed is reported once."""

    def __init__(self, spark: SparkSession, plan: AnalyticsPlan, clock: Clock) -> None:
        self._spark = spark
        self._plan = plan
        self._clock = clock
        self._seen: dict[int, tuple[int, ...]] = {}
        self._reported: set[tuple[int, str]] = set()

    def round(self) -> int:
        """Analyze what every table has got since the last round; return the number of tables that had something new.

        Raises:
            OwnershipError: another driver analyzes a table.
            StoreUnavailableError: the database does not answer.
            MillError: tables could not be analyzed; the others were.
        """
        failed: list[str] = []
        done = 0
        with AnalyticsTables(self._plan.database_url) as tables, _configured(self._spark):
            for table in tables.find(self._plan.graph):
                if self._seen.get(table.table_id) == table.bundles:
                    continue
                try:
                    done += self._analyze(tables, table)
                except OwnershipError:
                    raise
                except MillError as error:
                    failed.append(f"{table.name}: {error.message}")
                else:
                    self._seen[table.table_id] = table.bundles
        if failed:
            raise MillError(f"tables of {self._plan.graph} are not analyzed: {'; '.join(failed)}")
        return done

    def _analyze(self, tables: AnalyticsTables, table: AnalyzedTable) -> bool:
        columns = columns_of(self._plan, table.name)
        if columns is None:
            self._report(table, "has no numeric column, so it is not analyzed")
            return False
        root = self._plan.directory / f"{self._plan.graph}.{table.name}-{table.table_id}"
        query = f"{columns.value}, {columns.count}, {self._plan.settings.history.zone}"
        owner = self._fitting(tables, table, root, query)
        files = AnalyticsFiles(root)
        analytics = DeviceAnalytics(owner, files, columns, self._plan.settings, self._clock)
        wanted = [*columns.keys, "window_start", "window_end", "pane_index", "late_count", columns.value]
        if columns.count not in (None, columns.value):
            wanted.append(str(columns.count))
        panes = self._spark.readStream.format("millpy").options(
            table=f"{self._plan.graph}.{table.name}",
            url=self._plan.reader_url,
            columns=",".join(wanted),
            max_rows_per_trigger=str(self._plan.batch_rows),
            partitions="2",
            after_restore="reread",
        )
        running = panes.load().writeStream.foreachBatch(analytics).trigger(availableNow=True)
        try:
            running.option("checkpointLocation", str(root / "checkpoint")).start().awaitTermination()
        except PySparkException as error:
            if isinstance(analytics.error, MillError):
                raise analytics.error from error
            raise MillError(readable_error(str(error)), hint="the log of Spark has the whole error") from error
        return True

    def _fitting(self, tables: AnalyticsTables, table: AnalyzedTable, root: Path, query: str) -> AnalyticsOwner:
        """Return the table's owner, after the checkpoint was begun anew if it does not fit the database."""
        owner = tables.seize(table.table_id, f"{_query_in(root)}, {query}")
        committed = _last_batch(root / "checkpoint")
        missing = ""
        try:
            AnalyticsFiles(root).sweep(owner.directories)
        except CorruptionError as error:
            missing = error.message
        if owner.batch - committed in (0, 1) and not missing:
            return owner
        self._report(
            table,
            f"is analyzed from its first window on: {missing or 'checkpoint and database are not of one history'}",
        )
        shutil.rmtree(root)
        return tables.seize(table.table_id, f"{_query_in(root)}, {query}")

    def _report(self, table: AnalyzedTable, what: str) -> None:
        if (table.table_id, what) not in self._reported:
            self._reported.add((table.table_id, what))
            log.warning("%s.%s %s", self._plan.graph, table.name, what)


def columns_of(plan: AnalyticsPlan, table: str) -> Columns | None:
    """Return the roles of a table's columns; None if none is a number.

    Raises:
        ConfigError: the plan names a column that is not a number.
    """
    found = describe(plan.reader_url, plan.graph, table)
    _, keys = windowed(plan.reader_url, plan.graph, table)
    numbers = [name for name, kind in found.types.items() if kind in NUMBERS and name not in (*keys, *NOT_VALUES)]
    count = "n" if found.types.get("n") == "bigint" and "n" in numbers else None
    if named := plan.values.get(table):
        if named not in numbers:
            raise ConfigError(
                f"{table} has no numeric column {named!r}", hint=f"numeric columns: {', '.join(numbers) or 'none'}"
            )
        return Columns(keys, named, count)
    ranked = sorted(numbers, key=lambda name: (found.types[name] not in _DECIMALS, name == count))
    return Columns(keys, ranked[0], count) if ranked else None


@contextmanager
def _configured(spark: SparkSession) -> Iterator[None]:
    """Set what suits small batches inside the block; queries that start in it keep it."""
    before = {name: spark.conf.get(name, None) for name in _SESSION}
    for name, value in _SESSION.items():
        spark.conf.set(name, value)
    try:
        yield
    finally:
        for name, text in before.items():
            if text is None:
                spark.conf.unset(name)
            else:
                spark.conf.set(name, text)


def _query_in(root: Path) -> str:
    """Return the name of the query of a directory, which is made with it."""
    file = root / "query.json"
    if file.is_file():
        return str(json.loads(file.read_text())["query"])
    shutil.rmtree(root, ignore_errors=True)
    root.mkdir(parents=True)
    ready, name = root / "query.new", str(random_id())
    ready.write_text(json.dumps({"query": name}))
    ready.rename(file)
    return name


def _last_batch(checkpoint: Path) -> int:
    """Return the last batch that Spark's checkpoint has committed; -1 for none."""
    numbers = [int(path.name) for path in (checkpoint / "commits").glob("[0-9]*") if path.name.isdecimal()]
    return max(numbers, default=-1)
