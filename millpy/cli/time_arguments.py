"""Times on the command line: a time with its zone, or how long ago."""

from __future__ import annotations

import re
from datetime import UTC, datetime

from millpy.clock import Clock
from millpy.config.durations import parse_duration
from millpy.errors import UsageError

HINT = "for example 2026-11-20T08:00:00Z, or how long ago: 90s, 10m, 2h, 7d"
_AGO = re.compile(r"[\d. ]+[a-zµ].*", re.ASCII | re.IGNORECASE)


def moment(option: str, text: str, clock: Clock) -> str:
    """Return the time of an option as ISO 8601 in UTC; empty for empty text.

    Raises:
        UsageError: the text is neither a time with its zone nor how long ago.
    """
    if not text:
        return ""
    now = datetime.fromtimestamp(clock.now_us() / 1e6, UTC)
    try:
        found = now - parse_duration(text) if _AGO.fullmatch(text) else datetime.fromisoformat(text)
    except (ValueError, OverflowError):
        raise UsageError(f"{option} {text!r} is not a time", hint=HINT) from None
    if found.tzinfo is None:
        raise UsageError(f"{option} {text!r} has no zone", hint=HINT)
    return found.astimezone(UTC).isoformat()
