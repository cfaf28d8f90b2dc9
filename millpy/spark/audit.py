"""Audit: what a history gives, against what is committed.

A batch, or Spark by itself (`native`), recomputes the result tables; Spark joins them with the stored tables. Only what
is final is compared: windows that can have no later pane, and records before the low watermark; and only what the
retention of the table has not dropped. A row that differs because an operator corrected it is counted apart.
`pane_index`, `pane_timing`, `late_count` and the columns of `pane_info` depend on how records were bundled when they
arrived, and are not compared.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from math import isclose, isnan
from operator import or_
from typing import Any

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - Spark's own convention

from millpy.errors import UsageError
from millpy.model.deployment import PANE_INFO, ColumnSpec, TableSpec
from millpy.model.time import INSTANT_MAX, INSTANT_MIN, instant, nearest_datetime
from millpy.spark import json_columns
from millpy.spark.contributing import with_records
from millpy.spark.hosted_rows import TYPES
from millpy.spark.native import NativePlan, NativeTable
from millpy.spark.session import read_table

TOLERANCE = 1e-9
"""Relative and absolute: sums of floats depend on the order in which records were bundled."""
SHOWN_MAX = 100
HOUR_US = 3_600_000_000
HOURS_MAX = 10_000
"""How many hours of a table an audit tells apart, the newest."""
CORRECTED = "corrected"
"""The kind of a row that differs because an operator corrected it."""
KIND, HOUR, ROWS, EXPECTED, STORED = "kind of row", "hour of row", "number of rows", "expected row", "stored row"
"""Columns of a comparison. No field has such a name."""


@dataclass(frozen=True, slots=True)
class AuditDifference:
    """One row that differs.

    Attributes:
        kind: "missing" if only the history gives the row, "added" if only the database has it, else "changed".
        row: what identifies it: key and window, or all columns of a record.
        expected, stored: the columns that differ; for records, how often the row occurs.
        records: archived records of the window, as JSON, in the order of event time: at most 20, of 1,000 characters.
            Empty if the history was not an archive, or no archive has just the records of these windows.
    """

    kind: str
    row: dict[str, Any]
    expected: dict[str, Any]
    stored: dict[str, Any]
    records: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class AuditedHour:
    """What an audit has found in one hour: among windows that end in it, its end included, or records of it.

    Attributes:
        start_us: its beginning, in µs.
        rows, differences, uncertain, corrected: as in `TableAudit`.
    """

    start_us: int
    rows: int = 0
    differences: int = 0
    uncertain: int = 0
    corrected: int = 0


@dataclass(frozen=True, slots=True)
class TableAudit:
    """The audit of one result table.

    Attributes:
        rows: number of rows compared.
        differences: number of rows that differ.
        examples: the first of them, at most `SHOWN_MAX`.
        uncertain: number of windows that were not compared, because the archive cannot tell which of their records
            were late.
        left_out: value columns that were not compared, because Spark does not have their aggregates.
        hours: the hours that were compared whole, oldest first: the newest `HOURS_MAX`. Those without rows are among
            them if the scope has a start and an end.
        corrected: number of rows that differ because operators have corrected them; not among the differences.
    """

    table: str
    rows: int
    differences: int
    examples: list[AuditDifference] = field(default_factory=list)
    uncertain: int = 0
    left_out: tuple[str, ...] = ()
    hours: list[AuditedHour] = field(default_factory=list)
    corrected: int = 0


@dataclass(frozen=True, slots=True)
class AuditScope:
    """What to compare.

    Attributes:
        schema: the schema of the stored tables.
        final_us: computation -> its low watermark in the database, in µs.
        start_us, end_us: only windows that end after the start and at the end or before, and records that happened from
            the start to before the end. So scopes that follow each other leave no row out, and have none in common.
        database_url: the database; default: the session's.
        dropped_us: table -> the time before which its retention has dropped rows, in µs; they are not compared.
        corrected: table -> windows whose rows operators have corrected: the keys as text, then start and end in µs.
    """

    schema: str
    final_us: Mapping[str, int]
    start_us: int = INSTANT_MIN
    end_us: int = INSTANT_MAX
    database_url: str | None = None
    dropped_us: Mapping[str, int] = field(default_factory=dict)
    corrected: Mapping[str, Collection[tuple[str, ...]]] = field(default_factory=dict)


def audit(
    spark: SparkSession, tables: Mapping[str, DataFrame], specs: Sequence[TableSpec], scope: AuditScope
) -> list[TableAudit]:
    """Compare recomputed tables with the stored ones.

    Args:
        spark: a session with the format registered.
        tables: table -> its recomputed rows, from `BatchResult.tables`.
        specs: the tables of the graph.
        scope: what to compare.

    Raises:
        UsageError: the database has no such table.
    """
    return [_audited(spark, tables[spec.name], spec, scope) for spec in specs if spec.name in tables]


def audit_natively(spark: SparkSession, table: NativeTable, plan: NativePlan, scope: AuditScope) -> TableAudit:
    """Compare a table that Spark has computed by itself with the stored one; the differences have their records.

    Args:
        spark: a session with the format registered.
        table: the computed table.
        plan: what it is.
        scope: what to compare. Windows must be final for the archive, too.
    """
    found = _audited(spark, table.frame, plan.table, scope, table.uncertain)
    missed: dict[int, int] = {}
    if table.uncertain is not None:
        windows = _final(_normal(table.uncertain, _key(plan.table)), plan.table, scope)
        counts = windows.groupBy(_hour(plan.table)).count().orderBy(F.desc(f"`{HOUR}`")).limit(HOURS_MAX).collect()
        missed = {row[HOUR]: row["count"] for row in counts}
    examples = with_records(found.examples, table.records, plan.input, plan.table)
    of = {hour.start_us: hour for hour in found.hours}
    for start in _whole(missed, plan.table, scope):
        of[start] = replace(of.get(start, AuditedHour(start)), uncertain=missed.get(start, 0))
    hours = [of[start] for start in sorted(of)]
    return replace(found, examples=examples, uncertain=sum(missed.values()), left_out=plan.left_out, hours=hours)


def _audited(
    spark: SparkSession, expected: DataFrame, spec: TableSpec, scope: AuditScope, without: DataFrame | None = None
) -> TableAudit:
    compared = _without_corrections(compare(spark, expected, spec, scope, without), spec, scope).persist()
    try:
        kind, each = F.col(f"`{KIND}`"), F.col(f"`{ROWS}`")
        is_wrong = ~kind.isin("same", CORRECTED)
        sums = compared.rollup(_hour(spec)).agg(
            F.sum(each).alias("n"),
            F.sum(F.when(is_wrong, each).otherwise(0)).alias("wrong"),
            F.sum(F.when(kind == CORRECTED, each).otherwise(0)).alias("right"),
        )
        counts = sums.orderBy(F.desc_nulls_first(f"`{HOUR}`")).limit(HOURS_MAX + 1).collect()
        wrong = compared.where(is_wrong).orderBy(*_order(spec)).limit(SHOWN_MAX).collect()
    finally:
        compared.unpersist()
    found = list(_differences([row.asDict(recursive=True) for row in wrong], spec))
    of = {row[HOUR]: _counted(row) for row in counts if row[HOUR] is not None}
    hours = [of.get(start, AuditedHour(start)) for start in _whole(of, spec, scope)]
    total = replace(_counted(counts[0]), start_us=0) if counts else AuditedHour(0)  # the first sums them all up
    return TableAudit(spec.name, total.rows, total.differences, found, hours=hours, corrected=total.corrected)


def _counted(row: Any) -> AuditedHour:
    return AuditedHour(row[HOUR], row["n"], row["wrong"], corrected=row["right"])


def _without_corrections(compared: DataFrame, spec: TableSpec, scope: AuditScope) -> DataFrame:
    """Mark the rows that differ in windows that operators have corrected."""
    windows = [window for window in scope.corrected.get(spec.name, ()) if len(window) == len(spec.keys) + 2]
    if spec.kind != "windowed" or not windows:
        return compared
    names = [f"of window {place}" for place in range(len(spec.keys) + 2)]
    ddl = ", ".join(f"`{name}` string" for name in names)
    marks = compared.sparkSession.createDataFrame(sorted(windows), ddl).withColumn("is corrected", F.lit(True))
    texts = [*map(_key_text, spec.keys), *(F.col(column.name).cast("string") for column in _WINDOW)]
    same = [F.col(f"`{name}`").eqNullSafe(text) for name, text in zip(names, texts, strict=True)]
    marked = compared.join(F.broadcast(marks), same, "left")
    kind = F.when((F.col(f"`{KIND}`") != "same") & F.col("`is corrected`"), CORRECTED).otherwise(F.col(f"`{KIND}`"))
    return marked.withColumn(KIND, kind).select(*(F.col(f"`{name}`") for name in compared.columns))


def _key_text(column: ColumnSpec) -> Column:
    """Return a key in the text form that corrections have: as in JSON, text without quotes."""
    value = F.col(f"`{column.name}`")
    # Spark cuts base64 into lines of 76 characters.
    return F.regexp_replace(F.base64(value), r"\s", "") if column.sql_type == "bytea" else value.cast("string")


def compare(
    spark: SparkSession, expected: DataFrame, spec: TableSpec, scope: AuditScope, without: DataFrame | None = None
) -> DataFrame:
    """Return the final rows of a table, in the columns `KIND`, `ROWS`, what identifies a row, `EXPECTED`, `STORED`.

    Raises:
        UsageError: the database has no such table.
    """
    spark.sparkContext.setJobDescription(f"audit {spec.name}")
    if spec.computation not in scope.final_us:
        raise UsageError(
            f"{spec.computation} is not deployed in {scope.schema}", hint="audit the graph with which the workers run"
        )
    stored = read_table(spark, f"{scope.schema}.{spec.name}", database_url=scope.database_url)
    windowed = spec.kind == "windowed"
    columns = [*_key(spec), *spec.values] if windowed else [*spec.values, *_TIME]
    expected, stored = (_final(_normal(frame, columns), spec, scope) for frame in (expected, stored))
    if without is not None:
        key = _key(spec)
        uncertain = _normal(without, key)
        names = [column.name for column in key]
        expected, stored = (frame.join(uncertain, names, "left_anti") for frame in (expected, stored))
    return _windows(expected, stored, spec) if windowed else _records(expected, stored, columns)


def hour_of(spec: TableSpec, row: Mapping[str, Any]) -> int:
    """Return the hour in which a row of a difference is counted, in µs."""
    at = instant(row["window_end"]) - 1 if spec.kind == "windowed" else instant(row["event_time"])
    return at - at % HOUR_US


def final_us(spec: TableSpec, scope: AuditScope) -> int:
    """Return until when rows are final: the end of windows, or the event time of records."""
    final = scope.final_us[spec.computation]
    return max(INSTANT_MIN, final - spec.allowed_lateness_us) if spec.kind == "windowed" else final


def _hour(spec: TableSpec) -> Column:
    at = F.col("window_end") - 1 if spec.kind == "windowed" else F.col("event_time")
    return (at - F.pmod(at, F.lit(HOUR_US))).alias(HOUR)


def _dropped(spec: TableSpec, scope: AuditScope) -> int:
    """Return the time before which rows were dropped, in µs."""
    return scope.dropped_us.get(spec.name, INSTANT_MIN)


def _whole(found: Iterable[int], spec: TableSpec, scope: AuditScope) -> list[int]:
    """Return the hours that a scope holds whole, oldest first; without its start and end, only those found."""
    end, start = min(scope.end_us, final_us(spec, scope)), max(scope.start_us, _dropped(spec, scope))
    if scope.start_us > INSTANT_MIN and scope.end_us < INSTANT_MAX:
        first = max(-(-start // HOUR_US), end // HOUR_US - HOURS_MAX) * HOUR_US
        return list(range(first, end - HOUR_US + 1, HOUR_US))
    return sorted(hour for hour in found if hour >= start and hour + HOUR_US <= end)


_WINDOW = (ColumnSpec("window_start", "timestamptz", False), ColumnSpec("window_end", "timestamptz", False))
_TIME = (ColumnSpec("event_time", "timestamptz", False),)


def _key(spec: TableSpec) -> list[ColumnSpec]:
    return [*spec.keys, *_WINDOW]


def _compared(spec: TableSpec) -> list[ColumnSpec]:
    """Return the columns of values in which rows may not differ."""
    return [column for column in spec.values if spec.kind != "windowed" or column.name not in PANE_INFO]


def _order(spec: TableSpec) -> list[str]:
    """Return columns that give the rows of a table one order: an audit that is repeated shows the same examples."""
    if spec.kind == "windowed":
        return ["window_start", *(f"`{key.name}`" for key in spec.keys), "window_end"]
    return ["event_time", *(f"`{value.name}`" for value in spec.values)]


def _normal(frame: DataFrame, columns: Sequence[ColumnSpec]) -> DataFrame:
    """Select columns in one form, in which equal values are equal: times as µs, `numeric` and JSON as text."""
    chosen = []
    for column in columns:
        value = F.col(f"`{column.name}`")
        if column.sql_type == "jsonb":
            value = json_columns.in_one_form(value)
        elif column.sql_type == "numeric":
            # No cast to a number: it would round, and PostgreSQL's numbers may have any length, or be none.
            value = F.regexp_replace(value.cast("string"), r"\.0+$", "")
        elif column.sql_type == "decimal":
            value = F.regexp_replace(value.cast("string"), r"\.0*$|(\.[0-9]*[1-9])0+$", "$1")
            value = F.regexp_replace(value, "^-0$", "0")
        elif column.sql_type == "timestamptz":
            value = F.unix_micros(value)
        else:
            value = value.cast(TYPES[column.sql_type][1])
        chosen.append(value.alias(column.name))
    return frame.select(*chosen)


def _final(frame: DataFrame, spec: TableSpec, scope: AuditScope) -> DataFrame:
    final, dropped = final_us(spec, scope), _dropped(spec, scope)
    if spec.kind == "windowed":
        ends = F.col("window_end")
        return frame.where((ends <= final) & (ends > scope.start_us) & (ends <= scope.end_us) & (ends >= dropped))
    at = F.col("event_time")
    return frame.where((at < final) & (at >= max(scope.start_us, dropped)) & (at < scope.end_us))


def _windows(expected: DataFrame, stored: DataFrame, spec: TableSpec) -> DataFrame:
    """Join windows by key, start and end; both sides' values stay as structs."""
    names = [column.name for column in (*spec.keys, *_WINDOW)]
    sides = []
    for side, frame in ((EXPECTED, expected), (STORED, stored)):
        values = F.struct(*(F.col(f"`{column.name}`") for column in spec.values))
        sides.append(frame.select(*(F.col(f"`{name}`").alias(f"{side} {name}") for name in names), values.alias(side)))
    same_row = [F.col(f"`{EXPECTED} {name}`").eqNullSafe(F.col(f"`{STORED} {name}`")) for name in names]
    joined = sides[0].join(sides[1], same_row, "full_outer")
    changed = reduce(or_, (~equal(column) for column in _compared(spec)), F.lit(False))
    kind = (
        F.when(F.col(f"`{STORED}`").isNull(), "missing")
        .when(F.col(f"`{EXPECTED}`").isNull(), "added")
        .when(changed, "changed")
        .otherwise("same")
    )
    of_either = [F.coalesce(f"`{EXPECTED} {name}`", f"`{STORED} {name}`").alias(name) for name in names]
    sides_of = [F.col(f"`{side}`") for side in (EXPECTED, STORED)]
    return joined.select(kind.alias(KIND), F.lit(1).alias(ROWS), *of_either, *sides_of)


