"""A report over a table of windows: the profile of each device, its outliers, and how much came late.

    report = make_report(spark, url, Question("factory.temperature_1m", value="mean"))
    print(as_text(report))
    Path("report.html").write_text(page(report), encoding="utf-8")

Spark computes all of it (`statistics.py`, `scores.py`); the constants below bound what comes back.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Sequence
from dataclasses import dataclass, field

from pyspark.sql import Column, DataFrame, Row, SparkSession, Window
from pyspark.sql import functions as fn

from millpy.errors import ConfigError, TableSwitchedError
from millpy.spark.findings import Device, JudgedWindow, OutlierReport, TimeBin
from millpy.spark.scores import History, judged
from millpy.spark.session import read_table
from millpy.spark.statistics import Columns, lateness, over_time, profile
from millpy.spark.tables import SparkTable, describe, windowed

DEVICES_MAX = 200
"""The number of devices listed: those with most outliers first, then those with most late records."""
SERIES_MAX = 12
POINTS_MAX = 400
"""The number of devices drawn, and of the newest windows drawn for each."""
OUTLIERS_MAX = 50
STRETCHES = 48
"""The approximate number of time bins that the whole time is cut into."""
NUMBERS = ("double precision", "real", "numeric", "bigint", "integer", "smallint")
NOT_VALUES = ("pane_index", "late_count", "interval_id", "bundle")


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """The subject of a report.

    Attributes:
        table: `schema.table` of windows.
        value: the column analyzed; default: the first one with decimals.
        count: the column that counts a window's records; default: `n`, if the table has it.
        start: the time, with a zone, at or after which the windows start.
        end: the time before which the windows start.
        history: the history that a window is compared with.
    """

    table: str
    value: str | None = None
    count: str | None = None
    start: dt.datetime | None = None
    end: dt.datetime | None = None
    history: History = field(default_factory=History)


def subject(url: str, question: Question) -> tuple[str, Columns]:
    """Return (computation, columns) of the table; needs no Spark, so that a mistake shows before Spark starts.

    Raises:
        ConfigError: there is no such table of windows, or it lacks a column.
        StoreUnavailableError: the database does not answer.
    """
    table = _table(url, question)
    computation, keys = windowed(url, table.schema, table.name)
    columns = Columns(keys, _value_column(table, keys, question.value), _count_column(table, question.count))
    return computation, columns


def make_report(spark: SparkSession, url: str, question: Question) -> OutlierReport:
    """Read the table and its too-late records, and compute the report with Spark.

    Raises:
        ConfigError: there is no such table of windows, or it lacks a column.
        TableSwitchedError: the table now belongs to another generation, whose too-late records may be among these.
        StoreUnavailableError: the database does not answer.
    """
    table = _table(url, question)
    computation, columns = subject(url, question)
    windows = _windows(spark, url, question, columns).persist()
    try:
        found = _computed(
            windows, _too_late(spark, url, question, computation, _plain(columns), windows), question, columns
        )
    finally:
        windows.unpersist()
    if _table(url, question).oid != table.oid:
        raise TableSwitchedError(
            f"{question.table} was switched to another table while the report was made", hint="run the report again"
        )
    return found


def _table(url: str, question: Question) -> SparkTable:
    schema, _, name = question.table.partition(".")
    return describe(url, schema, name)


def _computed(windows: DataFrame, too_late: DataFrame, question: Question, asked: Columns) -> OutlierReport:
    columns = _plain(asked)
    points = judged(windows, columns, question.history).persist()
    devices = _devices(windows, too_late, points, columns).persist()
    try:
        (whole,) = devices.agg(
            fn.count("*").alias("device_count"),
            *(fn.coalesce(fn.sum(name), fn.lit(0)).alias(name) for name in ("windows", "late", "too_late")),
            fn.sum("records").alias("records"),
            fn.coalesce(fn.sum("outliers"), fn.lit(0)).alias("outlier_count"),
            fn.unix_micros(fn.min("first_at")).alias("first_at"),
            fn.unix_micros(fn.max("last_at")).alias("last_at"),
        ).collect()
        first, width = _time_bins(whole["first_at"], whole["last_at"], _shortest_us(windows))
        listed = devices.orderBy(*_noteworthy(), *columns.keys).limit(DEVICES_MAX).collect()
        drawn = [row["name"] for row in listed[:SERIES_MAX]]
        worst = points.where("outlier").orderBy(fn.desc("score"), *columns.keys, "window_start").limit(OUTLIERS_MAX)
        return OutlierReport(
            table=question.table,
            keys=asked.keys,
            value=asked.value,
            count=asked.count,
            history=question.history,
            first_at=_moment(whole["first_at"]),
            last_at=_moment(whole["last_at"]),
            bin_width=dt.timedelta(microseconds=width),
            devices=tuple(_device(row) for row in listed),
            outliers=tuple(_judged(row) for row in _shown(worst, columns).collect()),
            series=_series(points, columns, drawn),
            time_bins=_over_time(windows, too_late, columns, first, width),
            **{name: whole[name] for name in ("device_count", "windows", "records", "late", "too_late")},
            outlier_count=whole["outlier_count"],
        )
    finally:
        points.unpersist()
        devices.unpersist()


def _windows(spark: SparkSession, url: str, question: Question, columns: Columns) -> DataFrame:
    given, plain = _named(columns), _named(_plain(columns))
    wanted = [*given, "window_start", "window_end", "late_count"]
    found = read_table(
        spark, question.table, columns=wanted, start=question.start, end=question.end, database_url=url
    )  # fmt: skip
    renamed = found.toDF(*plain, "window_start", "window_end", "late_count")
    return renamed.withColumn("value", fn.col("value").cast("double"))


def _plain(columns: Columns) -> Columns:
    """Return columns under fixed names: a table's own names may clash with those of the figures."""
    count = columns.count if columns.count is None else "value" if columns.count == columns.value else "count"
    return Columns(tuple(f"key_{place}" for place, _ in enumerate(columns.keys)), "value", count)


