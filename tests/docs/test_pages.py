"""Every page is in the navigation, every public name in the reference, every view of the database in its table."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

import millpy

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
OUTSIDE = {"index.md", "architecture.md", "changelog.md", "benchmarks.md"}
"""Pages that docs/site/pages.py makes of documents elsewhere."""


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
