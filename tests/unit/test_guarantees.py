"""docs/guarantees.md promises nothing without a test: every line names some, and these fail when it is broken."""

import ast
import re
from pathlib import Path

import pytest

from tests.mutants import everything

ROOT = Path(__file__).resolve().parents[2]
TESTS = ROOT / "tests"
DOCUMENT = ROOT / "docs" / "guarantees.md"
NAMED = re.compile(r"`([\w/]+\.py)::(test_\w+)`")


def promises() -> list[str]:
    """Every bullet with its continuation lines."""
    blocks = re.split(r"^(?=\* |#)", DOCUMENT.read_text(), flags=re.MULTILINE)
    return [" ".join(block.split()) for block in blocks if block.startswith("* ")]


def is_named(killer: str, promise: str) -> bool:
    """Whether a promise names this test; a suite's tests are run by a class for each store."""
    file, _, name = killer.removeprefix("tests/").partition("::")
    name = name.rpartition("::")[2].partition("[")[0]
    return any(
        other == name and (where == file or where.endswith("_suite.py")) for where, other in NAMED.findall(promise)
    )


def names_in(file: str) -> set[str]:
    """Names of the test functions of a file under tests/."""
    tree = ast.parse((TESTS / file).read_text())
    found = (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
    return {node.name for node in found if node.name.startswith("test_")}


def test_page_has_promises() -> None:
    assert len(promises()) > 15


@pytest.mark.parametrize("promise", promises(), ids=lambda promise: promise[2:60])
def test_every_promise_names_tests_that_exist(promise: str) -> None:
    named = NAMED.findall(promise)

    assert named, "no test is named"
    missing = [f"{file}::{name}" for file, name in named if not (TESTS / file).exists() or name not in names_in(file)]
    assert missing == []
    assert promise.count("::") == len(named), "a test is not named in the form `file.py::test_name`"


@pytest.mark.parametrize("promise", promises(), ids=lambda promise: promise[2:60])
def test_every_promise_is_broken_by_a_mutant_for_its_own_tests(promise: str) -> None:
    tied = [mutant for mutant in everything() if mutant.line and promise.startswith(f"* **{mutant.line}")]

    assert tied, "no mutant in tests/mutants breaks it"
    killers = [killer for mutant in tied for killer in mutant.killers]
    assert [killer for killer in killers if not is_named(killer, promise)] == []


def test_mutants_break_one_promise_each() -> None:
    lines = {mutant.line for mutant in everything() if mutant.line}

    assert [line for line in lines if sum(p.startswith(f"* **{line}") for p in promises()) != 1] == []
    assert [str(mutant) for mutant in everything() if mutant.line and mutant.equivalent] == []
