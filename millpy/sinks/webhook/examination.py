"""Check the endpoint of a webhook for `millpy doctor`: name, TLS, certificate, secrets. No request is sent."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

from millpy.clock import SystemClock
from millpy.model.finding import Finding, Severity
from millpy.sinks.webhook.address import Origin
from millpy.sinks.webhook.signing import RequestSecrets
from millpy.sinks.webhook.tls import tls_context

if TYPE_CHECKING:
    from millpy.sinks.webhook.endpoint import Webhook

CHECK = "sink"
HOSTS_MAX = 20
"""The most hosts of hosts=(…) that are looked at."""
LONG_DAYS = 14
REFUSAL_S_MAX = 0.5
"""Seconds to wait for the refusal of our certificate, which TLS 1.3 sends after the handshake."""


async def examine(webhook: Webhook, sink: str) -> AsyncIterator[Finding]:
    """Yield what `millpy doctor` finds, with this machine's settings. Raises ConfigError: a setting is wrong."""
    RequestSecrets(webhook.access.signing, webhook.access.headers, SystemClock())
    tls = await asyncio.to_thread(tls_context, webhook.access.tls)
    if webhook.access.signing is None:
        yield Finding(
            Severity.NOTE,
            CHECK,
            f"{sink}: its requests are not signed",
            "a receiver cannot tell them from those of others",
            "name a secret: WebhookAccess(signing=…), see docs/sinks.md",
        )
    origins = sorted(webhook.hosts, key=str)
    for origin in origins[:HOSTS_MAX]:
        if origin.exposes_secrets:
            yield Finding(
                Severity.WARNING,
                CHECK,
                f"{sink}: records reach {origin} unencrypted",
                "an eavesdropper reads and changes them",
                "use https://",
            )
        yield await _reach(sink, origin, tls if origin.scheme == "https" else None, webhook.timeouts.connect_s)
    if len(origins) > HOSTS_MAX:
        yield Finding(Severity.NOTE, CHECK, f"{sink}: {len(origins) - HOSTS_MAX} more hosts are not looked at")


async def _reach(sink: str, origin: Origin, tls: ssl.SSLContext | None, within_s: float) -> Finding:
    """Connect and disconnect."""
    try:
        async with asyncio.timeout(within_s):
            days_left = await _connect(origin, tls)
    except (OSError, TimeoutError) as error:
        why = getattr(error, "verify_message", None) or str(error) or f"it takes longer than {within_s:g} s"
        return Finding(
            Severity.ERROR,
            CHECK,
            f"{sink}: no connection to {origin}: {why}",
            "its messages wait in the outbox; then its input waits, and at last the sources",
            "start the receiver, or correct the URL, the certificates or the name",
        )
    if days_left is not None and days_left < LONG_DAYS:
        return Finding(
            Severity.WARNING,
            CHECK,
            f"{sink}: the certificate of {origin} is valid for {days_left:.0f} more days",
            "then messages wait in the outbox",
            "have the receiver renew it",
        )
    valid = "" if days_left is None else f"; its certificate is valid for {days_left:.0f} more days"
    return Finding(Severity.OK, CHECK, f"{sink}: {origin} accepts connections{valid}")


async def _connect(origin: Origin, tls: ssl.SSLContext | None) -> float | None:
    """Return for how many days the certificate is valid; None without TLS."""
    reader, writer = await asyncio.open_connection(
        origin.host, origin.port, ssl=tls, server_hostname=origin.host if tls else None
    )
    try:
        if tls is None:
            return None
        ends = (writer.get_extra_info("ssl_object").getpeercert() or {}).get("notAfter")
        try:
            async with asyncio.timeout(REFUSAL_S_MAX):
                if not await reader.read(1):
                    raise ConnectionResetError("it hangs up after the handshake: does it want a certificate?")
        except TimeoutError:
            pass
        return (ssl.cert_time_to_seconds(ends) - SystemClock().now_us() / 1e6) / 86_400 if ends else None
    finally:
        writer.transport.abort()
