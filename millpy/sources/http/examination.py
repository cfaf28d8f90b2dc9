"""Check an HTTP source for `millpy doctor`: who may send, whether a worker answers, when its certificate ends."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import TYPE_CHECKING

from millpy.clock import SystemClock
from millpy.config.extras import to_install
from millpy.errors import ConfigError, SourceUnavailableError
from millpy.model.finding import Finding, Severity
from millpy.sources.http.address import ListenAddress
from millpy.sources.http.tokens import TOKENS_VARIABLE, TokenList

if TYPE_CHECKING:
    from millpy.sources.http.source import Http

ANSWER_S_MAX = 2.0
_LONG_S = 14 * 86_400


async def examine(source: Http, graph: str, stream: str) -> AsyncIterator[Finding]:
    """Yield what `millpy doctor` finds: tokens, encryption, the certificate, and whether a worker answers.

    It looks from this machine, with this machine's settings. Raises MillError: a setting is wrong, or nothing listens.
    """
    del graph
    try:
        import aiohttp  # noqa: F401 - workers need it
    except ImportError as error:
        raise ConfigError("HTTP needs the package aiohttp", hint=to_install("http")) from error
    address, tokens = source.address(), TokenList(SystemClock())
    address.tls_context()
    yield _access(source, stream, address, tokens)
    if address.is_open and address.certificate is None:
        yield Finding(
            Severity.WARNING,
            "HTTP encryption",
            f"{stream}: {address} is open to other machines without TLS",
            "an eavesdropper reads the records and the tokens",
            "listen with https:// (docs/http.md), or only for a proxy that encrypts",
        )
    status, days_left = await _ask(source.path, address)
    if days_left is not None and days_left * 86_400 < _LONG_S:
        yield Finding(
            Severity.WARNING,
            "HTTP certificate",
            f"{stream}: the certificate at {address} is valid for {days_left:.0f} more days",
            "then clients refuse to send",
            "renew it, and start the workers again",
        )
    if status == 405:  # to a GET
        yield Finding(Severity.OK, "HTTP source", f"{stream}: {address}{source.path} accepts requests")
    else:
        yield Finding(
            Severity.WARNING,
            "HTTP source",
            f"{stream}: {address}{source.path} answers with status {status}",
            "something else listens there, or a worker of another graph",
            "give each graph a port of its own",
        )


def _access(source: Http, stream: str, address: ListenAddress, tokens: TokenList) -> Finding:
    if not tokens.is_empty or address.ca is not None:
        what = "a token" if not tokens.is_empty else "a certificate"
        return Finding(Severity.OK, "HTTP access", f"{stream}: clients need {what}")
    if not address.is_open:
        return Finding(
            Severity.NOTE,
            "HTTP access",
            f"{stream}: every program of this machine may send to {address}",
            "its records count like any other",
            f"set {TOKENS_VARIABLE} (docs/http.md)",
        )
    return Finding(
        Severity.WARNING if source.anonymous else Severity.ERROR,
        "HTTP access",
        f"{stream}: {address} is open to other machines, and requests need no token",
        "any client that reaches it can send records" if source.anonymous else "workers refuse to start",
        f"set {TOKENS_VARIABLE} (docs/http.md)",
    )


async def _ask(path: str, address: ListenAddress) -> tuple[int, float | None]:
    """Return the status of a GET, and for how many days the certificate is valid; None without one.

    Raises:
        SourceUnavailableError: nothing answers.
    """
    tls = None
    if address.certificate is not None:
        tls = ssl.create_default_context(cafile=address.certificate)  # its own certificate: we look at its dates only
        tls.check_hostname = False
    host = "127.0.0.1" if address.host in ("", "0.0.0.0", "::") else address.host
    try:
        async with asyncio.timeout(ANSWER_S_MAX):
            reader, writer = await asyncio.open_connection(host, address.port, ssl=tls)
            try:
                writer.write(f"GET {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode())
                status = int((await reader.readline()).split()[1])
                return status, _days_left(writer.get_extra_info("ssl_object"))
            finally:
                writer.close()
                with suppress(OSError):
                    await writer.wait_closed()
    except (OSError, TimeoutError, ValueError, IndexError) as error:
        raise SourceUnavailableError(
            f"no worker answers at {address}{path}: {error or 'it takes too long'}",
            hint="start a worker, or look on the machine where it runs",
        ) from None


def _days_left(connection: ssl.SSLObject | None) -> float | None:
    found = (connection.getpeercert() or {}).get("notAfter") if connection is not None else None
    if not isinstance(found, str):
        return None
    return (ssl.cert_time_to_seconds(found) - SystemClock().now_us() / 1e6) / 86_400
