"""Rows of result tables are chosen by values of every type that a column has."""

from __future__ import annotations

from typing import Any

import pytest

from millpy.admin.results import DeployedTable, RowFilter, newest
from millpy.graph.sql_types import SQL_TYPES
from millpy.ui.tables import numbers_of

TYPES = sorted({*SQL_TYPES.values(), "numeric", "jsonb"})


class OneStatement:
    """Stands for the database: keeps the statement that would be run."""

    statement: Any = None

    def ask(self, *_: object, **__: object) -> list[dict[str, object]]:
        return []

    def select(self, statement: Any) -> list[dict[str, object]]:
        self.statement = statement
        return []


def a_table(sql_type: str) -> DeployedTable:
    return DeployedTable("plant", "sums", "windowed", "sums", {"device": "text"}, {"value": sql_type})


@pytest.mark.parametrize("sql_type", TYPES)
def test_rows_are_chosen_by_a_value_of_each_type(sql_type: str) -> None:
    database: Any = OneStatement()

    newest(database, a_table(sql_type), RowFilter(values={"value": "1"}, limit=1))

    assert "value = CAST(" in str(database.statement)


def test_a_chart_can_show_each_type_of_number() -> None:
    shown = {sql_type for sql_type in TYPES if numbers_of(a_table(sql_type))}

    assert shown == {"bigint", "double precision", "numeric", "decimal"}
