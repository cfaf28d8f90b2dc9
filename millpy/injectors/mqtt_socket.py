"""The socket under the MQTT client library, with a shorter way for messages.

The library reads from it and writes to it as from any socket (paho wraps its own for websockets likewise), but sees
only what is rare: CONNACK, SUBACK, PINGRESP, PUBACKs of what we publish, DISCONNECT. Messages are cut out of large
reads and handed on together; acknowledgements are written together, between two of the library's packets.

    socket --64 kB--> PacketCutter --messages--> deliver
                                   --the rest--> recv() of the library
    socket <--------- out <------- send() of the library (a whole packet each), acknowledge()

While paused nothing is read, so the broker's answer to a ping would stand behind messages that are not read: the ping
still goes out, which keeps the session at the broker, and is answered from here. Likewise anything that arrives
answers it, because behind a long backlog the true answer may come too late.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Callable, Sequence

from millpy.injectors.mqtt_packets import PacketCutter, Published, pubacks

READ_BYTES = 1 << 18
_PINGREQ = b"\xc0\x00"
_PINGRESP = b"\xd0\x00"


class PacketSocket:
    """A connected stream socket, plain or TLS, non-blocking, used on one event loop.

    Args:
        raw: the connected socket.
        loop: the loop on which it is read; construction may happen in another thread.
        cutter: of this connection alone.
        deliver: called with messages, in the order received.
        failed: called with the error when writing fails.
        readable: called when `recv` has something though the socket may have nothing.
    """

    def __init__(
        self,
        raw: socket.socket,
        *,
        loop: asyncio.AbstractEventLoop,
        cutter: PacketCutter,
        deliver: Callable[[Published], None],
        failed: Callable[[OSError], None],
        readable: Callable[[], None],
    ) -> None:
        self._raw = raw
        self._loop = loop
        self._cutter = cutter
        self._deliver = deliver
        self._failed = failed
        self._readable = readable
        self._for_library = bytearray()
        self._out = bytearray()
        self._writing = False
        self._pinged = False
        self._ended = False
        self._pings_out = self._pings_back = 0
        self._processed: asyncio.Future[None] | None = None
        self._processed_at = 0
        self.paused = False
        self.reads = 0
        """How often something came."""

    # -- what the library calls -----------------------------------------------------------------------------------

    def recv(self, bytes_max: int) -> bytes:
        """The next bytes of packets for the library; reads the socket when there are none.

        Raises:
            BlockingIOError: nothing for the library now.
            OSError: the connection is lost.
        """
        if not self._for_library and not self.paused and not self._ended:
            self._read()
        if not self._for_library:
            if self._ended:
                return b""
            raise BlockingIOError
        part = bytes(self._for_library[:bytes_max])
        del self._for_library[:bytes_max]
        return part

    def send(self, packet: bytes | bytearray) -> int:
        """Take all of it; what the network does not take now follows. Raises OSError when the connection is lost."""
        if packet[:2] == _PINGREQ:
            self._pinged = True
            self._pings_out += 1
            if self.paused:
                self._answer_ping()
                self._loop.call_soon(self._readable)
        self._write(packet)
        return len(packet)

    def pending(self) -> int:
        """Bytes that `recv` has without reading the socket."""
        return len(self._for_library)

    def fileno(self) -> int:
        """Of the socket underneath; -1 when closed."""
        return self._raw.fileno()

    def setblocking(self, flag: bool) -> None:
        """Of the socket underneath."""
        self._raw.setblocking(flag)

    def close(self) -> None:
        """Close at once; what has not been written is lost."""
        self._forget_writer()
        self._out.clear()
        self._ended = True
        self._hurry()
        self._raw.close()

    # -- what we call ---------------------------------------------------------------------------------------------

    def acknowledge(self, packet_ids: Sequence[int]) -> None:
        """Write PUBACKs, in this order. Raises OSError when the connection is lost."""
        self._write(pubacks(packet_ids))

    def ping(self) -> int:
        """Ask for an answer behind all that was written so far; returns what `answered` is to be asked with."""
        self._pings_out += 1
        self._write(_PINGREQ)
        return self._pings_out

    def answered(self, ping: int) -> bool:
        """Whether the broker, which takes packets in order, has answered this ping."""
        return self._pings_back >= ping

    async def processed(self) -> None:
        """Wait until the broker has done all that was written so far (or the connection has ended).

        It takes packets in order, so its answer to a ping tells. Without that, acknowledgements that it has received
        and not yet read are void when the next client takes the session over, and their messages come again.
        """
        self._processed = self._loop.create_future()
        self._processed_at = self._pings_out + 1
        self._hurry()
        self.ping()
        await self._processed

    def _hurry(self) -> None:
        waiting = self._processed
        if waiting is not None and not waiting.done() and (self._ended or self.answered(self._processed_at)):
            waiting.set_result(None)

    def pause(self) -> None:
        """Read no more; a ping that is out counts as answered."""
        self.paused = True
        if self._pinged:
            self._answer_ping()
            self._loop.call_soon(self._readable)

    def resume(self) -> None:
        """Read again."""
        self.paused = False
        self._loop.call_soon(self._readable)

    # -- in between -----------------------------------------------------------------------------------------------

    def _read(self) -> None:
        data = self._raw.recv(READ_BYTES)
        while data and isinstance(self._raw, ssl.SSLSocket) and self._raw.pending():
            # What TLS holds back wakes nobody.
            data += self._raw.recv(self._raw.pending())
        self._ended = not data
        self.reads += 1
        if self._pinged:
            self._answer_ping()
        published, others = self._cutter.feed(data)
        for packet in others:
            self._for_library += packet
            self._pings_back += packet == _PINGRESP
        self._hurry()
        if len(published):
            self._deliver(published)
        if self._out and not self._writing:
            self._flush()  # TLS may have waited for something to read

    def _answer_ping(self) -> None:
        self._pinged = False
        self._for_library += _PINGRESP

    def _write(self, data: bytes | bytearray) -> None:
        if not data or self._raw.fileno() < 0:
            return
        self._out += data
        if not self._writing:
            self._flush()

    def _flush(self) -> None:
        try:
            while self._out:
                del self._out[: self._raw.send(self._out)]
        except (BlockingIOError, ssl.SSLWantWriteError):
            if not self._writing:
                self._writing = True
                self._loop.add_writer(self._raw.fileno(), self._flush_later)
        except ssl.SSLWantReadError:
            self._forget_writer()  # `_read` goes on
        else:
            self._forget_writer()

    def _flush_later(self) -> None:
        try:
            self._flush()
        except OSError as error:
            self._forget_writer()
            self._failed(error)

    def _forget_writer(self) -> None:
        if self._writing:
            self._writing = False
            self._loop.remove_writer(self._raw.fileno())
