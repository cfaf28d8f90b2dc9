"""House rules of names: one name, one thing; a class is a noun; a method is a verb; the dead letter has one name."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "millpy"
IRREGULAR = {
    "Begun", "Drawn", "Found", "Given", "Gone", "Heard", "Held", "Kept", "Known", "Left", "Lost", "Made", "Met",
    "Read", "Seen", "Sent", "Struck", "Taken", "Thrown", "Told", "Understood", "Written",
}  # fmt: skip
PREPOSITIONS = {
    "above", "after", "among", "at", "before", "behind", "below", "beside", "beyond", "by", "during", "for", "from",
    "in", "into", "of", "on", "onto", "over", "since", "to", "toward", "under", "until", "upon", "with", "within",
    "without",
}  # fmt: skip
"""As the whole name of a method that takes something; `timer.at`, a property, is a value and not a method."""
METAPHORS = {
    "calm", "complain", "give_up", "go_on", "halt", "heart", "hunt", "mail", "pile", "piles", "remains", "restless",
    "sayable", "shore", "tape", "worded",
}  # fmt: skip
"""Each was once a name here, and each has a word that the field uses."""
NOT_DEAD_LETTER = re.compile(r"set_?aside|quarantin|\bset aside\b|\bsets aside\b", re.IGNORECASE)
CLASS = re.compile(r"\s*class _*(\w+?)_*[:(\[]")
SHOWN = ("millpy", "migrations", "services", "docs", "compose", "benchmarks", "examples")


def trees() -> Iterator[tuple[str, ast.Module]]:
    for path in sorted(PACKAGE.rglob("*.py")):
        yield str(path.relative_to(ROOT)), ast.parse(path.read_text())


def is_participle(name: str) -> bool:
    """Tell whether a name is one word that tells what was done to a thing, and not which thing."""
    word = name.strip("_")
    one = len(re.findall("[A-Z]", word)) == 1
    return one and (word in IRREGULAR or bool(re.search(r"(?<!e)ed$", word)))


def is_property(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return any(ast.unparse(mark).endswith("property") for mark in node.decorator_list)


def misnamed(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        match node:
            case ast.ClassDef(name=name) if is_participle(name):
                yield f"{node.lineno} class {name} is a participle"
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                word = name.strip("_")
                if word in PREPOSITIONS and not is_property(node):
                    yield f"{node.lineno} {name}() is a preposition"
                if word in METAPHORS:
                    yield f"{node.lineno} {name}() is no word of the field"
            case ast.arg(arg=name) | ast.Name(id=name) | ast.Attribute(attr=name) if name.strip("_") in METAPHORS:
                yield f"{node.lineno} {name} is no word of the field"


def test_class_name_occurs_once() -> None:
    places = defaultdict(list)
    for path in sorted(PACKAGE.rglob("*.py")):
        for number, line in enumerate(path.read_text().splitlines(), start=1):
            if found := CLASS.match(line):
                places[found[1]].append(f"{path.relative_to(ROOT)}:{number}")

    assert {name: found for name, found in places.items() if len(found) > 1} == {}


def test_classes_are_nouns_and_methods_are_verbs() -> None:
    assert [f"{path}:{fault}" for path, tree in trees() for fault in misnamed(tree)] == []


@pytest.mark.parametrize(
    "source",
    ["class Taken: ...", "class _Settled: ...", "def of(key): ...", "def _hunt(): ...", "mail = []", "self._heart = 1"],
)
def test_canary_is_caught(source: str) -> None:
    assert list(misnamed(ast.parse(source)))


@pytest.mark.parametrize("source", ["class Feed: ...", "class StoredRun: ...", "def value_of(key): ...", "x.of(key)"])
def test_good_name_passes(source: str) -> None:
    assert list(misnamed(ast.parse(source))) == []


def test_dead_letter_has_one_name() -> None:
    texts = [
        path
        for name in SHOWN
        for path in sorted((ROOT / name).rglob("*"))
        if path.suffix in (".py", ".sql", ".md", ".yaml")
    ]
    faults = [
        f"{path.relative_to(ROOT)}:{number}"
        for path in [*texts, *ROOT.glob("*.md")]
        for number, line in enumerate(path.read_text().splitlines(), start=1)
        if NOT_DEAD_LETTER.search(line)
    ]

    assert faults == []
