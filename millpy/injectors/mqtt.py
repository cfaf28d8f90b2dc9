"""MQTT as a source: QoS 1 in a persistent session, PUBACK after the commit (mqtt_injector.py).

One topic filter is one source partition with a session (client id) of its own, stable over restarts and owners. The
broker keeps the position: what is not acknowledged comes again with the next connection, and only then.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import combinations
from typing import TYPE_CHECKING, Literal

import xxhash

from millpy.errors import ConfigError
from millpy.extras import to_install
from millpy.injectors.mqtt_address import NOTHING, BrokerAddress, tls_context, url_of_environment
from millpy.injectors.mqtt_topics import TopicPattern, overlap
from millpy.injectors.protocol import SourceSetup
from millpy.model.deployment import own_name
from millpy.model.record import RecordType
from millpy.secret import is_other_machine

if TYPE_CHECKING:
    from millpy.injectors.mqtt_injector import MqttInjector

RECEIVE_MAX = 65_535
"""How far the broker may send ahead of acknowledgements; the protocol's largest, as they come a commit later."""


@dataclass(frozen=True, slots=True, init=False, repr=False)
class Mqtt:
    """Messages under one or more topic filters; each payload is one JSON record, or an array of them.

    Where the broker is and who we are there is left out of the repr, and so of the graph's fingerprint.

    Args:
        filters: MQTT topic filters, each a source partition of its own; no topic may match two of them. A level
            written `{name}` is a wildcard and fills the record's field of that name: `sensors/{site}/{device}`.
        host: the broker; this and the next four, when left out, come from the environment variable MILLPY_MQTT_URL
            (`mqtt://user:password@host:1883`, `mqtts://` for TLS), else it is localhost:1883.
        port: by default 1883, with TLS 8883.
        username: who we are there.
        password: in no repr, log line or error.
        tls: encrypt; the broker's certificate and name are verified. Left out: when files for it are named, or a
            password would go to another machine than this.
        tls_ca: a file with the certificates to trust instead of the system's.
        tls_certificate: a file with our own certificate, for brokers that ask for it.
        tls_key: the file with its key.
        client_id: the session's name at the broker; by default made of graph, stream, filter and a secret of the
            deployment. With several filters each gets its own ending, and so does the second generation of a graph
            (`ID_2`) and every later one. Two deployments on one broker need different ones, and whoever may log in to
            the broker and knows one can end its session: choose one that cannot be guessed.
        protocol: 5, or 311 for brokers that speak MQTT 3.1.1 only (mosquitto then keeps but 20 messages in flight).
        retained: take retained messages too when a subscription is new; left out by default, as they are old news.
        session_expiry_s: how long the broker keeps messages for us while we are away (MQTT 5).
        keepalive_s: a dead connection is noticed within one and a half of it.
    """

    filters: tuple[str, ...]
    host: str | None
    port: int | None
    username: str | None
    password: str | None
    tls: bool | None
    tls_ca: str | None
    tls_certificate: str | None
    tls_key: str | None
    client_id: str | None
    protocol: Literal[5, 311]
    retained: bool
    session_expiry_s: int
    keepalive_s: int

    def __init__(
        self,
        *filters: str,
        host: str | None = None,
        port: int | None = None,
        username: str | None = None,
        password: str | None = None,
        tls: bool | None = None,
        tls_ca: str | None = None,
        tls_certificate: str | None = None,
        tls_key: str | None = None,
        client_id: str | None = None,
        protocol: Literal[5, 311] = 5,
        retained: bool = False,
        session_expiry_s: int = 7 * 24 * 3600,
        keepalive_s: int = 20,
    ) -> None:
        if not filters:
            raise ConfigError("name one or more topic filters", hint='Mqtt("sensors/+/reading")')
        _check_apart([TopicPattern.of(text).filter for text in filters])
        if protocol not in (5, 311):
            raise ConfigError(f"unknown MQTT protocol {protocol!r}", hint="5 or 311")
        if client_id is not None and not client_id.strip():
            raise ConfigError(
                "client_id= is empty: a broker gives each connection without a name a new session, "
                "without what has queued",
                hint="name the session, or leave client_id= out",
            )
        if tls is False and (tls_ca or tls_certificate or tls_key):
            raise ConfigError("files for TLS are named, and tls=False", hint="leave tls= out")
        values = {
            "filters": filters, "host": host, "port": port, "username": username, "password": password, "tls": tls,
            "tls_ca": tls_ca, "tls_certificate": tls_certificate, "tls_key": tls_key, "client_id": client_id,
            "protocol": protocol, "retained": retained, "session_expiry_s": session_expiry_s,
            "keepalive_s": keepalive_s,
        }  # fmt: skip
        for name, value in values.items():
            object.__setattr__(self, name, value)

    def __repr__(self) -> str:
        retained = ", retained=True" if self.retained else ""
        return f"Mqtt({', '.join(map(repr, self.filters))}{retained})"

    def partitions(self) -> tuple[str, ...]:
        """The topic filters, as the broker is asked for them."""
        return tuple(TopicPattern.of(text).filter for text in self.filters)

    def validate(self, record_type: RecordType) -> None:
        """Refuse named topic levels that are no fields. Raises GraphError."""
        for text in self.filters:
            TopicPattern.of(text).validate(record_type)

    def connect(self, setup: SourceSetup) -> MqttInjector:
        """A reader of one filter, not yet connected.

        Raises:
            ConfigError: the package aiomqtt is missing, or MILLPY_MQTT_URL or a file with certificates cannot be read.
        """
        try:
            from millpy.injectors.mqtt_injector import MqttInjector  # needs an optional dependency
        except ImportError as error:
            raise ConfigError("MQTT needs the package aiomqtt", hint=to_install("mqtt")) from error
        address = self.address(setup)
        tls_context(address)
        pattern = next(p for p in map(TopicPattern.of, self.filters) if p.filter == setup.partition)
        return MqttInjector(setup, address, pattern, retained=self.retained)

    def _needs_tls(self) -> bool:
        """Files for it are named, or a password would go to another machine; a URL says it by its scheme."""
        secret = self.host is not None and bool(self.username or self.password) and is_other_machine(self.host)
        return bool(self.tls_ca or self.tls_certificate) or secret

    def address(self, setup: SourceSetup) -> BrokerAddress:
        """Where the broker is and who we are there: as given here, else by the environment. Raises ConfigError."""
        # Credentials belong to the address they were given with.
        url = url_of_environment() if self.host is None else NOTHING
        tls = self.tls if self.tls is not None else url.tls or self._needs_tls()
        return BrokerAddress(
            host=self.host or url.host,
            port=self.port or url.port or (8883 if tls else 1883),
            username=self.username or url.username,
            password=self.password or url.password,
            tls=tls,
            tls_ca=self.tls_ca or url.tls_ca,
            tls_certificate=self.tls_certificate or url.tls_certificate,
            tls_key=self.tls_key or url.tls_key,
            client_id=self._client_id(setup),
            protocol=self.protocol,
            keepalive_s=self.keepalive_s,
            session_expiry_s=self.session_expiry_s,
            receive_max=RECEIVE_MAX,
        )

    def _client_id(self, setup: SourceSetup) -> str:
        if self.client_id is None:
            return session_name(setup.graph, setup.stream, setup.partition, setup.secret)
        ours = own_name(self.client_id, setup.generation)
        return ours if len(self.filters) == 1 else f"{ours}-{_ending(setup.partition)}"


def session_name(graph: str, stream: str, partition: str, secret: str) -> str:
    """The client id of one filter's session where the user has given none; `graph`: what brokers know it by.

    Whoever may log in to a broker and knows a client id can take its session, and what is queued in it, away. So the
    ending cannot be guessed, and says nothing of the secret or of another session's ending.
    """
    ending = blake2b(partition.encode(), key=secret.encode(), digest_size=16).hexdigest()
    return f"millpy-{graph}-{stream}-{ending}"


def _ending(partition: str) -> str:
    return xxhash.xxh3_64_hexdigest(partition.encode())[:8]


def _check_apart(filters: Sequence[str]) -> None:
    for one, other in combinations(filters, 2):
        if overlap(one, other):
            raise ConfigError(
                f"topics can match both {one!r} and {other!r}, and their messages would be read twice",
                hint="name filters of which each topic matches one",
            )
