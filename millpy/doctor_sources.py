"""Looks at the brokers of a graph's sources: can they be reached, by whom, and what do they say of their limits."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import replace
from typing import Any

from millpy.clock import SystemClock, fresh_identity
from millpy.doctor import Finding, Severity
from millpy.errors import ConfigError, MillError
from millpy.extras import to_install
from millpy.graph import Graph, InjectorNode
from millpy.injectors.kafka import Kafka
from millpy.injectors.mqtt import Mqtt
from millpy.injectors.mqtt_address import BrokerAddress
from millpy.injectors.mqtt_packets import Published
from millpy.injectors.protocol import SourceSetup
from millpy.limits import Limits
from millpy.secret import goes_elsewhere, is_other_machine

ANSWER_S_MAX = 2.0
VERSION, STORED, DROPPED = (
    b"$SYS/broker/version",
    b"$SYS/broker/store/messages/count",
    b"$SYS/broker/publish/messages/dropped",
)
COUNTS = {VERSION, STORED, DROPPED}
UNREACHED = "its records wait at the broker; what exceeds the broker's limits is lost"


async def examine_sources(graph: Graph) -> list[Finding]:
    """All findings of the sources that have a broker, in the graph's order."""
    found: list[Finding] = []
    for node in graph.nodes:
        if not isinstance(node, InjectorNode):
            continue
        try:
            if isinstance(node.source, Mqtt):
                await _mqtt(node.source, graph.own_name, node.name, found)
            elif isinstance(node.source, Kafka):
                await _kafka(node.source, graph.own_name, node.name, found)
        except MillError as error:
            found.append(Finding(Severity.ERROR, "broker", f"{node.name}: {error.message}", UNREACHED, error.hint))
    return found


async def _mqtt(source: Mqtt, graph: str, stream: str, found: list[Finding]) -> None:
    """Connects beside the workers, in a session of its own that ends with the connection."""
    filters = source.partitions()
    setup = SourceSetup(
        graph=graph,
        stream=stream,
        partition=filters[0],
        limits=Limits(),
        clock=SystemClock(),
        ready=asyncio.Event(),
    )
    ours = source.address(setup)
    if ours.password and not ours.tls and is_other_machine(ours.host):
        found.append(_in_the_clear(f"{stream}: the password goes to {ours} as it is", "use mqtts:// or tls=True"))
    try:
        from millpy.injectors.mqtt_connection import Connection  # needs an optional dependency
    except ImportError as error:
        raise ConfigError("MQTT needs the package aiomqtt", hint=to_install("mqtt")) from error
    said: dict[bytes, bytes] = {}
    changed = asyncio.Event()

    def deliver(published: Published) -> None:
        said.update(zip(published.topics, published.payloads, strict=True))
        changed.set()

    address = replace(ours, client_id=f"millpy-doctor-{fresh_identity().hex[:8]}", session_expiry_s=0, protocol=5)
    connection = Connection(address, deliver, packet_bytes_max=100_000_000, kept_bytes=1_000)
    await connection.open()
    try:
        with suppress(ConfigError, TimeoutError):  # the broker need not allow it
            for topic in COUNTS:
                await connection.subscribe(topic.decode(), retained=True)
            async with asyncio.timeout(ANSWER_S_MAX):
                while not said.keys() >= COUNTS:
                    changed.clear()
                    await changed.wait()
        for topic_filter in filters:
            await connection.subscribe(topic_filter, retained=False)
    finally:
        await connection.close()
    name = said.get(VERSION, b"a broker").decode(errors="replace")
    found.append(Finding(Severity.OK, "broker", f"{stream}: {name} at {ours} allows {', '.join(filters)}"))
    found.append(_queues(stream, said))
    found.append(_session(stream, source))
    anonymous = replace(address, username=None, password=None, tls_certificate=None, tls_key=None)
    found.append(
        _login(
            stream, ours, await _lets_in(Connection(anonymous, deliver, packet_bytes_max=1_000_000, kept_bytes=1_000))
        )
    )


async def _lets_in(connection: Any) -> bool:
    """Whether the broker takes a client that says nothing of itself."""
    try:
        await connection.open()
    except MillError:
        return False
    await connection.close()
    return True


def _login(stream: str, ours: BrokerAddress, open_to_all: bool) -> Finding:
    if not open_to_all:
        return Finding(Severity.OK, "broker login", f"{stream}: {ours} lets nobody in without a login")
    return Finding(
        Severity.WARNING if is_other_machine(ours.host) else Severity.NOTE,
        "broker login",
        f"{stream}: {ours} lets everybody in",
        "whoever reaches it can publish records, and read those of others",
        "give devices logins that may only publish, and millpy one of its own (compose/mosquitto/start.sh does)",
    )


def _session(stream: str, source: Mqtt) -> Finding:
    if source.client_id is None:
        return Finding(
            Severity.OK, "broker session", f"{stream}: its name at the broker has a secret of this deployment"
        )
    return Finding(
        Severity.WARNING,
        "broker session",
        f"{stream}: its name at the broker is the client_id= of the graph's file",
        "whoever may log in to the broker and knows it can end the session, with all readings that are queued in it",
        "leave client_id= out, or make it one that nobody can guess",
    )


def _queues(stream: str, said: dict[bytes, bytes]) -> Finding:
    stored, dropped = (said.get(topic, b"") for topic in (STORED, DROPPED))
    if not (stored.isdigit() or dropped.isdigit()):
        return Finding(
            Severity.NOTE,
            "broker queues",
            f"{stream}: the broker shows no counts under $SYS",
            "a broker drops what exceeds its queue for a client that is away, and nobody here would see it",
            "look at the broker: with mosquitto max_queued_messages and max_queued_bytes",
        )
    found = f"{stream}: {stored.decode() or 'unknown'} messages stored, {dropped.decode() or 'unknown'} dropped"
    if dropped.isdigit() and int(dropped):
        return Finding(
            Severity.WARNING,
            "broker queues",
            f"{found} since the broker began",
            "a queue was full: what a device sent while its reader was away or slow is lost",
            "raise the broker's queue limits (mosquitto: max_queued_messages), and run enough workers",
        )
    return Finding(Severity.OK, "broker queues", found)


async def _kafka(source: Kafka, graph: str, stream: str, found: list[Finding]) -> None:
    """Asks for the topic's metadata."""
    cluster = source.cluster()
    if cluster.username and not cluster.tls and goes_elsewhere(cluster.servers):
        found.append(_in_the_clear(f"{stream}: the connection to {cluster.servers} is not encrypted", "use tls=True"))
    from millpy.injectors.kafka_client import Client  # cluster() has found the package

    client = Client(cluster, source.topic, 0, f"millpy-doctor-{graph}")
    try:
        await client.start()
        there = await client.partitions()
    finally:
        await client.stop()
    text = f"{stream}: topic {source.topic} at {cluster.servers} has {there} partitions, {source.count} are read"
    if there < source.count:
        finding = Finding(
            Severity.ERROR,
            "broker",
            text,
            "the source waits for those that are missing, and holds every watermark behind it",
            "make the topic with as many partitions, or deploy the graph with fewer",
        )
    elif there > source.count:
        finding = Finding(
            Severity.WARNING,
            "broker",
            text,
            "records of the others are in no result",
            f"say partitions={there} in the graph and start a worker with it; the others follow",
        )
    else:
        finding = Finding(Severity.OK, "broker", text)
    found.append(finding)


def _in_the_clear(found: str, action: str) -> Finding:
    return Finding(
        Severity.WARNING, "broker encryption", found, "whoever listens on the way can log in with it", action
    )
