"""Lanes: named connections of one worker, each used by one task at a time.

A worker needs few connections, and each has another temper: the commit lane is the recorded backend of the worker,
the listen lane blocks for as long as it likes, folding may take a minute. A lane connects when it is first used, and
again after it was lost; it never retries by itself, because only the caller knows whether a retry is safe.

What keeps a frozen or vanished worker from holding row locks: `idle_in_transaction_session_timeout`, which is below
the lease, the server's own keepalives, and a successor, who terminates the backend that the worker recorded. A
statement may take longer than the lease: heartbeats go on beside it, and the fence makes a late commit harmless. None
is of unbounded size, so `statement_timeout` is for what hangs. A connection that is silent is given up by `silence.py`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import psycopg
from psycopg import AsyncConnection
from psycopg.pq import TransactionStatus
from psycopg.rows import TupleRow

from millpy.errors import StoreUnavailableError
from millpy.limits import Limits
from millpy.session_settings import ENCODING
from millpy.store.postgres import pooling
from millpy.store.postgres.arrays import register_arrays
from millpy.store.postgres.errors import not_connected, translate
from millpy.store.postgres.session import pin_async
from millpy.store.postgres.silence import BoundedAsyncConnection, hang_up
from millpy.store.postgres.statements import statement

Connection = AsyncConnection[TupleRow]
STALE_PLAN = ("0A000", "26000", "42P05")
"""A prepared statement whose tables have changed, or that a pooler has lost: only a new connection helps."""
_PROCESS = b"SELECT pg_catalog.pg_backend_pid()"


def _no_answer() -> StoreUnavailableError:
    return StoreUnavailableError(
        "the database let us in and does not answer",
        hint="a pool before it may have no connection to spare: `millpy doctor` tells",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionSettings:
    """How the store connects.

    Attributes:
        connect_s: how long a connection attempt may take.
        statement_s: server-side limit of a statement.
        long_statement_s: limit of a statement that folds or deploys.
        idle_s: server-side limit of idling in a transaction; below the lease.
        answer_s: how long no byte may move while the server does not work for us.
        prepare_threshold: None behind a transaction pooler that cannot keep prepared statements.
    """

    connect_s: float = 5.0
    statement_s: float = 60.0
    long_statement_s: float = 600.0
    idle_s: float = 4.0
    answer_s: float = 10.0
    prepare_threshold: int | None = 1

    @classmethod
    def under(cls, limits: Limits) -> ConnectionSettings:
        """As a worker's lease demands."""
        idle_s = limits.lease_ttl_s - limits.lease_margin_s
        statement_s = limits.statement_s
        return cls(statement_s=statement_s, long_statement_s=10 * statement_s, idle_s=idle_s, answer_s=2 * idle_s + 2)


class _NoEcho(logging.Filter):
    """Hides the echo of an error: a pipeline that has failed also warns that the commands behind it were skipped."""

    def filter(self, record: logging.LogRecord) -> bool:
        arguments = record.args if isinstance(record.args, tuple) else ()
        return not any(isinstance(argument, psycopg.errors.PipelineAborted) for argument in arguments)


logging.getLogger("psycopg").addFilter(_NoEcho())


class Outages:
    """What the lanes of one worker tell each other: one has lost its connection, so the others' may be dead too.

    A restarted server or a network that is back leaves dead connections behind in all lanes. Found out one by one, each
    would cost the worker a failed turn and another wait before it tries again. When one was silent for too long,
    whoever waits on another is woken, too: a fold would else wait for as long as a fold may take.

    Attributes:
        server: whose commits the worker's soft state was read from; None before anything was. After a failover to a
            standby that lacks some, the lanes that depend on soft state raise until the worker has read all of it
            again: `PostgresStore.register` and `take_over_from_self`, which come before that, say so.
    """

    def __init__(self) -> None:
        self.count = 0
        self.connections: set[BoundedAsyncConnection] = set()
        self.server: str | None = None

    async def read_anew(self, connection: Connection) -> None:
        """The soft state is dropped, and read from this server from now on; what is connected to another goes."""
        server = await server_of(connection)
        if self.server not in (None, server):
            self.count += 1
        self.server = server

    def silent(self) -> None:
        """A connection does not answer."""
        self.count += 1
        for connection in self.connections:
            hang_up(connection)


