"""Print an explanation of a watermark: on a terminal each step as lines that are wrapped, and none is cut."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from datetime import timedelta

from millpy.admin.loaders import utc_text
from millpy.admin.queries import Row
from millpy.cli import text_table as tables
from millpy.config.durations import format_duration
from millpy.config.escape import visible

INDENT = "  "
TIMES = ("input_watermark", "low_watermark", "held_for")


def echo(steps: Sequence[Row]) -> None:
    """Print the steps of `Admin.explain_watermark`."""
    width = tables.terminal_width()
    if width is None:
        tables.echo(steps)
    else:
        tables.say(wrapped(steps, width))


def wrapped(steps: Sequence[Row], width: int) -> str:
    """Return the steps as text with lines of at most `width` characters, unless a word is longer."""
    lines = []
    for step in steps:
        times = ", ".join(f"{name.replace('_', ' ')} {_text(step[name])}" for name in TIMES if step[name] is not None)
        texts = (
            f"{step['step']}. {step['computation']}, {step['part']}",
            times,
            f"{step['held_by']}: {step['detail']}",
        )
        for indent, text in zip(("", INDENT, INDENT), texts, strict=True):
            lines += textwrap.wrap(
                visible(text), max(width, 20), initial_indent=indent, subsequent_indent=indent or INDENT * 2,
                break_on_hyphens=False, break_long_words=False,
            )  # fmt: skip
    return "\n".join(lines)


def _text(value: object) -> str:
    if isinstance(value, timedelta):
        return format_duration(value)
    return utc_text(tables.SENTINELS.get(str(value), str(value)))
