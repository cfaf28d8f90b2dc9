"""The native engine of an audit: windows in plain DataFrame operations over an archive.

It shares no line with `millpy.windowing`: what a graph means is read from its description, windows are arithmetic on
the event time, lateness is the archived watermark of the row, and the aggregates are Spark's own. So where it agrees
with what workers wrote, two programs have found the same. What it cannot compute it names, with the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - Spark's own convention

from millpy.model.deployment import GraphSpec, TableSpec
from millpy.spark.contributing import archived_records
from millpy.store.archive.input import ArchivedInput, archived_input
from millpy.store.archive.parquet import EVENT_TIME, WATERMARK

START, END = "_start_us", "_end_us"
WHOLE = "decimal(38,0)"


@dataclass(frozen=True, slots=True)
class NativePlan:
    """A result table that Spark can compute by itself.

    Attributes:
        table: the table, with the value columns that are computed.
        input: the archive with the records of its windows.
        window: the description of the windows: size, period and offset in µs.
        aggregates: value column -> description of its aggregate.
        left_out: value columns that are not computed.
    """

    table: TableSpec
    input: ArchivedInput
    window: Mapping[str, Any]
    aggregates: Mapping[str, Mapping[str, Any]]
    left_out: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class NativeTable:
    """A computed table.

    Attributes:
        frame: its rows: key, `window_start`, `window_end`, values.
        records: the archived records, late ones too.
        uncertain: windows that the archive cannot decide, because a record may have missed them; None for none.
    """

    frame: DataFrame
    records: DataFrame
    uncertain: DataFrame | None = field(default=None)


def native_plans(spec: GraphSpec) -> tuple[list[NativePlan], dict[str, str]]:
    """Return the tables of a graph that Spark can compute, and why it cannot compute each of the others."""
    plans, refused = [], {}
    for table in spec.tables:
        found = _planned(spec, table)
        if isinstance(found, str):
            refused[table.name] = found
        else:
            plans.append(found)
    return plans, refused


def _planned(spec: GraphSpec, table: TableSpec) -> NativePlan | str:
    computations = {computation.name: computation for computation in spec.computations}
    identity = computations[table.computation].identity
    if table.kind != "windowed" or table.stream != table.computation or "window" not in identity:
        return "it is no table of windows"
    if identity["window"]["kind"] == "calendar":
        return "Spark has no windows of a calendar, and its `date_trunc` begins a day that the clock repeats elsewhere"
    if identity["window"]["kind"] == "global":
        return "an audit goes by the hours in which windows end, and a global window ends in the year 9999"
    if identity["window"]["kind"] == "window_function":
        return "its windows are a function of yours, which Spark's own windows cannot call"
    if identity["window"]["kind"] not in _EVERY:
        return f"Spark has no {identity['window']['kind']} windows of the same meaning"
    if _closes(identity["trigger"]):
        return "its trigger closes windows, and which records came too late for that depends on their bundles"
    taken = archived_input(spec, table)
    if isinstance(taken, str):
        return taken
    aggregates = {name: dict(aggregate) for name, aggregate in identity["aggregates"]}
    known = tuple(
        value
        for value in table.values
        if aggregates.get(value.name, {}).get("kind") in _AGGREGATES and value.sql_type != "decimal"  # text in Parquet
    )
    if not known:
        return "Spark has none of its aggregates"
    return NativePlan(
        table=replace(table, values=known),
        input=taken,
        window=identity["window"],
        aggregates=aggregates,
        left_out=tuple(value.name for value in table.values if value not in known),
    )


def _closes(trigger: Mapping[str, Any]) -> bool:
    """Tell whether a trigger may be finished, and then close its window."""
    kind = trigger["kind"]
    if kind == "after_watermark":
        return bool(trigger.get("late", {}).get("kind") == "nothing")
    if kind == "after_each":
        return all(map(_closes, trigger["triggers"]))
    return kind not in ("every", "never", "repeatedly")


def native_table(spark: SparkSession, plan: NativePlan, files: Sequence[str], *, partitions: int) -> NativeTable:
    """Compute a table from an archive.

    Args:
        spark: any session.
        plan: the table.
        files: the archived files, as the manifest lists them.
        partitions: the number of partitions of the source. With several, a record is judged by the watermark of all of
            them, which its row does not have; a window that it may have missed is uncertain.
    """
    records = archived_records(spark, plan.input, files)
    size, every = plan.window["size_us"], plan.window[_EVERY[plan.window["kind"]]]
    at = F.col(EVENT_TIME)
    last = at - F.pmod(at - F.lit(plan.window.get("offset_us", 0)), F.lit(every))
    starts = F.array(*(last - F.lit(back * every) for back in range(-(-size // every)))) if size > every else None
    entries = records.withColumn(START, last if starts is None else F.explode(starts))
    entries = entries.withColumn(END, F.col(START) + F.lit(size)).where(at < F.col(END))
    # A null in the key has made the record a dead letter.
    entries = entries.dropna(subset=list(plan.input.key_fields))
    is_late = F.col(WATERMARK) >= F.col(END) + F.lit(plan.table.allowed_lateness_us)
    key = [F.col(name).alias(key.name) for name, key in zip(plan.input.key_fields, plan.table.keys, strict=True)]
    bounds = [
        F.timestamp_micros(START).alias("window_start"),
        F.timestamp_micros(F.col(START) + F.lit(size)).alias("window_end"),
    ]
    values = [
        _AGGREGATES[plan.aggregates[value.name]["kind"]](records, plan.aggregates[value.name]).alias(value.name)
        for value in plan.table.values
    ]
    uncertain = entries.where(is_late).select(*key, *bounds).distinct() if partitions > 1 else None
    # The start stands for the window until there is one row of it.
    windows = entries.where(~is_late).groupBy(*key, START).agg(*values)
    names = [each.name for each in plan.table.keys], [each.name for each in plan.table.values]
    return NativeTable(windows.select(*names[0], *bounds, *names[1]), records, uncertain)


def _count(records: DataFrame, aggregate: Mapping[str, Any]) -> Column:
    return F.count(F.lit(1) if aggregate["field"] is None else F.col(aggregate["field"]))


def _sum(records: DataFrame, aggregate: Mapping[str, Any]) -> Column:
    value = F.col(aggregate["field"])
    return F.sum(value) if _is_float(records, aggregate) else F.try_sum(value.cast(WHOLE))


def _mean(records: DataFrame, aggregate: Mapping[str, Any]) -> Column:
    values = F.count(F.col(aggregate["field"]))
    return F.when(values > 0, _sum(records, aggregate).cast("double") / values)


def _min(records: DataFrame, aggregate: Mapping[str, Any]) -> Column:
    value = F.col(aggregate["field"])
    if not _is_float(records, aggregate):
        return F.min(value)
    return F.when(F.isnan(F.max(value)), F.lit(float("nan"))).otherwise(F.min(value))  # NaN is Spark's largest


def _max(records: DataFrame, aggregate: Mapping[str, Any]) -> Column:
    return F.max(F.col(aggregate["field"]))


def _variance(records: DataFrame, aggregate: Mapping[str, Any]) -> Column:
    return (F.var_pop if aggregate["population"] else F.var_samp)(F.col(aggregate["field"]))


def _standard_deviation(records: DataFrame, aggregate: Mapping[str, Any]) -> Column:
    return (F.stddev_pop if aggregate["population"] else F.stddev_samp)(F.col(aggregate["field"]))


def _is_float(records: DataFrame, aggregate: Mapping[str, Any]) -> bool:
    return bool(records.select(aggregate["field"]).dtypes[0][1] == "double")


_EVERY = {"fixed": "size_us", "sliding": "every_us"}
"""Kind of window -> the part of its description that is the time from one start to the next."""
_AGGREGATES: Mapping[str, Callable[[DataFrame, Mapping[str, Any]], Column]] = {
    "count": _count,
    "sum": _sum,
    "mean": _mean,
    "min": _min,
    "max": _max,
    "variance": _variance,
    "standard_deviation": _standard_deviation,
}