def equal(column: ColumnSpec) -> Column:
    """Return whether a column of the structs `EXPECTED` and `STORED` is equal, within `TOLERANCE` for floats."""
    one, other = (F.col(f"`{side}`.`{column.name}`") for side in (EXPECTED, STORED))
    equal = one.eqNullSafe(other)
    if column.sql_type == "jsonb":
        return equal | F.coalesce(json_columns.near(one, other, TOLERANCE), F.lit(False))
    if column.sql_type != "double precision":
        return equal
    size = F.greatest(F.abs(one), F.abs(other), F.lit(1.0))
    # A tolerance relative to infinity is infinite; NaN is greater than infinity, and equals itself, in Spark.
    near = (size < float("inf")) & (F.abs(one - other) <= size * TOLERANCE)
    return equal | F.coalesce(near, F.lit(False))


def _records(expected: DataFrame, stored: DataFrame, columns: Sequence[ColumnSpec]) -> DataFrame:
    """Compare how often each row occurs."""
    names = [f"`{column.name}`" for column in columns]
    sides = {EXPECTED: F.col(f"`{EXPECTED}`"), STORED: F.col(f"`{STORED}`")}
    counted = expected.withColumn(ROWS, F.lit(1)).unionByName(stored.withColumn(ROWS, F.lit(-1)))
    grouped = counted.groupBy(*names).agg(
        F.count_if(F.col(f"`{ROWS}`") > 0).alias(EXPECTED), F.count_if(F.col(f"`{ROWS}`") < 0).alias(STORED)
    )
    kind = (
        F.when(sides[EXPECTED] > sides[STORED], "missing")
        .when(sides[EXPECTED] < sides[STORED], "added")
        .otherwise("same")
    )
    rows = F.when(kind == "same", sides[STORED]).otherwise(F.abs(sides[EXPECTED] - sides[STORED]))
    return grouped.select(kind.alias(KIND), rows.alias(ROWS), *names, *sides.values())


