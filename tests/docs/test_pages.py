"""Every page is in the navigation, every public name in the reference, every view of the database in its table."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
import yaml

import millpy
import millpy.testing
from millpy.sinks import Sink, SinkConnection
from millpy.sources import Injector, Source

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
OUTSIDE = {"index.md", "architecture.md", "changelog.md", "benchmarks.md", "api/http.md"}
"""Pages that docs/site/ makes of documents elsewhere, and of the API's OpenAPI document."""


def pages_in(nav: Any) -> Iterator[str]:
    """The paths in the navigation, in order."""
    if isinstance(nav, str):
        yield nav
    for entry in nav.values() if isinstance(nav, dict) else nav if isinstance(nav, list) else ():
        yield from pages_in(entry)


@pytest.fixture(scope="module")
def navigation() -> list[str]:
    return list(pages_in(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]))


def test_every_page_is_in_the_navigation_once(navigation: list[str]) -> None:
    pages = {str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md")}

    assert sorted(navigation) == sorted(pages | OUTSIDE)


def test_every_public_name_is_in_the_reference() -> None:
    reference = "\n".join(path.read_text() for path in (DOCS / "api").glob("*.md"))

    described = re.findall(r"^::: millpy\.(\w+)$", reference, re.MULTILINE)
    assert sorted(set(described) - {"errors"}) == sorted(millpy.__all__)
    of_kit = re.findall(r"^::: millpy\.testing\.(\w+)$", reference, re.MULTILINE)
    assert sorted(of_kit) == sorted(millpy.testing.__all__)


@pytest.mark.parametrize("module", ["sinks", "sources", "spark", "testing"])
def test_every_name_of_a_public_module_is_in_the_reference(module: str) -> None:
    reference = "\n".join(path.read_text() for path in (DOCS / "api").glob("*.md"))
    exported = re.search(r"^__all__ = (\[.*?\])", (ROOT / "millpy" / module / "__init__.py").read_text(), re.M | re.S)
    assert exported is not None

    described = re.findall(r"^::: millpy(?:\.\w+)*\.(\w+)$", reference, re.MULTILINE)
    assert sorted(set(ast.literal_eval(exported[1])) - set(described)) == []


@pytest.mark.parametrize("public", [Source, Injector, Sink, SinkConnection])
def test_every_method_to_write_is_on_its_page(public: type) -> None:
    page = "".join((DOCS / name).read_text() for name in ("own-source.md", "sinks.md"))

    methods = [name for name, made in vars(public).items() if inspect.isfunction(made) and not name.startswith("_")]
    assert methods
    assert [name for name in methods if not re.search(rf"`{name}\b|def {name}\(", page)] == []


def test_every_view_column_and_function_of_the_database_is_described(database_url: str) -> None:
    page = (DOCS / "views.md").read_text()
    with psycopg.connect(database_url) as connection:
        columns = connection.execute(
            "SELECT table_name, column_name FROM information_schema.columns WHERE table_schema = 'millpy'"
        ).fetchall()
        functions = connection.execute(
            "SELECT DISTINCT proname FROM pg_proc WHERE pronamespace = 'millpy'::regnamespace"
        ).fetchall()

    asked = re.findall(r"SELECT ([\w,\s\"*]+?)\s+FROM millpy\.(\w+)\b(?!\()", page)
    shown = {view: re.split(r",\s*", names.replace('"', "")) for names, view in asked}
    hidden = [f"{view}.{name}" for view, name in columns if not {name, "*"} & set(shown.get(view, ()))]
    assert hidden == []
    assert [view for view in {view for view, _ in columns} if f"| `millpy.{view}` |" not in page] == []
    assert [name for (name,) in functions if f"`millpy.{name}(" not in page] == []
