"""Windows that are refused when they are made, with a hint that says what to do."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

import pytest

from millpy import FixedWindows, SlidingWindows, hours, minutes, seconds
from millpy.errors import GraphError

REFUSED: dict[str, tuple[Callable[[], object], str]] = {
    "a negative offset": (lambda: FixedWindows(hours(1), offset=minutes(-15)), "offset=minutes(45)"),
    "an offset of the size": (lambda: FixedWindows(hours(1), offset=hours(1)), "offset=seconds(0)"),
    "an offset that is a number": (
        lambda: FixedWindows(hours(1), offset=900),  # type: ignore[arg-type]
        "offset=minutes(15)",
    ),
    "an offset of the period": (
        lambda: SlidingWindows(hours(1), every=minutes(10), offset=minutes(15)),
        "offset=minutes(5)",
    ),
    "a negative offset of sliding windows": (
        lambda: SlidingWindows(hours(1), every=minutes(10), offset=seconds(-1)),
        "offset=seconds(599)",
    ),
}


@pytest.mark.parametrize(("make", "hint"), REFUSED.values(), ids=REFUSED)
def test_windows_are_refused_with_a_hint(make: Callable[[], object], hint: str) -> None:
    with pytest.raises(GraphError) as refused:
        make()

    assert hint in refused.value.hint


def test_windows_with_an_offset_of_zero_are_those_without() -> None:
    assert FixedWindows(hours(1), offset=timedelta(0)).identity() == FixedWindows(hours(1)).identity()
    assert repr(FixedWindows(hours(1), offset=minutes(5))) == "FixedWindows(hours(1), offset=minutes(5))"
