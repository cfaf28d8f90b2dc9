"""Durations as people write and read them: `30m`, `1h30m`, `20 d 17 h`; the parser and printer of all commands."""

from __future__ import annotations

import re
from datetime import timedelta

EXAMPLES = "90s, 30m, 2h, 1h30m, 7d"
_UNITS_US = {
    "us": 1, "µs": 1, "ms": 1_000, "s": 1_000_000, "sec": 1_000_000, "m": 60_000_000, "min": 60_000_000,
    "h": 3_600_000_000, "d": 86_400_000_000, "w": 604_800_000_000,
}  # fmt: skip
_PRINTED = (("d", 86_400_000_000), ("h", 3_600_000_000), ("min", 60_000_000))
_PART = re.compile(r"\s*(\d{1,12}(?:\.\d{1,12})?)\s*([a-zµ]+)\s*", re.ASCII | re.IGNORECASE)
_SECONDS = re.compile(r"\d{1,12}(?:\.\d{1,12})?", re.ASCII)


def parse_duration(text: str) -> timedelta:
    """Return a duration written as numbers with units, the greatest unit first; a bare number is seconds.

    Args:
        text: for example `90s`, `30m`, `1.5h`, `1h30m`, `20 d 17 h`, `2w`, `500ms` or `45`.

    Raises:
        ValueError: the text is no duration, or one of more than 999,999,999 days.
    """
    bare = text.strip()
    if _SECONDS.fullmatch(bare):
        bare += "s"
    at, total_us, last_us = 0, 0.0, 0
    while at < len(bare) and (part := _PART.match(bare, at)):
        unit_us = _UNITS_US.get(part[2].lower(), 0)
        if not unit_us or (last_us and unit_us >= last_us):
            break
        total_us += float(part[1]) * unit_us
        at, last_us = part.end(), unit_us
    if not bare or at < len(bare):
        raise ValueError(f"{text!r} is not a duration")
    try:
        return timedelta(microseconds=total_us)
    except OverflowError:
        raise ValueError(f"{text!r} is too long a duration") from None


def format_duration(duration: timedelta | float, *, exact: bool = False) -> str:
    """Return a duration as people read it: `0.4 s`, `45 s`, `3 min 20 s`, `20 d 17 h`.

    Args:
        duration: a duration, or seconds.
        exact: whether all units are printed, down to microseconds. Otherwise there are two, and the rest is cut off.
    """
    if not isinstance(duration, timedelta):
        duration = timedelta(seconds=float(duration))
    if duration < timedelta(0):
        positive = format_duration(-duration, exact=exact)
        return positive if positive == "0 s" else f"-{positive}"
    rest_us = duration // timedelta(microseconds=1)
    parts: list[tuple[int | str, str]] = []
    for unit, unit_us in _PRINTED:
        count, rest_us = divmod(rest_us, unit_us)
        if count or (parts and not exact):
            parts.append((count, unit))
    if exact:
        if rest_us or not parts:
            parts.append((_seconds(rest_us, 6), "s"))
    elif not parts:
        digits = 1 if rest_us >= 10_000_000 else 3
        parts.append((_seconds(rest_us, digits), "s"))
    elif len(parts) == 1:
        parts.append((rest_us // 1_000_000, "s"))
    shown = parts if exact else parts[:2]
    if len(shown) == 2 and shown[1][0] == 0:
        shown = shown[:1]
    return " ".join(f"{count} {unit}" for count, unit in shown)


def format_latency(seconds: float) -> str:
    """Return a short duration in milliseconds with two digits that count: `0.42 ms`, `12 ms`, `1200 ms`."""
    return f"{float(format(seconds * 1_000, '.2g')):.10g} ms"


def _seconds(microseconds: int, digits: int) -> str:
    step = 10 ** (6 - digits)
    whole, part = divmod(microseconds // step, 10**digits)
    return f"{whole}.{part:0{digits}d}".rstrip("0").rstrip(".") if digits else str(whole)
