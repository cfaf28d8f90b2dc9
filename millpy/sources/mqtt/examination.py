"""Check an MQTT broker for `millpy doctor`: whether it answers, which logins it accepts, which counts it reports."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from millpy.clock import SystemClock, random_id
from millpy.config.extras import to_install
from millpy.config.secrets import is_other_machine
from millpy.errors import ConfigError, MillError
from millpy.ingest.protocol import SourceSetup
from millpy.limits import Limits
from millpy.model.finding import Finding, Severity, unencrypted_password
from millpy.sources.mqtt.address import BrokerAddress
from millpy.sources.mqtt.packets import Messages

if TYPE_CHECKING:
    from millpy.sources.mqtt.source import Mqtt

ANSWER_S_MAX = 2.0
VERSION, STORED, DROPPED = (
    b"$SYS/broker/version",
    b"$SYS/broker/store/messages/count",
    b"$SYS/broker/publish/messages/dropped",
)
COUNTS = {VERSION, STORED, DROPPED}


async def examine(source: Mqtt, graph: str, stream: str) -> AsyncIterator[Finding]:
    """Yield what `millpy doctor` finds at the broker: encryption, access to the filters, queues, logins.

    Connects in sessions of its own, which end with the connections. Raises MillError: the broker cannot be reached, or
    refuses.
    """
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
        yield unencrypted_password(f"{stream}: the password goes to {ours} unencrypted", "use mqtts:// or tls=True")
    try:
        from millpy.sources.mqtt.connection import MqttConnection  # needs an optional dependency
    except ImportError as error:
        raise ConfigError("MQTT needs the package aiomqtt", hint=to_install("mqtt")) from error
    said: dict[bytes, bytes] = {}
    changed = asyncio.Event()

    def deliver(published: Messages) -> None:
        said.update(zip(published.topics, published.payloads, strict=True))
        changed.set()

    address = replace(ours, client_id=f"millpy-doctor-{random_id().hex[:8]}", session_expiry_s=0, clean=True)
    connection = MqttConnection(address, deliver, packet_bytes_max=100_000_000, kept_bytes=1_000)
    await connection.open()
    try:
        with suppress(ConfigError, TimeoutError):  # a broker may forbid it
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
    yield Finding(Severity.OK, "broker", f"{stream}: {name} at {ours} allows {', '.join(filters)}")
    yield _queues(stream, said)
    yield _session(stream, source)
    yield await examine_login(stream, address)


async def examine_login(step: str, address: BrokerAddress) -> Finding:
    """Return whether the broker accepts a client without a login. Raises ConfigError: a file is unreadable."""
    from millpy.sources.mqtt.connection import MqttConnection  # needs an optional dependency

    anonymous = replace(address, username=None, password=None, tls_certificate=None, tls_key=None)
    connection = MqttConnection(anonymous, lambda _: None, packet_bytes_max=1_000_000, kept_bytes=1_000)
    try:
        await connection.open()
    except MillError:
        return Finding(Severity.OK, "broker login", f"{step}: {address} requires a login")
    await connection.close()
    return Finding(
        Severity.WARNING if is_other_machine(address.host) else Severity.NOTE,
        "broker login",
        f"{step}: {address} accepts clients without a login",
        "any client that reaches it can publish messages, and read those of others",
        "give devices logins that may only publish, and millpy a login (compose/mosquitto/start.sh does)",
    )


def _session(stream: str, source: Mqtt) -> Finding:
    if source.session.client_id is None:
        return Finding(Severity.OK, "broker session", f"{stream}: its client id contains a secret of this deployment")
    return Finding(
        Severity.WARNING,
        "broker session",
        f"{stream}: its client id is the client_id= of the graph's file",
        "a client that may log in and knows the id can end the session, with all readings that are queued in it",
        "leave out client_id=, or choose one that cannot be guessed",
    )


def _queues(stream: str, said: dict[bytes, bytes]) -> Finding:
    stored, dropped = (said.get(topic, b"") for topic in (STORED, DROPPED))
    if not (stored.isdigit() or dropped.isdigit()):
        return Finding(
            Severity.NOTE,
            "broker queues",
            f"{stream}: the broker publishes no counts under $SYS",
            "a broker drops messages beyond its queue for an absent client, and this cannot be seen from here",
            "check the broker's limits (mosquitto: max_queued_messages and max_queued_bytes)",
        )
    kept = f"{stored.decode() or 'unknown'} messages stored (retained ones and the broker's own counts among them)"
    found = f"{stream}: {kept}, {dropped.decode() or 'unknown'} dropped"
    if dropped.isdigit() and int(dropped):
        return Finding(
            Severity.NOTE,
            "broker queues",
            f"{found} since the broker started, over all of its clients",
            "a queue of some client was full; if it was the queue of a reader of this graph, those records are lost",
            "if `millpy sources list` has fewer records than were sent, raise max_queued_messages (mosquitto)",
        )
    return Finding(Severity.OK, "broker queues", found)
