"""How each dialect writes its readings: topics and payloads as the devices' own software makes them.

Nothing here is millpy's: the payloads are what `docs/payloads.md` shows, written by hand or by independent libraries.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime

import cbor2
import msgpack

from tests.plant.fleet import BERLIN, SINGLE, Reading, describe

Message = tuple[str, bytes]
READINGS_OF_MESSAGE_MAX = 400


def _json(value: object) -> bytes:
    return json.dumps(value).encode()


def _zigbee(reading: Reading) -> Message:
    payload = {"battery": 100, "last_seen": describe(reading.at), "linkquality": 120, "temperature": reading.value}
    return f"zigbee2mqtt/{reading.device.place}/{reading.device.name}", _json(payload)


def _tasmota(reading: Reading) -> Message:
    local = datetime.fromtimestamp(reading.at, UTC).astimezone(BERLIN).strftime("%Y-%m-%dT%H:%M:%S")
    sensor = {"Temperature": reading.value, "Humidity": 53.2}
    return f"tele/{reading.device.name}/SENSOR", _json({"Time": local, "AM2301": sensor, "TempUnit": "C"})


def _shelly(reading: Reading) -> Message:
    switch = {"id": 0, "apower": reading.value, "voltage": 230.1}
    told = {
        "src": reading.device.name,
        "dst": "hall/events",
        "method": "NotifyStatus",
        "params": {"ts": float(reading.at), "switch:0": switch},
    }
    return f"shellies/{reading.device.name}/events/rpc", _json(told)


def _chirpstack(reading: Reading) -> Message:
    name = reading.device.name
    uplink = {
        "time": describe(reading.at),
        "deviceInfo": {"tenantName": "plant", "deviceName": "Tank", "devEui": name},
        "fPort": 1,
        "data": "qg==",
        "object": {"temperature": reading.value},
        "rxInfo": [{"gatewayId": "0016c001f153a14c", "rssi": -57, "snr": 10}],
    }
    return f"application/7/device/{name}/event/up", _json(uplink)


def tts_payload(reading: Reading, value: object) -> bytes:
    """Return an uplink of The Things Stack, with any value."""
    uplink = {
        "end_device_ids": {"device_id": reading.device.name, "application_ids": {"application_id": "app1"}},
        "received_at": describe(reading.at),
        "uplink_message": {"f_port": 1, "decoded_payload": {"temperature": value}},
    }
    return _json(uplink)


def _tts(reading: Reading) -> Message:
    value = f"ERR {reading.value}" if reading.bad else reading.value
    return f"v3/app1@plant/devices/{reading.device.name}/up", tts_payload(reading, value)


def _telegraf(gateway: str, readings: Sequence[Reading]) -> Message:
    metrics = [
        {
            "fields": {"temp": reading.value, "rpm": 1_200},
            "name": "opcua",
            "tags": {"host": gateway, "machine": reading.device.name},
            "timestamp": reading.at,
        }
        for reading in readings
    ]
    return f"telegraf/{gateway}/opcua", _json({"metrics": metrics})


def _line(gateway: str, readings: Sequence[Reading]) -> Message:
    lines = (
        f"climate,device={reading.device.name},host={gateway} value={reading.value},cores=8i {reading.at}000000000"
        for reading in readings
    )
    return f"lines/{gateway}/climate", "\n".join(lines).encode()


def _opcua(gateway: str, readings: Sequence[Reading]) -> Message:
    messages = [
        {
            "DataSetWriterName": reading.device.name,
            "SequenceNumber": number,
            "Timestamp": describe(reading.at),
            "Payload": {"Temperature": {"Value": reading.value}},
        }
        for number, reading in enumerate(readings)
    ]
    network = {"MessageId": "32235546", "MessageType": "ua-data", "PublisherId": gateway, "Messages": messages}
    return f"opcua/json/data/{gateway}", _json(network)


def _csv(gateway: str, readings: Sequence[Reading]) -> Message:
    lines = ["Zeitstempel;Messstelle;Füllstand [m³];Status"]
    for reading in readings:
        local = datetime.fromtimestamp(reading.at, UTC).astimezone(BERLIN).strftime("%d.%m.%Y %H:%M:%S")
        lines.append(f"{local};{reading.device.name};{str(reading.value).replace('.', ',')};gut")
    return f"scada/{gateway}", ("\r\n".join(lines) + "\r\n").encode("cp1252")


def _msgpack(gateway: str, readings: Sequence[Reading]) -> Message:
    maps = [{"device": reading.device.name, "at": reading.at, "value": reading.value} for reading in readings]
    return f"packed/{gateway}", msgpack.packb(maps)


def _cbor(gateway: str, readings: Sequence[Reading]) -> Message:
    inside = [{"d": reading.device.name, "at": reading.at * 1_000, "v": reading.value} for reading in readings]
    return f"cbor/{gateway}", cbor2.dumps({"g": gateway, "r": inside})


def _gateway(gateway: str, readings: Sequence[Reading]) -> Message:
    inside = [{"device": reading.device.name, "at": reading.at * 1_000, "value": reading.value} for reading in readings]
    payload = _json({"gateway": gateway, "sent": readings[-1].at, "readings": inside})
    return f"gateways/{gateway}/readings", gzip.compress(payload, compresslevel=1, mtime=0)


_OF_ONE: dict[str, Callable[[Reading], Message]] = {
    "zigbee": _zigbee, "tasmota": _tasmota, "shelly": _shelly, "chirpstack": _chirpstack, "tts": _tts,
}  # fmt: skip
_OF_MANY: dict[str, Callable[[str, Sequence[Reading]], Message]] = {
    "telegraf": _telegraf, "line": _line, "opcua": _opcua, "csv": _csv, "msgpack": _msgpack, "cbor": _cbor,
    "gateway": _gateway,
}  # fmt: skip


def messages(readings: Sequence[Reading]) -> Iterator[Message]:
    """Yield the messages that carry some readings, those of a gateway together."""
    collected: dict[tuple[str, str], list[Reading]] = {}
    for reading in readings:
        device = reading.device
        if device.dialect in SINGLE:
            yield _OF_ONE[device.dialect](reading)
        else:
            collected.setdefault((device.dialect, device.gateway), []).append(reading)
    for (dialect, gateway), together in collected.items():
        for start in range(0, len(together), READINGS_OF_MESSAGE_MAX):
            yield _OF_MANY[dialect](gateway, together[start : start + READINGS_OF_MESSAGE_MAX])
