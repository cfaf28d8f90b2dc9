"""MQTT as a source: QoS 1 in a persistent session, PUBACK after the commit (injector.py).

Each topic filter is a source partition with a separate session (client id), which stays the same over restarts and
owners. The broker keeps the position: it sends unacknowledged messages again on the next connection, and only then.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from itertools import combinations
from typing import TYPE_CHECKING, Any, Literal

import xxhash

from millpy.config.access import NO_LOGIN, Login, Tls
from millpy.config.extras import to_install
from millpy.errors import ConfigError
from millpy.formats import Format, Message
from millpy.formats.message import checked_format
from millpy.ingest.protocol import Source, SourceSetup
from millpy.model.arguments import check_flags, check_instance, is_whole
from millpy.model.deployment import permanent_name
from millpy.model.finding import Finding
from millpy.model.identity import Identity
from millpy.model.record import RecordType
from millpy.sources.mqtt.address import BrokerAccess, BrokerAddress, check_address
from millpy.sources.mqtt.topics import TopicPattern, overlap

if TYPE_CHECKING:
    from millpy.sources.mqtt.injector import MqttInjector

RECEIVE_MAX = 65_535
"""How many messages the broker may send ahead of acknowledgements: the protocol's maximum, as a commit comes first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MqttSession:
    """The sessions of a source at a broker, one for each topic filter.

    Attributes:
        client_id: the session's name at the broker; by default derived from graph, stream, filter and a secret of the
            deployment. The sessions of all filters but the first get a suffix, and so do those of the second generation
            of a graph (`ID_2`) and every later one. Two deployments on one broker need different client ids. A user who
            can log in to the broker and knows a client id can end its session: choose one that cannot be guessed.
        expiry_s: how long the broker keeps messages while no worker is connected, in seconds (MQTT 5).
        keepalive_s: the MQTT keep-alive in seconds: a broker ends a connection without a packet from us for one and a
            half times this. A broker that does not answer is noticed sooner (docs/mqtt.md).
    """

    client_id: str | None = None
    expiry_s: int = 7 * 24 * 3600
    keepalive_s: int = 20

    def __post_init__(self) -> None:
        if self.client_id is not None and not (isinstance(self.client_id, str) and self.client_id.strip()):
            raise ConfigError(
                "client_id= is no name: without one, each connection gets a new session and loses the queued messages",
                hint="name the session, or leave out client_id=",
            )
        for name, most in (("expiry_s", 2**32 - 1), ("keepalive_s", 2**16 - 1)):
            given = getattr(self, name)
            if not is_whole(given, 1, most):
                raise ConfigError(
                    f"{name}={given!r} is no number of seconds", hint=f"use a whole number from 1 to {most:,}"
                )


DEFAULT_SESSION = MqttSession()


