"""Where messages may be posted: checked URLs, and the origins that a URL from a field may have."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from millpy.config.addresses import is_host_name
from millpy.config.secrets import is_other_machine
from millpy.errors import ConfigError

if TYPE_CHECKING:
    from yarl import URL

URL_CHARACTERS_MAX = 2_000
HOSTS_MAX = 1_000
PORTS = {"https": 443, "http": 80}
_UNFIT = re.compile(r"[\x00-\x20\x7f\\]")


@dataclass(frozen=True, slots=True)
class Origin:
    """Scheme, host and port of a URL: all of it that a log or an error names."""

    scheme: str
    host: str
    port: int

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.scheme}://{host}" if self.port == PORTS[self.scheme] else f"{self.scheme}://{host}:{self.port}"

    @property
    def exposes_secrets(self) -> bool:
        """Whether what is sent there crosses a network unencrypted."""
        return self.scheme == "http" and is_other_machine(self.host)


def origin_of(url: object) -> Origin:
    """Check the URL of an endpoint, and return its origin.

    Raises:
        ConfigError: it is none, or has parts that an endpoint's URL cannot have. The message quotes no path or query,
            which may be secret.
    """
    if not isinstance(url, str) or not url:
        raise ConfigError("a webhook needs the URL of its endpoint", hint='for example "https://example.org/alerts"')
    if len(url) > URL_CHARACTERS_MAX or _UNFIT.search(url) or not url.isascii():
        raise ConfigError(
            f"the URL has more than {URL_CHARACTERS_MAX:,} characters, or one that is not allowed in URLs",
            hint="percent-encode spaces and letters that are not ASCII; write a host name in its xn-- form",
        )
    try:
        parts = urlsplit(url)
        scheme, host, port = parts.scheme.lower(), parts.hostname or "", parts.port
    except ValueError:  # it quotes what it takes for a port
        raise ConfigError("this is no URL", hint='for example "https://example.org/alerts"') from None
    if scheme not in PORTS or not is_host_name(host):
        raise ConfigError(
            "the URL of an endpoint begins with https:// (or http://) and a host",
            hint='for example "https://example.org/alerts"',
        )
    if parts.username is not None or parts.password is not None:
        raise ConfigError(
            f"the URL of {host} has a login in it",
            hint='name a variable: WebhookAccess(headers={"Authorization": "ALERTS_AUTHORIZATION"})',
        )
    if parts.fragment:
        raise ConfigError(f"the URL of {host} has a fragment (#…), which is never sent", hint="leave it out")
    return Origin(scheme, host, port or PORTS[scheme])


def allowed_origins(hosts: Iterable[str]) -> frozenset[Origin]:
    """Return the origins that a URL from a field may have: `host`, `host:port` or a URL without a path.

    Raises:
        ConfigError: an entry is none, or there are none or too many.
    """
    if not isinstance(hosts, Iterable):
        raise ConfigError(f"hosts={hosts!r} are no hosts", hint='for example hosts=("hooks.example.org",)')
    given = (hosts,) if isinstance(hosts, str) else tuple(hosts)
    if not 0 < len(given) <= HOSTS_MAX:
        raise ConfigError(
            f"url_field= needs hosts=(…), and has {len(given)}: the field decides where we connect",
            hint=f'name each host that may be reached, for example hosts=("hooks.example.org",); at most {HOSTS_MAX:,}',
        )
    found = []
    for host in given:
        url = host if isinstance(host, str) and "://" in host else f"https://{host}"
        origin = origin_of(url)
        if "*" in url or urlsplit(url).path not in ("", "/") or urlsplit(url).query:
            raise ConfigError(f"hosts= takes whole hosts, not {host!r}", hint='for example "hooks.example.org:8443"')
        found.append(origin)
    return frozenset(found)


def parsed(url: URL) -> Origin | None:
    """Return the origin of a URL as the client reads it; None if it is no URL of an endpoint."""
    if url.scheme not in PORTS or not url.raw_host or url.user is not None or url.password is not None:
        return None
    return Origin(url.scheme, url.raw_host.lower(), url.port or PORTS[url.scheme])  # raw: the xn-- form
