"""What an API is started with."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass

from millpy.config.addresses import ip_address
from millpy.config.database_url import complete
from millpy.config.secrets import secret
from millpy.config.settings import OWNER_URL, READER_URL, Settings
from millpy.errors import ConfigError
from millpy.observability.http import address_of

Network = ipaddress.IPv4Network | ipaddress.IPv6Network


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiConfiguration:
    """The settings of an API.

    Attributes:
        address: host and port.
        certificate, key: files for TLS; empty for none.
        reader_url: the database as a role that only reads.
        operator_url: the database as the role of workers, for actions and for tokens.
        owner_url: the database as its owner, for switches.
        connections_max: the connections that read.
        nice: by how much the priority of its process is lowered.
        session_s: how long a session of the page lasts.
        proxies: the networks of reverse proxies.
        identity_header: the header in which they name the user; empty for none.
        cookie_of_port: whether the name of the session's cookie has the port, so that several on one machine, whose
            cookies a browser does not tell apart, do not end each other's sessions.
    """

    address: tuple[str, int]
    certificate: str = ""
    key: str = ""
    reader_url: str
    operator_url: str
    owner_url: str
    connections_max: int = 4
    nice: int = 0
    session_s: float = 43_200.0
    proxies: tuple[Network, ...] = ()
    identity_header: str = ""
    cookie_of_port: bool = False

    def trusts(self, address: str) -> bool:
        """Tell whether an address is that of a reverse proxy."""
        found = ip_address(address)
        return found is not None and any(found in network for network in self.proxies)


def configuration(settings: Settings, database_url: str) -> ApiConfiguration:
    """Return the configuration that the environment gives.

    Args:
        settings: the settings.
        database_url: the database, as `millpy.process.launcher.database` yields it.

    Raises:
        ConfigError: a setting is invalid.
    """
    if bool(settings.api_certificate) != bool(settings.api_key):
        raise ConfigError("MILLPY_API_CERTIFICATE and MILLPY_API_KEY belong together", hint="set both, or neither")
    if settings.api_identity_header and not settings.api_proxies:
        raise ConfigError(
            "MILLPY_API_IDENTITY_HEADER needs MILLPY_API_PROXIES",
            hint="name the addresses from which the header is believed",
        )
    reader, owner = secret(READER_URL), secret(OWNER_URL)
    return ApiConfiguration(
        address=address_of(settings.api, "MILLPY_API"),
        certificate=settings.api_certificate,
        key=settings.api_key,
        reader_url=complete(reader) if reader else database_url,
        operator_url=database_url,
        owner_url=complete(owner) if owner else database_url,
        connections_max=settings.api_connections_max,
        nice=settings.api_nice,
        session_s=settings.api_session_s,
        proxies=networks(settings.api_proxies),
        identity_header=settings.api_identity_header,
    )


def networks(text: str) -> tuple[Network, ...]:
    """Read addresses and networks with commas between them.

    Raises:
        ConfigError: one of them is neither.
    """
    try:
        return tuple(_network(part.strip()) for part in text.split(",") if part.strip())
    except ValueError as error:
        raise ConfigError(f"MILLPY_API_PROXIES: {error}", hint="for example 10.0.0.5,10.1.0.0/16") from None


def _network(text: str) -> Network:
    mapped = ip_address(text)  # an address that is mapped to IPv6 arrives as IPv4, too
    return ipaddress.ip_network(text if mapped is None else mapped)
