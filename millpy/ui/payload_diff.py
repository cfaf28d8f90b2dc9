"""The difference between two payloads, piece by piece, in bounded time."""

from __future__ import annotations

import re
from collections.abc import Sequence
from difflib import SequenceMatcher

PIECES_MAX = 3_000
"""More are compared as lines, and more lines than this not at all: the time grows with their square."""
_PIECE = re.compile(r"\w+|\s+|[^\w\s]")


def difference(before: str, after: str) -> list[tuple[str, str]] | None:
    """Return pieces with "same", "removed" or "added"; None if the payloads are too long."""
    for pieces in (_PIECE.findall, _lines):
        old, new = pieces(before), pieces(after)
        if max(len(old), len(new)) <= PIECES_MAX:
            return _compared(old, new)
    return None


def _lines(text: str) -> list[str]:
    return text.splitlines(keepends=True)


def _compared(old: Sequence[str], new: Sequence[str]) -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    for kind, begin, end, new_begin, new_end in SequenceMatcher(None, old, new, autojunk=False).get_opcodes():
        if kind == "equal":
            found.append(("same", "".join(old[begin:end])))
            continue
        found += [("removed", "".join(old[begin:end]))] if begin < end else []
        found += [("added", "".join(new[new_begin:new_end]))] if new_begin < new_end else []
    return found
