"""Check the broker of a sink for `millpy doctor`: whether it answers, and what it takes. It publishes nothing."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

from millpy.clock import random_id
from millpy.config.extras import to_install
from millpy.config.secrets import is_other_machine
from millpy.errors import ConfigError
from millpy.model.finding import Finding, Severity, unencrypted_password
from millpy.sources.mqtt.examination import examine_login

if TYPE_CHECKING:
    from millpy.sinks.mqtt.topic import MqttTopic


async def examine(topic: MqttTopic, graph: str, sink: str) -> AsyncIterator[Finding]:
    """Yield what `millpy doctor` finds at the broker, in a session of its own. Raises MillError."""
    del graph
    address = topic.address(f"millpy-doctor-{random_id().hex[:8]}")
    if address.password and not address.tls and is_other_machine(address.host):
        yield unencrypted_password(f"{sink}: the password goes to {address} unencrypted", "use mqtts:// or tls=True")
    try:
        from millpy.sinks.mqtt.link import BrokerLink  # needs an optional dependency
    except ImportError as error:
        raise ConfigError("MQTT needs the package aiomqtt", hint=to_install("mqtt")) from error
    link = BrokerLink(address, qos=topic.qos, retain=topic.retain)
    try:
        await link.open()
    finally:
        await link.close()
    limits = link.limits
    taken = f"{sink}: the broker at {address} takes QoS {topic.qos}, packets of up to {limits.packet_bytes_max:,} bytes"
    if limits.packet_bytes_max < topic.message_bytes_max:
        yield Finding(
            Severity.WARNING,
            "sink",
            f"{taken}; the sink makes messages of up to {topic.message_bytes_max:,}",
            "larger messages are refused when they are sent, and become dead letters then",
            "raise the broker's limit (mosquitto: max_packet_size), or lower message_bytes_max of the sink",
        )
    else:
        yield Finding(Severity.OK, "sink", f"{taken}, and {limits.receive_max:,} messages before it acknowledges")
    yield await examine_login(sink, address)
