"""Check an HTTP source for `millpy doctor`: who may send, whether a worker answers, when its certificate ends."""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

from millpy.clock import SystemClock
from millpy.config.extras import to_install
from millpy.errors import ConfigError
from millpy.model.finding import Finding, Severity
from millpy.sources.http.address import ListenAddress
from millpy.sources.http.port_check import asking
from millpy.sources.http.tokens import TOKENS_VARIABLE, TokenList

if TYPE_CHECKING:
    from millpy.sources.http.source import Http

ANSWER_S_MAX = 2.0
_LONG_S = 14 * 86_400


async def examine(source: Http, graph: str, stream: str) -> AsyncIterator[Finding]:
    """Yield what `millpy doctor` finds: tokens, encryption, the certificate, and whether a worker answers.

    It looks from this machine, with this machine's settings. Raises ConfigError: a setting is wrong.
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
    try:
        status, days_left = await _ask(source.path, address)
    except (OSError, TimeoutError, ValueError, IndexError) as error:
        yield Finding(
            Severity.ERROR,
            "HTTP source",
            f"{stream}: no worker answers at {address}{source.path}: {error or 'it takes too long'}",
            "clients cannot send, and have to keep their records",
            "start a worker, or look on the machine where it runs",
        )
        return
    if days_left is not None and days_left * 86_400 < _LONG_S:
        yield Finding(
            Severity.WARNING,
            "HTTP certificate",
            f"{stream}: the certificate at {address} is valid for {days_left:.0f} more days",
            "then clients refuse to send",
            "renew it, and start the workers again",
        )
    if status is None:
        found = f"{stream}: a worker listens at {address}; it demands a certificate, so that its answer is not checked"
        yield Finding(Severity.OK, "HTTP source", found)
    elif status == 405:  # to a GET
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


async def _ask(path: str, address: ListenAddress) -> tuple[int | None, float | None]:
    """Return the status of a GET, and for how many days the certificate is valid.

    The first is None for a worker that demands a certificate, the second without TLS.
    """
    tls = None
    if address.certificate is not None:
        tls = ssl.create_default_context(cafile=address.certificate)  # its own certificate: we look at its dates only
        tls.check_hostname = False
        tls.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    async with asking(address, path, tls, ANSWER_S_MAX) as (reader, writer):
        days_left = _days_left(writer.get_extra_info("ssl_object"))
        return None if address.ca is not None else int((await reader.readline()).split()[1]), days_left


def _days_left(connection: ssl.SSLObject | None) -> float | None:
    found = (connection.getpeercert() or {}).get("notAfter") if connection is not None else None
    if not isinstance(found, str):
        return None
    return (ssl.cert_time_to_seconds(found) - SystemClock().now_us() / 1e6) / 86_400
