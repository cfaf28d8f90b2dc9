from __future__ import annotations

import ast
import asyncio
import re
import socket
import traceback
from pathlib import Path
from typing import Any

import pytest

from millpy.clock import SystemClock
from millpy.config.access import Login, Tls
from millpy.errors import ConfigError, SourceUnavailableError
from millpy.ingest.protocol import SourceSetup
from millpy.limits import Limits
from millpy.sources.mqtt import connection
from millpy.sources.mqtt.address import BrokerAddress
from millpy.sources.mqtt.connection import MqttConnection
from millpy.sources.mqtt.injector import marker_topic
from millpy.sources.mqtt.source import Mqtt, MqttSession


def address(
    source: Mqtt, partition: str = "a/#", graph: str = "g", generation: int = 1, secret: str = "s"
) -> BrokerAddress:
    setup = SourceSetup(
        graph=graph,
        generation=generation,
        secret=secret,
        stream="s",
        partition=partition,
        place=source.partitions().index(partition) if partition in source.partitions() else 0,
        limits=Limits(),
        clock=SystemClock(),
        ready=asyncio.Event(),
    )
    return source.address(setup)


def test_each_filter_is_a_source_partition() -> None:
    assert Mqtt("a/#", "b/#").partitions() == ("a/#", "b/#")


def test_session_name_cannot_be_guessed_and_is_stable() -> None:
    names = {
        address(Mqtt("a/#", "b/#"), partition, graph=graph, secret=secret).client_id
        for partition in ("a/#", "b/#")
        for graph in ("g", "h")
        for secret in ("one", "two")
    }

    assert len(names) == 8
    assert all(re.fullmatch(r"millpy-[gh]-s-[0-9a-f]{32}", name) for name in names)
    known = address(Mqtt("a/#"), secret="one")
    assert known.client_id == address(Mqtt("a/#"), secret="one").client_id
    assert known.client_id not in repr(known)
    assert known.client_id[-32:] not in marker_topic(known.client_id)


def test_generations_with_a_client_id_have_separate_sessions() -> None:
    source = Mqtt("a/#", session=MqttSession(client_id="plant"))
    assert [address(source, generation=n).client_id for n in (1, 2, 3)] == ["plant", "plant_2", "plant_3"]
    several = Mqtt("a/#", "b/#", session=MqttSession(client_id="plant"))
    assert (
        len({address(several, partition, generation=n).client_id for n in (1, 2) for partition in ("a/#", "b/#")}) == 4
    )


@pytest.mark.parametrize("name", ["", " "], ids=["empty", "blank"])
def test_session_without_a_name_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="client_id= is no name"):
        Mqtt("a/#", session=MqttSession(client_id=name))


@pytest.mark.parametrize("given", [0, -1, 2**32, 1.5, "7", True])
def test_times_that_no_session_can_have_are_refused(given: Any) -> None:
    """A session of 0 s would end with its connection, and lose what comes until the next one."""
    with pytest.raises(ConfigError, match=r"expiry_s=.* is no number of seconds"):
        MqttSession(expiry_s=given)
    with pytest.raises(ConfigError, match=r"keepalive_s=.* is no number of seconds"):
        MqttSession(keepalive_s=given)


def test_repr_shows_the_topics_but_no_broker_and_no_password() -> None:
    assert repr(Mqtt("a/#", "b/#", host="h", login=Login("u", "secret"))) == "Mqtt('a/#', 'b/#')"


@pytest.mark.parametrize(
    "host", ["", "broker:1883", "mqtt://broker", "me:s3cret@broker", "a broker", "[::1]", "::1:1883:x", "broker/"]
)
def test_a_host_is_a_name_or_an_address(host: str) -> None:
    with pytest.raises(ConfigError, match="host= is neither") as caught:
        Mqtt("a/#", host=host)
    assert "s3cret" not in str(caught.value)
    with pytest.raises(ConfigError, match="port=65536"):
        Mqtt("a/#", host="broker", port=65_536)
    for known in ("broker_1.plant.example", "10.0.0.7", "::1", "fe80::1%eth0", "mühle.example"):
        Mqtt("a/#", host=known, port=65_535)


def test_broker_is_read_from_the_environment_unless_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MILLPY_MQTT_URL", raising=False)
    assert str(address(Mqtt("a/#"))) == "localhost:1883"

    monkeypatch.setenv("MILLPY_MQTT_URL", "mqtts://me:p%40ss@broker.example")
    found = address(Mqtt("a/#"))
    assert (str(found), found.username, found.password, found.tls) == ("broker.example:8883", "me", "p@ss", True)

    named = address(Mqtt("a/#", host="other"))
    assert (str(named), named.username, named.password, named.tls) == ("other:1883", None, None, False)


