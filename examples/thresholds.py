"""Threshold rules from a table: a row changed in SQL changes what is an alarm, within a second and without deployment.

    psql "$MILLPY_DATABASE_URL" -f examples/data/registry.sql
    millpy run examples/thresholds.py
    millpy sql "SELECT rule, device, temperature FROM thresholds.alarms ORDER BY at LIMIT 5"

On a live feed, change the rules meanwhile: UPDATE plant_registry.thresholds SET above = 80 WHERE name = 'overheated'
"""

from datetime import datetime
from pathlib import Path

import msgspec

from millpy import Computation, Context, EventTime, File, Graph, LookupTable, seconds


class Reading(msgspec.Struct):
    device: str
    at: datetime
    temperature: float


class Threshold(msgspec.Struct, frozen=True):
    name: str
    device: str | None
    above: float


class Alarm(msgspec.Struct):
    rule: str
    device: str
    at: datetime
    temperature: float


class Thresholds(Computation):
    """Compares each reading with every rule."""

    rules = LookupTable("plant_registry.thresholds", Threshold, key="name", refresh=seconds(1))

    def process_record(self, context: Context, reading: Reading) -> None:
        for rule in context.table(Thresholds.rules).values():
            if rule.device in (None, reading.device) and reading.temperature > rule.above:
                context.produce(Alarm(rule.name, reading.device, reading.at, reading.temperature))


graph = Graph("thresholds")
(
    graph.inject(
        "readings",
        File(Path(__file__).parent / "data/machines.ndjson"),
        schema=Reading,
        event_time=EventTime("at", max_disorder=seconds(10)),
    )
    .key_by("device")
    .process(Thresholds(), name="check", output=Alarm)
    .to_table("alarms")
)
