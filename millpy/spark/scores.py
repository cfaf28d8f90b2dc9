"""How unlike its own device's history each window is: a score per window, as Spark DataFrames.

A window is compared with the hour of day that it starts in, on the device's earlier days; where that history is too
short, with the device's latest windows. The distance is measured in a scale that has a floor. All of it is columns:

    windows = read_table(spark, "factory.temperature_1m")
    judged(windows, Columns(("device",), "mean"), History(zone="Europe/Berlin")).where("outlier").show()

The hours are condensed first (one row for each device and hour), so the history of a window is at most `days` numbers,
however short the windows are.
"""

from __future__ import annotations

import zoneinfo
from collections.abc import Sequence
from dataclasses import dataclass

from pyspark.sql import Column, DataFrame, Window, WindowSpec
from pyspark.sql import functions as fn

from millpy.errors import ConfigError
from millpy.spark.statistics import Columns

SIGMA_OF_MEDIAN_DEVIATION = 1.4826
SIGMA_OF_MEAN_DEVIATION = 1.2533
SIGMA_OF_QUARTILES = 1 / 1.349
"""A normal distribution's standard deviation, as a multiple of its median and its mean absolute deviation, and of the
distance between its quartiles."""
DISTRUST_OF_FEW_WINDOWS = 8.0
DISTRUST_OF_FEW_DAYS = 4.0
"""The number of windows, and of days, at which a history doubles the scale: a few values often lie close together."""
OWN_SPREAD_SHARE = 1 / 3
REST_SPREAD_SHARE = 0.75
"""The smallest scale, as a share of the spread of all the device's windows; against hours, of the spread of what the
hours leave unexplained. A night's readings hardly differ, and a day's first sunlight would get any score."""
FLEET_SPREAD_SHARE = 0.1
"""The smallest scale, as a share of the fleet's spread: the lower quartile of the devices' spreads, since one table may
hold several quantities. It decides where a device's own windows are nearly constant."""
RESOLUTION_QUANTILE = 0.05
STEPS_MIN = 20
"""The smallest scale is also the measured values' resolution: a low quantile of the changes from one window to the
next that are not zero, if there are this many. A value that is one digit off must not be an outlier."""
MAGNITUDE_SHARE = 0.001
"""The smallest scale, as a share of the median absolute value. It decides where a device and its fleet are nearly
constant: a score above 1,000 needs a change by more than the value itself."""
LARGEST_SHARE = 0.01
"""The smallest scale, as a share of the largest absolute value, where all of these are zero: a counter of faults that
never counted. It keeps such scores below 100."""
LEVEL_HOURS = 72
LEVEL_HOURS_MIN = 6
"""The level is the median distance of the last hours from their usual values: warm days move what is expected, one
faulty day does not."""
_HOUR_US = 3_600_000_000
_JUDGED = ("baseline", "expected", "scale", "score", "outlier")
_FORGOTTEN = ("past", "recent_scale", "bucket", "season", "usual", "seasonal_scale", "known", "floor", "recent_floor")
"""Columns that `judged` adds, and drops again."""


@dataclass(frozen=True, slots=True)
class History:
    """The history that a window is compared with.

    Attributes:
        windows: the number of the device's windows before it.
        windows_min: the number below which a window is not judged by them.
        threshold: the score from which a window is an outlier.
        days: the number of days before it, of which the same hour is compared.
        days_min: the number of them with windows below which the latest windows are compared instead.
        weeks: the number of weeks before it, of which the same hour of the same weekday is compared.
        weeks_min: the number of them with windows below which all days are compared.
        zone: the IANA name of the time zone of hours and weekdays.
    """

    windows: int = 30
    windows_min: int = 8
    threshold: float = 5.0
    days: int = 28
    days_min: int = 5
    weeks: int = 8
    weeks_min: int = 6
    zone: str = "UTC"

    def __post_init__(self) -> None:
        assert 3 <= self.windows_min <= self.windows, self
        assert 3 <= self.days_min <= self.days, self
        assert 3 <= self.weeks_min <= self.weeks, self
        assert self.threshold > 0, self
        _check_zone(self.zone)


