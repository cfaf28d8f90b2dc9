"""The public face: one import line, nothing by accident."""

from __future__ import annotations

import types

import millpy


def test_all_is_sorted_and_without_repetition() -> None:
    assert list(millpy.__all__) == sorted(set(millpy.__all__))


def test_all_lists_exactly_the_public_names() -> None:
    public = {
        name
        for name, value in vars(millpy).items()
        if not name.startswith("_") and not isinstance(value, types.ModuleType) and name != "annotations"
    }

    assert public == {name for name in millpy.__all__ if not name.startswith("_")}


def test_names_in_the_readme_exist() -> None:
    from millpy import (  # noqa: F401
        AdvanceWithClock,
        Computation,
        Context,
        Count,
        Dedupe,
        EventTime,
        FixedWindows,
        Graph,
        Max,
        Mean,
        Mqtt,
        hours,
        minutes,
        seconds,
    )