@dataclass(frozen=True, slots=True, init=False, repr=False)
class Mqtt(Source):
    """Messages under one or more topic filters; by default each payload is one JSON record or an array of records.

    The repr and the identity leave out the broker's address and the credentials.

    Args:
        filters: MQTT topic filters, each a separate source partition; a topic may match only one of them. A level
            written `{name}` is a wildcard and fills the record's field of that name: `sensors/{site}/{device}`.
        host: the broker. When it is left out, the broker, the credentials and TLS come from the environment variable
            MILLPY_MQTT_URL (`mqtt://user:password@host:1883`, `mqtts://` for TLS); the default is localhost:1883.
        port: the broker's port; by default 1883, with TLS 8883.
        login: our user name and password: `Login("me", "secret")`.
        tls: whether to encrypt, and to verify the broker's certificate and name; `Tls(ca=…)` names files for it. By
            default True if a password would go to another machine.
        session: the name and the times of our sessions at the broker.
        protocol: 5, or 311 for brokers that only speak MQTT 3.1.1 (mosquitto then keeps only 20 messages in flight).
        retained: whether a new subscription also takes retained messages; by default False, as they may be old.
        format: the payload format, such as `Scalar("temperature")`; by default JSON.
        decode: instead of a format, a function from a `Message` to its records.
    """

    filters: tuple[str, ...]
    host: str | None
    port: int | None
    login: Login
    tls: Tls | bool | None
    session: MqttSession
    protocol: Literal[5, 311]
    retained: bool
    format: Format | None

    def __init__(  # noqa: PLR0913 - what a user may say of a feed
        self,
        *filters: str,
        host: str | None = None,
        port: int | None = None,
        login: Login = NO_LOGIN,
        tls: Tls | bool | None = None,
        session: MqttSession = DEFAULT_SESSION,
        protocol: Literal[5, 311] = 5,
        retained: bool = False,
        format: Format | None = None,
        decode: Callable[[Message], Iterable[Any]] | None = None,
    ) -> None:
        if not filters:
            raise ConfigError("Mqtt needs a topic filter", hint='name one or more: Mqtt("sensors/+/reading")')
        _check_apart([TopicPattern.parse(text).filter for text in filters])
        check_address(host, port, login, tls)
        check_flags(retained=retained)
        check_instance("session", session, MqttSession, 'for example session=MqttSession(client_id="plant")')
        if protocol not in (5, 311):
            raise ConfigError(f"unknown MQTT protocol {protocol!r}", hint="choose 5 or 311")
        values = {
            "filters": filters, "host": host, "port": port, "login": login, "tls": tls, "session": session,
            "protocol": protocol, "retained": retained, "format": checked_format(format, decode),
        }  # fmt: skip
        for name, value in values.items():
            object.__setattr__(self, name, value)

    def identity(self) -> Identity:
        """Describe the topic filters with the fields that they fill."""
        found = {"kind": "mqtt", "filters": list(self.filters), "retained": self.retained}
        return found if self.format is None else {**found, "format": self.format.identity()}

    def payload_format(self) -> Format | None:
        """Return `format`."""
        return self.format

    def partitions(self) -> tuple[str, ...]:
        """Return the source partitions: the topic filters, with `+` for each named level."""
        return tuple(TopicPattern.parse(text).filter for text in self.filters)

    def validate(self, record_type: RecordType) -> None:
        """Check that the named topic levels fit the record. Raises GraphError."""
        for text in self.filters:
            TopicPattern.parse(text).validate(record_type, self.format)
        if self.format is not None:
            self.format.validate(record_type)

    def connect(self, setup: SourceSetup) -> MqttInjector:
        """Return the injector of one filter, not yet connected.

        Raises:
            ConfigError: the package aiomqtt is missing.
        """
        try:
            from millpy.sources.mqtt.injector import MqttInjector  # needs an optional dependency
        except ImportError as error:
            raise ConfigError("MQTT needs the package aiomqtt", hint=to_install("mqtt")) from error
        pattern = next(p for p in map(TopicPattern.parse, self.filters) if p.filter == setup.partition)
        return MqttInjector(setup, partial(self.address, setup), pattern, retained=self.retained, format=self.format)

    def examine(self, graph: str, stream: str) -> AsyncIterator[Finding]:
        """Check the broker, its logins and its queues. Raises MillError."""
        from millpy.sources.mqtt.examination import examine

        return examine(self, graph, stream)

    def address(self, setup: SourceSetup) -> BrokerAddress:
        """Return the address and credentials, as given here or else by the environment. Raises ConfigError."""
        return BrokerAccess(self.host, self.port, self.login, self.tls).address(
            client_id=self._client_id(setup),
            protocol=self.protocol,
            keepalive_s=self.session.keepalive_s,
            session_expiry_s=self.session.expiry_s,
            receive_max=RECEIVE_MAX,
        )

    def _client_id(self, setup: SourceSetup) -> str:
        if self.session.client_id is None:
            return session_name(setup.graph, setup.stream, setup.partition, setup.secret)
        ours = permanent_name(self.session.client_id, setup.generation)
        # The first filter keeps its session, with what is queued there, when the source gets more filters.
        return ours if setup.place == 0 else f"{ours}-{_ending(setup.partition)}"


def session_name(graph: str, stream: str, partition: str, secret: str) -> str:
    """Return the default client id of one filter's session; `graph` is the graph's name at brokers.

    A user who can log in to a broker and knows a client id can take over its session and the messages queued in it. So
    the ending cannot be guessed, and does not reveal the secret or another session's ending.
    """
    ending = blake2b(partition.encode(), key=secret.encode(), digest_size=16).hexdigest()
    return f"millpy-{graph}-{stream}-{ending}"


def _ending(partition: str) -> str:
    return xxhash.xxh3_64_hexdigest(partition.encode())[:8]


def _check_apart(filters: Sequence[str]) -> None:
    for one, other in combinations(filters, 2):
        if overlap(one, other):
            raise ConfigError(
                f"a topic can match both {one!r} and {other!r}, and its messages would be read twice",
                hint="choose filters that do not overlap",
            )
