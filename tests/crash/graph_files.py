"""Files of one graph in a directory with a feed, for workers and commands of several versions."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import psycopg

from tests.forked import ForkedProcess

DEVICES = 5
MIDDLE, END = 90, 240
"""In seconds: the change comes in the middle of the second minute."""


class Reading(msgspec.Struct):
    device: str
    at: int
    value: int


def reading(device: int, at: int) -> bytes:
    return msgspec.json.encode(Reading(f"d{device}", at, at * 10 + device))


def feed_of(*spans: tuple[int, int]) -> list[bytes]:
    return [reading(device, at) for start, end in spans for at in range(start, end) for device in range(DEVICES)]


def rows(url: str, query: str) -> list[tuple[Any, ...]]:
    with psycopg.connect(url, autocommit=True) as connection:
        return connection.execute(query).fetchall()  # type: ignore[call-overload]


def one(url: str, query: str) -> Any:
    return rows(url, query)[0][0]


def forgotten(url: str, table: str) -> list[tuple[Any, ...]]:
    """Return the rows that only a table or only its history has, and windows that have two panes there."""
    here, there = f"SELECT * FROM {table}", f"SELECT * FROM millpy.as_of(NULL::{table}, now())"
    twice = f"SELECT device, window_start FROM {table}_history GROUP BY 1, 2 HAVING count(*) > 1"
    return rows(url, f"({here} EXCEPT {there}) UNION ALL ({there} EXCEPT {here})") + rows(url, twice)


def sums(start: int, end: int, from_s: int = 0) -> list[tuple[str, int, int]]:
    """(device, n, total) of a window, of what came from a second on."""
    found = []
    for device in range(DEVICES):
        values = [at * 10 + device for at in range(max(start, from_s), min(end, END))]
        found.append((f"d{device}", len(values), sum(values)))
    return found


SOURCE = """
import msgspec
from datetime import timedelta
from pathlib import Path
from typing import Any
from millpy import *

class Reading(msgspec.Struct):
    device: str
    at: int
    value: int

graph = Graph("factory")
source = graph.inject(
    "readings", Directory("feed", settle=timedelta(0), every=timedelta(seconds=0.05)), schema=Reading,
    event_time=EventTime("at", unit="s", sorted=True),
)
"""
GRAPH = (
    SOURCE
    + """
keyed = source.key_by("device")
keyed.window(FixedWindows(minutes(1))).aggregate(n=Count(), total=Sum("value")).to_table("minutes", history=True)
"""
)
EVERY_MINUTE = """
SELECT device, n, total::int8 FROM factory.minutes WHERE window_start < to_timestamp(240) ORDER BY window_start, device
"""


def drop(place: Path, start: int, end: int) -> None:
    """More of the feed."""
    hidden = place / f".{start:06}.ndjson"
    hidden.write_bytes(b"".join(line + b"\n" for line in feed_of((start, end))))
    hidden.rename(place / "feed" / f"{start:06}.ndjson")


def done(process: ForkedProcess) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=60)
    assert process.returncode is not None
    return process.returncode, out, err


def consumed(url: str, count: int) -> Callable[[], bool]:
    query = "SELECT coalesce(sum(consumed), 0) FROM millpy.accounting WHERE consumer = 'minutes'"
    return lambda: one(url, "SELECT count(*) FROM mill.graphs") == 1 and one(url, query) == count