def _named(columns: Columns) -> list[str]:
    """Return every column once."""
    counts = [] if columns.count in (None, columns.value) else [str(columns.count)]
    return [*columns.keys, columns.value, *counts]


def _too_late(
    spark: SparkSession, url: str, question: Question, computation: str, columns: Columns, windows: DataFrame
) -> DataFrame:
    """Read the records that are in no window: the key's columns, and window_start. Replayed ones are in a window."""
    found = read_table(
        spark,
        "millpy.late_records",
        columns=["key", "window_start"],
        key=["late_record_id"],
        keys={
            "graph": [question.table.partition(".")[0]],
            "computation": [computation],
            "state": ["open", "requested", "discarded"],
        },
        start=question.start,
        end=question.end,
        database_url=url,
    )
    text = fn.concat(fn.lit("["), "key", fn.lit("]")) if len(columns.keys) == 1 else fn.col("key")
    members = fn.from_json(text, "array<string>")
    return found.select(
        *(_member(members[place], windows, name).alias(name) for place, name in enumerate(columns.keys)),
        "window_start",
    ).persist()


def _member(text: Column, windows: DataFrame, name: str) -> Column:
    """Convert a key, as millpy writes it in JSON, to the type of the table's column."""
    kind = windows.schema[name].dataType.simpleString()
    return fn.unbase64(text) if kind == "binary" else text.cast(kind)


def _devices(windows: DataFrame, too_late: DataFrame, points: DataFrame, columns: Columns) -> DataFrame:
    keys = [*columns.keys]
    unlike = points.where("outlier").groupBy(*keys).agg(fn.count("*").alias("outliers"))
    own = profile(windows, columns).drop("records", "late")
    return (
        lateness(windows, too_late, columns)
        .join(own, keys, "left")
        .join(unlike, keys, "left")
        .fillna(0, ["windows", "outliers"])
        .withColumn("name", _name(columns))
    )


def _noteworthy() -> list[Column]:
    return [fn.desc("outliers"), fn.desc(fn.coalesce(fn.col("late_share") + fn.col("too_late_share"), fn.lit(0.0)))]


