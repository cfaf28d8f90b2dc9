"""Every code block of the documentation works as its page describes; `blocks.py` tells how each kind is tested."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from millpy.config.settings import Settings
from millpy.limits import Limits
from tests.docs.blocks import DOCUMENTS, ROOT, TESTS, blocks_of, prose_of
from tests.docs.commands import faults_of, faults_of_mention
from tests.docs.reader import Reader

NAMED = [str(path.relative_to(ROOT)) for path in DOCUMENTS]
MENTION = re.compile(r"(?<!`)`((?:millpy|make) [^`]+)`(?!`)")
CODE = [
    ROOT / "Makefile",
    *(path for folder in ("millpy", "services", "tests") for path in (ROOT / folder).rglob("*.py")),
]
VARIABLE = re.compile(r"\bMILLPY_[A-Z0-9_]*[A-Z0-9]\b")
NAMED_VARIABLE = re.compile(r'"(MILLPY_[A-Z0-9_]*[A-Z0-9])"')


def needs_a_database(path: Path) -> bool:
    return any(
        block.language == "sql" or (block.test == "run" and "millpy run" in block.body) for block in blocks_of(path)
    )


@pytest.mark.parametrize("name", NAMED)
def test_every_block_names_its_kind_of_test(name: str) -> None:
    unknown = [
        f"{block}: ```{block.language} {block.options}"
        for block in blocks_of(ROOT / name)
        if block.test not in TESTS.get(block.language, ())
    ]

    assert unknown == []


@pytest.mark.parametrize("name", [name for name in NAMED if not needs_a_database(ROOT / name)])
def test_page_without_a_database_works_as_described(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    Reader(ROOT / name, tmp_path, "").follow(blocks_of(ROOT / name))


@pytest.mark.parametrize("name", [name for name in NAMED if needs_a_database(ROOT / name)])
def test_page_with_a_database_works_as_described(
    name: str, tmp_path: Path, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    Reader(ROOT / name, tmp_path, database_url).follow(blocks_of(ROOT / name))


@pytest.mark.parametrize("name", NAMED)
def test_commands_in_sentences_exist(name: str) -> None:
    mentions = MENTION.findall(" ".join(prose_of(ROOT / name).split()))

    assert [fault for mention in mentions for fault in faults_of_mention(mention)] == []


def test_settings_exist_and_all_are_in_their_table() -> None:
    settings = {f"MILLPY_{name.upper()}" for name in (*Settings.model_fields, *Limits.__dataclass_fields__)}
    elsewhere = {name for path in CODE for name in VARIABLE.findall(path.read_text())}
    elsewhere |= {f"{name}_FILE" for name in elsewhere | settings}  # of secrets
    mentioned = {path: set(VARIABLE.findall(path.read_text())) for path in DOCUMENTS}

    assert set().union(*mentioned.values()) - settings - elsewhere == set()
    in_code = {name for path in (ROOT / "millpy").rglob("*.py") for name in NAMED_VARIABLE.findall(path.read_text())}
    listed = mentioned[ROOT / "docs" / "settings.md"]
    assert (settings | in_code) - {"MILLPY_LEASE_TTL_S", "MILLPY_DEMO_PLACE"} - listed == set()


@pytest.mark.parametrize(
    "command",
    [
        "millpy dead-letters show",
        "millpy run graph.py --worker 2",
        "millpy dead-letters show seventeen",
        "millpy deploi graph.py",
        "make lunch",
        "pip install '.[mqqt]'",
        "pip install 'millpy[mqtt]'",
        "cd plant && millpy status --jason",
        "python nowhere.py",
        "unheard-of",
    ],
)
def test_wrong_command_is_caught(command: str) -> None:
    assert list(faults_of(command))


@pytest.mark.parametrize("mention", ["millpy runn", "millpy run --worker", "millpy sources wake x", "make lunch"])
def test_wrong_mention_is_caught(mention: str) -> None:
    assert list(faults_of_mention(mention))
