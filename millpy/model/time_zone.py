"""Time zones of the IANA database, by name."""

from __future__ import annotations

import difflib
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError, available_timezones

from millpy.errors import GraphError

_MACHINE_ZONES = ("localtime", "posixrules")


def time_zone(name: object) -> ZoneInfo:
    """Return a time zone by its name in the IANA database.

    Raises:
        GraphError: the zone is unknown, or this machine has no tz database.
    """
    example = 'for example zone="Europe/Berlin"'
    if not isinstance(name, str) or not name:
        raise GraphError(f"zone must be the name of a time zone, not {name!r}", hint=example)
    if name in _MACHINE_ZONES:
        raise GraphError(f"{name!r} is another zone on each machine", hint=example)
    try:
        return ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError, OSError):
        known = available_timezones()
    if not known:
        raise GraphError("this machine has no tz database", hint="install one: pip install tzdata")
    close = difflib.get_close_matches(name, known, 1, 0.7)
    raise GraphError(f"unknown time zone {name!r}", hint=f'for example zone="{close[0]}"' if close else example)
