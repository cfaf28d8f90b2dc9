"""The Parquet directories of one analyzed table, which appear under their names once a batch is committed.

    ROOT/windows/_commit=NAME    written, perhaps committed; Spark and others skip what begins with an underscore
    ROOT/windows/commit=NAME     committed: the panes of a batch, with their scores
    ROOT/hours/commit=NAME       what the batch made of its devices' hours

The manifest in PostgreSQL says which are committed. Directories are merged, so that their number stays small.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from pyspark.sql import DataFrame, SparkSession, Window
from pyspark.sql import functions as fn

from millpy.clock import random_id
from millpy.errors import CorruptionError
from millpy.store.archive.local_storage import sync_directory
from millpy.store.postgres.analytics import AnalyticsDirectory

WINDOWS, HOURS = "windows", "hours"
MERGED = 16
"""The number of directories of a level that become one of the next."""
LEVEL_MAX = 3
_IDENTITY = {WINDOWS: ("device", "window_start", "window_end"), HOURS: ("device", "bucket")}


class AnalyticsFiles:
    """The directories below ROOT."""

    def __init__(self, root: Path) -> None:
        self._root = root
        for kind in _IDENTITY:
            (root / kind).mkdir(parents=True, exist_ok=True)

    def sweep(self, directories: Sequence[AnalyticsDirectory]) -> None:
        """Give committed directories their names, and remove what no commit names.

        Raises:
            CorruptionError: a committed directory is missing.
        """
        named = {each.name for each in directories}
        for name in named:
            self.publish(name)
            if missing := [kind for kind in _IDENTITY if not self._path(kind, name).is_dir()]:
                raise CorruptionError(f"{self._path(missing[0], name)} is missing")
        for kind in _IDENTITY:
            for path in (self._root / kind).iterdir():
                if path.name.partition("=")[2] not in named:
                    shutil.rmtree(path, ignore_errors=True)

    def write(self, number: int, level: int, windows: DataFrame, hours: DataFrame) -> str:
        """Write the directories of a batch durably; return their name."""
        name = f"{number:012}-{level}-{random_id().hex[:12]}"
        for kind, rows in ((WINDOWS, windows), (HOURS, hours)):
            path = self.pending(kind, name)
            rows.coalesce(1).write.parquet(str(path))
            for file in path.iterdir():
                _sync(file)
            sync_directory(path)
            sync_directory(path.parent)
        return name

    def pending(self, kind: str, name: str) -> Path:
        """Return where a directory is before it is published."""
        return self._root / kind / f"_commit={name}"

    def publish(self, name: str) -> None:
        """Give committed directories their names; those that have them already are left alone."""
        for kind in _IDENTITY:
            with suppress(FileNotFoundError):
                self.pending(kind, name).rename(self._path(kind, name))
                sync_directory(self._root / kind)

    def remove(self, names: Sequence[str]) -> None:
        """Remove directories that no manifest names any more."""
        for name in names:
            for kind in _IDENTITY:
                shutil.rmtree(self._path(kind, name), ignore_errors=True)

    def newest(self, spark: SparkSession, kind: str, directories: Sequence[AnalyticsDirectory]) -> DataFrame | None:
        """Return the newest row of every window, or of every device's hour; None without directories."""
        if not directories:
            return None
        found = spark.read.parquet(*(str(self._path(kind, each.name)) for each in directories))
        return newest_rows(found, kind)

    def _path(self, kind: str, name: str) -> Path:
        return self._root / kind / f"commit={name}"


def newest_rows(rows: DataFrame, kind: str) -> DataFrame:
    """Return the row of the last batch of every window, or of every device's hour."""
    order = Window.partitionBy(*_IDENTITY[kind]).orderBy(fn.desc("batch"))
    return rows.withColumn("age", fn.row_number().over(order)).where("age = 1").drop("age")


def to_merge(directories: Sequence[AnalyticsDirectory]) -> list[AnalyticsDirectory]:
    """Return the directories to merge next: the oldest of a level that has enough of them; none if no level has."""
    for level in range(LEVEL_MAX):
        found = [each for each in directories if each.level == level]
        if len(found) >= MERGED:
            return found[:MERGED]
    return []


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