def judged(
    windows: DataFrame, columns: Columns, history: History | None = None, by_hour: DataFrame | None = None
) -> DataFrame:
    """Return the windows that have a value, with baseline, expected, scale, score and outlier.

    baseline says what a window is compared with: `weekday` or `hour` (the same hour of the same weekday, or of all
    days), or `recent` (the device's latest windows). expected is the median of that history, scale a robust standard
    deviation of it, wider the shorter it is, and never below the floor of the device (`floors`). score is the distance
    of the value from expected in scales. All are null, and outlier false, where the history is too short.

    Arguments:
        windows: the windows.
        columns: the roles of their columns.
        history: the history to compare with.
        by_hour: what earlier hours let expect (`hours`), if it is known already; default: what these windows say.

    Raises:
        ConfigError: the windows have a column of one of these names.
    """
    if taken := [name for name in (*_JUDGED, *_FORGOTTEN) if name in windows.columns]:
        raise ConfigError(f"the windows have a column {taken[0]!r} already", hint="rename it with withColumnRenamed()")
    history = history or History()
    value, keys = fn.col(columns.value).cast("double"), [*columns.keys]
    plain = [f"key_{place}" for place, _ in enumerate(keys)]
    back = dict(zip(plain, keys, strict=True))
    valued = windows.where(value.isNotNull() & ~fn.isnan(value)).withColumn("bucket", hour_number(history.zone))
    points = valued.select(*map(fn.col, keys), "window_start", "window_end", "bucket", value.alias("value")).toDF(
        *plain, "window_start", "window_end", "bucket", "value"
    )
    if by_hour is None:
        by_hour = hours(points, plain, history).withColumnsRenamed(back)
    before = Window.partitionBy(*keys).orderBy("window_start", "window_end").rowsBetween(-history.windows, -1)
    known, hourly = fn.size("past"), fn.col("seasonal_scale").isNotNull()
    distrust = fn.when(hourly, DISTRUST_OF_FEW_DAYS / fn.col("known")).otherwise(DISTRUST_OF_FEW_WINDOWS / known)
    spread = fn.when(hourly, fn.greatest("seasonal_scale", "floor")).otherwise(
        fn.greatest("recent_scale", "recent_floor")
    )
    basis = fn.when(hourly, fn.col("season")).when(known >= history.windows_min, "recent")
    expected = fn.when(hourly, fn.col("usual")).when(basis.isNotNull(), _median(fn.col("past")))
    score = fn.try_divide(fn.abs(value - fn.col("expected")), "scale")
    return (
        valued.withColumn("past", _sorted_over(value, before))
        .withColumn("recent_scale", _deviation(fn.col("past")))
        .join(by_hour, [*keys, "bucket"], "left")
        .join(floors(points, plain).withColumnsRenamed(back), keys, "left")
        .select(
            *windows.columns, basis.alias("baseline"), expected.alias("expected"),
            fn.when(basis.isNotNull(), spread * (1 + distrust)).alias("scale"),
        )
        .withColumn("score", score)
        .withColumn("outlier", fn.coalesce((fn.col("score") >= history.threshold) & ~fn.isnan("score"), fn.lit(False)))
    )  # fmt: skip


def outliers(windows: DataFrame, columns: Columns, history: History | None = None) -> DataFrame:
    """Return the windows of `judged` that are outliers."""
    return judged(windows, columns, history).where("outlier")


