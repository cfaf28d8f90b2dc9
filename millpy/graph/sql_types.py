"""The SQL types of record fields, in result tables and as parameters of statements."""

from __future__ import annotations

from datetime import date, datetime
from decimal import Decimal
from typing import Any
from uuid import UUID

from millpy.model.field_types import enum_type, is_enum, is_json
from millpy.model.record import is_wide, without_none

SQL_TYPES: dict[Any, str] = {
    str: "text",
    int: "bigint",
    float: "double precision",
    bool: "boolean",
    bytes: "bytea",
    datetime: "timestamptz",
    UUID: "uuid",
    Decimal: "decimal",
    date: "date",
}


def sql_type(annotation: Any) -> str:
    """Return the SQL type of a field in a result table; a nested field becomes jsonb.

    A Decimal is a `decimal`, another name for `numeric`, which columns of whole numbers have.
    """
    if is_wide(annotation):
        return "numeric"
    if is_json(annotation):
        return "jsonb"
    plain = without_none(annotation)[0]
    return SQL_TYPES.get(enum_type(plain) if is_enum(plain) else plain, "jsonb")
