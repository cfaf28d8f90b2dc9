"""The reason why a connection to Kafka fails. aiokafka does not report it, so this module connects to each broker.

A fault that an operator must correct is a `ConfigError`, so that the worker stops; a broker that is down may come back.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Mapping
from typing import Any

from aiokafka.client import AIOKafkaClient
from aiokafka.conn import create_conn
from aiokafka.errors import (
    IllegalSaslStateError,
    KafkaError,
    SaslAuthenticationFailed,
    UnsupportedSaslMechanismError,
)
from aiokafka.helpers import create_ssl_context

from millpy.errors import ConfigError, SourceUnavailableError


class RefusalError(ConfigError):
    """A broker refuses our login or rights, we do not trust it, or a file that says so is unreadable.

    If it was in order before, it may be so again.
    """


Reason = ConfigError | SourceUnavailableError
PROBE_S_MAX = 3.0
"""Seconds that a broker may take to say why; a host that answers nothing at all must not keep us from the others."""
_OURS = ("security_protocol", "ssl_context", "sasl_mechanism", "sasl_plain_username", "sasl_plain_password")


def verifying(ca_file: str | None) -> ssl.SSLContext:
    """Return a TLS context that verifies certificate and name.

    Raises:
        ConfigError: the file cannot be read, or contains no certificate.
    """
    try:
        return create_ssl_context(cafile=ca_file)  # type: ignore[no-any-return]
    except OSError as error:
        why = error.strerror if not isinstance(error, ssl.SSLError) else "it contains no certificate"
        raise ConfigError(f"cannot use the TLS file {ca_file}: {why}", hint="name a PEM file in Tls(ca=…)") from error


async def reason(client: AIOKafkaClient, options: Mapping[str, Any], error: Exception) -> Reason:
    """Return the error that keeps us from connecting, preferably one that an operator must correct.

    Args:
        client: it knows the brokers, as we name them and as they name themselves.
        options: the options of aiokafka's consumer or producer.
        error: the error that aiokafka raised.
    """
    named = [(broker.host, broker.port) for broker in client.cluster.brokers()]
    places = dict.fromkeys([*((host, port) for host, port, _ in client.hosts), *named])
    found = await asyncio.gather(*(_probe(host, port, options) for host, port in places))
    correctable = [each for each in found if isinstance(each, ConfigError)]
    return next(
        iter(correctable + found), SourceUnavailableError(f"Kafka: {error!r}", hint="check that the broker runs")
    )


async def _probe(host: str, port: int, options: Mapping[str, Any]) -> Reason:
    """Connect to one broker; return why that fails."""
    try:
        async with asyncio.timeout(PROBE_S_MAX):
            connection = await create_conn(host, port, **{name: options[name] for name in _OURS if name in options})
    except (KafkaError, OSError, TimeoutError) as refused:
        return _reason_of(f"{host}:{port}", options, refused)
    connection.close()
    return _silent(f"{host}:{port} accepts the connection but does not answer", options)


def _reason_of(place: str, options: Mapping[str, Any], error: Exception) -> Reason:
    user, sasl = options.get("sasl_plain_username"), options.get("sasl_mechanism")
    match error:
        case ssl.SSLCertVerificationError():
            return RefusalError(
                f"the certificate of the Kafka broker at {place} is not trusted: {error.verify_message}",
                hint="set tls=Tls(ca=…) to the authorities to trust; the broker's must contain the name in servers=",
            )
        case SaslAuthenticationFailed():
            return RefusalError(
                f"the Kafka broker at {place} refuses user {user!r} with {sasl}",
                hint="check sasl=Sasl(…), or MILLPY_KAFKA_USERNAME and MILLPY_KAFKA_PASSWORD",
            )
        case UnsupportedSaslMechanismError():
            return ConfigError(
                f"the Kafka broker at {place} does not support {sasl}", hint="set another mechanism= in sasl=Sasl(…)"
            )
        case IllegalSaslStateError():
            return ConfigError(
                f"the Kafka broker at {place} accepts no login on this port",
                hint="leave out sasl=, or name the port for logins",
            )
        case socket.gaierror():
            return SourceUnavailableError(f"Kafka: cannot resolve host {place}", hint="correct servers=")
        case ConnectionRefusedError():
            return SourceUnavailableError(f"Kafka: nothing listens at {place}", hint="check that the broker runs")
        case TimeoutError():
            return SourceUnavailableError(f"Kafka: {place} does not answer", hint="check that the broker runs")
    return _silent(f"{place} closes the connection", options)


def _silent(what: str, options: Mapping[str, Any]) -> SourceUnavailableError:
    speaks = "TLS" if "ssl_context" in options else "no TLS"
    who = options.get("sasl_plain_username") or "none"
    return SourceUnavailableError(
        f"the Kafka broker at {what}", hint=f"check that it runs, and the port: this client uses {speaks}, user {who}"
    )
