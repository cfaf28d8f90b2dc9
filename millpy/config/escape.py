"""Escapes for invisible characters in foreign text on terminals and in logs.

A device chooses its keys, topics and payloads. Printed unchanged, they could move a terminal's cursor, hide the text
before them, reverse the reading direction, or begin a line that looks like one of ours. JSON output needs no escaping:
it is ASCII, and exact.
"""

from __future__ import annotations


def visible(text: str, keep: str = "") -> str:
    """Replace each character that is invisible or controls a terminal with its Python escape.

    Args:
        text: foreign text.
        keep: characters to keep, for example line ends in a text of several lines.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in keep else c.encode("unicode_escape").decode() for c in text)


def visible_lines(text: str, indent: str = "") -> str:
    """Escape a text of several lines and indent each, so that no line looks like one of ours."""
    return "\n".join(indent + visible(line, keep="\t") for line in text.split("\n"))