def hours(points: DataFrame, keys: Sequence[str], history: History) -> DataFrame:
    """Return what earlier hours let expect of each device and hour (`expectations`).

    Arguments:
        points: windows as keys, bucket (the number of the hour in the history's zone) and value.
        keys: the key columns, with names that differ from those here.
        history: the history to compare with.
    """
    quartiles = points.groupBy(*keys, "bucket").agg(fn.percentile("value", [0.25, 0.5, 0.75]).alias("quartiles"))
    return expectations(quartiles, keys, history)


def expectations(condensed: DataFrame, keys: Sequence[str], history: History) -> DataFrame:
    """Return what earlier hours let expect of each device and hour.

    The columns are the keys, bucket, season (`weekday` or `hour`), usual, seasonal_scale and known. usual is the median
    of the same hour on earlier days, moved by the level: how far the last three days were from theirs. seasonal_scale
    joins two spreads: of the differences that were left on `known` earlier days, and of the windows within an hour; it
    is null where the history is too short.

    Arguments:
        condensed: one row for each device and hour: keys, bucket, quartiles (an array of three).
        keys: the key columns, with names that differ from those here.
        history: the history to compare with.
    """
    quartile = [fn.get("quartiles", fn.lit(place)) for place in range(3)]
    day = fn.floor(fn.col("bucket") / 24)
    earlier = Window.partitionBy(*keys, "hour").orderBy("day").rangeBetween(-history.days, -1)
    same_weekday = Window.partitionBy(*keys, "hour", "weekday").orderBy("day").rangeBetween(-7 * history.weeks, -1)
    last_hours = Window.partitionBy(*keys).orderBy("bucket").rangeBetween(-LEVEL_HOURS, -1)
    whole = Window.partitionBy(*keys)
    weekly, daily = fn.size("weekdays") >= history.weeks_min, fn.size("days") >= history.days_min
    base = fn.when(weekly, _median(fn.col("weekdays"))).when(daily, _median(fn.col("days")))
    level = fn.when(fn.size("lately") >= LEVEL_HOURS_MIN, _median(fn.col("lately"))).otherwise(0.0)
    rest = fn.col("middle") - fn.col("usual")
    spread = fn.hypot(_deviation(fn.col("rests")), _median(fn.col("ranges")))
    own = fn.hypot(_between(fn.col("unexplained")), "typical_range") * REST_SPREAD_SHARE
    enough = fn.col("base").isNotNull() & (fn.size("rests") >= history.days_min)
    return (
        condensed.select(
            *keys, "bucket", "quartiles", fn.pmod("bucket", fn.lit(24)).alias("hour"), day.alias("day")
        )
        .select(
            "*", quartile[1].alias("middle"), fn.pmod("day", fn.lit(7)).alias("weekday"),
            ((quartile[2] - quartile[0]) * SIGMA_OF_QUARTILES).alias("range"),
        )
        .select(
            "*", _sorted_over(fn.col("middle"), same_weekday).alias("weekdays"),
            _sorted_over(fn.col("middle"), earlier).alias("days"),
            _sorted_over(fn.col("range"), earlier).alias("ranges"),
            fn.percentile_approx("range", 0.5).over(whole).alias("typical_range"),
        )
        .select("*", fn.when(weekly, "weekday").otherwise("hour").alias("season"), base.alias("base"))
        .withColumn("lately", _sorted_over(fn.col("middle") - fn.col("base"), last_hours))
        .withColumn("usual", fn.col("base") + level)
        .select(
            "*", _sorted_over(rest, earlier).alias("rests"),
            fn.percentile_approx(rest, [0.25, 0.75]).over(whole).alias("unexplained"),
        )
        .select(
            *keys, "bucket", "season", "usual", fn.size("rests").alias("known"),
            fn.when(enough, fn.greatest(spread, own)).alias("seasonal_scale"),
        )
    )  # fmt: skip


