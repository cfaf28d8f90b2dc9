"""Print rows as tables that fit the terminal.

A table that is too wide first loses its empty columns, then long texts are cut, and at last each row becomes a block of
lines. Pipes and files get every column whole, without colors.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import timedelta
from decimal import Decimal
from typing import Any

import typer

from millpy.admin.loaders import utc_text
from millpy.config.durations import format_duration
from millpy.config.escape import visible, visible_lines

Row = Mapping[str, Any]
SENTINELS = {"infinity": "the end", "-infinity": "the beginning"}
COLUMN_CHARACTERS_MIN = 12
GAP = "  "
_TIME = re.compile(r"(\d{4}-\d\d-\d\d) (\d\d:\d\d)(?::(\d\d)(?:\.\d+)?)?Z")
_FRACTION = re.compile(r"-?\d+\.\d{3,}")


def echo(rows: Sequence[Row], *, none: str = "(none)") -> None:
    """Print rows as a table that fits the terminal, or the text `none` if the list is empty."""
    width = terminal_width()
    say((table(rows) if width is None else fitted(rows, width)) or none)


def say(text: str, *, head: str = "") -> None:
    """Print lines with control characters made visible; only `head`, before the first line, may hold a color."""
    typer.echo(head + visible_lines(text))


def terminal_width() -> int | None:
    """Return the width of the terminal on standard output; None when that is not a terminal."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def table(rows: Sequence[Row]) -> str:
    """Format rows as aligned text with every column whole; empty text for an empty list."""
    return _aligned(*_texts(rows), _numeric(rows)) if rows else ""


def fitted(rows: Sequence[Row], width: int) -> str:
    """Format rows as aligned text with lines of at most `width` characters, or else as one block per row.

    Return empty text for an empty list.
    """
    if not rows:
        return ""
    names, lines = _texts(rows)
    if _width(names, lines) > width:
        used = [place for place in range(len(names)) if any(line[place] for line in lines)]
        names, lines = [names[place] for place in used], [[line[place] for place in used] for line in lines]
    times = [place for place in range(len(names)) if _holds_times(line[place] for line in lines)]
    numeric = _numeric(rows)
    numbers = [place for place, name in enumerate(names) if name in numeric]
    short = _shortened(lines, times, numbers) if _width(names, lines) > width else lines
    limits = _limits(names, short, width, times)
    if limits is None:
        return _blocks(names, lines, width)
    cut = [[_cut(cell, limit) for cell, limit in zip(line, limits, strict=True)] for line in short]
    return _aligned(names, cut, numeric)


def continued(rows: Sequence[Row], widths: Sequence[int]) -> tuple[str, list[int]]:
    """Format rows below a table with these column widths; empty `widths` begin a table. Return text and new widths."""
    names, lines = _texts(rows)
    grown = list(map(max, _widths(names, lines), widths or [0] * len(names)))
    text = _aligned(names, lines, _numeric(rows), grown)
    return text if not widths else "\n".join(text.split("\n")[2:]), grown


def _texts(rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    names = list(rows[0])
    return [visible(name) for name in names], [[_cell(row[name]) for name in names] for row in rows]


def _cell(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return format(value, ".10g")
    if isinstance(value, timedelta):
        return format_duration(value)
    if isinstance(value, bytes):
        return f"\\x{value.hex()}"  # as PostgreSQL prints bytes
    if isinstance(value, dict | list):
        return visible(json.dumps(value, ensure_ascii=False, default=_cell))
    text = SENTINELS.get(str(value), str(value))
    return visible(" ".join(utc_text(text).split("\n")))


def _numeric(rows: Sequence[Row]) -> frozenset[str]:
    """Return the columns of numbers, which are right-aligned."""
    return frozenset(
        name
        for name in rows[0]
        if all(
            row[name] is None or (isinstance(row[name], int | float | Decimal) and not isinstance(row[name], bool))
            for row in rows
        )
        and any(row[name] is not None for row in rows)
    )


def _widths(names: Sequence[str], lines: Sequence[Sequence[str]]) -> list[int]:
    return [max(len(name), *(len(line[place]) for line in lines)) for place, name in enumerate(names)]


def _width(names: Sequence[str], lines: Sequence[Sequence[str]]) -> int:
    return sum(_widths(names, lines)) + len(GAP) * (len(names) - 1)


def _limits(
    names: Sequence[str], lines: Sequence[Sequence[str]], width: int, whole: Collection[int]
) -> list[int] | None:
    """Return the width of each column, cutting the widest first, but none of `whole`; None if that is not enough."""
    limits = _widths(names, lines)
    least = [
        limit if place in whole else min(limit, max(len(name), COLUMN_CHARACTERS_MIN))
        for place, (limit, name) in enumerate(zip(limits, names, strict=True))
    ]
    excess = sum(limits) + len(GAP) * (len(names) - 1) - width
    if sum(limits) - sum(least) < excess:
        return None
    while excess > 0:
        place = max(range(len(limits)), key=lambda place: (limits[place] > least[place], limits[place]))
        limits[place] -= 1
        excess -= 1
    return limits


def _shortened(lines: Sequence[Sequence[str]], times: Collection[int], numbers: Collection[int]) -> list[list[str]]:
    """Return the cells with six digits of a number, without fractions of seconds, and without a date that is repeated.

    Args:
        lines: the cells.
        times: the places of columns of times. A time that was cut would say nothing, so these are only shortened.
        numbers: the places of columns of numbers.
    """
    whole = {place for place in times if all(line[place].endswith(":00Z") for line in lines if line[place])}
    return [
        [
            _short_time(line, place, whole)
            if place in times
            else format(float(cell), ".6g")
            if place in numbers and _FRACTION.fullmatch(cell)
            else cell
            for place, cell in enumerate(line)
        ]
        for line in lines
    ]


def _short_time(line: Sequence[str], place: int, whole: Collection[int]) -> str:
    """Return a time without its fraction, without seconds in `whole`, and without the date of the time before it."""
    found = _TIME.fullmatch(line[place])
    if found is None:
        return line[place]
    time = f"{found[2]}Z" if place in whole else f"{found[2]}:{found[3] or '00'}Z"
    repeated = place > 0 and line[place - 1].startswith(found[1]) and _TIME.fullmatch(line[place - 1])
    return time if repeated else f"{found[1]} {time}"


def _holds_times(cells: Iterable[str]) -> bool:
    """Tell whether every cell that has a text has a time."""
    found = [cell for cell in cells if cell]
    return bool(found) and all(_TIME.fullmatch(cell) for cell in found)


def _cut(text: str, limit: int) -> str:
    return text if len(text) <= limit else text[: limit - 1] + "…"


def _aligned(
    names: Sequence[str],
    lines: Sequence[Sequence[str]],
    numeric: frozenset[str],
    widths: Sequence[int] | None = None,
) -> str:
    widths = widths or _widths(names, lines)
    rules = ["-" * width for width in widths]
    return "\n".join(
        GAP.join(
            cell.rjust(width) if name in numeric else cell.ljust(width)
            for name, cell, width in zip(names, line, widths, strict=True)
        ).rstrip()
        for line in (names, rules, *lines)
    )


def _blocks(names: Sequence[str], lines: Sequence[Sequence[str]], width: int) -> str:
    """Format one block per row, with one line for each column that has a value."""
    indent = max(map(len, names)) + len(GAP)
    return "\n\n".join(
        "\n".join(
            name.ljust(indent) + _cut(cell, max(width - indent, COLUMN_CHARACTERS_MIN))
            for name, cell in zip(names, line, strict=True)
            if cell
        )
        for line in lines
    )
