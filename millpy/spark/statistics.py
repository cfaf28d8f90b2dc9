"""The statistics of a table of windows as Spark DataFrames: profile and lateness. All columns, no rows.

Every function takes DataFrames and returns a DataFrame with the columns that its docstring names; each works alone:

    windows = read_table(spark, "factory.temperature_1m")
    profile(windows, Columns(("device",), "mean")).orderBy("stddev", ascending=False).show()
"""

from __future__ import annotations

from dataclasses import dataclass

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as fn


@dataclass(frozen=True, slots=True)
class Columns:
    """The roles of a result table's columns.

    Attributes:
        keys: the columns of the device, or of another key.
        value: the number analyzed.
        count: the number of records of a window; None if the table does not count them.
    """

    keys: tuple[str, ...]
    value: str
    count: str | None = None


def profile(windows: DataFrame, columns: Columns) -> DataFrame:
    """Return one row per device: keys, windows, records, mean, stddev, low, high, late, first_at, last_at.

    mean, stddev, low and high are over the windows' values, each window counting once; records and late are sums.
    """
    value = fn.col(columns.value)
    return windows.groupBy(*columns.keys).agg(
        fn.count("*").alias("windows"),
        _records(columns).alias("records"),
        fn.avg(value).alias("mean"),
        fn.stddev_samp(value).alias("stddev"),
        fn.min(value).alias("low"),
        fn.max(value).alias("high"),
        fn.sum("late_count").alias("late"),
        fn.min("window_start").alias("first_at"),
        fn.max("window_start").alias("last_at"),
    )


def lateness(windows: DataFrame, too_late: DataFrame, columns: Columns) -> DataFrame:
    """Return one row per device: keys, records, late, too_late, late_share, too_late_share.

    late counts the records that came after the watermark had passed their window's end; too_late those in no window.
    Both shares are of all records, including those in no window; null where the table does not count records. A record
    counts once for each window that it belongs to.

    Arguments:
        windows: the result table.
        too_late: one row per record, with the same key columns.
        columns: the roles of the columns.
    """
    here = windows.groupBy(*columns.keys).agg(_records(columns).alias("records"), fn.sum("late_count").alias("late"))
    lost = too_late.groupBy(*columns.keys).agg(fn.count("*").alias("too_late"))
    both = here.join(lost, [*columns.keys], "full").fillna(0, ["late", "too_late"])
    if columns.count is not None:
        both = both.fillna(0, ["records"])
    everything = fn.col("records") + fn.col("too_late")
    return both.withColumn("late_share", fn.try_divide("late", everything)).withColumn(
        "too_late_share", fn.try_divide("too_late", everything)
    )


def over_time(windows: DataFrame, columns: Columns, *, first_us: int, width_us: int) -> DataFrame:
    """Return one row per time bin, by windows' starts: place (0 from first_us on), windows, records, late."""
    place = fn.floor((fn.unix_micros("window_start") - fn.lit(first_us)) / fn.lit(width_us))
    return (
        windows.groupBy(place.alias("place"))
        .agg(fn.count("*").alias("windows"), _records(columns).alias("records"), fn.sum("late_count").alias("late"))
        .orderBy("place")
    )


def _records(columns: Columns) -> Column:
    return fn.lit(None).cast("bigint") if columns.count is None else fn.sum(columns.count).cast("bigint")
