"""A TCP proxy that can cut connections, or forward nothing, between any client and server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class TcpProxy:
    """Forwards what arrives at its port to a server.

    Attributes:
        port: the port on 127.0.0.1.
        passed: bytes that have gone to the server.
        made: the connections so far.
    """

    def __init__(self, host: str, port: int) -> None:
        self._server = (host, port)
        self.port = self.passed = self.made = 0
        self._cut_after: int | None = None
        self._writers: set[asyncio.StreamWriter] = set()

    def cut(self) -> None:
        """End all connections at once, without a word."""
        for writer in self._writers:
            writer.transport.abort()

    def cut_after(self, size: int) -> None:
        """End all connections after a number of further bytes to the server."""
        self._cut_after = self.passed + size

    async def take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Connect a client with the server."""
        self.made += 1
        self._writers.add(writer)
        back_reader, back_writer = await asyncio.open_connection(*self._server)
        self._writers.add(back_writer)
        try:
            await asyncio.gather(
                self._forward(reader, back_writer, counts=True), self._forward(back_reader, writer, counts=False)
            )
        finally:
            for end in (writer, back_writer):
                self._writers.discard(end)
                end.transport.abort()

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, counts: bool) -> None:
        try:
            while data := await reader.read(65_536):
                if counts and self._cut_after is not None and self.passed + len(data) > self._cut_after:
                    writer.write(data[: self._cut_after - self.passed])
                    await writer.drain()
                    self._cut_after = None
                    self.cut()
                    return
                self.passed += len(data) if counts else 0
                writer.write(data)
                await writer.drain()
        except OSError:
            pass
        finally:
            writer.transport.abort()


@asynccontextmanager
async def tcp_proxy(host: str, port: int) -> AsyncIterator[TcpProxy]:
    """Run a proxy in front of a server, on this event loop."""
    proxy = TcpProxy(host, port)
    tasks: set[asyncio.Task[None]] = set()

    def take(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(proxy.take(reader, writer))
        tasks.add(task)

    server = await asyncio.start_server(take, "127.0.0.1", 0)
    proxy.port = server.sockets[0].getsockname()[1]
    try:
        yield proxy
    finally:
        server.close()
        proxy.cut()
        await asyncio.gather(*tasks, return_exceptions=True)
