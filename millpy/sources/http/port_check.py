"""Find out which graph listens at an address before listening there, too.

The processes of one graph share a port. The system would let those of two graphs share it as well, and each would get
some of the requests that are meant for the other. So a worker asks first, and refuses to share the port of another
graph, or of another generation.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from hashlib import blake2b

from millpy.errors import ConfigError
from millpy.sources.http.address import URL_VARIABLE, ListenAddress

GRAPH_HEADER = "Millpy-Graph"
ANSWER_S_MAX = 1.0
_HEAD_BYTES_MAX = 8_192


def graph_mark(graph: str, secret: str) -> str:
    """Return the value of GRAPH_HEADER, which shows to which graph of which deployment a worker belongs."""
    return blake2b(graph.encode(), key=secret.encode()[:64], digest_size=8).hexdigest()


@asynccontextmanager
async def asking(
    address: ListenAddress, path: str, tls: ssl.SSLContext | None, within_s: float
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """Connect from this machine, and ask for a path by GET. Raises OSError or TimeoutError, also for the block."""
    async with asyncio.timeout(within_s):
        reader, writer = await asyncio.open_connection(address.local_host, address.port, ssl=tls)
        try:
            writer.write(f"GET {path} HTTP/1.1\r\nHost: {address.local_host}\r\nConnection: close\r\n\r\n".encode())
            yield reader, writer
        finally:
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()


async def check_port(address: ListenAddress, mark: str) -> None:
    """Refuse an address at which a worker of another graph answers.

    A worker that is frozen, or demands certificates of clients, does not say to which graph it belongs.

    Raises:
        ConfigError: another graph has it.
    """
    tls = None
    if address.certificate is not None:
        tls = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        tls.check_hostname, tls.verify_mode = False, ssl.CERT_NONE  # it sends no secret, and trusts no answer
    try:
        async with asking(address, "/", tls, ANSWER_S_MAX) as (reader, _):
            head = (await reader.read(_HEAD_BYTES_MAX)).decode("latin-1").lower()
    except (OSError, TimeoutError):
        return
    fields = dict(line.partition(": ")[::2] for line in head.splitlines()[1:])
    found = fields.get(GRAPH_HEADER.lower())
    if found is not None and found != mark:
        raise ConfigError(
            f"a worker of another graph, or of another generation of it, accepts requests at {address}",
            hint=f"give each an address of its own: {URL_VARIABLE}, or Http(…, url=…)",
        )
