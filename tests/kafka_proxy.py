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
import threading
from collections.abc import Coroutine
from enum import Enum
from types import TracebackType
from typing import Any, Self

from tests.kafka_server import KafkaServer

TXN_OFFSET_COMMIT, END_TXN = 28, 26
"""API keys of the protocol."""


class RequestFault(Enum):
    """A fault of one request."""

    LOST_ANSWER = "lost answer"
    LOST = "lost"
    LATE = "late"


class KafkaProxy:
    """Passes requests and answers on, in its own thread.

    Attributes:
        struck: the number of armed faults that have happened.
    """

    def __init__(self, server: KafkaServer) -> None:
        self._front, self._behind = server.proxied, server.behind
        self.struck = 0
        self._armed: tuple[int, RequestFault] | None = None
        self._late: list[tuple[asyncio.StreamWriter, bytes]] = []
        self._links: set[_Link] = set()
        self._loop = asyncio.new_event_loop()
        self._flowing = asyncio.Event()
        self._listener: asyncio.Server | None = None
        self._thread = threading.Thread(target=self._loop.run_forever, name="kafka-proxy", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        self._call(self._listen())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._call(self._shut())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def cut(self) -> None:
        """Close all connections, on both sides, now."""
        self._call(self._cut())

    def stall(self, stalled: bool) -> None:
        """Pass nothing in either direction until called with False."""
        self._loop.call_soon_threadsafe(self._flowing.clear if stalled else self._flowing.set)

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

    def _call(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(30)

    async def _listen(self) -> None:
        self._flowing.set()
        host, port = self._front.split(":")
        self._listener = await asyncio.start_server(self._accept, host, int(port), reuse_address=True)

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

    async def _cut(self) -> None:
        for link in list(self._links):
            link.cut()

    async def _land(self) -> None:
        late, self._late = self._late, []
        for server, request in late:
            server.write(request)
            await server.drain()
        await asyncio.sleep(0.2)  # the broker answers meanwhile
        for server, _ in late:
            server.transport.abort()

    async def _shut(self) -> None:
        assert self._listener is not None
        self._listener.close()
        self._flowing.set()
        await self._cut()
        for server, _ in self._late:
            server.transport.abort()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)


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