def _differences(wrong: Sequence[Mapping[str, Any]], spec: TableSpec) -> Iterator[AuditDifference]:
    identity = _key(spec) if spec.kind == "windowed" else [*spec.values, *_TIME]
    for row in wrong:
        expected, stored = row[EXPECTED], row[STORED]
        if spec.kind != "windowed":
            expected, stored = {"rows": expected}, {"rows": stored}
        elif expected and stored:
            differ = [one.name for one in _compared(spec) if not same(one, expected[one.name], stored[one.name])]
            expected, stored = ({name: side[name] for name in differ} for side in (expected, stored))
        expected, stored = (_readable(side or {}, spec.values) for side in (expected, stored))
        named = _readable({column.name: row[column.name] for column in identity}, identity)
        yield AuditDifference(row[KIND], named, expected, stored)


def same(column: ColumnSpec, one: Any, other: Any) -> bool:
    """Compare as `equal` does, NaN with NaN too."""
    if isinstance(one, float) and isinstance(other, float):
        return isclose(one, other, rel_tol=TOLERANCE, abs_tol=TOLERANCE) or (isnan(one) and isnan(other))
    if column.sql_type == "jsonb" and one is not None and other is not None:
        return bool(one == other) or json_columns.is_near(one, other, TOLERANCE)
    return bool(one == other)


def _readable(values: Mapping[str, Any], columns: Sequence[ColumnSpec]) -> dict[str, Any]:
    types = {column.name: column.sql_type for column in columns}
    return {name: _value(types.get(name), value) for name, value in values.items()}


def _value(sql_type: str | None, value: Any) -> Any:
    """Return a value as people read it; a time before or after all years of Python as the first or the last one."""
    if value is None:
        return None
    if sql_type == "timestamptz":
        return nearest_datetime(value)
    if sql_type == "numeric":
        return int(value) if value.removeprefix("-").isdigit() else value
    return bytes(value) if sql_type == "bytea" else value
