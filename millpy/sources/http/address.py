"""The address at which workers accept requests, and the certificate that they show there."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from urllib.parse import parse_qs, urlsplit

from millpy.config.addresses import is_host_name
from millpy.config.secrets import is_other_machine, secret
from millpy.errors import ConfigError

URL_VARIABLE = "MILLPY_INGEST_URL"
DEFAULT_URL = "http://127.0.0.1:8081"
_HINT = (
    "write http://127.0.0.1:8081, http://0.0.0.0:8081 for all interfaces, "
    "or https://0.0.0.0:8443?certificate=FILE&key=FILE, with &ca=FILE to demand certificates of clients"
)
_FILES = ("certificate", "key", "ca")


@dataclass(frozen=True, slots=True, kw_only=True)
class ListenAddress:
    """Where a worker listens.

    Attributes:
        host: the interface; empty for all.
        port: the port; 0 for one that the system chooses.
        certificate, key: the files of our certificate; None without TLS.
        ca: the file of the authorities whose certificates a client must show; None if it need not.
    """

    host: str
    port: int
    certificate: str | None = None
    key: str | None = None
    ca: str | None = None

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host or "*"
        return f"{'https' if self.certificate else 'http'}://{host}:{self.port}"

    @property
    def is_open(self) -> bool:
        """Whether other machines can reach it."""
        return self.host in ("", "0.0.0.0", "::") or is_other_machine(self.host)

    @property
    def local_host(self) -> str:
        """Where a program of this machine reaches it."""
        return {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host)

    def tls_context(self) -> ssl.SSLContext | None:
        """Return the context of a server; None for plain TCP.

        Raises:
            ConfigError: a file cannot be read, or holds no certificate or key.
        """
        if self.certificate is None:
            return None
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        try:
            context.load_cert_chain(self.certificate, self.key)
            if self.ca is not None:
                context.load_verify_locations(self.ca)
                context.verify_mode = ssl.CERT_REQUIRED
        except (OSError, ssl.SSLError) as error:
            files = [file for file in (self.certificate, self.key, self.ca) if file]
            raise ConfigError(f"cannot use the TLS files {', '.join(files)}: {error}", hint="name PEM files") from error
        return context


def listen_address(url: str | None) -> ListenAddress:
    """Return an address from a URL, by default from MILLPY_INGEST_URL or the file that MILLPY_INGEST_URL_FILE names.

    Raises:
        ConfigError: it is not such a URL.
    """
    given = url or secret(URL_VARIABLE) or DEFAULT_URL
    name = "url=" if url else URL_VARIABLE
    try:
        parts = urlsplit(given)
        port, host = parts.port, parts.hostname or ""
    except ValueError:
        raise ConfigError(f"{name} is not an address to listen at", hint=_HINT) from None
    is_url = parts.scheme in ("http", "https") and is_host_name(host)
    if not is_url or parts.path.strip("/") or parts.fragment or parts.username:
        raise ConfigError(f"{name} is not an address to listen at", hint=_HINT)
    files = {key: values[-1] for key, values in parse_qs(parts.query, keep_blank_values=True).items()}
    if unknown := sorted(files.keys() - set(_FILES)):
        raise ConfigError(f"{name} has unknown parameters: {', '.join(unknown)}", hint=_HINT)
    if (parts.scheme == "https") != bool(files.get("certificate")) or (files and parts.scheme == "http"):
        raise ConfigError(f"{name}: https:// needs a certificate, and http:// must not have one", hint=_HINT)
    if port is None:
        port = 8443 if parts.scheme == "https" else 8081
    return ListenAddress(
        host=host, port=port, certificate=files.get("certificate"), key=files.get("key"), ca=files.get("ca")
    )
