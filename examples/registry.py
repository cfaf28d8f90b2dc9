"""Enrichment by a device registry: each reading gets the hall and the maker of its device, from an ordinary SQL table.

    psql "$MILLPY_DATABASE_URL" -f examples/data/registry.sql
    millpy run examples/registry.py
    millpy sql "SELECT hall, readings, hottest FROM machines.halls ORDER BY hall"

The readings of a device that the table does not have are in `millpy.dead_letters`. `millpy dead-letters replay --all`
and a worker take them once its row is there. (On a live feed they then amend their hour, if it has `allowed_lateness`;
the hours of a file are over when it ends, so they are in `millpy.late_records`.)
"""

from datetime import datetime
from pathlib import Path

import msgspec

from millpy import Count, EventTime, File, FixedWindows, Graph, Max, hours, seconds


class Reading(msgspec.Struct):
    device: str
    at: datetime
    temperature: float


class Device(msgspec.Struct):
    device: str
    hall: str
    maker: str | None


graph = Graph("machines")
readings = graph.inject(
    "readings",
    File(Path(__file__).parent / "data/machines.ndjson"),
    schema=Reading,
    event_time=EventTime("at", max_disorder=seconds(10)),
)
known = readings.lookup(
    table="plant_registry.devices",
    row=Device,
    key="device",
    refresh=seconds(30),
    missing="dead_letter",
    name="known",
)
known.key_by("hall").window(FixedWindows(hours(1))).aggregate(readings=Count(), hottest=Max("temperature")).to_table(
    "halls"
)
