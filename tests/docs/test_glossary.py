"""The glossary has each term once, in alphabetical order, and every name that it mentions exists in the code."""

from __future__ import annotations

import ast
import re

from tests.docs.blocks import ROOT

TEXT = (ROOT / "docs" / "concepts" / "glossary.md").read_text()
ROWS = [[cell.strip() for cell in line.strip("|").split("|")] for line in TEXT.splitlines() if line.startswith("| ")][
    1:
]
NAME = re.compile(r"`([^`]+)`")


def classes() -> set[str]:
    trees = (ast.parse(path.read_text()) for path in (ROOT / "millpy").rglob("*.py"))
    return {node.name for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}


def test_each_term_occurs_once_in_alphabetical_order() -> None:
    terms = [row[0] for row in ROWS]

    assert len(terms) > 40
    assert terms == sorted(set(terms))


def test_each_term_has_a_meaning_and_a_source_that_the_page_names() -> None:
    for term, meaning, _, origin in ROWS:
        assert meaning, term
        assert not re.match(r"(MW|DF)\b", origin) or re.fullmatch(r"(MW|DF) \d(\.\d){0,2}", origin), (term, origin)


def test_classes_of_the_glossary_exist() -> None:
    named = {name for row in ROWS for name in NAME.findall(row[2])}

    assert named - classes() == set()
