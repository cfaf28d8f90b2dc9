"""The public face: one import line, nothing by accident."""

from __future__ import annotations

import subprocess
import sys
import types

import pytest

import millpy
import millpy.public


def test_all_is_sorted_and_without_repetition() -> None:
    assert list(millpy.__all__) == sorted(set(millpy.__all__))


def test_all_lists_exactly_the_public_names() -> None:
    public = {
        name
        for name, value in vars(millpy.public).items()
        if not name.startswith("_") and not isinstance(value, types.ModuleType) and name != "annotations"
    }

    assert public == {name for name in millpy.__all__ if not name.startswith("_")}
    assert set(dir(millpy)) >= public


def test_a_name_that_does_not_exist_is_an_error() -> None:
    with pytest.raises(AttributeError, match="module 'millpy' has no attribute 'Grph'"):
        getattr(millpy, "Grph")  # noqa: B009
    with pytest.raises(ImportError, match="cannot import name 'Grph' from 'millpy'"):
        exec("from millpy import Grph")


def test_commands_that_only_ask_the_database_import_no_engine() -> None:
    code = (
        "import sys, millpy.cli.status, millpy.cli.app; print({'pyarrow', 'numpy', 'millpy.graph'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert done.stdout == "set()\n"


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
