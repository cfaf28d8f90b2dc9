"""JSON columns of an audit: equal documents become equal text, and floats in them may differ by a tolerance.

jsonb stores numbers as decimals and prints them without an exponent; millpy writes floats as Python does. Spark parses
both forms, but keeps their difference.
"""

from __future__ import annotations

import json
import re
from decimal import Decimal
from math import isclose, isfinite
from typing import Any

from pyspark.sql import Column
from pyspark.sql import functions as F  # noqa: N812 - Spark's own convention
from pyspark.sql.types import BooleanType, StringType

_TEXT_OR_EXPONENT = re.compile(r'"(?:[^"\\]|\\.)*"|-?\d+(?:\.\d+)?[eE][+-]?\d{1,4}(?!\d)')


def in_one_form(document: Column) -> Column:
    """Return JSON text without spaces, with keys in order and numbers without exponents.

    A document that Spark cannot parse (a number of a thousand digits) stays as it is.
    """
    has_exponent = document.rlike(r"\d[eE][+-]?\d")
    # The function gets null for all other rows: Spark calls it for every row, whatever surrounds it.
    spelled_out = F.udf(without_exponents, StringType(), useArrow=True)(F.when(has_exponent, document))
    text = F.coalesce(spelled_out, document)
    return F.coalesce(F.to_json(F.try_parse_json(text)), text)


def near(one: Column, other: Column, tolerance: float) -> Column:
    """Return whether JSON texts in one form are equal, but for floats that differ by a tolerance; null with a null."""

    def close(first: str | None, second: str | None) -> bool | None:
        return None if first is None or second is None else is_near(first, second, tolerance)

    differ = one != other
    return F.udf(close, BooleanType(), useArrow=True)(F.when(differ, one), F.when(differ, other))


def without_exponents(document: str | None) -> str | None:
    """Write numbers as jsonb prints them: 1.5e-7 as 0.00000015."""
    if document is None:
        return None
    return _TEXT_OR_EXPONENT.sub(
        lambda found: found[0] if found[0].startswith('"') else format(Decimal(found[0]), "f"), document
    )


def is_near(one: str, other: str, tolerance: float) -> bool:
    """Compare two JSON texts; floats may differ by a relative or absolute tolerance."""
    return _is_near(json.loads(one, parse_float=_number), json.loads(other, parse_float=_number), tolerance)


def _number(text: str) -> float | Decimal:
    value = float(text)
    return value if isfinite(value) else Decimal(text)  # two numbers above 1.8e308 are not equal as infinities


def _is_near(one: Any, other: Any, tolerance: float) -> bool:
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(_is_near(*pair, tolerance) for pair in zip(one, other, strict=True))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_is_near(one[name], other[name], tolerance) for name in one)
    if isinstance(one, bool) or isinstance(other, bool):
        return one is other
    if isinstance(one, float) or isinstance(other, float):
        try:
            return isclose(one, other, rel_tol=tolerance, abs_tol=tolerance)
        except (OverflowError, TypeError):  # a whole number of more than 308 digits, or no number
            return False
    return bool(one == other)
