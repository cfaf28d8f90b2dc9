"""Lay out sections of rows for a terminal: each is a title, a table of short columns, and notes on what is wrong."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

from millpy.cli.text_table import Row, fitted, table
from millpy.config.escape import visible

ROWS_SHOWN_MIN = 3
NOTES_MAX = 3


@dataclass(frozen=True, slots=True)
class Section:
    """One part of a picture.

    Attributes:
        title: its heading.
        rows: the lines of its table; those that need somebody come first.
        notes: sentences below the table, such as why a source is disconnected.
    """

    title: str
    rows: Sequence[Row] = ()
    notes: Sequence[str] = ()


def lay_out(head: Sequence[str], sections: Sequence[Section], width: int | None, height: int | None) -> list[str]:
    """Return the lines of a picture of at most `width` by `height` characters; None is without a bound.

    If not all rows fit, each section shows as many of its first ones as leave room for the others, and says how many
    more there are.
    """
    above = [line for text in head for line in _wrapped(text, width)]
    most = max((len(section.rows) for section in sections), default=0)
    if height is None:
        return above + _lines(sections, most, width)
    shown = min(most, height)
    while len(above) + len(lines := _lines(sections, shown, width)) > height and shown > ROWS_SHOWN_MIN:
        shown -= 1
    if len(above) + len(lines) > height:
        hidden = len(above) + len(lines) - height + 1
        lines = [*lines[: max(0, height - len(above) - 1)], f"({hidden} more lines do not fit)"]
    return [*above, *lines][:height]


def _lines(sections: Sequence[Section], shown: int, width: int | None) -> list[str]:
    found: list[str] = []
    for section in sections:
        rows = section.rows[:shown]
        hidden = len(section.rows) - len(rows)
        notes = [*section.notes[:NOTES_MAX]]
        if len(section.notes) > NOTES_MAX:
            notes.append(f"and {len(section.notes) - NOTES_MAX} more like these")
        body = (table(rows) if width is None else fitted(rows, width)).splitlines()
        body += [f"({hidden} more)"] if hidden else []
        body += [line for note in notes for line in _wrapped(note, width)]
        found += ["", section.title, *body]
    return found


def _wrapped(text: str, width: int | None) -> list[str]:
    line = visible(" ".join(text.split()))
    return [line] if width is None else textwrap.wrap(line, max(width, 20)) or [""]
