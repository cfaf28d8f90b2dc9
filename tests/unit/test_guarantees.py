"""docs/guarantees.md promises nothing without a test: every line names some, and they exist."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TESTS = ROOT / "tests"
DOCUMENT = ROOT / "docs" / "guarantees.md"
NAMED = re.compile(r"`([\w/]+\.py)::(test_\w+)`")


def promises() -> list[str]:
    """Every bullet with its continuation lines."""
    blocks = re.split(r"^(?=\* |#)", DOCUMENT.read_text(), flags=re.MULTILINE)
    return [" ".join(block.split()) for block in blocks if block.startswith("* ")]


def names_in(file: str) -> set[str]:
    """Names of the test functions of a file under tests/."""
    tree = ast.parse((TESTS / file).read_text())
    found = (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
    return {node.name for node in found if node.name.startswith("test_")}


def test_there_are_promises() -> None:
    assert len(promises()) > 15


@pytest.mark.parametrize("promise", promises(), ids=lambda promise: promise[2:60])
def test_every_promise_names_tests_that_exist(promise: str) -> None:
    named = NAMED.findall(promise)

    assert named, "no test is named"
    missing = [f"{file}::{name}" for file, name in named if not (TESTS / file).exists() or name not in names_in(file)]
    assert missing == []
    assert promise.count("::") == len(named), "a test is not named in the form `file.py::test_name`"
