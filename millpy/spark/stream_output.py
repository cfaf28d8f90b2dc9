"""The rows of a streaming query as Parquet: written by tasks under hidden names, named after the commit.

    OUTPUT/tables/NAME/*.parquet      every pane as it was emitted, with `_bundle` and `_deleted`
    OUTPUT/late_records/*.parquet
    OUTPUT/dead_letters/*.parquet
    OUTPUT/_tables.json               the keys of the tables, for `read_results`

Spark and Arrow skip names that begin with a dot, so a reader of the directory sees rows of committed batches only, and
each once. A file gets its name after the commit that lists it; after a crash between, the next driver names it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - Spark's own convention

from millpy.errors import CorruptionError, UsageError
from millpy.model.checkpoint import Checkpoint
from millpy.model.deployment import GraphSpec, TableSpec
from millpy.spark.hosted_rows import BUNDLE, DEAD_LETTERS, LATE, TYPES, result_batches
from millpy.spark.stream_records import dead_letter_rows, late_record_rows
from millpy.spark.stream_state import write_durably
from millpy.store.archive.local_storage import sync_directory
from millpy.store.memory.database import MemoryDatabase

DELETED = "_deleted"
TABLES_FILE = "_tables.json"
_HIDDEN = "."


class StagedRows:
    """The rows of one interval in one batch, written as they are made.

    Args:
        output: the output directory.
        database: the tables by their id.
        name: the name of this attempt's files.
    """

    def __init__(self, output: Path, database: MemoryDatabase, name: str) -> None:
        self._output = output
        self._database = database
        self._name = f"{name}.parquet"
        self._writers: dict[str, pq.ParquetWriter] = {}
        self.rows: dict[int, int] = {}
        """Table -> number of its rows; rows to delete do not count."""

    def add(self, checkpoint: Checkpoint) -> None:
        """Write the rows, late records and dead letters of a checkpoint."""
        for gone in checkpoint.deleted:  # before its rows: a commit deletes first
            spec = self._database.tables[gone.table_id].spec
            for batch in result_batches(spec, gone.columns, checkpoint.bundle):
                self._write(f"tables/{spec.name}", _widened(batch, spec, deleted=True))
        for rows in checkpoint.results:
            spec = self._database.tables[rows.table_id].spec
            for batch in result_batches(spec, rows.columns, checkpoint.bundle):
                self._write(f"tables/{spec.name}", _widened(batch, spec, deleted=False))
                self.rows[rows.table_id] = self.rows.get(rows.table_id, 0) + len(batch)
        for late in checkpoint.late:
            self._write("late_records", late_record_rows(late, checkpoint.bundle))
        if checkpoint.dead_letters:
            self._write("dead_letters", dead_letter_rows(checkpoint.dead_letters, checkpoint.bundle))

    def close(self) -> list[str]:
        """Finish the files; return their names below the output directory, as they will be after the commit."""
        for writer in self._writers.values():
            writer.close()
        return [f"{folder}/{self._name}" for folder in self._writers]

    def _write(self, folder: str, batch: pa.RecordBatch) -> None:
        if folder not in self._writers:
            path = _staged(self._output / folder / self._name)
            path.parent.mkdir(parents=True, exist_ok=True)
            self._writers[folder] = pq.ParquetWriter(path, batch.schema, compression="zstd")
        self._writers[folder].write_batch(batch)


def _widened(batch: pa.RecordBatch, spec: TableSpec, *, deleted: bool) -> pa.RecordBatch:
    """Return rows with all columns of the table, empty where rows to delete have none, and whether they are deleted."""
    fields = [(column.name, TYPES[column.sql_type][0]) for column in spec.columns()]
    fields += [(BUNDLE, pa.int64())]
    present = set(batch.schema.names)
    arrays = [batch.column(name) if name in present else pa.nulls(len(batch), of_type) for name, of_type in fields]
    arrays.append(pa.repeat(pa.scalar(deleted), len(batch)))
    return pa.RecordBatch.from_arrays(arrays, names=[*(name for name, _ in fields), DELETED])


def _staged(path: Path) -> Path:
    return path.with_name(_HIDDEN + path.name)


class StreamOutput:
    """The output directory of a query, as its driver sees it."""

    def __init__(self, path: Path, spec: GraphSpec) -> None:
        """Describe the tables in the directory.

        Raises:
            UsageError: the directory holds something else.
        """
        self._path = path
        keys = {table.name: [column.name for column in table.columns()[: _key_length(table)]] for table in spec.tables}
        content = msgspec.json.encode(keys)
        described, ready = path / TABLES_FILE, path / f"{_HIDDEN}{TABLES_FILE}"
        if described.exists():
            if described.read_bytes() != content:
                raise UsageError(f"{path} has the tables of another graph", hint="name a new directory")
            return
        if path.exists() and any(there != ready for there in path.iterdir()):
            raise UsageError(f"{path} is not empty", hint="name a new directory, or the one of this query")
        path.mkdir(parents=True, exist_ok=True)
        ready.unlink(missing_ok=True)  # of a driver that was killed
        write_durably(ready, content)
        ready.rename(described)
        sync_directory(path)

    def publish(self, outputs: Mapping[int, Sequence[str]]) -> None:
        """Name the files of a commit, given by interval; the second time it changes nothing.

        Raises:
            CorruptionError: a file is missing.
        """
        folders = set()
        for name in chain.from_iterable(outputs.values()):
            path = self._path / name
            try:
                _staged(path).rename(path)
            except FileNotFoundError as error:
                if not path.exists():
                    raise CorruptionError(f"{path} is missing, whose rows are committed") from error
            folders.add(path.parent)
        for folder in folders:
            sync_directory(folder)

    def sweep(self) -> None:
        """Delete what attempts that failed have left; only after the newest commit is published."""
        for folder in self._folders():
            for path in folder.glob(f"{_HIDDEN}*.parquet"):
                path.unlink(missing_ok=True)

    def _folders(self) -> Iterator[Path]:
        yield from (self._path / "tables").glob("*")
        yield from (self._path / name for name in ("late_records", "dead_letters"))


def _key_length(spec: TableSpec) -> int:
    return len(spec.keys) + 2 if spec.kind == "windowed" else 0


def read_results(spark: SparkSession, output: str | Path) -> dict[str, DataFrame]:
    """Return what a streaming query has written: its tables with the newest pane of each window, and the rest.

    Also "late_records" and "dead_letters", unless a table has that name.

    Args:
        spark: a session.
        output: the query's `--output`, also while it runs.

    Raises:
        UsageError: the directory is not one of a streaming query.
    """
    path = Path(output)
    try:
        keys = msgspec.json.decode((path / TABLES_FILE).read_bytes(), type=dict[str, list[str]])
    except FileNotFoundError:
        raise UsageError(f"{path} is not the output of a streaming query") from None
    found = {}
    for name, schema in (("late_records", LATE), ("dead_letters", DEAD_LETTERS)):
        if any((path / name).glob("[!.]*.parquet")):
            found[name] = spark.read.parquet(str(path / name)).select(schema.names)
        else:
            found[name] = spark.createDataFrame(schema.empty_table())
    for name, key in keys.items():
        if any((path / "tables" / name).glob("[!.]*.parquet")):
            found[name] = _newest(spark.read.parquet(str(path / "tables" / name)), key)
    return found


def _newest(rows: DataFrame, key: list[str]) -> DataFrame:
    names = [f"`{name}`" for name in rows.columns if name not in (BUNDLE, DELETED)]
    if not key:
        return rows.select(*names)
    newest = F.max_by(F.struct(*names, DELETED), F.struct(BUNDLE, ~F.col(DELETED)))
    grouped = rows.groupBy(*(f"`{name}`" for name in key)).agg(newest.alias("_newest"))
    return grouped.where(f"NOT _newest.{DELETED}").select(*(F.col(f"_newest.{name}") for name in names))
