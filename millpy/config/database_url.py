"""The database's URL: parsed once, completed with the password and verified TLS, and never quoted in an error.

A connection to another machine is encrypted, and the server's certificate and name are verified, unless the URL, the
environment (PGSSLMODE) or a service file decides otherwise. By default, libpq connects without TLS to a server that
does not offer it.
"""

from __future__ import annotations

import os
import ssl
from pathlib import Path

from millpy.config.secrets import is_other_machine
from millpy.errors import ConfigError

URL_FORM = "postgresql://user:password@host:5432/database"
_HINT = f"write MILLPY_DATABASE_URL (or --database) as {URL_FORM}, with %40 %3A %2F %3F %23 for @ : / ? # in a password"
CERTIFICATE_FILES = (
    "/etc/ssl/certs/ca-certificates.crt",
    "/etc/pki/tls/certs/ca-bundle.crt",
    "/etc/ssl/cert.pem",
)
"""Files of trusted authorities on common systems. The OpenSSL in psycopg's wheels searches elsewhere."""


def unreadable_url_error() -> ConfigError:
    """Return the error for an unreadable URL. It does not quote the URL, which may contain a password."""
    return ConfigError("the database URL cannot be read", hint=_HINT)


def complete(url: str, password: str | None = None) -> str:
    """Complete a URL with the password, if one is given, and with verified TLS to another machine.

    Args:
        url: a URL or `keyword=value` pairs, as libpq accepts them.
        password: the password to use if the URL has none.

    Returns:
        `keyword=value` pairs; the URL itself if it is complete.

    Raises:
        ConfigError: the URL is unreadable. The message does not quote it, because it may contain a password.
    """
    from psycopg import ProgrammingError, conninfo  # imported late, so that the command line starts fast

    scheme, separator, _ = url.partition("://")
    if separator and scheme.isalpha() and scheme not in ("postgresql", "postgres"):
        raise ConfigError(f"the database URL is for {scheme}, not PostgreSQL", hint=_HINT)
    try:
        parts = {name: str(value) for name, value in conninfo.conninfo_to_dict(url).items() if value is not None}
    except ProgrammingError:
        raise unreadable_url_error() from None
    _refuse_torn(parts)
    added: dict[str, str] = {}
    if password and "password" not in parts:
        added["password"] = password
    if not _says_tls(parts) and _is_remote(parts):
        added["sslmode"] = "verify-full"
        if "sslrootcert" not in parts and (trusted := _trusted()) is not None:
            added["sslrootcert"] = trusted
    return conninfo.make_conninfo("", **(parts | added)) if added else url


def with_setting(url: str, name: str, value: str) -> str:
    """Return a readable URL whose sessions begin with one more setting."""
    from psycopg import conninfo

    before = conninfo.conninfo_to_dict(url).get("options") or os.environ.get("PGOPTIONS", "")
    return conninfo.make_conninfo(url, options=f"{before} -c {name}={value}".strip())


def _refuse_torn(parts: dict[str, str]) -> None:
    """Raise ConfigError for a URL that an unescaped @ or / in its password splits in the wrong place.

    Errors of the server would otherwise quote a part of the password as a host or a database.
    """
    ports = [port for port in parts.get("port", "").split(",") if port]
    hosts = [host for host in parts.get("host", "").split(",") if host[:1] not in ("/", "@")]
    torn = any("@" in host for host in hosts) or not all(port.isdigit() for port in ports)
    if torn or ("@" in parts.get("dbname", "") and "user" not in parts):
        raise unreadable_url_error()


def _says_tls(parts: dict[str, str]) -> bool:
    return bool("sslmode" in parts or "service" in parts or os.environ.get("PGSSLMODE") or os.environ.get("PGSERVICE"))


def _is_remote(parts: dict[str, str]) -> bool:
    said = parts.get("host") or os.environ.get("PGHOST") or parts.get("hostaddr") or os.environ.get("PGHOSTADDR") or ""
    return any(is_other_machine(host) for host in said.split(","))


def _trusted() -> str | None:
    """Return the system's file of trusted authorities; None if libpq's variable or file names one."""
    if os.environ.get("PGSSLROOTCERT") or (Path.home() / ".postgresql" / "root.crt").exists():
        return None
    named = ssl.get_default_verify_paths().cafile
    return next((file for file in (named, *CERTIFICATE_FILES) if file and Path(file).is_file()), "system")
