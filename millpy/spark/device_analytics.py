"""What a batch of panes says about its devices: their hours, and the windows that are unlike their history.

A device's hour is condensed from the newest panes of its windows. What to expect of it is computed once, when its first
window comes, from the device's earlier hours (`scores.expectations`); each window is then judged by it, or by the
device's latest windows where the history is short. So a batch reads its own hours, and the whole history only when a
new hour begins.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as fn

from millpy.clock import Clock
from millpy.spark.analytics_files import HOURS, WINDOWS, AnalyticsFiles, newest_rows, to_merge
from millpy.spark.scores import History, expectations, hour_number, judged
from millpy.spark.statistics import Columns
from millpy.store.postgres.analytics import AnalyticsBatch, AnalyticsDirectory, AnalyticsOwner

HOUR_US = 3_600_000_000
DAY_US = 24 * HOUR_US
VALUE_MAX = 1e150
"""Values beyond it, infinite ones and NaN count as missing: their squares have no double."""
LOOKBACK_US_MAX = 2 * DAY_US
WINDOW_COLUMNS = ("device", "window_start", "window_end", "pane_index", "value", "records", "late", "batch")
_EXPECTED = ("device", "bucket", "season", "usual", "seasonal_scale", "known")


@dataclass(frozen=True, slots=True, kw_only=True)
class AnalyticsSettings:
    """How tables are analyzed.

    Attributes:
        history: the history that a window is compared with.
        days: the number of days that hours, anomalies and Parquet directories are kept.
    """

    history: History = field(default_factory=History)
    days: int = 56


class DeviceAnalytics:
    """Analyzes the batches of one table: the function that `foreachBatch` calls.

    Attributes:
        error: what ended the last batch; Spark keeps its text only.
    """

    def __init__(
        self, owner: AnalyticsOwner, files: AnalyticsFiles, columns: Columns, settings: AnalyticsSettings, clock: Clock
    ) -> None:
        self._owner = owner
        self._files = files
        self._columns = columns
        self._settings = settings
        self._clock = clock
        self._held: list[DataFrame] = []
        self.error: Exception | None = None

    def __call__(self, batch: DataFrame, number: int) -> None:
        """Commit a batch; one that is committed already changes nothing."""
        if number <= self._owner.batch:
            return
        try:
            self._analyze(batch, number)
        except Exception as error:
            self.error = error
            raise

    def _analyze(self, batch: DataFrame, number: int) -> None:
        spark = batch.sparkSession
        fresh = self._hold(_prepared(batch, self._columns, number))
        try:
            start = fn.unix_micros("window_start")
            length = fn.max(fn.unix_micros("window_end") - start)
            (span,) = fresh.agg(fn.count("*"), fn.min(start), fn.max(start), length).collect()
            if not span[0]:
                self._owner.commit(AnalyticsBatch(number, 0))
                return
            first, last = int(span[1]), int(span[2])
            lookback = min(max(HOUR_US, self._settings.history.windows * int(span[3])), LOOKBACK_US_MAX)
            windows, hours = self._computed(spark, fresh, number, (first - HOUR_US - lookback, last + HOUR_US))
            name = self._files.write(number, 0, windows, hours)
        finally:
            while self._held:
                self._held.pop().unpersist()
        oldest = self._oldest_us(last)
        expired = [each for each in self._owner.directories if each.end_us < oldest]
        added = [AnalyticsDirectory(name, 0, first, last)]
        merged = to_merge([each for each in self._owner.directories if each not in expired])
        if merged:
            added.append(self._merged(spark, number, merged))
        removed = [each.name for each in (*expired, *merged)]
        self._owner.commit(
            AnalyticsBatch(
                number,
                int(span[0]),
                _hour_rows(pq.read_table(self._files.pending(HOURS, name))),
                _anomaly_rows(pq.read_table(self._files.pending(WINDOWS, name))),
                added,
                removed,
                oldest,
            )
        )
        for each in added:
            self._files.publish(each.name)
        self._files.remove(removed)

    def _hold(self, rows: DataFrame) -> DataFrame:
        """Keep rows in memory until the batch is written."""
        self._held.append(rows.persist())
        return rows

    def _computed(
        self, spark: SparkSession, fresh: DataFrame, number: int, span: tuple[int, int]
    ) -> tuple[DataFrame, DataFrame]:
        """Return the batch's panes with their scores, and what its devices' hours have become."""
        zone = self._settings.history.zone
        near = [each for each in self._owner.directories if each.end_us >= span[0] and each.start_us <= span[1]]
        before = self._files.newest(spark, WINDOWS, near)
        windows = fresh
        if before is not None:
            inside = fn.unix_micros("window_start").between(*span)
            windows = newest_rows(before.select(*WINDOW_COLUMNS).where(inside).unionByName(fresh), WINDOWS)
        windows = self._hold(windows)
        bucket = hour_number(zone).alias("bucket")
        touched = fresh.select("device", bucket).distinct()
        inside_hours = windows.withColumn("bucket", bucket).join(touched, ["device", "bucket"], "left_semi")
        condensed = self._hold(_condensed(inside_hours, zone))
        by_hour = self._hold(self._expected(spark, condensed, near))
        scored = judged(windows, Columns(("device",), "value"), self._settings.history, by_hour)
        missing = fresh.where(fn.col("value").isNull()).withColumn("outlier", fn.lit(False))
        panes = scored.where(fn.col("batch") == number).unionByName(missing, allowMissingColumns=True)
        return panes, condensed.join(by_hour, ["device", "bucket"], "left").withColumn("batch", fn.lit(number))

    def _expected(self, spark: SparkSession, condensed: DataFrame, near: Sequence[AnalyticsDirectory]) -> DataFrame:
        """Return what earlier hours let expect of the hours of a batch: as known, or computed for new hours."""
        touched = condensed.select("device", "bucket")
        known = self._files.newest(spark, HOURS, near)
        wanted = touched
        if known is not None:
            known = known.select(*_EXPECTED).join(touched, ["device", "bucket"], "left_semi")
            wanted = self._hold(touched.join(known, ["device", "bucket"], "left_anti"))
            if wanted.isEmpty():
                return known
        quartiles = condensed.select("device", "bucket", "quartiles")
        earlier = self._files.newest(spark, HOURS, self._owner.directories)
        if earlier is not None:
            past = earlier.select(*quartiles.columns).join(touched, ["device", "bucket"], "left_anti")
            quartiles = quartiles.unionByName(past.join(wanted.select("device").distinct(), "device", "left_semi"))
        new = expectations(quartiles, ["device"], self._settings.history).join(
            wanted, ["device", "bucket"], "left_semi"
        )
        return new.select(*_EXPECTED) if known is None else known.unionByName(new.select(*_EXPECTED))

    def _merged(self, spark: SparkSession, number: int, merged: Sequence[AnalyticsDirectory]) -> AnalyticsDirectory:
        level = merged[0].level + 1
        windows, hours = (self._files.newest(spark, kind, merged) for kind in (WINDOWS, HOURS))
        assert windows is not None and hours is not None
        name = self._files.write(number, level, windows, hours)
        return AnalyticsDirectory(name, level, min(e.start_us for e in merged), max(e.end_us for e in merged))

    def _oldest_us(self, last: int) -> int:
        """Return the start of the retention: before the newest window, but a device's clock may be ahead."""
        newest = max([last, *(each.end_us for each in self._owner.directories)])
        return min(newest, self._clock.now_us()) // HOUR_US * HOUR_US - self._settings.days * DAY_US


