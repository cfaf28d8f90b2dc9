"""The plant's graph: a source for each dialect, half hours of all devices, and gateways that fall silent.

Its file is what an operator edits: `PLANT_SETTINGS` names a file with what changes in the course of the day.
"""

from __future__ import annotations

import json
import os
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import msgspec

from millpy import (
    Cbor,
    Count,
    Csv,
    Dedupe,
    EventTime,
    FixedWindows,
    Graph,
    Gzip,
    Json,
    LineProtocol,
    Max,
    MessagePack,
    Min,
    Mqtt,
    Sum,
    hours,
    minutes,
)

SETTINGS: dict[str, Any] = json.loads(Path(os.environ["PLANT_SETTINGS"]).read_text())
DISORDER, WINDOW = minutes(15), FixedWindows(minutes(30))
WITHIN = hours(1)
INTERVALS = 4


class Dated(msgspec.Struct):
    device: str
    at: datetime
    value: float


class Numbered(msgspec.Struct):
    device: str
    at: int
    value: float


class Counted(msgspec.Struct):
    device: str
    at: float
    value: float


class Relayed(msgspec.Struct):
    gateway: str
    device: str
    at: int
    value: float


class Sample(msgspec.Struct):
    device: str
    value: float


def mqtt(*filters: str, format: Any) -> Mqtt:
    return Mqtt(*filters, host="127.0.0.1", port=SETTINGS["port"], format=format)


def inject(name: str, source: Mqtt, schema: Any, **time: Any) -> Any:
    event_time = EventTime("at", max_disorder=DISORDER, **time)
    return graph.inject(
        name, source, schema=schema, event_time=event_time, dedupe=Dedupe("device", "at", within=WITHIN)
    )


def sample(batch: Any) -> Any:
    return {"device": batch["device"], "value": batch["value"]}


graph = Graph("plant")
halls = [f"zigbee2mqtt/{hall}/{{device}}" for hall in SETTINGS["halls"]]
sources = [
    inject("zigbee", mqtt(*halls, format=Json(fields={"at": "last_seen", "value": "temperature"})), Dated),
    inject(
        "tasmota",
        mqtt("tele/{device}/SENSOR", format=Json(fields={"at": "Time", "value": "AM2301.Temperature"})),
        Dated,
        zone="Europe/Berlin",
    ),
    inject(
        "shelly",
        mqtt(
            "shellies/+/events/rpc",
            format=Json(path="params", envelope={"device": "src"}, fields={"at": "ts", "value": "switch:0.apower"}),
        ),
        Counted,
        unit="s",
    ),
    inject(
        "chirpstack",
        mqtt(
            "application/+/device/+/event/up",
            format=Json(
                path="object",
                envelope={"device": "deviceInfo.devEui", "at": "time"},
                fields={"value": "temperature"},
            ),
        ),
        Dated,
    ),
    inject(
        "tts",
        mqtt(
            "v3/+/devices/{device}/up",
            format=Json(
                path="uplink_message.decoded_payload",
                envelope={"at": "received_at"},
                fields={"value": "temperature"},
            ),
        ),
        Dated,
    ),
    inject(
        "telegraf",
        mqtt(
            "telegraf/+/opcua",
            format=Json(many="metrics", fields={"device": "tags.machine", "at": "timestamp", "value": "fields.temp"}),
        ),
        Numbered,
        unit="s",
    ),
    inject("line", mqtt("lines/+/climate", format=LineProtocol(time="at")), Dated),
    inject(
        "opcua",
        mqtt(
            "opcua/json/data/#",
            format=Json(
                many="Messages",
                fields={"device": "DataSetWriterName", "at": "Timestamp", "value": "Payload.Temperature.Value"},
            ),
        ),
        Dated,
    ),
    inject(
        "csv",
        mqtt(
            "scada/+",
            format=Csv(
                delimiter=";",
                decimal=",",
                encoding="cp1252",
                rename={"Zeitstempel": "at", "Messstelle": "device", "Füllstand [m³]": "value"},
            ),
        ),
        Dated,
        zone="Europe/Berlin",
        format="%d.%m.%Y %H:%M:%S",
    ),
    inject("msgpack", mqtt("packed/+", format=MessagePack()), Numbered, unit="s"),
    inject(
        "cbor",
        mqtt("cbor/+", format=Cbor(Json(many="r", fields={"device": "d", "value": "v"}))),
        Numbered,
        unit="ms",
    ),
]
gateways = inject(
    "gateways",
    mqtt("gateways/+/readings", format=Gzip(Json(many="readings", envelope={"gateway": "gateway"}))),
    Relayed,
    unit="ms",
)
gateways.key_by("gateway").silent_after(minutes(30), name="silences", intervals=1).to_table("silences")


def half_hours(stream: Any, table: str, lateness: timedelta) -> None:
    windows = stream.key_by("device").window(WINDOW, allowed_lateness=lateness, intervals=INTERVALS)
    windows.aggregate(n=Count(), total=Sum("value"), low=Min("value"), high=Max("value")).to_table(table)


first, *others = [source.map(sample, Sample, columns=True) for source in sources]
half_hours(first.union(*others), "devices", hours(1))
half_hours(gateways.map(sample, Sample, columns=True), "relayed", hours(SETTINGS["relayed_lateness_h"]))
