"""The relay between an MQTT broker and the client library, with a shortcut for messages.

The library connects to a Unix socket of ours instead of the broker, and sees only the rare packets: CONNACK, SUBACK,
PINGRESP, PUBACKs for our publications, DISCONNECT. The relay cuts messages out of large reads and delivers them
together, and writes acknowledgements together, between two packets of the library.

    broker ---256 kB---> PacketCutter ---messages---> deliver
                                      ---the rest---> library
    broker <------------ the library's packets, acknowledge(), ping()

A paused relay reads nothing from the broker, so the answer to a ping would wait behind unread messages. The ping still
goes out, which keeps the session alive at the broker, and the relay answers it to the library. Any packet that arrives
answers a ping likewise, because the true answer may come too late behind a long backlog.
"""

from __future__ import annotations

import asyncio
import ssl
import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import cast

from millpy.sources.mqtt.packets import Messages, PacketCutter, PacketError, pubacks

_PINGREQ = b"\xc0\x00"
_PINGRESP = b"\xd0\x00"
_TLS_FAREWELL_S_MAX = 3.0


class _End(asyncio.Protocol):
    """One of the relay's two connections.

    Args:
        received: called with what arrives.
        blocked: called with True when writes pile up in memory, and with False when they no longer do.
        lost: called with the error when the connection has ended.
    """

    def __init__(
        self,
        received: Callable[[bytes], None],
        blocked: Callable[[bool], None],
        lost: Callable[[Exception | None], None],
    ) -> None:
        self._received = received
        self._blocked = blocked
        self._lost = lost
        self.transport: asyncio.Transport | None = None
        self.is_lost = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        self._received(data)

    def pause_writing(self) -> None:
        self._blocked(True)

    def resume_writing(self) -> None:
        self._blocked(False)

    def connection_lost(self, error: Exception | None) -> None:
        self.is_lost = True
        self._lost(error)

    @property
    def is_open(self) -> bool:
        """Whether the connection is made, and has neither ended nor been closed."""
        return self.transport is not None and not self.transport.is_closing()

    def write(self, data: bytes) -> None:
        """Write now or later; do nothing on a connection that is not open."""
        if data and self.transport is not None and not self.transport.is_closing():
            self.transport.write(data)

    def close(self) -> None:
        """Close the connection when what waits is written; only once, since Python 3.11.2 aborts none closed twice."""
        if self.transport is not None and not self.transport.is_closing():
            self.transport.close()