def _prepared(batch: DataFrame, columns: Columns, number: int) -> DataFrame:
    value = fn.col(columns.value).cast("double")
    records = fn.lit(None) if columns.count is None else fn.col(columns.count)
    return batch.select(
        device_name(columns.keys).alias("device"),
        "window_start",
        "window_end",
        fn.col("pane_index").cast("bigint").alias("pane_index"),
        fn.when(fn.abs(value) < VALUE_MAX, value).alias("value"),
        records.cast("bigint").alias("records"),
        fn.col("late_count").cast("bigint").alias("late"),
        fn.lit(number).cast("bigint").alias("batch"),
    )


def device_name(keys: Sequence[str]) -> Column:
    """Return the text of one key column, or of several as a JSON array."""
    texts = [fn.coalesce(fn.col(name).cast("string"), fn.lit("")) for name in keys]
    return texts[0] if len(texts) == 1 else fn.to_json(fn.array(*texts))


def _condensed(windows: DataFrame, zone: str) -> DataFrame:
    """Return one row for each device and hour of windows that have their bucket."""
    hour = fn.to_utc_timestamp(fn.timestamp_seconds(fn.col("bucket") * 3600), zone)
    return (
        windows.groupBy("device", "bucket")
        .agg(
            fn.count("*").alias("windows"),
            fn.count("value").alias("measured"),
            fn.sum("records").alias("records"),
            fn.sum("late").alias("late"),
            fn.avg("value").alias("mean"),
            fn.stddev_samp("value").alias("stddev"),
            fn.min("value").alias("low"),
            fn.max("value").alias("high"),
            fn.percentile("value", [0.25, 0.5, 0.75]).alias("quartiles"),
            fn.min("window_start").alias("first_at"),
            fn.max("window_start").alias("last_at"),
        )
        .withColumn("hour", hour)
    )


def _hour_rows(hours: pa.Table) -> list[dict[str, Any]]:
    rows = hours.drop_columns(["quartiles", "batch", "known"]).to_pylist()
    for row, quartiles in zip(rows, hours["quartiles"].to_pylist(), strict=True):
        row["median"] = quartiles[1] if quartiles else None
        seasonal = row.pop("seasonal_scale")
        row["baseline"], row["expected"] = row.pop("season"), row.pop("usual")
        row["scale"] = seasonal
        if seasonal is None:
            row["baseline"] = row["expected"] = None
    return [_storable(row) for row in rows]


def _anomaly_rows(panes: pa.Table) -> list[dict[str, Any]]:
    """Return the outliers, and for other windows that had a pane before a row without a score."""
    outlier = pc.fill_null(panes["outlier"], False)
    again = pc.greater(panes["pane_index"], 0)
    wanted = panes.filter(pc.or_(outlier, again)).drop_columns(["records", "late", "batch"])
    rows = wanted.to_pylist()
    for row in rows:
        if not row.pop("outlier"):
            row["score"] = None
    return [_storable(row) for row in rows]


def _storable(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row whose instants have their zone."""
    return {
        name: value.replace(tzinfo=dt.UTC) if isinstance(value, dt.datetime) and value.tzinfo is None else value
        for name, value in row.items()
    }
