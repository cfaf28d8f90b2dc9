"""The tree of errors in the docstring, which the reference shows, is that of the classes."""

from __future__ import annotations

import inspect
import re

from millpy import errors

BRANCH = re.compile(r"^(?P<before>[│ ]*)[├└]── (?P<name>\w+)")


def described() -> dict[str, str]:
    """Class -> the class that the docstring puts it under."""
    parents, above = {}, {0: "MillError"}
    current = "MillError"
    for line in inspect.getdoc(errors).splitlines():  # type: ignore[union-attr]
        if branch := BRANCH.match(line.strip("\n").removeprefix("    ")):
            depth = len(branch["before"]) // 4
            current = branch["name"]
            parents[current] = above[depth]
            above[depth + 1] = current
        if "──" in line or "·" in line:
            parents |= {name: current for name in re.findall(r"\w+Error\b", line) if name not in parents}
    return parents


def test_tree_of_the_docstring_is_that_of_the_classes() -> None:
    classes = [one for _, one in inspect.getmembers(errors, inspect.isclass) if one.__module__ == errors.__name__]

    assert described() == {one.__name__: one.__base__.__name__ for one in classes if one is not errors.MillError}
