"""A worker is killed or frozen inside a send to MQTT: all cases of these are in the matrix, some of them here."""

from __future__ import annotations

import os
import signal
from functools import partial
from pathlib import Path

import aiomqtt
import msgspec
import pytest

from millpy import Graph, MqttTopic
from millpy.embedded import mosquitto_program
from millpy.sinks import SendBound
from tests.conformance.mqtt_subject import SettledBroker
from tests.crash.cases.mqtt_sinks import broker_restarted, in_send
from tests.crash.conftest import Survives
from tests.crash.test_lookups import until
from tests.crash.test_refusals import BALANCED, LETTERS, QUICK, REFUSED
from tests.crash.test_sinks import reading, readings, working
from tests.crash.world import Case
from tests.feed import Feed


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize(("point", "qos"), [("before", 1), ("published", 1), ("answered", 2), ("acknowledged", 1)])
def test_a_kill_in_a_send_loses_nothing_and_repeats_at_most_one_send_under_known_ids(
    survives: Survives, point: str, qos: int
) -> None:
    survives(Case("SIGKILL in a send to MQTT", point, partial(in_send, point=point, qos=qos, number=400)))


def test_a_frozen_owner_publishes_nothing_after_another_has_taken_over(survives: Survives) -> None:
    survives(Case("SIGSTOP in a send to MQTT", "", partial(in_send, point="answered", frozen=True, number=400)))


def test_a_broker_that_is_restarted_gets_everything(survives: Survives) -> None:
    survives(Case("MQTT broker restarted, with a sink", "", broker_restarted))


@pytest.mark.skipif(mosquitto_program() is None, reason="mosquitto is not installed")
async def test_a_topic_without_rights_waits_a_large_message_is_given_up_and_all_others_leave(
    database_url: str, tmp_path: Path
) -> None:
    rights = tmp_path / "rights"
    rights.write_text("topic readwrite ok/#\ntopic read closed/#\n")
    rights.chmod(0o644)
    tmp_path.chmod(0o755)
    feed = Feed()

    def build() -> Graph:
        graph = Graph("plant")
        sink = MqttTopic(
            lambda record: f"closed/{record.device}" if record.device == "a" else f"ok/{record.device}",
            host="127.0.0.1",
            port=broker.port,
            bound=SendBound(records=4),
        )
        readings(graph, feed).to_sink(sink, key="device", name="out", intervals=1)
        return graph

    with SettledBroker(tmp_path / "broker", [f"acl_file {rights}", "max_packet_size 1500"]) as broker:
        async with aiomqtt.Client("127.0.0.1", broker.port, protocol=aiomqtt.ProtocolVersion.V5) as client:
            await client.subscribe([("ok/#", 1), ("closed/#", 1)])
            large = "c" * 900  # its topic and its record are too large together
            async with working(database_url, build, QUICK):
                for value in range(4):
                    feed.push(*(reading(device, float(value)) for device in ("a", "b", large)))
                got = [await anext(client.messages) for _ in range(4)]
                assert [device_and_value(message) for message in got] == [("b", float(value)) for value in range(4)]
                await until(database_url, LETTERS, [("out", "readings", "refused", f'"{large}"', "open")] * 4)
                behind = [('"a"', position, "waits behind a refused message") for position in (3, 6, 9)]
                await until(database_url, REFUSED, [('"a"', 0, "refused"), *behind])
                rights.write_text("topic readwrite #\n")
                os.kill(broker.pid(), signal.SIGHUP)
                got = [await anext(client.messages) for _ in range(4)]
                assert [device_and_value(message) for message in got] == [("a", float(value)) for value in range(4)]
                await until(database_url, REFUSED, [])
                await until(database_url, BALANCED, [(True,)])


def device_and_value(message: aiomqtt.Message) -> tuple[str, float]:
    found = msgspec.json.decode(message.payload)  # type: ignore[arg-type]
    return found["device"], found["value"]
