"""How a transcript writes durations and times.

duration   90s, 1m30s, 250ms, 2h, 1d; units are us, ms, s, m, h, d
time       a duration after the transcript's origin (10s, -5s), or ISO 8601 with a zone (2026-11-20T08:00:00Z)
"""

from __future__ import annotations

import re
from datetime import datetime
from fractions import Fraction

from millpy.errors import UsageError
from millpy.model.time import INSTANT_MAX, INSTANT_MIN, YEARS_HI, YEARS_LO, Instant, instant, to_datetime

UNITS = {"d": 86_400_000_000, "h": 3_600_000_000, "m": 60_000_000, "s": 1_000_000, "ms": 1_000, "us": 1}
_PART = r"([0-9]{1,18}(?:\.[0-9]{1,9})?)(us|ms|s|m|h|d)"
_DURATION = re.compile(rf"-?(?:{_PART})+")
_HINT = "write a duration such as 90s, 1m30s or 250ms; units are us, ms, s, m, h, d"


def duration_us(text: str, what: str) -> int:
    """Return a duration in µs.

    Raises:
        UsageError: the text is no duration, or not a whole number of µs.
    """
    if not _DURATION.fullmatch(text):
        raise UsageError(f"{what}: {text!r} is not a duration", hint=_HINT)
    total = sum(Fraction(number) * UNITS[unit] for number, unit in re.findall(_PART, text))
    if total.denominator != 1 or total > INSTANT_MAX:
        raise UsageError(f"{what}: {text!r} is not a whole number of µs, or too long", hint=_HINT)
    return -int(total) if text.startswith("-") else int(total)


def time_us(text: str, origin: Instant, what: str) -> Instant:
    """Return a time between the years 1 and 9999 in µs since the epoch.

    Raises:
        UsageError: the text is no time.
    """
    if _DURATION.fullmatch(text):
        at = origin + duration_us(text, what)
    else:
        at = _iso_us(text, what)
    if not YEARS_LO <= at <= YEARS_HI:
        raise UsageError(f"{what}: {text!r} is outside the years 1 to 9999")
    return Instant(at)


def watermark_us(text: str, origin: Instant, what: str) -> Instant:
    """Return an expected watermark: a time, `beginning` or `end`."""
    named = {"beginning": INSTANT_MIN, "end": INSTANT_MAX}
    return named[text] if text in named else time_us(text, origin, what)


def time_text(at: int, origin: Instant) -> str:
    """Write a time: as a duration after the origin if it is within 100 days of it, else in ISO 8601."""
    if at <= INSTANT_MIN:
        return "beginning"
    if at >= INSTANT_MAX:
        return "end"
    after = at - origin
    if abs(after) > 100 * UNITS["d"]:
        return to_datetime(Instant(at)).isoformat().replace("+00:00", "Z")
    text = "-" if after < 0 else ""
    rest = abs(after)
    for unit, size in UNITS.items():
        number, rest = divmod(rest, size)
        if number:
            text += f"{number}{unit}"
    return text or "0s"


def _iso_us(text: str, what: str) -> Instant:
    hint = "write a time as a duration after the origin (10s), or in ISO 8601 with its zone (2026-11-20T08:00:00Z)"
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        raise UsageError(f"{what}: {text!r} is not a time", hint=hint) from None
    if found.tzinfo is None:
        raise UsageError(f"{what}: {text!r} has no time zone", hint=hint)
    return instant(found)
