"""The injector of a table: hands to the turns what its thread has read (`table_thread.py`).

open      starts the thread, which checks the table and creates the publication and the slot
copy      the rows that are there (`table_copy.py`, `table_position.py`)
follow    the changes, in the order of commits (`replication.py`, `pgoutput.py`)
confirm   what is committed to the slot, so that the server forgets its log; without changes, all that it looked at
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np

from millpy.config.database_url import complete
from millpy.config.secrets import secret
from millpy.config.settings import SOURCE_URL
from millpy.errors import ConfigError
from millpy.ingest.protocol import RejectedRow, SourceBatch, SourceSetup
from millpy.model.record import Instants
from millpy.sources.postgres.change_records import UNCHANGED_REASON
from millpy.sources.postgres.page_thread import PageThread
from millpy.sources.postgres.table import PostgresTable
from millpy.sources.postgres.table_checks import slot_name
from millpy.sources.postgres.table_position import TablePosition
from millpy.sources.postgres.table_thread import TableThread

PROOF_S = 5.0
JOIN_S_MAX = 10.0


def database_of(table: str, database: str | None, own: str) -> tuple[str, bool]:
    """Return the URL of a table's database, and whether it is that of the workers.

    Args:
        table: its name.
        database: the URL that the graph gives.
        own: that of the workers.

    Raises:
        ConfigError: there is none, or it cannot be read.
    """
    url = database or secret(SOURCE_URL)
    if url:
        return complete(url), False
    if not own:
        raise ConfigError(
            f"table {table!r} has no database",
            hint=f"run the graph with `millpy run`, or set {SOURCE_URL}",
        )
    return own, True


Call = Callable[[Callable[[], None]], object]


def follow_table(setup: SourceSetup, source: PostgresTable) -> PageReader:
    """Return the injector of a table and its changes.

    Raises:
        ConfigError: there is no database, or its URL cannot be read.
    """
    url, is_own = database_of(source.table, source.database, setup.database)

    def begin(position: bytes | None, call: Call) -> PageThread:
        read_to = None if position is None else msgspec.json.decode(position, type=TablePosition)
        return TableThread(setup, source, url, slot_name(setup, is_own=is_own), read_to, call)

    return PageReader(setup, begin)


class PageReader:
    """The injector of one table.

    Args:
        setup: what to read for.
        begin: makes the thread that reads behind a position.
    """

    def __init__(self, setup: SourceSetup, begin: Callable[[bytes | None, Call], PageThread]) -> None:
        self._setup = setup
        self._begin = begin
        self._thread: PageThread | None = None
        self._total = 0

    async def open(self, position: bytes | None) -> None:
        """Begin to read in a thread, which connects."""
        self._setup.connection.managed = True
        self._thread = self._begin(position, asyncio.get_running_loop().call_soon_threadsafe)
        self._thread.start()

    async def take(self) -> SourceBatch | None:
        """Return what was read, at most a bundle.

        Raises:
            MillError: reading has stopped for good.
        """
        thread = self._thread
        assert thread is not None
        with thread.changed:
            if not thread.pages:
                if thread.failure is not None:
                    raise thread.failure
                return None
            page, bound = thread.pages[0], self._setup.take_bound
            begin, count, size = page.begin, 0, 0
            for payload in page.payloads[begin : begin + bound.records]:
                size += len(payload)
                if count and size > bound.bytes:
                    break
                count += 1
            page.begin = end = begin + count
            if end >= len(page.payloads):
                thread.pages.popleft()
            if thread.pages:
                self._setup.ready.set()
            thread.changed.notify_all()
        self._total += count
        position = page.position_of(end - 1)
        return SourceBatch(
            format="json",
            arrived_at=self._setup.clock.now_us(),
            arrivals=lambda: _instants(page.arrivals[begin:end]),
            payloads=page.payloads[begin:end],
            refused=[
                RejectedRow(row - begin, UNCHANGED_REASON, why)
                for row, why in page.refused.items()
                if begin <= row < end
            ],
            describe=lambda row: page.place_of(begin + row),
            position=msgspec.json.encode(position),
            token=(max(count, 1), position),
            total=self._total,
        )

    async def acknowledge(self, token: Any) -> None:
        """Let the slot forget what is committed."""
        if self._thread is not None:
            self._thread.committed(*token)

    def quiet(self) -> bool:
        """Tell whether all that was committed some seconds ago was taken."""
        thread = self._thread
        return thread is not None and not thread.pages and thread.now - thread.drained_at < PROOF_S

    async def close(self) -> None:
        """Disconnect."""
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.stop()
            await asyncio.to_thread(thread.join, JOIN_S_MAX)


def _instants(arrivals: list[int]) -> Instants:
    return np.array(arrivals, np.int64)
