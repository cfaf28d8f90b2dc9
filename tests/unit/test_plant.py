"""The day in the plant without its machines: its dialects through the test kit give what its oracle says."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterable
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from millpy.formats import Message
from millpy.testing import GraphDriver
from tests.plant import oracle
from tests.plant.dialects import messages
from tests.plant.disturbances import TOLD_S_MAX, Outcome
from tests.plant.fleet import DIALECTS, Device, Options, Reading, closers, readings_of

GRAPH = Path(oracle.__file__).with_name("graph.py")
DEVICES = 2 * len(DIALECTS)
FROM_TOPICS: dict[str, Callable[[list[str]], str]] = {
    "zigbee": lambda levels: levels[2], "tasmota": lambda levels: levels[1], "tts": lambda levels: levels[3],
}  # fmt: skip
"""Dialects whose device is in the topic, which the source itself adds to a record."""


def message(dialect: str, topic: str, payload: bytes) -> Message:
    device = FROM_TOPICS.get(dialect, lambda _: "")(topic.split("/"))
    return Message(payload, topic, ending=b',"device":"%b"}' % device.encode() if device else b"")


def rows(driver: GraphDriver, table: str) -> oracle.Rows:
    return {
        (row["device"], int(row["window_start"].timestamp())): (row["n"], row["total"], row["low"], row["high"])
        for row in driver.rows(table)
    }


def test_every_dialect_gives_the_windows_of_the_oracle(
    graph_driver: Callable[[Any], GraphDriver], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = tmp_path / "settings.json"
    settings.write_text(json.dumps({"port": 1, "halls": ["hall1"], "relayed_lateness_h": 2}))
    monkeypatch.setenv("PLANT_SETTINGS", str(settings))
    options = Options(DEVICES, 2 * 3_600, int(datetime.fromisoformat("2026-03-02T00:00:00Z").timestamp()))
    driver = graph_driver(str(GRAPH))
    of_dialect: dict[str, list[Reading]] = defaultdict(list)
    for device in options.fleet:
        of_dialect[device.dialect] += [each for each in readings_of(device, options) if not each.bad]

    for dialect, readings in of_dialect.items():
        sent = sorted(readings, key=lambda reading: reading.at)
        closing = [reading for reading in closers(options) if reading.device.dialect == dialect]
        stream = "gateways" if dialect == "gateway" else dialect
        for some in (sent, closing):
            driver.feed(stream, [message(dialect, *each) for each in messages(some)])

    expected = oracle.expected(options, corrected=False)
    assert of_dialect.keys() == set(DIALECTS)
    assert driver.dead_letters() == []
    assert {table: rows(driver, table) for table in expected} == expected


def test_bad_firmware_sends_what_is_no_number() -> None:
    ((_, payload),) = messages([Reading(a_device("tts"), 0, 21.5, bad=True)])

    assert json.loads(payload)["uplink_message"]["decoded_payload"] == {"temperature": "ERR 21.5"}


def test_late_and_missing_signs_are_faults() -> None:
    outcome = Outcome("broker", {"status": 1.0, "events": TOLD_S_MAX + 1, "metrics": None})

    assert outcome.faults() == ["broker: events only after 11.0 s", "broker: metrics never"]


def test_oracle_counts_bad_values_only_when_they_are_corrected() -> None:
    def count(tables: dict[str, oracle.Rows]) -> int:
        return sum(n for rows in tables.values() for n, *_ in rows.values())

    options = Options(DEVICES, 600, 0)
    bad = sum(reading.bad for device in options.fleet for reading in readings_of(device, options))

    assert count(oracle.expected(options, corrected=True)) - count(oracle.expected(options, corrected=False)) == bad > 0


def a_device(dialect: str) -> Device:
    devices: Iterable[Device] = Options(DEVICES).fleet
    return next(device for device in devices if device.dialect == dialect)
