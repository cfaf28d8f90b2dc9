"""Named statements, loaded once from `millpy/store/sql/`.

Each statement is headed by `-- name: …`. Tests check that every statement is used, and that PREPARE accepts it on a
migrated database (tests/conformance/test_statements.py).
"""

from __future__ import annotations

import re
from functools import cache
from importlib.resources import files

_HEADER = re.compile(r"^-- name: (\w+)\n", re.MULTILINE)


@cache
def statements() -> dict[str, bytes]:
    """Load the text of every statement, by name."""
    found: dict[str, bytes] = {}
    for entry in sorted(files("millpy.store").joinpath("sql").iterdir(), key=lambda e: e.name):
        if not entry.name.endswith(".sql"):
            continue
        _, *parts = _HEADER.split(entry.read_text(encoding="utf-8"))
        for name, text in zip(parts[::2], parts[1::2], strict=True):
            assert name not in found, name
            found[name] = _without_comments(text).encode()
    return found


def statement(name: str) -> bytes:
    """Return the statement of a name, with psycopg's named parameters."""
    return statements()[name]


def _without_comments(text: str) -> str:
    # Comments may hold a percent sign, which psycopg would take for a parameter.
    lines = [line.partition("--")[0].rstrip() for line in text.splitlines()]
    return "\n".join(line for line in lines if line).strip().removesuffix(";")