@pytest.mark.parametrize(
    "url",
    [
        "broker.example:1883",
        "http://broker.example",
        "mqtt://me:se/cret@broker.example",
        "mqtt://me:se#cret@broker.example",
        "mqtt://me:5?secret@broker.example",
        "mqtts://me:5?secret=x&cret@broker.example",
        "mqtts://me:5?ca=secret@broker.example",
        "mqtt://me:secret@broker.example:port",
        "mqtts://me:secret@broker.example?cafile=x",
        "mqtt://me:secret@broker.example?ca=x",
    ],
)
def test_invalid_address_is_refused_without_its_password(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    monkeypatch.setenv("MILLPY_MQTT_URL", url)

    with pytest.raises(ConfigError) as caught:
        address(Mqtt("a/#"))

    assert "mqtts://" in caught.value.hint
    reported = "".join(traceback.format_exception(caught.value))
    assert "MILLPY_MQTT_URL" in reported
    assert "cret" not in reported.partition("ConfigError")[2] and "'se'" not in reported


def test_tls_files_belong_to_the_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MILLPY_MQTT_URL", "mqtts://broker.example?ca=a.pem&certificate=c.pem&key=k.pem")

    found = address(Mqtt("a/#"))
    named = address(Mqtt("a/#", host="h", tls=Tls(ca="b.pem")))

    assert (found.tls, found.tls_ca, found.tls_certificate, found.tls_key) == (True, "a.pem", "c.pem", "k.pem")
    assert (named.tls, named.port, named.tls_ca, named.tls_certificate) == (True, 8883, "b.pem", None)
    with pytest.raises(ConfigError, match="needs a certificate"):
        Tls(key="k.pem")


def test_topics_that_would_be_read_twice_are_refused() -> None:
    with pytest.raises(ConfigError, match="read twice"):
        Mqtt("a/+/x", "a/{site}/x")


def test_renaming_a_level_keeps_the_session() -> None:
    one, other = Mqtt("a/{site}"), Mqtt("a/{place}")

    assert one.partitions() == other.partitions() == ("a/+",)
    assert address(one, "a/+").client_id == address(other, "a/+").client_id


def test_session_is_named_by_graph_stream_and_filter() -> None:
    names = {
        address(Mqtt("a/#")).client_id,
        address(Mqtt("a/#"), partition="b/#").client_id,
        address(Mqtt("a/#"), graph="other").client_id,
    }

    assert len(names) == 3
    assert address(Mqtt("a/#")).client_id == address(Mqtt("a/#")).client_id
    assert address(Mqtt("a/#", session=MqttSession(client_id="mine"))).client_id == "mine"
    several = Mqtt("a/#", "b/#", session=MqttSession(client_id="mine"))
    assert address(several).client_id == "mine", "the first filter keeps its session when the source gets another"
    assert address(several, partition="b/#").client_id != "mine"


def test_source_without_a_filter_is_refused() -> None:
    with pytest.raises(ConfigError):
        Mqtt()


def test_client_library_is_used_only_by_public_names() -> None:
    tree = ast.parse(Path(connection.__file__).read_text())
    private = [
        ast.unparse(node)
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and re.match("_[^_]", node.attr)
        and not (isinstance(node.value, ast.Name) and node.value.id == "self")
    ]
    targets = [
        ast.unparse(node)
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and not (isinstance(node.value, ast.Name) and node.value.id in ("self", "properties"))
    ]
    assert private == []
    assert targets == []


async def test_failure_of_the_connection_task_is_reported_on_the_next_take(monkeypatch: pytest.MonkeyPatch) -> None:
    ready = asyncio.Event()
    setup = SourceSetup(graph="g", stream="s", partition="a/#", limits=Limits(), clock=SystemClock(), ready=ready)
    injector = Mqtt("a/#").connect(setup)

    async def connect() -> None:
        raise ZeroDivisionError("a fault of the client library")

    monkeypatch.setattr(injector, "_connect", connect)
    injector._keeper = asyncio.create_task(injector._keep_connected())
    await asyncio.wait([injector._keeper])

    with pytest.raises(ZeroDivisionError):
        await injector.take()
    await injector.close()


async def test_broker_that_dies_after_accepting_counts_as_unavailable() -> None:
    async def accept_and_die(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        writer.write(b"\x20\x03\x00\x00\x00")  # CONNACK
        writer.close()

    async with await asyncio.start_server(accept_and_die, "127.0.0.1", 0) as broker:
        port = broker.sockets[0].getsockname()[1]
        opened = MqttConnection(
            address(Mqtt("a/#", host="127.0.0.1", port=port)),
            lambda _: None,
            packet_bytes_max=1_000,
            kept_bytes=1_000,
        )

        with pytest.raises(SourceUnavailableError):
            await opened.open()
        await opened.close()


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
async def test_a_missing_broker_is_reported_with_the_systems_message(host: str) -> None:
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        port = reserved.getsockname()[1]
        opened = MqttConnection(
            address(Mqtt("a/#", host=host, port=port)), lambda _: None, packet_bytes_max=1_000, kept_bytes=1_000
        )

        with pytest.raises(SourceUnavailableError) as raised:
            await opened.open()

    assert raised.value.message == f"cannot connect to the MQTT broker at {host}:{port}: Connection refused"
