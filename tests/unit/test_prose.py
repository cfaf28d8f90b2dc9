"""House rules of the prose that a machine can hold: phrases that make a sentence hard to read, and commit subjects."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROSE = (
    "ARCHITECTURE.md",
    "CHANGELOG.md",
    "README.md",
    "docs/**/*.md",
    "migrations/versions/*.py",
    "migrations/versions/*.sql",
    "millpy/**/*.py",
    "millpy/**/*.sql",
    "mkdocs.yml",
    "services/*.py",
    "benchmarks/**/*.py",
    "tests/**/*.py",
)
HARD_TO_READ = (
    "as it came", "are told", "by and by", "for people", "gives up", "goes on", "hunt for", "is told", "mend",
    "mends", "none that", "of one's own", "so manieth", "so many", "stand still", "stands still", "stood still",
    "to be told", "went on", "whoever", "whom",
)  # fmt: skip
"""Few, each read more than once in texts of ours, and hardly ever right: say who does what to whose thing."""
BANNED = re.compile(
    r"(?<![\w'])(?:"
    + "|".join(HARD_TO_READ).replace(" ", r"\s+")
    + r"|(?<!word )in words)(?!\w)",  # `for word in words`
    re.IGNORECASE,
)
SUBJECT_MAX = 72
"""What `git log --oneline` and a pull request show of a subject on one line."""
RULED_SINCE = "2026-11-22T20"
"""Subjects of commits that were written before are longer."""


def banned(text: str) -> Iterator[str]:
    for found in BANNED.finditer(text):
        yield f"{text.count(chr(10), 0, found.start()) + 1}: {found[0]}"


def long_subjects(log: str) -> Iterator[str]:
    """Of lines of "date subject"."""
    for line in log.splitlines():
        date, _, subject = line.partition(" ")
        if date >= RULED_SINCE and len(subject) > SUBJECT_MAX:
            yield subject


def test_prose_has_no_banned_phrase() -> None:
    paths = sorted({path for pattern in PROSE for path in ROOT.glob(pattern)} - {Path(__file__).resolve()})
    faults = [f"{path.relative_to(ROOT)}:{fault}" for path in paths for fault in banned(path.read_text())]

    assert len(paths) > 200
    assert faults == []


def test_commit_subjects_fit_one_line() -> None:
    # A shallow clone has some of the commits, an unpacked archive none.
    log = subprocess.run(
        ["git", "log", "--no-merges", "--date=iso-strict-local", "--format=%ad %s"],
        cwd=ROOT,
        env={**os.environ, "TZ": "UTC"},
        capture_output=True,
        text=True,
        check=False,
    )

    assert list(long_subjects(log.stdout if (ROOT / ".git").exists() else "")) == []


@pytest.mark.parametrize("text", ["Is told\nof it.", "an error in words", "three mends", "whom nobody owns"])
def test_banned_phrase_is_caught(text: str) -> None:
    assert len(list(banned(text))) == 1


@pytest.mark.parametrize("text", ["[word for word in words]", "recommended", "mending"])
def test_other_words_pass(text: str) -> None:
    assert list(banned(text)) == []


def test_long_subject_is_caught() -> None:
    log = f"2026-11-23T00:00:00Z {'a' * 73}\n2026-11-23T00:00:00Z {'b' * 72}\n2026-11-01T00:00:00Z {'c' * 73}"

    assert list(long_subjects(log)) == ["a" * 73]
