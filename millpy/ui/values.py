"""Values as the page shows them: one form for each type; foreign text cannot act, hide, or turn around what is read."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable
from datetime import datetime, timedelta
from decimal import Decimal
from typing import Any

from markupsafe import Markup, escape

from millpy.admin.json_output import json_safe
from millpy.admin.loaders import TimeText
from millpy.config.durations import format_duration, format_latency
from millpy.config.escape import visible

NONE = "–"
SENTINELS = {"infinity": "the end", "-infinity": "the beginning"}
BYTES_SHOWN_MAX = 1_000
CHARACTERS_SHOWN_MAX = 2_000
"""Of a value in a table; what is longer takes long to draw."""
LINE_CHARACTERS_MAX = 36
"""Of text that stays on one line, whatever hyphens it has: names of devices, and UUIDs."""
MILLISECONDS = 4
"""Characters of a fraction that is shown; the element has all of it."""
_INSTANT = re.compile(r"(\d{4}-\d\d-\d\d)T(\d\d:\d\d:\d\d)(\.\d+)?Z")
_THOUSANDS = "\N{NARROW NO-BREAK SPACE}"
_UNITS = ("B", "kB", "MB", "GB", "TB")


def safe(value: object) -> object:
    """Return what an expression in a template writes, before it is escaped for HTML.

    Markup is written as it is. In all other text, characters that are invisible are shown as escapes.
    """
    if isinstance(value, Markup):
        return value
    if isinstance(value, str):
        return visible(str(value), keep="\n\t")
    return "" if value is None else shown(value)


def shown(value: object) -> Markup:
    """Return a value of the database in the form of its type."""
    if value is None:
        return Markup('<span class="none">–</span>')
    if isinstance(value, bool):
        return Markup("yes" if value else "no")
    if isinstance(value, int | float | Decimal):
        return escape(number(value))
    if isinstance(value, TimeText | datetime):
        return instant(value)
    if isinstance(value, timedelta):
        return Markup('<span class="duration">{}</span>').format(format_duration(value))
    if isinstance(value, bytes | bytearray | memoryview):
        return _foreign(_bytes_text(bytes(value)))
    if isinstance(value, dict | list | tuple):
        return _foreign(_cut(json.dumps(json_safe(value), ensure_ascii=False, default=str)))
    return _foreign(_cut(str(value)))


def exact(text: str) -> Markup:
    """Return text as it is, escaped for HTML only: for the value of a field that a form sends back."""
    return escape(text)


def number(value: float | Decimal) -> str:
    """Return a number with thousands apart; a fraction has at most ten significant digits."""
    if isinstance(value, int) or (isinstance(value, Decimal) and value.is_finite() and value == int(value)):
        return f"{int(value):,}".replace(",", _THOUSANDS)
    if isinstance(value, float):
        return format(value, ".10g")
    return str(value)


def size(count: float | Decimal | None) -> str:
    """Return a number of bytes with its unit."""
    if count is None:
        return NONE
    left, unit = float(count), 0
    while left >= 1000 and unit < len(_UNITS) - 1:
        left, unit = left / 1000, unit + 1
    return f"{left:.0f} {_UNITS[unit]}" if unit == 0 or left >= 100 else f"{left:.1f} {_UNITS[unit]}"


def seconds(count: float | Decimal | None) -> str:
    """Return a number of seconds as a duration."""
    return NONE if count is None else format_duration(float(count))


def latency(count: float | None) -> str:
    """Return a number of seconds in milliseconds."""
    return NONE if count is None else format_latency(count)


def rate(count: float | None) -> str:
    """Return a number of records a second, with as many digits as can be read while it changes."""
    if count is None:
        return NONE
    return number(round(count)) if count >= 100 or count == 0 else f"{count:.1f}"


def instant(value: object) -> Markup:
    """Return a time in UTC, with its exact form for machines."""
    if value is None:
        return shown(None)
    text = str(json_safe(value))
    if found := _INSTANT.fullmatch(text):
        fraction = (found[3] or "")[:MILLISECONDS].rstrip("0").rstrip(".")
        words = f"{found[1]} {found[2]}{fraction}"
        return Markup('<time datetime="{}">{}<span class="zone"> UTC</span></time>').format(text, words)
    return _foreign(SENTINELS.get(text, text))


def _cut(text: str) -> str:
    more = f" … ({len(text):,} characters)"
    return text if len(text) <= CHARACTERS_SHOWN_MAX else text[:CHARACTERS_SHOWN_MAX] + more


def _foreign(text: str) -> Markup:
    """Return foreign text: apart from what is around it in its direction, with invisible characters as escapes."""
    found = visible(text, keep="\n\t")
    whole = len(found) <= LINE_CHARACTERS_MAX and "\n" not in found
    return Markup('<bdi class="line">{}</bdi>' if whole else "<bdi>{}</bdi>").format(found)


def _bytes_text(value: bytes) -> str:
    """Return bytes as text if they are UTF-8, and else in hexadecimal, as PostgreSQL prints them."""
    cut = value[:BYTES_SHOWN_MAX]
    more = f" … ({len(value):,} bytes)" if len(value) > len(cut) else ""
    try:
        return codecs.utf_8_decode(cut, "strict", not more)[0] + more  # the cut may be inside a character
    except UnicodeDecodeError:
        return f"\\x{cut.hex()}{more}"


FILTERS: dict[str, Callable[..., Any]] = {
    "shown": shown, "number": number, "size": size, "seconds": seconds, "rate": rate, "instant": instant,
    "exact": exact, "latency": latency,
}  # fmt: skip
