"""Entries of a MapCell are found by keys that are equal, as in a dict."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta, timezone
from decimal import Decimal
from typing import Any

import pytest

from millpy.computation import MapCell
from millpy.errors import RefusedValueError
from millpy.operators.state import MapStore

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        (float, [1, 1.0]),
        (float, [0.0, -0.0, 0]),
        (datetime, [NOON, NOON.astimezone(timezone(timedelta(hours=2)))]),
        (Decimal, [Decimal("1.5"), Decimal("1.50"), Decimal("15E-1")]),
        (Decimal, [Decimal(100), Decimal("1E+2")]),
        (Decimal, [Decimal("0.0"), Decimal("-0"), 0]),
        (tuple[float, datetime], [(1, NOON), (1.0, NOON.astimezone(timezone(timedelta(hours=2))))]),
        (tuple[str, Decimal], [("a", Decimal("1.5")), ("a", Decimal("1.50"))]),
        (str, ["a", "a"]),
        (int, [1, 1]),
        (bool, [True, True]),
    ],
)
def test_equal_keys_are_one_entry(kind: Any, names: list[Any]) -> None:
    store = MapStore("cell", MapCell(kind, int))
    view = store.load("key")
    for place, name in enumerate(names):
        view[name] = place
    store.take("key", 0, view)

    again = store.load("key")
    assert len(again) == 1
    assert [again[name] for name in names] == [len(names) - 1] * len(names)


@pytest.mark.parametrize(
    ("kind", "name"),
    [(int, True), (int, 1.5), (bool, 1), (str, 1), (float, "1"), (float, True), (Decimal, Decimal("1E+39"))],
)
def test_key_of_another_type_is_refused(kind: Any, name: Any) -> None:
    with pytest.raises(RefusedValueError):
        MapStore("cell", MapCell(kind, int)).load("key")[name] = 1
