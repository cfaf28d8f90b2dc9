"""What the result tables must be: plain loops over what the devices have measured. It imports nothing of millpy.

A value of a bad firmware counts only once somebody has corrected it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import psycopg

from tests.plant.fleet import Options, Reading, readings_of

WINDOW_S = 1_800
Row = tuple[int, float, float, float]
Rows = dict[tuple[str, int], Row]
"""(device, beginning of the window in seconds) -> number, sum, least and greatest value."""


def windows(readings: Iterable[Reading]) -> Rows:
    """Return the windows of some readings."""
    found: Rows = {}
    for reading in readings:
        key = (reading.device.name, reading.at // WINDOW_S * WINDOW_S)
        n, total, low, high = found.get(key, (0, 0.0, reading.value, reading.value))
        found[key] = (n + 1, total + reading.value, min(low, reading.value), max(high, reading.value))
    return found


def expected(options: Options, *, corrected: bool) -> dict[str, Rows]:
    """Return the rows of each result table, by its name, once the day is over."""
    devices: list[Reading] = []
    relayed: list[Reading] = []
    for device in options.fleet:
        kept = [reading for reading in readings_of(device, options) if corrected or not reading.bad]
        (relayed if device.dialect == "gateway" else devices).extend(kept)
    return {"devices": windows(devices), "relayed": windows(relayed)}


def stored(connection: psycopg.Connection, table: str) -> Rows:
    """Return the rows of a result table of the graph `plant`."""
    query = f"SELECT device, extract(epoch FROM window_start)::bigint, n, total, low, high FROM plant.{table}"
    return {(device, start): (n, total, low, high) for device, start, n, total, low, high in connection.execute(query)}


def differences(url: str, tables: Mapping[str, Rows]) -> list[str]:
    """Return each row that is missing, too much, or different, as text."""
    found = []
    with psycopg.connect(url, autocommit=True) as connection:
        for table, rows in tables.items():
            there = stored(connection, table)
            for key in sorted(rows.keys() | there.keys()):
                if rows.get(key) != there.get(key):
                    found.append(f"{table} {key}: expected {rows.get(key)}, is {there.get(key)}")
    return found
