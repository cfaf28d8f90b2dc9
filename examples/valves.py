"""Opens the inlet of a tank below 200 liters and closes it above 800, by commands to its valve over MQTT.

MILLPY_MQTT_URL=mqtt://localhost:1883 millpy run examples/valves.py
MILLPY_MQTT_URL=mqtt://localhost:1883 python examples/valve.py positions.json
"""

from datetime import datetime
from pathlib import Path

import msgspec

from millpy import Computation, Context, EventTime, File, Graph, Value, seconds

LOW, HIGH = 200.0, 800.0


class Level(msgspec.Struct):
    tank: str
    at: datetime
    liters: float


class Command(msgspec.Struct):
    tank: str
    at: datetime
    open: bool


class Valves(Computation):
    """One command whenever the valve must move."""

    is_open = Value(bool, default=False)

    def process_record(self, context: Context, level: Level) -> None:
        was_open = context[Valves.is_open]
        wanted = level.liters < LOW if not was_open else level.liters <= HIGH
        if wanted != was_open:
            context[Valves.is_open] = wanted
            context.produce(Command(level.tank, level.at, wanted))


graph = Graph("valves")
levels = graph.inject(
    "levels",
    File(Path(__file__).parent / "data" / "levels.ndjson"),
    schema=Level,
    event_time=EventTime("at", max_disorder=seconds(5)),
)
commands = levels.key_by("tank").in_order(name="in_order").process(Valves(), name="valves", output=Command)
commands.to_mqtt("valves/{tank}", key="tank", name="to_valves", retain=True)
