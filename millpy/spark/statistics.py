"""The statistics of a table of windows as Spark DataFrames: profile, outliers, lateness. All columns, no rows.

Every function takes DataFrames and returns a DataFrame with the columns that its docstring names; each works alone:

    windows = read_table(spark, "factory.temperature_1m")
    outliers(windows, Columns(("device",), "mean")).orderBy("score", ascending=False).show()
"""

from __future__ import annotations

from dataclasses import dataclass

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as fn

from millpy.errors import ConfigError

SIGMA_OF_MEDIAN_DEVIATION = 1.4826
SIGMA_OF_MEAN_DEVIATION = 1.2533
"""A normal distribution's standard deviation, as a multiple of its median and its mean absolute deviation."""
DISTRUST_OF_SHORT_HISTORY = 8.0
"""A history of this many windows doubles the scale: the median deviation of few values is often too small."""
SCALE_SHARE_MIN = 1e-9
"""The smallest scale, as a share of the median: rounding must not make an outlier where all values were equal."""
_JUDGED = ("expected", "scale", "score", "outlier")
_FORGOTTEN = ("past", "apart")
"""Columns that `judged` adds, and drops again."""


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


@dataclass(frozen=True, slots=True)
class History:
    """The history that a window is compared with.

    Attributes:
        windows: the number of the device's windows before it.
        windows_min: the number below which a window is not judged.
        threshold: the score from which a window is an outlier.
    """

    windows: int = 30
    windows_min: int = 8
    threshold: float = 5.0

    def __post_init__(self) -> None:
        assert 3 <= self.windows_min <= self.windows, self
        assert self.threshold > 0, self


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


def judged(windows: DataFrame, columns: Columns, history: History | None = None) -> DataFrame:
    """Return the windows that have a value, with expected, scale, score and outlier, by the device's earlier windows.

    expected is the median of the history. scale is a robust standard deviation of it, wider the shorter it is: from the
    median absolute deviation, or from the mean one where more than half of the history is one value. score is the
    distance of the value from expected in scales. All are null, and outlier false, where the history is too short.

    Raises:
        ConfigError: the windows have a column of one of these names.
    """
    if taken := [name for name in (*_JUDGED, *_FORGOTTEN) if name in windows.columns]:
        raise ConfigError(f"the windows have a column {taken[0]!r} already", hint="rename it with withColumnRenamed()")
    history = history or History()
    before = Window.partitionBy(*columns.keys).orderBy("window_start", "window_end").rowsBetween(-history.windows, -1)
    past, expected, value = fn.col("past"), fn.col("expected"), fn.col(columns.value)
    known = fn.size("past")
    return (
        windows.where(value.isNotNull() & ~fn.isnan(value.cast("double")))
        .withColumn("past", fn.array_sort(fn.collect_list(value.cast("double")).over(before)))
        .withColumn("expected", fn.when(known >= history.windows_min, _median(past)))
        .withColumn("apart", fn.array_sort(fn.transform(past, lambda one: fn.abs(one - expected))))
        .withColumn("scale", _scale(fn.col("apart"), expected, known))
        .withColumn("score", fn.try_divide(fn.abs(value.cast("double") - expected), "scale"))
        .withColumn("outlier", fn.coalesce((fn.col("score") >= history.threshold) & ~fn.isnan("score"), fn.lit(False)))
        .drop(*_FORGOTTEN)
    )


def outliers(windows: DataFrame, columns: Columns, history: History | None = None) -> DataFrame:
    """Return the windows of `judged` that are outliers."""
    return judged(windows, columns, history).where("outlier")


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


def _median(ordered: Column) -> Column:
    """Return the median of a sorted array; null if it is empty."""
    middle = (fn.size(ordered) - 1) / 2
    return (fn.get(ordered, fn.floor(middle).cast("int")) + fn.get(ordered, fn.ceil(middle).cast("int"))) / 2


def _scale(apart: Column, expected: Column, known: Column) -> Column:
    """Return a robust standard deviation from sorted distances; never zero."""
    mean = fn.try_divide(fn.aggregate(apart, fn.lit(0.0), lambda total, one: total + one), known)
    floor = fn.abs(expected) * SCALE_SHARE_MIN + fn.lit(1e-300)
    median = _median(apart)
    spread = fn.when(median > floor, median * SIGMA_OF_MEDIAN_DEVIATION).otherwise(
        fn.greatest(mean * SIGMA_OF_MEAN_DEVIATION, floor)
    )
    return spread * (1 + fn.try_divide(fn.lit(DISTRUST_OF_SHORT_HISTORY), known))
