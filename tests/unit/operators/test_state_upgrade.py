"""An upgrade function that fails, in whatever way, is an error of the deployment, which changes nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from millpy.computation import Value
from millpy.errors import GraphError
from millpy.operators.state_migration import StateUpgrade


def test_the_function_gets_plain_data_and_gives_the_new_cells() -> None:
    upgrade = StateUpgrade("totals", {"total": Value(float)}, lambda old: {"total": old["count"] / 2})

    assert upgrade(b'"a"', [("count", "", b"3")]) == [("total", "", b"1.5")]


@pytest.mark.parametrize("error", [ValueError("bad"), SystemExit(0), KeyError("count")], ids=repr)
def test_what_the_function_raises_names_the_key(error: BaseException) -> None:
    def fails(_old: dict[str, Any]) -> Mapping[str, Any]:
        raise error

    with pytest.raises(GraphError, match="the upgrade of 'totals' fails for key \"a\"") as raised:
        StateUpgrade("totals", {"total": Value(float)}, fails)(b'"a"', [])
    assert type(error).__name__ in raised.value.message
