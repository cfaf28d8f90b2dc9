"""examples/backfill.ipynb: its cells, one after the other."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from pyspark.sql import SparkSession
from typer.testing import CliRunner

from millpy.cli.app import app
from tests.small_spark import SMALL_QUERIES

NOTEBOOK = Path(__file__).resolve().parents[2] / "examples" / "backfill.ipynb"


def test_the_notebook_backfills_audits_and_draws(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    display = ModuleType("IPython.display")
    display.HTML = str  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "IPython", ModuleType("IPython"))
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    monkeypatch.delenv("MILLPY_DATABASE_URL", raising=False)
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    printed = []
    for name in SMALL_QUERIES:  # of thousands of records
        spark.conf.unset(name)

    for cell in json.loads(NOTEBOOK.read_text())["cells"]:
        text = "".join(cell["source"])
        if cell["cell_type"] == "code" and text.startswith("!millpy "):
            done = CliRunner().invoke(app, shlex.split(text)[1:])
            assert done.exit_code == 0, done.output
            printed.append(done.output)
        elif cell["cell_type"] == "code":
            exec(compile(text, cell["id"], "exec"), names)

    _, audited, _ = printed
    assert "plant.per_five_minutes: 216 rows, 0 differences" in audited
    assert list(names["hottest"]["pump"]) == ["west"] * 3
    assert names["hottest"]["mean"][0] > 80
    assert "<svg" in (tmp_path / "report.html").read_text()
    for name, value in SMALL_QUERIES.items():
        spark.conf.set(name, value)
