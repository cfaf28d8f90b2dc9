"""Text of others on terminals and in logs: what is not visible is written as an escape.

A device chooses its keys, topics and payloads. Printed as they are, they could move a terminal's cursor, hide what
stands before them, turn the reading direction around, or begin a line that looks like one of ours. JSON output is not
meant: it is ASCII, and exact.
"""

from __future__ import annotations


def visible(text: str, keep: str = "") -> str:
    """The text with an escape, as Python writes it, for each character that shows nothing, or acts.

    Args:
        text: of anybody.
        keep: characters that stay, for example line ends in a text of several lines.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in keep else c.encode("unicode_escape").decode() for c in text)


def visible_lines(text: str, indent: str = "") -> str:
    """The same for a text of several lines, each indented: so none of them can look like a line of somebody else's."""
    return "\n".join(indent + visible(line, keep="\t") for line in text.split("\n"))
