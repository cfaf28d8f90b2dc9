"""The list of mutants stays true while the kernel changes; `make mutants` plays it."""

from __future__ import annotations

from pathlib import Path

from tests.mutants import everything
from tests.mutants.mutant import Mutant
from tests.mutants.run import KILLED, NOT_PLAYED, PROFILE, SURVIVED, TOO_SLOW, files_in_doubt, play

TESTS = """
import threading
import pytest
from one import ONE

def test_one():
    assert ONE == 1

@pytest.fixture
def a_fixture():
    assert ONE == 1

def test_whose_fixture_fails(a_fixture):
    pass

@pytest.mark.timeout(0.5)
def test_that_waits():
    threading.Event().wait()
"""


def test_every_mutant_can_be_made() -> None:
    assert [f"{mutant}: {fault}" for mutant in everything() if (fault := mutant.fault())] == []


def test_mutants_differ() -> None:
    changes = [(mutant.file, mutant.old, mutant.new) for mutant in everything()]

    assert len(changes) == len(set(changes))


def test_mutant_that_no_test_notices_survives(tmp_path: Path) -> None:
    outcomes = [play(mutant, tmp_path) for mutant in trial(tmp_path)]

    assert outcomes == [KILLED, SURVIVED, NOT_PLAYED, NOT_PLAYED, TOO_SLOW]
    assert (tmp_path / "one.py").read_text() == "ONE = 1\nTWO = 2\n", "the tree is as it was"


def trial(tree: Path) -> list[Mutant]:
    """A tree whose first test looks at one of two numbers, and a mutant of each; of the others no test fails."""
    (tree / "one.py").write_text("ONE = 1\nTWO = 2\n")
    (tree / "test_one.py").write_text(TESTS)
    (tree / "pytest.ini").write_text("[pytest]\npythonpath = .\n")
    (tree / "conftest.py").write_text(f"import hypothesis\n\nhypothesis.settings.register_profile({PROFILE!r})\n")
    killers = ("test_one.py::test_one",)
    return [
        Mutant("one.py", "ONE = 1", "ONE = 2", killers),
        Mutant("one.py", "TWO = 2", "TWO = 3", killers),
        Mutant("one.py", "ONE = 1", "ONE = 2", ("test_one.py::test_nothing",)),
        Mutant("one.py", "ONE = 1", "ONE = 2", ("test_one.py::test_whose_fixture_fails",)),
        Mutant("one.py", "ONE = 1", "ONE = 2", ("test_one.py::test_that_waits",)),
    ]


def test_tests_that_did_not_pass_are_known_by_their_files(tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    case = '<testcase classname="tests.unit.test_{}" name="test_a">{}</testcase>'

    def doubt(*cases: str) -> set[str] | None:
        report.write_text(f"<testsuites><testsuite>{''.join(cases)}</testsuite></testsuites>")
        return files_in_doubt(report)

    passed = case.format("prose", "<system-out>a</system-out>")
    assert doubt(passed, case.format("mutants.TestA", '<failure message="m"/>')) == {"tests/unit/test_mutants.py"}
    assert doubt(passed, case.format("tidy", "<skipped/>")) == {"tests/unit/test_tidy.py"}
    assert doubt(passed, '<testcase classname="" name="a"><error message="m"/></testcase>') is None
    assert doubt(passed) is None
    assert files_in_doubt(tmp_path / "none.xml") is None