class PacketRelay:
    """The connection to the broker, and the library's connection to us; used on one event loop.

    Args:
        five: whether the protocol is MQTT 5.
        packet_bytes_max: the length above which a message is delivered without the end of its payload.
        kept_bytes: the length of the beginning that is delivered then.
        deliver: called with messages, in the order received.
        answer: called with the other packets of a read from the broker; returns those that the library is to see.
    """

    def __init__(
        self,
        *,
        five: bool,
        packet_bytes_max: int,
        kept_bytes: int,
        deliver: Callable[[Messages], None],
        answer: Callable[[list[bytes]], list[bytes]] = list,
    ) -> None:
        self._incoming = PacketCutter(five=five, packet_bytes_max=packet_bytes_max, kept_bytes=kept_bytes)
        self._outgoing = PacketCutter(five=five, packet_bytes_max=packet_bytes_max, kept_bytes=kept_bytes)
        self._deliver = deliver
        self._answer = answer
        self._broker = _End(self._from_broker, lambda _blocked: None, self._broker_lost)
        self._library = _End(self._from_library, self._library_blocked, self._library_lost)
        self._is_library_blocked = False
        self._pinged = False
        self._pings_out = self._pings_back = 0
        self._processed: asyncio.Future[None] | None = None
        self._processed_at = 0
        self.ended = asyncio.get_running_loop().create_future()
        """Done when both connections have ended, or the broker's has and the library never connected."""
        self.error: Exception | None = None
        """The first error, if any."""
        self.paused = False
        self.reads = 0
        """The number of reads from the broker so far."""
        self.reads_beside_pings = 0
        """Those with anything but answers to pings."""

    async def connect(self, host: str, port: int, context: ssl.SSLContext | None) -> None:
        """Connect to the broker, with TLS if there is a context. Raises OSError."""
        await asyncio.get_running_loop().create_connection(
            lambda: self._broker,
            host,
            port,
            ssl=context,
            ssl_shutdown_timeout=_TLS_FAREWELL_S_MAX if context is not None else None,
        )

    @asynccontextmanager
    async def entrance(self) -> AsyncIterator[str]:
        """Listen on a Unix socket for the library, in a directory that no other user can enter; yield its path.

        Raises:
            OSError: the directory for temporary files cannot hold a socket.
        """
        with tempfile.TemporaryDirectory(prefix="millpy-") as directory:
            path = f"{directory}/mqtt"
            server = await asyncio.get_running_loop().create_unix_server(lambda: self._library, path)
            try:
                yield path
            finally:
                server.close()

    # -- called by the connection ---------------------------------------------------------------------------------

    @property
    def is_open(self) -> bool:
        """Whether the broker can be written to."""
        return self._broker.is_open

    def acknowledge(self, packet_ids: Sequence[int]) -> None:
        """Write PUBACKs, in this order; do nothing on a lost connection."""
        self._broker.write(pubacks(packet_ids))

    def write(self, data: bytes) -> None:
        """Write whole packets, between two packets of the library; do nothing on a lost connection."""
        self._broker.write(data)

    def ping(self) -> int:
        """Send a ping behind everything written so far, and return its number for `answered`."""
        self._pings_out += 1
        self._broker.write(_PINGREQ)
        return self._pings_out

    def answered(self, ping: int) -> bool:
        """Tell whether the broker, which processes packets in order, has answered this ping."""
        return self._pings_back >= ping

    async def processed(self) -> None:
        """Wait until the broker has processed everything written so far, or the connection has ended.

        The broker processes packets in order, so its answer to a ping proves it. Without this wait, acknowledgements
        that it has received but not read are void when the next client takes over the session, and it sends their
        messages again.
        """
        self._processed = asyncio.get_running_loop().create_future()
        self._processed_at = self.ping()
        self._check_processed()
        await self._processed

    def _check_processed(self) -> None:
        waiting = self._processed
        if waiting is not None and not waiting.done() and (not self.is_open or self.answered(self._processed_at)):
            waiting.set_result(None)

    def pause(self) -> None:
        """Stop reading from the broker; an unanswered ping counts as answered."""
        self.paused = True
        self._read_or_wait()
        if self._pinged:
            self._answer_ping()

    def resume(self) -> None:
        """Resume reading."""
        self.paused = False
        self._read_or_wait()

    def abort(self, error: Exception) -> None:
        """End the connection to the broker at once; the library sees it end after what came before."""
        self.error = self.error or error
        if self._broker.transport is not None:
            self._broker.transport.abort()

    async def close(self, *, timeout_s: float) -> None:
        """End both connections; wait until written packets are sent and the library has closed its end, but no longer
        than the timeout.
        """
        if self._broker.transport is not None:
            self.resume()  # or TLS would not see the broker's end
            self._broker.close()
            await asyncio.wait([self.ended], timeout=timeout_s)
        for end in (self._broker, self._library):
            if end.transport is not None and not end.is_lost:
                end.transport.abort()

    # -- called by the two ends -----------------------------------------------------------------------------------

    def _from_broker(self, data: bytes) -> None:
        self.reads += 1
        if self._pinged:
            self._answer_ping()
        try:
            published, others = self._incoming.feed(data)
            answered = others.count(_PINGRESP)
            self._pings_back += answered
            self.reads_beside_pings += not answered or answered < len(others) or len(published) > 0
            self._library.write(b"".join(self._answer(others)))
        except PacketError as error:
            self.abort(error)
            return
        self._check_processed()
        if len(published):
            self._deliver(published)

    def _from_library(self, data: bytes) -> None:
        _, packets = self._outgoing.feed(data)
        pings = packets.count(_PINGREQ)
        self._broker.write(data)
        if pings:
            self._pings_out += pings
            self._pinged = True
            if self.paused:
                self._answer_ping()

    def _answer_ping(self) -> None:
        self._pinged = False
        self._library.write(_PINGRESP)

    def _library_blocked(self, blocked: bool) -> None:
        self._is_library_blocked = blocked
        self._read_or_wait()

    def _read_or_wait(self) -> None:
        transport = self._broker.transport
        if transport is None or transport.is_closing():
            return
        if self.paused or self._is_library_blocked:
            transport.pause_reading()
        else:
            transport.resume_reading()

    def _broker_lost(self, error: Exception | None) -> None:
        self.error = self.error or error
        if self._library.transport is not None and not self._library.is_lost:
            self._library.transport.write_eof()
        self._end()

    def _library_lost(self, error: Exception | None) -> None:
        self._broker.close()
        self._end()

    def _end(self) -> None:
        self._check_processed()
        library_left = self._library.transport is None or self._library.is_lost
        if self._broker.is_lost and library_left and not self.ended.done():
            self.ended.set_result(None)
