"""The address of an MQTT broker, our credentials there, and the verification of its certificate."""

from __future__ import annotations

import re
import ssl
from dataclasses import dataclass, field
from ipaddress import IPv6Address
from urllib.parse import SplitResult, parse_qs, unquote, urlsplit

from millpy.config.access import NO_LOGIN, Login, Tls, files_of, text_of
from millpy.config.addresses import is_host_name
from millpy.config.secrets import is_other_machine, secret
from millpy.errors import ConfigError
from millpy.model.arguments import check_instance, is_whole

URL_VARIABLE = "MILLPY_MQTT_URL"
PASSWORD_VARIABLE = "MILLPY_MQTT_PASSWORD"
_NAME = re.compile(r"[^\s:/@?#\[\]]+")
_HINT = (
    "write mqtts://user:password@host:8883?ca=FILE&certificate=FILE&key=FILE, "
    "with %40 for @, %2F for / and %3F for ? in a password"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokerAddress:
    """The address, the credentials and the settings of a connection to a broker.

    Attributes:
        clean: whether the connection begins with a new session; under MQTT 3.1.1 it then ends with the connection, too.
    """

    host: str
    port: int
    username: str | None
    password: str | None = field(repr=False)
    tls: bool
    tls_ca: str | None
    tls_certificate: str | None
    tls_key: str | None
    client_id: str = field(repr=False)
    protocol: int
    keepalive_s: int
    session_expiry_s: int
    receive_max: int
    clean: bool = False

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokerUrl:
    """The parts of MILLPY_MQTT_URL."""

    host: str
    port: int | None
    username: str | None
    password: str | None = field(repr=False)
    tls: bool
    tls_ca: str | None
    tls_certificate: str | None
    tls_key: str | None


NOTHING = BrokerUrl(
    host="", port=None, username=None, password=None, tls=False, tls_ca=None, tls_certificate=None, tls_key=None
)


def url_of_environment() -> BrokerUrl:
    """Read MILLPY_MQTT_URL, or the file that MILLPY_MQTT_URL_FILE names; the default is localhost.

    MILLPY_MQTT_PASSWORD (or …_FILE) is the password if the URL has none.

    Raises:
        ConfigError: it is not an MQTT address. The message does not quote it, as it may hold a password.
    """
    try:
        url = urlsplit(secret(URL_VARIABLE) or "mqtt://localhost:1883")
        host, port = url.hostname or "", url.port
    except ValueError:
        raise ConfigError(f"{URL_VARIABLE} is not an MQTT address", hint=_HINT) from None
    if url.scheme not in ("mqtt", "mqtts") or not is_host_name(host) or url.path.strip("/") or url.fragment:
        raise ConfigError(f"{URL_VARIABLE} is not an MQTT address", hint=_HINT)
    files = _files(url)
    return BrokerUrl(
        host=host,
        port=port,
        username=unquote(url.username) if url.username else None,
        password=unquote(url.password) if url.password else secret(PASSWORD_VARIABLE),
        tls=url.scheme == "mqtts",
        tls_ca=files.get("ca"),
        tls_certificate=files.get("certificate"),
        tls_key=files.get("key"),
    )


def _files(url: SplitResult) -> dict[str, str]:
    said = parse_qs(url.query, keep_blank_values=True)
    unknown = said.keys() - {"ca", "certificate", "key"}
    if "@" in url.query and url.username is None:  # a ? in a password has split it
        raise ConfigError(f"{URL_VARIABLE} is not an MQTT address", hint=_HINT)
    if unknown:
        raise ConfigError(f"{URL_VARIABLE} has unknown parameters: {', '.join(sorted(unknown))}", hint=_HINT)
    if said and url.scheme != "mqtts":
        raise ConfigError(f"{URL_VARIABLE} names TLS files, but begins with mqtt://", hint=_HINT)
    return {name: values[-1] for name, values in said.items()}


def check_address(host: str | None, port: int | None, login: Login, tls: Tls | bool | None) -> None:
    """Check `host=`, `port=`, `login=` and `tls=` of a source or a sink. Raises ConfigError, GraphError."""
    check_instance("login", login, Login, 'for example login=Login("me", "secret")')
    files_of(tls)
    if host is not None and not (isinstance(host, str) and (_is_name(host) or _is_ipv6(host))):
        raise ConfigError(
            "host= is neither the name nor the address of a host",  # it may hold a password
            hint='write it alone, with port=… and tls=… beside it: host="broker.plant", port=8883, tls=True',
        )
    if port is not None and not is_whole(port, 1, 65_535):
        raise ConfigError(f"port={port!r} is not between 1 and 65,535", hint="leave it out for 1883, with TLS 8883")


def _is_name(host: str) -> bool:
    return _NAME.fullmatch(host) is not None and is_host_name(host)


def _is_ipv6(host: str) -> bool:
    try:
        IPv6Address(host)
    except ValueError:
        return False
    return True


@dataclass(frozen=True, slots=True)
class BrokerAccess:
    """A broker as a graph names it: `host=`, `port=`, `login=` and `tls=` of a source or a sink.

    Without a host, the environment names the broker, the credentials and TLS: MILLPY_MQTT_URL.
    """

    host: str | None
    port: int | None
    login: Login
    tls: Tls | bool | None

    def address(
        self,
        *,
        client_id: str,
        protocol: int,
        keepalive_s: int,
        session_expiry_s: int,
        receive_max: int,
        clean: bool = False,
    ) -> BrokerAddress:
        """Return the address and credentials, as given here or else by the environment. Raises ConfigError."""
        # Credentials belong to the address that they were given with.
        url = url_of_environment() if self.host is None else NOTHING
        files = files_of(self.tls)
        tls = url.tls or self._needs_tls() if self.tls is None else self.tls is not False
        return BrokerAddress(
            host=self.host or url.host,
            port=self.port or url.port or (8883 if tls else 1883),
            username=self.login.username or url.username,
            password=self.login.password or url.password,
            tls=tls,
            tls_ca=text_of(files.ca) or url.tls_ca,
            tls_certificate=text_of(files.certificate) or url.tls_certificate,
            tls_key=text_of(files.key) or url.tls_key,
            client_id=client_id,
            protocol=protocol,
            keepalive_s=keepalive_s,
            session_expiry_s=session_expiry_s,
            receive_max=receive_max,
            clean=clean,
        )

    def _needs_tls(self) -> bool:
        """Tell whether a password would go to another machine; a URL decides by its scheme."""
        return self.host is not None and self.login != NO_LOGIN and is_other_machine(self.host)


def tls_context(address: BrokerAddress) -> ssl.SSLContext | None:
    """Return a TLS context that verifies the broker's certificate and name; None for plain TCP.

    Raises:
        ConfigError: a file cannot be read, or holds no certificate or key.
    """
    if not address.tls:
        return None
    try:
        context = ssl.create_default_context(cafile=address.tls_ca)
        if address.tls_certificate is not None:
            context.load_cert_chain(address.tls_certificate, address.tls_key)
    except (OSError, ssl.SSLError) as error:
        files = [file for file in (address.tls_ca, address.tls_certificate, address.tls_key) if file]
        raise ConfigError(f"cannot use the TLS files {', '.join(files)}: {error}", hint="name PEM files") from error
    return context
