"""The reader of an injected stream: reads ahead, and deletes what is committed.

read     the next unread records, in pages of one snapshot each (`injected_position.py`)
wake     when nothing is new, it notes that it sleeps, so that `millpy.inject` notifies it. It looks again after that,
         and then from time to time, because a transaction may have looked before. While many records come, nobody is
         notified: commits with a notification wait for each other
forget   records are deleted after the commit that has their effects, outside of it. What an owner has left there
         when it died, its successor deletes
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from millpy.errors import ConfigError, TransientError
from millpy.formats.message import encoded_names
from millpy.ingest.json_append import completed
from millpy.ingest.protocol import SourceBatch, SourceSetup
from millpy.model.record import Instants
from millpy.sources.postgres.injected import InjectedStream
from millpy.sources.postgres.injected_position import InjectedPosition, XidRange, from_multirange, open_in
from millpy.store.postgres.arrays import Bigints
from millpy.store.postgres.connection import Channel, Connection, ConnectionGroup, ConnectionSettings, all_rows
from millpy.store.postgres.statements import statement

log = logging.getLogger(__name__)

LISTEN = b"LISTEN millpy_injected"
PAGES_MAX = 2
"""Pages that are read ahead."""
BUSY_RECORDS = 200
"""Records of a page from which no notification is wanted."""
NAP_S_MIN, NAP_S_MAX = 0.005, 0.25
_FORGET_EVERY_S = 0.2
_FORGET_RECORDS_MAX = 20_000
_PROOF_S = 3.0
_RETRY_S_MIN, _RETRY_S_MAX = 0.1, 5.0


@dataclass(frozen=True, slots=True)
class InjectedPage:
    """Records that one statement has read behind a position, and the transactions that may have been open."""

    before: InjectedPosition
    numbers: Sequence[int]
    payloads: Sequence[bytes]
    arrivals: Sequence[int]
    open_xids: Sequence[XidRange]
    whole: bool

    @property
    def position(self) -> InjectedPosition:
        """The position behind the page."""
        return self.before.advance(self.numbers[-1], self.open_xids, whole=self.whole)

    def cut(self, count: int) -> tuple[InjectedPage, InjectedPage]:
        """Split the page into its first records and the rest."""
        first, rest = slice(count), slice(count, None)
        return self._part(first, whole=False), self._part(rest, whole=self.whole)

    def _part(self, part: slice, *, whole: bool) -> InjectedPage:
        columns = (self.numbers[part], self.payloads[part], self.arrivals[part])
        return InjectedPage(self.before, *columns, self.open_xids, whole)


@dataclass(frozen=True, slots=True)
class DeliveredBatch:
    """The token of a batch: what may be deleted when it is committed."""

    position: InjectedPosition
    numbers: Sequence[int]


class InjectedReader:
    """The injector of one injected stream."""

    def __init__(self, setup: SourceSetup, source: InjectedStream) -> None:
        self._setup = setup
        self._source = source
        group = ConnectionGroup(setup.database, ConnectionSettings.from_limits(setup.limits))
        self._read_channel = Channel(group, "injected")
        self._forget_channel = Channel(group, "injected forget", durable=False)
        self._listen_channel = Channel(group, "injected listen", listens=True)
        self._listening: Connection | None = None
        self._id = b""
        if source.id_field is not None and setup.record_type is not None:
            self._id = b"," + msgspec.json.encode(encoded_names(setup.record_type)[source.id_field]) + b":"
        self._graph_id = 0
        self._read_to = InjectedPosition(0)
        self._pages: deque[InjectedPage] = deque()
        self._total = 0
        self._room = asyncio.Event()
        self._proven_at = float("-inf")
        self._asleep = True  # as `open` notes it
        self._delivered: deque[DeliveredBatch] = deque()  # committed, not deleted yet
        self._forgot_at = float("-inf")
        self._keeper: asyncio.Task[None] | None = None

    async def open(self, position: bytes | None) -> None:
        """Find the reader's row, delete what is committed, and begin to read.

        Raises:
            TransientError: the database does not answer now.
            ConfigError: the deployed graph has no such source.
        """
        setup = self._setup
        named = {
            "graph": setup.graph,
            "generation": setup.generation,
            "source": setup.stream,
            "stream": self._source.stream,
            "waiting_max": self._source.waiting_max,
        }
        async with self._read_channel.use() as connection:
            found = await all_rows(connection, statement("open_injected"), named)
        if not found:
            raise ConfigError(
                f"graph {setup.graph!r} is not deployed with {setup.stream!r} as a source of injected records",
                hint="deploy it: millpy deploy GRAPH.py",
            )
        self._graph_id, last, open_xids, rest, after = found[0]
        if position is None:
            self._read_to = InjectedPosition(last, from_multirange(open_xids), from_multirange(rest), after)
        else:
            self._read_to = msgspec.json.decode(position, type=InjectedPosition)
        await self._forget(self._read_to, None)
        setup.connection.managed = True
        setup.connection.connected()
        self._keeper = asyncio.create_task(self._keep(), name=f"millpy-injected-{self._source.stream}")
        self._keeper.add_done_callback(lambda _: setup.ready.set())

    # -- beside the turns -----------------------------------------------------------------------------------------

    async def _keep(self) -> None:
        """Read; try again after a failure."""
        retry_s = _RETRY_S_MIN
        while True:
            try:
                nap_s = NAP_S_MIN
                while True:
                    nap_s = await self._work(nap_s)
                    retry_s = _RETRY_S_MIN
                    self._setup.connection.connected()
            except TransientError as error:
                self._setup.connection.disconnected(error.message, attempted=True)
            await self._setup.clock.sleep(retry_s)
            retry_s = min(_RETRY_S_MAX, retry_s * 2)

    async def _work(self, nap_s: float) -> float:
        """Read a page, or sleep. Return how long to sleep when the next page is empty."""
        await self._forget_delivered()
        while len(self._pages) >= PAGES_MAX:
            self._room.clear()
            if self._delivered:
                await self._forget_delivered(at_once=True)
            await self._room.wait()
        page = await self._read()
        if page is not None:
            self._read_to = page.position
            self._pages.append(page)
            self._setup.ready.set()
            if not page.whole or len(page.numbers) >= BUSY_RECORDS:
                await self._sleep_or_wake(asleep=False)
                return NAP_S_MIN
            nap_s = NAP_S_MIN
        elif not self._asleep:
            await self._sleep_or_wake(asleep=True)
            return nap_s
        else:
            self._proven_at = self._setup.clock.monotonic()
        await self._nap(nap_s)
        return min(NAP_S_MAX, nap_s * 2)

    async def _read(self) -> InjectedPage | None:
        limits, stream = self._setup.limits, self._source.stream
        bounds = {"stream": stream, "records_max": limits.bundle_records_max, "bytes_max": limits.bundle_bytes_max}
        async with self._read_channel.use() as connection:
            rows = await all_rows(connection, statement("read_injected"), {**self._read_to.parameters(), **bounds})
            if not rows and self._read_to.rest:
                self._read_to = self._read_to.without_rest()
                rows = await all_rows(connection, statement("read_injected"), {**self._read_to.parameters(), **bounds})
        if not rows:
            return None
        whole = len(rows) == rows[0][6] < limits.bundle_records_max
        return InjectedPage(
            self._read_to,
            [row[0] for row in rows],
            [row[1] for row in rows] if not self._id else [self._with_id(row[1], row[2]) for row in rows],
            [row[3] for row in rows],
            open_in(rows[0][4], rows[0][5]),
            whole,
        )

    def _with_id(self, payload: bytes, dedupe_id: str | None) -> bytes:
        if dedupe_id is None:
            return payload  # which may have an id of its own
        return completed(payload, self._id + msgspec.json.encode(dedupe_id) + b"}")

    async def _sleep_or_wake(self, *, asleep: bool) -> None:
        if asleep == self._asleep:
            return
        parameters = {"graph_id": self._graph_id, "source": self._setup.stream, "asleep": asleep}
        async with self._forget_channel.use() as connection:
            await connection.execute(statement("sleep_or_wake"), parameters)
        self._asleep = asleep

    async def _nap(self, nap_s: float) -> None:
        """Wait for a notification, at most this long."""
        async with self._listen_channel.use() as connection:
            if self._listening is not connection:
                await connection.execute(LISTEN)
                self._listening = connection
            async with aclosing(connection.notifies(timeout=nap_s)) as notices:
                async for notice in notices:
                    if notice.payload == self._source.stream:
                        return

    async def _forget_delivered(self, *, at_once: bool = False) -> None:
        """Delete what is committed, some batches at a time."""
        now = self._setup.clock.monotonic()
        count = sum(len(delivered.numbers) for delivered in self._delivered)
        if not self._delivered or not (
            at_once or count >= _FORGET_RECORDS_MAX or now - self._forgot_at >= _FORGET_EVERY_S
        ):
            return
        batches = list(self._delivered)
        numbers = np.concatenate([np.array(delivered.numbers, np.int64) for delivered in batches])
        await self._forget(batches[-1].position, numbers)
        for _ in batches:
            self._delivered.popleft()
        self._forgot_at = now

    async def _forget(self, position: InjectedPosition, numbers: np.ndarray[Any, Any] | None) -> None:
        """Note a committed position, and delete what every reader of the stream has committed.

        Args:
            position: what is committed.
            numbers: the records to delete; None for all that were read.
        """
        named: dict[str, Any] = {"stream": self._source.stream}
        noted = {**position.parameters(), "graph_id": self._graph_id, "source": self._setup.stream}
        async with self._forget_channel.use() as connection, connection.transaction():
            await connection.execute(statement("lock_injection_readers"), named)
            await connection.execute(statement("note_injected"), noted)
            if numbers is None:
                await connection.execute(statement("delete_all_injected"), named)
                return
            for begin in range(0, len(numbers), _FORGET_RECORDS_MAX):
                piece = Bigints(numbers[begin : begin + _FORGET_RECORDS_MAX])
                await connection.execute(statement("delete_injected"), {**named, "numbers": piece})

    # -- called by the worker -------------------------------------------------------------------------------------

    async def take(self) -> SourceBatch | None:
        """Return what was read, at most a bundle.

        Raises:
            MillError: reading has stopped for good.
        """
        if not self._pages:
            if self._keeper is not None and self._keeper.done():
                self._keeper.result()
            return None
        page = self._pages.popleft()
        bound = self._setup.take_bound
        sizes = np.cumsum([len(payload) for payload in page.payloads])
        count = max(1, min(bound.records, int(np.searchsorted(sizes, bound.bytes, side="right"))))
        if count < len(page.numbers):
            page, rest = page.cut(count)
            self._pages.appendleft(rest)
        self._room.set()
        if self._pages:
            self._setup.ready.set()
        position = page.position
        self._total += len(page.numbers)
        stream, numbers, arrivals = self._source.stream, page.numbers, page.arrivals
        return SourceBatch(
            format="json",
            arrived_at=self._setup.clock.now_us(),
            arrivals=lambda: _instants(arrivals),
            payloads=page.payloads,
            describe=lambda row: f"{stream}#{numbers[row]}",
            position=msgspec.json.encode(position),
            token=DeliveredBatch(position, numbers),
            total=self._total,
        )

    async def acknowledge(self, token: Any) -> None:
        """Let the records of a batch be deleted, which is committed."""
        self._delivered.append(token)

    def quiet(self) -> bool:
        """Tell whether all committed records were taken, as a look in the last seconds has shown."""
        return not self._pages and self._setup.clock.monotonic() - self._proven_at < _PROOF_S

    async def close(self) -> None:
        """Disconnect."""
        keeper, self._keeper = self._keeper, None
        if keeper is not None:
            keeper.cancel()
            await asyncio.wait([keeper])
            if not keeper.cancelled():
                keeper.exception()
        for channel in (self._read_channel, self._forget_channel, self._listen_channel):
            await channel.close()
        self._pages.clear()


def _instants(arrivals: Sequence[int]) -> Instants:
    return np.array(arrivals, np.int64)