def floors(points: DataFrame, keys: Sequence[str]) -> DataFrame:
    """Return the smallest scales of each device, from all of its windows and those of the fleet.

    The columns are the keys, floor and recent_floor. floor is the largest of the resolution, a share of the fleet's
    spread and a share of the values themselves; null where all values are zero. recent_floor, for windows that are
    compared with the latest, is at least a share of the device's spread.

    Arguments:
        points: windows as keys, window_start, window_end and value.
        keys: the key columns, with names that differ from those here.
    """
    finite = fn.when(fn.abs("value") < float("inf"), fn.col("value"))
    step = fn.abs(finite - fn.lag(finite).over(Window.partitionBy(*keys).orderBy("window_start", "window_end")))
    devices = (
        points.select(*keys, finite.alias("finite"), fn.when(step > 0, step).alias("step"))
        .groupBy(*keys)
        .agg(
            fn.percentile_approx("finite", [0.25, 0.75]).alias("quartiles"),
            fn.percentile_approx(fn.abs("finite"), 0.5).alias("magnitude"),
            fn.max(fn.abs("finite")).alias("largest"),
            fn.when(fn.count("step") >= STEPS_MIN, fn.percentile_approx("step", RESOLUTION_QUANTILE)).alias("finest"),
        )
        .withColumn("spread", fn.nullif(_between(fn.col("quartiles")), fn.lit(0.0)))
    )
    fleet = devices.agg(fn.percentile_approx("spread", 0.25).alias("fleet"))
    known = fn.greatest("finest", fn.col("fleet") * FLEET_SPREAD_SHARE, fn.col("magnitude") * MAGNITUDE_SHARE)
    last_resort = fn.nullif(fn.col("largest") * LARGEST_SHARE, fn.lit(0.0))
    floor = fn.coalesce(fn.nullif(known, fn.lit(0.0)), last_resort)
    recent_floor = fn.greatest(floor, fn.col("spread") * OWN_SPREAD_SHARE)
    return devices.crossJoin(fleet).select(*keys, floor.alias("floor"), recent_floor.alias("recent_floor"))


def _between(quartiles: Column) -> Column:
    """Return a standard deviation from an array of the lower and the upper quartile."""
    return (fn.get(quartiles, fn.lit(1)) - fn.get(quartiles, fn.lit(0))) * SIGMA_OF_QUARTILES


def _sorted_over(value: Column, frame: WindowSpec) -> Column:
    return fn.sort_array(fn.collect_list(value).over(frame))


def hour_number(zone: str) -> Column:
    """Return the number of the hour in which a window starts, by the zone's clocks, whatever the session's zone."""
    local = fn.unix_micros(fn.from_utc_timestamp("window_start", zone))
    return fn.floor(local / fn.lit(_HOUR_US))


def _check_zone(zone: str) -> None:
    """Raise ConfigError unless the zone exists; UTC exists also where the system has no zones."""
    if zone == "UTC":
        return
    try:
        zoneinfo.ZoneInfo(zone)
    except (zoneinfo.ZoneInfoNotFoundError, ValueError, OSError):
        raise ConfigError(
            f"there is no time zone {zone!r}", hint="give an IANA name, for example Europe/Berlin, or UTC"
        ) from None


def _median(ordered: Column) -> Column:
    """Return the median of a sorted array; null if it is empty."""
    middle = (fn.size(ordered) - 1) / 2
    return (fn.get(ordered, fn.floor(middle).cast("int")) + fn.get(ordered, fn.ceil(middle).cast("int"))) / 2


def _deviation(ordered: Column) -> Column:
    """Return a robust standard deviation of an array: by the median deviation, or the mean one if that is zero."""
    apart = fn.transform(ordered, lambda one: fn.abs(one - _median(ordered)))
    mean = fn.try_divide(fn.aggregate(apart, fn.lit(0.0), lambda total, one: total + one), fn.size(ordered))
    by_median = _median(fn.sort_array(apart)) * SIGMA_OF_MEDIAN_DEVIATION
    return fn.when(by_median == 0, mean * SIGMA_OF_MEAN_DEVIATION).otherwise(by_median)
