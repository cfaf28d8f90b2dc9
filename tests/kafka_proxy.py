"""A TCP proxy in front of a Kafka broker, at the address that the broker advertises to those who come through it.

proxy.cut()              close all connections now
proxy.stall(True)        pass nothing until stall(False); connections stay open
proxy.arm(api, fault)    the next request of this API meets a fault:
    LOST_ANSWER          it arrives; its answer and the connection are lost
    LOST                 the connection is cut before it arrives
    LATE                 the client loses its connection; the request arrives at `land()`, however late
"""

from __future__ import annotations

import asyncio
from enum import Enum
from types import TracebackType
from typing import Self

from millpy.testing.proxy_thread import ProxyThread
from tests.kafka_server import KafkaServer

TXN_OFFSET_COMMIT, END_TXN = 28, 26
"""API keys of the protocol."""


class RequestFault(Enum):
    """A fault of one request."""

    LOST_ANSWER = "lost answer"
    LOST = "lost"
    LATE = "late"


class KafkaProxy(ProxyThread):
    """Passes requests and answers on."""

    def __init__(self, server: KafkaServer) -> None:
        super().__init__()
        self._front, self._behind = server.proxied, server.behind
        self._fronting = server.fronting
        self._armed: tuple[int, RequestFault] | None = None
        self._late: list[tuple[asyncio.StreamWriter, bytes]] = []

    def __enter__(self) -> Self:
        self._fronting.acquire()
        try:
            return super().__enter__()
        except BaseException:
            self._fronting.release()
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            super().__exit__(kind, error, trace)
        finally:
            self._fronting.release()

    def arm(self, api: int, fault: RequestFault) -> None:
        """Arm a fault for the next request of an API."""
        self._armed = (api, fault)

    def land(self) -> None:
        """Let the late requests arrive, and the broker answer them."""
        self._call(self._land())

    async def pass_request(self, link: _Link, request: bytes) -> bool:
        """Pass a request on, unless it meets a fault; return whether the client still has a connection."""
        await self._flowing.wait()
        api = int.from_bytes(request[4:6], "big")
        if self._armed is None or self._armed[0] != api:
            link.server.write(request)
            return True
        (_, fault), self._armed = self._armed, None
        self.struck += 1
        if fault is RequestFault.LATE:
            self._late.append((link.server, request))
        elif fault is RequestFault.LOST_ANSWER:
            link.is_deaf = True
            link.server.write(request)
            await asyncio.sleep(0.2)  # the broker answers meanwhile
        link.client.transport.abort()
        return False

    async def wait_while_stalled(self) -> None:
        """Wait while the proxy is stalled."""
        await self._flowing.wait()

    async def _listen(self) -> asyncio.Server:
        host, port = self._front.split(":")
        return await asyncio.start_server(self._accept, host, int(port), reuse_address=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        host, port = self._behind.split(":")
        try:
            from_server, server = await asyncio.open_connection(host, int(port))
        except OSError:
            writer.transport.abort()
            return
        link = _Link(self, writer, server)
        self._links.add(link)
        back = asyncio.create_task(link.run_backward(from_server))
        try:
            await link.run_forward(reader)
        except (OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            self._links.discard(link)
            back.cancel()
            await asyncio.gather(back, return_exceptions=True)
            writer.transport.abort()
            if all(late is not server for late, _ in self._late):
                server.transport.abort()

    async def _land(self) -> None:
        late, self._late = self._late, []
        for server, request in late:
            server.write(request)
            await server.drain()
        await asyncio.sleep(0.2)  # the broker answers meanwhile
        for server, _ in late:
            server.transport.abort()

    async def _shut(self) -> None:
        for server, _ in self._late:
            server.transport.abort()
        await super()._shut()


class _Link:
    """One client, and its connection to the broker."""

    def __init__(self, proxy: KafkaProxy, client: asyncio.StreamWriter, server: asyncio.StreamWriter) -> None:
        self.proxy = proxy
        self.client, self.server = client, server
        self.is_deaf = False

    def cut(self) -> None:
        for writer in (self.client, self.server):
            writer.transport.abort()

    async def run_forward(self, reader: asyncio.StreamReader) -> None:
        """Pass requests on, one by one."""
        connected = True
        while connected:
            length = await reader.readexactly(4)
            body = await reader.readexactly(int.from_bytes(length, "big"))
            connected = await self.proxy.pass_request(self, length + body)

    async def run_backward(self, reader: asyncio.StreamReader) -> None:
        """Pass answers on; the broker's end ends the client's connection."""
        try:
            while data := await reader.read(65_536):
                await self.proxy.wait_while_stalled()
                if not self.is_deaf:
                    self.client.write(data)
        except OSError:
            pass
        finally:
            if not self.is_deaf:
                self.client.transport.abort()
