"""Rows that Spark's tasks commit have the values that the database would show."""

from __future__ import annotations

from decimal import Decimal

import pytest

from millpy.model.deployment import ColumnSpec, TableSpec
from millpy.spark.hosted_rows import result_batches


@pytest.mark.parametrize(
    ("value", "text"),
    [("1E-7", "0.0000001"), ("0E-10", "0.0000000000"), ("1E+3", "1000"), ("-2.50", "-2.50"), (None, None)],
)
def test_a_decimal_has_no_exponent(value: str | None, text: str | None) -> None:
    spec = TableSpec("prices", "records", "prices", "prices", (), (ColumnSpec("price", "decimal", True),))
    (batch,) = result_batches(spec, [[None if value is None else Decimal(value)]], 1)
    assert batch["price"].to_pylist() == [text]
