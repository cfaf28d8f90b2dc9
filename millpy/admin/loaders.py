"""Loaders for values of PostgreSQL that Python lacks: infinite times, years after 9999, hour 24, long intervals.

Times are texts, as the server prints them, of a class that knows their RFC 3339 form. Ranges are texts, too.
"""

from __future__ import annotations

import re
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import psycopg
from psycopg.types.datetime import IntervalLoader
from psycopg.types.string import TextLoader

if TYPE_CHECKING:
    from psycopg.abc import Buffer

TIMES = ("date", "time", "timetz", "timestamp", "timestamptz")
RANGES = ("int4", "int8", "num", "date", "ts", "tstz")
_INSTANT = re.compile(r"(\d{4}-\d\d-\d\d) (\d\d:\d\d:\d\d(?:\.\d+)?)(\+00)?")


class TimeText(str):
    """A date or time as the server prints it."""

    __slots__ = ()

    def rfc3339(self) -> str:
        """Return the time as RFC 3339; unchanged what has no such form, as `infinity` and years after 9999."""
        found = _INSTANT.fullmatch(self)
        return f"{found[1]}T{found[2]}{'Z' if found[3] else ''}" if found else str(self)


def utc_text(time: str) -> str:
    """Return a time that the server printed in UTC with Z instead of +00; other text unchanged."""
    return f"{time[:-3]}Z" if time.endswith("+00") and _INSTANT.fullmatch(time) else time


def load_any_value(connection: psycopg.Connection[Any]) -> None:
    """Register the loaders for a connection, whose time zone is UTC."""
    for name in TIMES:
        connection.adapters.register_loader(name, _TimeLoader)
    for name in RANGES:
        connection.adapters.register_loader(f"{name}range", TextLoader)
        connection.adapters.register_loader(f"{name}multirange", TextLoader)
    connection.adapters.register_loader("interval", _AnyInterval)


class _TimeLoader(TextLoader):
    def load(self, data: Buffer) -> str:
        return TimeText(bytes(data).decode())


class _AnyInterval(IntervalLoader):
    def load(self, data: Buffer) -> Any:
        try:
            found: timedelta = super().load(data)
        except (psycopg.DataError, OverflowError):
            return bytes(data).decode()
        return found
