"""`millpy doctor GRAPH.py`: what it finds at real brokers, and of a topic's partitions."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner

from millpy import EventTime, Graph, Kafka, KafkaBrokers, Login, Mqtt, MqttSession, seconds
from millpy.admin.doctor_sources import examine_sources
from millpy.cli.app import app
from millpy.embedded import EmbeddedBroker, free_port
from millpy.model.finding import Finding, Severity
from millpy.sources.kafka.client import Client
from millpy.sources.kafka.topic_ids import TopicMetadata
from millpy.sources.mqtt.examination import COUNTS, DROPPED, STORED, _queues
from tests.conformance.guarded_broker import PASSWORD, GuardedBroker

GRAPH = """
import msgspec
from millpy import Count, EventTime, FixedWindows, Graph, Mqtt, seconds

class Reading(msgspec.Struct):
    device: str
    at: float

graph = Graph("plant")
source = Mqtt("sensors/+/reading", host="127.0.0.1", port=PORT)
event_time = EventTime("at", unit="s", max_disorder=seconds(1))
readings = graph.inject("readings", source, schema=Reading, event_time=event_time)
readings.key_by("device").window(FixedWindows(seconds(10))).aggregate(n=Count()).to_table("counts")
"""


class Reading(msgspec.Struct):
    device: str
    at: float


def plant(source: Mqtt | Kafka) -> Graph:
    graph = Graph("plant")
    graph.inject("readings", source, schema=Reading, event_time=EventTime("at", unit="s", max_disorder=seconds(1)))
    return graph


async def findings_of(source: Mqtt | Kafka) -> dict[str, Finding]:
    return {finding.check: finding for finding in await examine_sources(plant(source))}


def test_a_broker_that_answers_is_healthy_and_keeps_no_session(
    broker: EmbeddedBroker, tmp_path: Path, database_url: str
) -> None:
    file = tmp_path / "plant.py"
    file.write_text(GRAPH.replace("PORT", str(broker.port)))

    result = CliRunner().invoke(app, ["doctor", str(file), "--database", database_url])

    assert result.exit_code == 0, result.output
    assert f"at 127.0.0.1:{broker.port} allows sensors/+/reading" in result.output
    assert "broker queues" in result.output


async def test_guessable_names_and_open_brokers_are_reported(broker: EmbeddedBroker, tmp_path: Path) -> None:
    known = await findings_of(Mqtt("a", host="127.0.0.1", port=broker.port, session=MqttSession(client_id="plant")))
    unknown = await findings_of(Mqtt("a", host="127.0.0.1", port=broker.port))

    assert known["broker session"].severity is Severity.WARNING
    assert unknown["broker session"].severity is Severity.OK
    assert unknown["broker login"].severity is Severity.NOTE  # on this machine
    with GuardedBroker(tmp_path / "guarded") as guarded:
        mine = {"host": "127.0.0.1", "port": guarded.port, "login": Login("millpy", PASSWORD)}
        assert (await findings_of(Mqtt("sensors/#", **mine)))["broker login"].severity is Severity.OK


async def test_unreachable_broker_is_an_error_with_a_hint() -> None:
    finding = (await findings_of(Mqtt("a", host="127.0.0.1", port=free_port())))["broker"]

    assert finding.severity is Severity.ERROR
    assert "cannot connect to the MQTT broker" in finding.found
    assert finding.action


async def test_a_password_sent_in_clear_text_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MILLPY_MQTT_URL", f"mqtt://me:hunter2@192.0.2.1:{free_port()}")
    monkeypatch.setattr("millpy.sources.mqtt.connection._CONNECT_S_MAX", 0.05)  # an address without a host

    finding = (await findings_of(Mqtt("a")))["broker encryption"]

    assert finding.severity is Severity.WARNING
    assert "hunter2" not in str(finding)


@pytest.mark.parametrize(
    ("stored", "dropped", "severity"),
    [(b"7", b"0", Severity.OK), (b"7", b"3", Severity.NOTE), (b"", b"", Severity.NOTE)],
)
def test_counts_of_a_broker_are_explained(stored: bytes, dropped: bytes, severity: Severity) -> None:
    said = {topic: count for topic, count in ((STORED, stored), (DROPPED, dropped)) if count}

    assert set(said) <= COUNTS
    assert _queues("readings", said).severity is severity


@pytest.mark.parametrize(
    ("there", "new", "severity"),
    [
        (0, "read", Severity.ERROR),
        (1, "read", Severity.ERROR),
        (2, "report", Severity.OK),
        (3, "report", Severity.WARNING),
        (3, "read", Severity.OK),
        (1_001, "read", Severity.WARNING),
    ],
)
async def test_missing_and_unread_partitions_are_reported(
    there: int, new: Any, severity: Severity, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def reached(_: Client) -> None:
        await asyncio.sleep(0)

    async def topic(_: Client) -> TopicMetadata:
        return TopicMetadata(0, there, None)

    monkeypatch.setattr(Client, "start", reached)
    monkeypatch.setattr(Client, "topic", topic)

    found = await findings_of(Kafka("readings", partitions=2, new_partitions=new, brokers=KafkaBrokers("localhost:1")))

    assert found["broker"].severity is severity
    assert f"has {there} partitions, 2 are read" in found["broker"].found
