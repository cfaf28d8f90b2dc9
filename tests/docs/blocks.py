"""The code blocks of README.md and docs/: how pages are split into blocks, and the words allowed at a fence.

A block is tested by its language, and by what its fence says beside it (```` ```sql test="other" ````):

    python            executed, after what is before it on the page and in `page_names.py`; every graph must be whole
                      (one that imports what it needs is loaded once more, as a file of its own)
    python, title test_x.py   run by pytest, beside the page's titled blocks
    python signatures executed with Spark's helpers replaced by ones that only check how they are called
    python other      code of another system: compiled, no more
    console           commands after `$`: millpy's are parsed by its command line, targets of make and extras must exist
    console run       `millpy run FILE.py` or `millpy test FILE.yaml` is really run, in a directory that has the page's
                      titled blocks as files
    sql other         for another system, or for what the page does not have yet: not tested
    sql               executed in a database where the page's graphs are deployed (the README's, when it has none)
    text result       what the SQL block, or the run of `millpy test`, before it prints
    json, yaml, toml  parsed; with a title, also a file for `console run`
    text, java, …     not tested
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = [ROOT / "README.md", ROOT / "ARCHITECTURE.md", *sorted((ROOT / "docs").rglob("*.md"))]
TESTS = {
    "python": ("", "signatures", "other"),
    "console": ("", "run"),
    "sql": ("", "other"),
    "text": ("", "result"),
    "json": ("",),
    "yaml": ("",),
    "toml": ("",),
    "java": ("",),
    "ini": ("",),
}
FENCE = re.compile(r"^(?P<indent> *)```(?P<info>[^`\n]*)\n(?P<body>.*?)^(?P=indent)```$", re.MULTILINE | re.DOTALL)
OPTION = re.compile(r'(\w+)="([^"]*)"')


@dataclass(frozen=True)
class Block:
    """A fenced block, the line at which it starts, and the words at its fence."""

    path: Path
    line: int
    language: str
    options: dict[str, str]
    body: str

    @property
    def test(self) -> str:
        return self.options.get("test", "")

    def __str__(self) -> str:
        return f"{self.path.relative_to(ROOT)}:{self.line}"


def blocks_of(path: Path) -> list[Block]:
    """The blocks of a page, from top to bottom."""
    text = path.read_text()
    return [block_at(path, text, match) for match in FENCE.finditer(text)]


def block_at(path: Path, text: str, match: re.Match[str]) -> Block:
    language, _, rest = match["info"].partition(" ")
    body = re.sub(f"^{match['indent']}", "", match["body"], flags=re.MULTILINE)
    return Block(path, text.count("\n", 0, match.start()) + 2, language, dict(OPTION.findall(rest)), body)


def prose_of(path: Path) -> str:
    """A page without its blocks."""
    return FENCE.sub("", path.read_text())