def _series(points: DataFrame, columns: Columns, names: Sequence[str]) -> dict[str, tuple[JudgedWindow, ...]]:
    """Return the newest windows of the devices in `names`, by device, in order of time."""
    newest = Window.partitionBy(*columns.keys).orderBy(fn.desc("window_start"), fn.desc("window_end"))
    found = (
        _shown(points.where(_name(columns).isin([*names])), columns, fn.row_number().over(newest).alias("age"))
        .where(fn.col("age") <= POINTS_MAX)
        .orderBy("name", "start")
        .collect()
    )  # fmt: skip
    series: dict[str, list[JudgedWindow]] = {name: [] for name in names}
    for row in found:
        series[row["name"]].append(_judged(row))
    return {name: tuple(points) for name, points in series.items()}


def _shown(points: DataFrame, columns: Columns, *more: Column) -> DataFrame:
    return points.select(
        _name(columns).alias("name"),
        fn.unix_micros("window_start").alias("start"),
        (fn.lit(None) if columns.count is None else fn.col(columns.count)).cast("bigint").alias("records"),
        fn.col(columns.value).alias("value"),
        "baseline", "expected", "scale", "score", "outlier", *more,
    )  # fmt: skip


def _over_time(
    windows: DataFrame, too_late: DataFrame, columns: Columns, first: int, width: int
) -> tuple[TimeBin, ...]:
    place = fn.floor((fn.unix_micros("window_start") - fn.lit(first)) / fn.lit(width))
    lost = too_late.groupBy(place.alias("place")).agg(fn.count("*").alias("too_late"))
    found = (
        over_time(windows, columns, first_us=first, width_us=width)
        .join(lost, "place", "left")
        .fillna(0, ["too_late"])
        .orderBy("place")
        .collect()
    )
    return tuple(
        TimeBin(
            start=_instant_of(first + row["place"] * width),
            **{name: row[name] for name in ("windows", "records", "late", "too_late")},
        )
        for row in found
    )


def _name(columns: Columns) -> Column:
    return fn.concat_ws(" / ", *(fn.col(name).cast("string") for name in columns.keys))


def _device(row: Row) -> Device:
    return Device(**{name: row[name] for name in Device.__dataclass_fields__})


def _judged(row: Row) -> JudgedWindow:
    return JudgedWindow(
        **{name: row[name] for name in JudgedWindow.__dataclass_fields__ if name != "start"},
        start=_instant_of(row["start"]),
    )


def _instant_of(us: int) -> dt.datetime:
    return dt.datetime(1970, 1, 1, tzinfo=dt.UTC) + dt.timedelta(microseconds=us)


def _moment(us: int | None) -> dt.datetime | None:
    return None if us is None else _instant_of(us)


def _shortest_us(windows: DataFrame) -> int:
    length = fn.unix_micros("window_end") - fn.unix_micros("window_start")
    (found,) = windows.agg(fn.coalesce(fn.min(length), fn.lit(0))).collect()
    return int(found[0])


def _time_bins(first: int | None, last: int | None, shortest: int) -> tuple[int, int]:
    """Return the start of the first time bin and the width of all, in µs: round seconds, at least those of a window."""
    if first is None or last is None:
        return 0, 1_000_000
    wanted = max(1, (last - first) // 1_000_000 // STRETCHES, shortest // 1_000_000)
    steps = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 21600, 43200]
    width = next((step for step in steps if step >= wanted), -(-wanted // 86400) * 86400) * 1_000_000
    return first // width * width, width


def _value_column(table: SparkTable, keys: Sequence[str], named: str | None) -> str:
    numbers = [name for name, kind in table.types.items() if kind in NUMBERS and name not in (*keys, *NOT_VALUES)]
    if named is not None:
        table.select([named])
        if named not in numbers:
            raise ConfigError(
                f"column {named!r} is not numeric", hint=f"numeric columns: {', '.join(numbers) or 'none'}"
            )
        return named
    found = next((name for name in numbers if table.types[name] in ("double precision", "real", "numeric")), None)
    if found is None:
        raise ConfigError(
            "the table has no column with decimals", hint=f"name one with --value: {', '.join(numbers) or 'none'}"
        )
    return found


def _count_column(table: SparkTable, named: str | None) -> str | None:
    if named is not None:
        table.select([named])
        if table.types[named] not in ("bigint", "integer", "smallint"):
            raise ConfigError(
                f"column {named!r} is of type {table.types[named]}, so it is not a count",
                hint="name the column of Count()",
            )
        return named
    return "n" if table.types.get("n") == "bigint" else None
