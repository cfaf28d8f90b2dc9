"""The command line: what a person does wrong ends in one clear line and a hint, never in a traceback."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from millpy.launch import exit_status
from millpy.store.admin import table

pytestmark = pytest.mark.usefixtures("clean_environment")


@pytest.fixture
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    for name in list(os.environ):
        if name.startswith("MILLPY_"):
            monkeypatch.delenv(name)


def millpy(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    root = Path(__file__).resolve().parents[2]
    code = f"import sys; sys.path.insert(0, {str(root)!r}); from millpy.cli import main; main()"
    return subprocess.run(
        [sys.executable, "-c", code, *arguments], cwd=cwd, capture_output=True, text=True, check=False, timeout=60
    )


EMPTY = "x = 1\n"
BROKEN = "x = 1\ny = undefined\n"
RESERVED = 'from millpy import Graph\ngraph = Graph("mill")\n'


@pytest.mark.parametrize(
    ("arguments", "source", "line", "hint"),
    [
        (["run", "graph.py"], None, "there is no file graph.py", "name the Python file"),
        (["run", "graph.py"], EMPTY, "graph.py defines no graph", "make one at module level"),
        (["run", "graph.py"], BROKEN, "graph.py:2: NameError: name 'undefined' is not defined", "correct the file"),
        (["run", "graph.py"], RESERVED, "'mill' is a reserved schema", "another name"),
        (["run", "graph.py", "--workers", "0"], EMPTY, "0 workers cannot be", "from 1 to"),
        (["migrate"], None, "no database is configured", "MILLPY_DATABASE_URL"),
        (["status"], None, "no database is configured and there is none in .millpy", "MILLPY_DATABASE_URL"),
    ],
)
def test_usage_error_is_one_line_and_a_hint(
    tmp_path: Path, arguments: list[str], source: str | None, line: str, hint: str
) -> None:
    if source is not None:
        (tmp_path / "graph.py").write_text(source)

    done = millpy(*arguments, cwd=tmp_path)

    assert done.returncode == 2, done.stderr
    first, second = done.stderr.strip().splitlines()
    assert first == f"millpy: {line}"
    assert hint in second
    assert not (tmp_path / ".millpy").exists()


def test_unreachable_database_is_one_line(tmp_path: Path) -> None:
    done = millpy("status", "--database", "postgresql://somebody@127.0.0.1:1/none", cwd=tmp_path)

    assert done.returncode == 1
    assert done.stderr.startswith("millpy: the database does not answer")
    assert "Traceback" not in done.stderr


def test_database_that_is_not_migrated_is_named(tmp_path: Path, empty_database_url: str) -> None:
    done = millpy("status", "--database", empty_database_url, cwd=tmp_path)

    assert done.returncode == 2
    assert "run `millpy migrate` first" in done.stderr


def test_migrate_then_status_and_watermarks_are_json(tmp_path: Path, empty_database_url: str) -> None:
    assert millpy("migrate", "--database", empty_database_url, cwd=tmp_path).returncode == 0
    assert millpy("migrate", "--database", empty_database_url, cwd=tmp_path).returncode == 0

    status = millpy("status", "--json", "--database", empty_database_url, cwd=tmp_path)
    watermarks = millpy("watermarks", "--json", "--database", empty_database_url, cwd=tmp_path)

    assert json.loads(status.stdout) == {"workers": [], "accounting": []}
    assert json.loads(watermarks.stdout) == {"watermarks": []}


def test_table_aligns_columns() -> None:
    assert table([{"a": 1, "name": "x"}, {"a": 22, "name": None}]) == "a   name\n--  ----\n1   x\n22"


@pytest.mark.parametrize(
    ("codes", "status"),
    [([0, 0], 0), ([0, -9], 0), ([-9, -9], 1), ([0, 2], 2), ([3, 1, -15], 3)],
)
def test_run_ends_with_its_workers_status(codes: list[int], status: int) -> None:
    assert exit_status(codes) == status
