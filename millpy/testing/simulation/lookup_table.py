"""The SQL table that a lookup behind the source reads, and its contents, which change during a run."""

from __future__ import annotations

import json
from datetime import timedelta

import msgspec

from millpy.graph.streams import Stream
from millpy.store.memory.store import MemoryDatabase

TABLE = "public.devices"
LOOKED_UP = "known"
"""The name of the step, and of its result table."""
CONTENTS = 40
"""The number of contents, from 0; only tables up to this one are made."""
NUMBERED = 10
"""A row has the number of the content, times this, plus the number of its device."""


class ListedDevice(msgspec.Struct, frozen=True):
    """A row of the table."""

    device: str
    hall: int


def add_lookup(readings: Stream) -> None:
    """Look readings up by device, with the result in a table."""
    refresh = timedelta(milliseconds=200)
    readings.lookup(TABLE, ListedDevice, key="device", refresh=refresh, name=LOOKED_UP, intervals=2).to_table(LOOKED_UP)


def hall_of(content: int, device: str) -> int | None:
    """Return the value of a device in a content of the table; None if it has no row."""
    number = int(device[1:])
    return None if content % 6 == number else content * NUMBERED + number


def put_table(database: MemoryDatabase, content: int, devices: int) -> None:
    """Give the table a content."""
    halls = {f"d{number}": hall_of(content, f"d{number}") for number in range(devices)}
    rows = [json.dumps({"device": device, "hall": hall}) for device, hall in halls.items() if hall is not None]
    database.lookup_tables[TABLE] = "\n".join(rows).encode()
