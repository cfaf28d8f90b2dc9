"""Why there is no connection to a Kafka broker: aiokafka says only that there is none, so we ask each once more.

What a person has to mend is a `ConfigError`, so that nothing waits for it; a broker that is away may come back.
"""

from __future__ import annotations

import socket
import ssl
from collections.abc import Iterable, Mapping
from typing import Any

from aiokafka.conn import create_conn
from aiokafka.errors import (
    IllegalSaslStateError,
    KafkaError,
    SaslAuthenticationFailed,
    UnsupportedSaslMechanismError,
)
from aiokafka.helpers import create_ssl_context

from millpy.errors import ConfigError, SourceUnavailableError

Place = tuple[str, int]
Reason = ConfigError | SourceUnavailableError
_OURS = ("security_protocol", "ssl_context", "sasl_mechanism", "sasl_plain_username", "sasl_plain_password")


def verifying(ca_file: str | None) -> ssl.SSLContext:
    """How to speak TLS, verifying certificate and name.

    Raises:
        ConfigError: the file cannot be read, or holds no certificate.
    """
    try:
        return create_ssl_context(cafile=ca_file)  # type: ignore[no-any-return]
    except OSError as error:
        why = error.strerror if not isinstance(error, ssl.SSLError) else "it holds no certificate"
        raise ConfigError(f"ca_file: cannot use {ca_file}: {why}", hint="a file of certificates, as PEM") from error


async def reason(options: Mapping[str, Any], places: Iterable[Place], error: Exception) -> Reason:
    """What keeps us from connecting: what a person has to mend, if that is it at one of the places.

    Args:
        options: as aiokafka's consumer has them.
        places: brokers, as we name them and as they name themselves.
        error: what aiokafka said.
    """
    found: list[Reason] = []
    for host, port in places:
        try:
            connection = await create_conn(host, port, **{name: options[name] for name in _OURS if name in options})
        except (KafkaError, OSError, TimeoutError) as refused:
            found.append(_in_words(f"{host}:{port}", options, refused))
        else:
            connection.close()
            found.append(_silent(f"{host}:{port} takes the connection and does not answer", options))
    mendable = [each for each in found if isinstance(each, ConfigError)]
    return next(iter(mendable + found), SourceUnavailableError(f"Kafka: {error!r}", hint="is the broker running?"))


def _in_words(place: str, options: Mapping[str, Any], error: Exception) -> Reason:
    user, sasl = options.get("sasl_plain_username"), options.get("sasl_mechanism")
    match error:
        case ssl.SSLCertVerificationError():
            return ConfigError(
                f"the certificate of the Kafka broker at {place} is not to be trusted: {error.verify_message}",
                hint="ca_file= names the authorities to trust; the name in servers= has to be in the broker's own",
            )
        case SaslAuthenticationFailed():
            return ConfigError(
                f"the Kafka broker at {place} refuses user {user!r} with {sasl}",
                hint="check username=, password= and sasl=, or MILLPY_KAFKA_USERNAME and MILLPY_KAFKA_PASSWORD",
            )
        case UnsupportedSaslMechanismError():
            return ConfigError(f"the Kafka broker at {place} does not take {sasl}", hint="say another sasl=")
        case IllegalSaslStateError():
            return ConfigError(
                f"the Kafka broker at {place} takes no login there",
                hint="leave username= out, or name the port for those who log in",
            )
        case socket.gaierror():
            return SourceUnavailableError(f"Kafka: there is no host {place}", hint="correct servers=")
        case ConnectionRefusedError():
            return SourceUnavailableError(f"Kafka: nothing listens at {place}", hint="is the broker running?")
        case TimeoutError():
            return SourceUnavailableError(f"Kafka: {place} does not answer", hint="is the broker running?")
    return _silent(f"{place} ends the connection", options)


def _silent(what: str, options: Mapping[str, Any]) -> SourceUnavailableError:
    speaks = "TLS" if "ssl_context" in options else "no TLS"
    who = options.get("sasl_plain_username") or "nobody"
    return SourceUnavailableError(
        f"the Kafka broker at {what}", hint=f"is it just starting? does it want {speaks} there, and a login as {who}?"
    )
