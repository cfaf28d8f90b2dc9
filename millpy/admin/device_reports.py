"""When devices reported, and what: the rows of a windowed result table in equal spans of time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import ARRAY, Double, Integer, Text, cast, column, desc, func, literal, select, table, true
from sqlalchemy.dialects.postgresql import TIMESTAMP
from sqlalchemy.sql.elements import ColumnElement

from millpy.admin.queries import Admin, Row
from millpy.admin.results import DeployedTable

ROWS_MAX = 1_000
"""Of each device, the newest windows that count."""


def reports(
    admin: Admin, result_table: DeployedTable, devices: Sequence[Sequence[str]], value: str, start: str, span_s: float
) -> list[Row]:
    """Return for each device and span with rows: `place`, `span`, `windows`, and the mean of a value as `mean`.

    Args:
        admin: the database.
        result_table: a windowed table whose keys are the devices.
        devices: the key of each device, as texts; `place` counts them from 1.
        value: a column of numbers.
        start: where span 0 begins, as text that PostgreSQL reads.
        span_s: the length of a span.

    Raises:
        UsageError: a key does not fit its column.
    """
    names = list(result_table.keys)
    lists = [
        cast(literal([device[place] for device in devices], ARRAY(Text())), ARRAY(Text()))
        for place in range(len(names))
    ]
    wanted = func.unnest(*lists).table_valued(
        *(f"key {place}" for place in range(len(names))), with_ordinality="place"
    ).render_derived(name="devices")  # fmt: skip
    rows = table(result_table.name, *map(column, {*names, result_table.time, value}), schema=result_table.graph)
    begin = cast(literal(start, Text), TIMESTAMP(timezone=True))
    own: list[ColumnElement[bool]] = [
        rows.c[name] == cast(wanted.c[f"key {place}"], result_table.type_in_order(name))
        for place, name in enumerate(names)
    ]
    newest = (
        select(rows.c[result_table.time].label("at"), cast(rows.c[value], Double()).label("value"))
        .where(*own, rows.c[result_table.time] >= begin)
        .order_by(desc(rows.c[result_table.time]))
        .limit(ROWS_MAX)
        .lateral("newest")
    )
    span: Any = cast(func.floor(func.extract("epoch", newest.c.at - begin) / span_s), Integer)
    return admin.select(
        select(
            wanted.c.place, span.label("span"), func.count().label("windows"), func.avg(newest.c.value).label("mean")
        )
        .select_from(wanted.join(newest, true()))
        .group_by(wanted.c.place, span)
        .order_by(wanted.c.place, span)
    )
