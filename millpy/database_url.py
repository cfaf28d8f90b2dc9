"""The database's address: read once, completed by its password and by verified TLS, and never quoted in an error.

A connection to another machine is encrypted, and the server's certificate and name are verified, unless the URL, the
environment (PGSSLMODE) or a service file says otherwise. libpq itself would go without when the server offers none.
"""

from __future__ import annotations

import os
import ssl
from pathlib import Path

from millpy.errors import ConfigError
from millpy.secret import is_other_machine

URL_FORM = "postgresql://user:password@host:5432/database"
_HINT = f"MILLPY_DATABASE_URL (or --database) is like {URL_FORM}; in a password @ : / ? # are %40 %3A %2F %3F %23"
CERTIFICATE_FILES = (
    "/etc/ssl/certs/ca-certificates.crt",
    "/etc/pki/tls/certs/ca-bundle.crt",
    "/etc/ssl/cert.pem",
)
"""Where systems keep the authorities that they trust; the driver brings an OpenSSL that looks elsewhere."""


def unreadable() -> ConfigError:
    """The address is none; it is not quoted, as it may hold a password."""
    return ConfigError("the database URL cannot be read", hint=_HINT)


def complete(url: str, password: str | None = None) -> str:
    """The address with what it leaves out: the password when one is given, and verified TLS to another machine.

    Args:
        url: as libpq takes it: a URL, or `keyword=value` pairs.
        password: used when the URL has none.

    Returns:
        `keyword=value` pairs; the URL itself when nothing is left out.

    Raises:
        ConfigError: it cannot be read. It is not quoted, as it may hold a password.
    """
    from psycopg import ProgrammingError, conninfo  # the command line loads fast

    scheme, separator, _ = url.partition("://")
    if separator and scheme.isalpha() and scheme not in ("postgresql", "postgres"):
        raise ConfigError(f"the database URL is one of {scheme}, not PostgreSQL", hint=_HINT)
    try:
        parts = {name: str(value) for name, value in conninfo.conninfo_to_dict(url).items() if value is not None}
    except ProgrammingError:
        raise unreadable() from None
    _refuse_torn(parts)
    added: dict[str, str] = {}
    if password and "password" not in parts:
        added["password"] = password
    if not _says_tls(parts) and _is_remote(parts):
        added["sslmode"] = "verify-full"
        if "sslrootcert" not in parts and (trusted := _trusted()) is not None:
            added["sslrootcert"] = trusted
    return conninfo.make_conninfo("", **(parts | added)) if added else url


def _refuse_torn(parts: dict[str, str]) -> None:
    """A bare @ or / in a password tears a URL apart; what is then taken for host, port or database would be shown."""
    ports = [port for port in parts.get("port", "").split(",") if port]
    hosts = [host for host in parts.get("host", "").split(",") if host[:1] not in ("/", "@")]
    torn = any("@" in host for host in hosts) or not all(port.isdigit() for port in ports)
    if torn or ("@" in parts.get("dbname", "") and "user" not in parts):
        raise unreadable()


def _says_tls(parts: dict[str, str]) -> bool:
    return bool("sslmode" in parts or "service" in parts or os.environ.get("PGSSLMODE") or os.environ.get("PGSERVICE"))


def _is_remote(parts: dict[str, str]) -> bool:
    said = parts.get("host") or os.environ.get("PGHOST") or parts.get("hostaddr") or os.environ.get("PGHOSTADDR") or ""
    return any(is_other_machine(host) for host in said.split(","))


def _trusted() -> str | None:
    """The file of the authorities that this system trusts; None when libpq is told by its own variable or file."""
    if os.environ.get("PGSSLROOTCERT") or (Path.home() / ".postgresql" / "root.crt").exists():
        return None
    named = ssl.get_default_verify_paths().cafile
    return next((file for file in (named, *CERTIFICATE_FILES) if file and Path(file).is_file()), "system")