class Lane:
    """One connection and the lock that serialises its use."""

    def __init__(
        self,
        url: str,
        name: str,
        settings: ConnectionSettings,
        *,
        long: bool = False,
        durable: bool = True,
        listens: bool = False,
        prepare: Callable[[Connection], Awaitable[None]] | None = None,
        outages: Outages | None = None,
        progressed: Callable[[], None] | None = None,
        soft: bool = False,
    ) -> None:
        self._url = url
        self._name = name
        self._settings = settings
        self._plans = "force_custom_plan" if long else "force_generic_plan"
        self._statement_s = settings.long_statement_s if long else settings.statement_s
        self._synchronous_commit = "on" if durable else "off"
        self._answer_s = None if listens else settings.answer_s
        self._progressed = progressed
        self._soft = soft
        self._prepare = prepare
        self._outages = outages or Outages()
        self._outages_seen = 0
        self._connection: BoundedAsyncConnection | None = None
        self._lock = asyncio.Lock()

    @asynccontextmanager
    async def use(self) -> AsyncIterator[Connection]:
        """The connection, in autocommit mode, for one task at a time; psycopg's errors come out translated."""
        try:
            async with self.use_raw() as connection:
                yield connection
        except psycopg.Error as error:
            raise translate(error) from error

    @asynccontextmanager
    async def use_raw(self) -> AsyncIterator[Connection]:
        """The same with psycopg's own errors, for the commit, which reads more from them."""
        async with self._lock:
            try:
                yield await self.connected()
            except psycopg.Error as error:
                if error.sqlstate in STALE_PLAN:
                    await self.drop()
                raise
            finally:
                await self._tidy()

    async def connected(self) -> Connection:
        """The live connection, made anew when it or that of another lane was lost.

        Raises:
            ConfigError: of a pooler that shares connections, among what else only people can mend.
            StoreUnavailableError: there is none to be had now.
        """
        if self._outages_seen != self._outages.count:
            await self.drop()
        if self._connection is not None and not self._connection.closed:
            return self._connection
        self._outages_seen = self._outages.count
        timeout_ms = int(self._statement_s * 1000)
        try:
            connection = await BoundedAsyncConnection.connect(
                self._url,
                autocommit=True,
                connect_timeout=max(2, int(self._settings.connect_s)),
                application_name=f"millpy {self._name}",
                prepare_threshold=self._settings.prepare_threshold,
                keepalives_idle=5,
                keepalives_interval=2,
                keepalives_count=3,
                # Not less: a server that is busy and does not read acknowledges nothing new either.
                tcp_user_timeout=timeout_ms,
                client_encoding=ENCODING,
            )
        except psycopg.Error as error:
            raise not_connected(error) from error
        try:
            # A pool without a process to spare lets us in and does not answer; no lane waits longer for that.
            connection.answer_s = self._settings.answer_s
            connection.prepared_max = 500
            register_arrays(connection)
            # Before anything is set: settings on a connection that a pool shares would be other programs'.
            process = await (await connection.execute(_PROCESS, prepare=False)).fetchone()
            if process != (connection.info.backend_pid,) and await asyncio.to_thread(pooling.shares, self._url):
                raise pooling.refusal()
            await pin_async(connection, self._own_settings())
            if self._prepare is not None:
                await self._prepare(connection)
            known = self._outages.server
            if self._soft and known is not None and await server_of(connection) != known:
                raise StoreUnavailableError("the database was restarted, or is another server: reading again")
            connection.answer_s, connection.on_silence = self._answer_s, self._outages.silent
            connection.works = partial(self._works, connection.info.backend_pid)
            connection.on_progress = self._progressed
        except psycopg.OperationalError as error:
            await connection.close()
            raise (translate(error) if error.sqlstate else _no_answer()) from error
        except BaseException:
            await connection.close()
            raise
        self._connection = connection
        self._outages.connections.add(connection)
        return connection

    def _own_settings(self) -> dict[str, str]:
        return {
            "statement_timeout": str(int(self._statement_s * 1000)),
            # Long statements may be, long idling never: it would hold row locks of a process that is frozen.
            "idle_in_transaction_session_timeout": str(int(self._settings.idle_s * 1000)),
            # A server that writes to a peer that is gone would hold them, too.
            "tcp_keepalives_idle": "5",
            "tcp_keepalives_interval": "2",
            "tcp_keepalives_count": "3",
            "synchronous_commit": self._synchronous_commit,
            "plan_cache_mode": self._plans,
        }

    async def _works(self, backend_pid: int) -> bool:
        """Whether the server is at work for a connection of this lane; asked over another."""
        try:
            async with asyncio.timeout(self._settings.answer_s):
                asking = await AsyncConnection.connect(
                    self._url,
                    autocommit=True,
                    connect_timeout=max(2, int(self._settings.connect_s)),
                    application_name="millpy asks",
                    client_encoding=ENCODING,
                )
                async with asking:
                    await pin_async(asking, {})
                    answer = await asking.execute(statement("is_at_work"), {"backend_pid": backend_pid})
                    row = await answer.fetchone()
        except (psycopg.Error, TimeoutError):
            return False
        return row is not None and bool(row[0])

    async def close(self) -> None:
        """Disconnect."""
        async with self._lock:
            await self.drop()

    async def drop(self) -> None:
        """Disconnect at once; for the holder of the lane."""
        connection, self._connection = self._connection, None
        if connection is not None:
            self._outages.connections.discard(connection)
            await connection.close()

    async def _tidy(self) -> None:
        """A connection that is not idle afterwards is in an unknown state: drop it rather than mend it."""
        connection = self._connection
        if connection is None:
            return
        status = connection.info.transaction_status
        if status == TransactionStatus.UNKNOWN and self._outages_seen == self._outages.count:
            self._outages.count += 1
        if status == TransactionStatus.IDLE:
            return
        if status == TransactionStatus.INERROR:
            try:
                await connection.rollback()
                return
            except psycopg.Error:
                pass  # it is dropped below
        await self.drop()


async def server_of(connection: Connection) -> str:
    """Which run of which server a connection sees; a run that goes on has lost no commit."""
    rows = await all_rows(connection, statement("read_server"), {})
    return str(rows[0][0])


async def all_rows(connection: Connection, query: bytes, parameters: dict[str, Any]) -> list[TupleRow]:
    """Every row of one statement, transferred in binary."""
    cursor = await connection.execute(query, parameters, binary=True)
    return await cursor.fetchall()
