"""Channels: named connections of one worker, each used by one task at a time.

A worker needs few connections, and uses each differently: the commit channel is the recorded backend of the worker,
the listen channel blocks for as long as it likes, a fold may take a minute. A channel connects at its first use, and
again after its connection was lost. It never retries by itself, because only the caller knows whether a retry is safe.

Three things keep a frozen or vanished worker from holding row locks: `idle_in_transaction_session_timeout`, which is
below the lease; the server's own keepalives; and a successor, which terminates the backend that the worker recorded. A
statement may take longer than the lease: heartbeats continue beside it, and the fence makes a late commit harmless. The
size of every statement is bounded, so `statement_timeout` only ends statements that hang. `timeouts.py` closes a
connection that is silent.
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
from millpy.store.postgres.arrays import register_arrays
from millpy.store.postgres.errors import connect_error, translate
from millpy.store.postgres.pooler_check import pooler_error, pooler_shares
from millpy.store.postgres.session import pin_async
from millpy.store.postgres.session_settings import ENCODING, KEEPALIVES
from millpy.store.postgres.statements import statement
from millpy.store.postgres.timeouts import BoundedAsyncConnection, hang_up

Connection = AsyncConnection[TupleRow]
STALE_PLAN = ("0A000", "26000", "42P05")
"""SQLSTATEs of a prepared statement whose tables have changed, or that a pooler has lost. Only reconnecting helps."""
_PROCESS = b"SELECT pg_catalog.pg_backend_pid()"


def _no_answer() -> StoreUnavailableError:
    return StoreUnavailableError(
        "the database accepted the connection but does not answer",
        hint="a pooler in front of it may have no free connection: check with `millpy doctor`",
    )


def _forget(_notice: psycopg.Notify) -> None:
    """Take a notice."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionSettings:
    """Settings of the store's connections.

    Attributes:
        connect_s: limit of a connection attempt.
        statement_s: server-side limit of a statement.
        long_statement_s: server-side limit of a statement that folds or deploys.
        idle_s: server-side limit of idling in a transaction; below the lease.
        answer_s: longest time without a moving byte while the server is not at work for this connection.
        prepare_threshold: None behind a transaction pooler that cannot keep prepared statements.
    """

    connect_s: float = 5.0
    statement_s: float = 60.0
    long_statement_s: float = 600.0
    idle_s: float = 4.0
    answer_s: float = 10.0
    prepare_threshold: int | None = 1

    @classmethod
    def from_limits(cls, limits: Limits) -> ConnectionSettings:
        """Return the settings that fit a worker's lease."""
        idle_s = limits.lease_ttl_s - limits.lease_margin_s
        statement_s = limits.statement_s
        return cls(statement_s=statement_s, long_statement_s=10 * statement_s, idle_s=idle_s, answer_s=2 * idle_s + 2)


class _NoEcho(logging.Filter):
    """Drops psycopg's warnings that it skipped the commands behind a failed one in a pipeline."""

    def filter(self, record: logging.LogRecord) -> bool:
        arguments = record.args if isinstance(record.args, tuple) else ()
        return not any(isinstance(argument, psycopg.errors.PipelineAborted) for argument in arguments)


logging.getLogger("psycopg").addFilter(_NoEcho())


class ConnectionGroup:
    """The channels of one worker. When one loses its connection, all reconnect, because the others' may be dead too.

    A restarted server or a restored network leaves dead connections in all channels. If each channel found out by
    itself, each would cost the worker a failed turn and another wait before the retry. When one connection was silent
    for too long, tasks that wait on another are woken, too: otherwise a fold would wait for as long as a fold may take.

    Args:
        url: the database.
        settings: the limits of every connection.
        progressed: called while bytes move on a channel of turns.

    Attributes:
        losses: counts lost connections and changes of server; a channel that has seen fewer of them reconnects.
        server: the server run that the worker's soft state was read from; None before the first read. After a failover
            to a standby that lacks some commits, channels that depend on soft state raise until the worker reads all of
            it again. `PostgresStore.register` and `take_over_from_self` precede that read and set the new server.
    """

    def __init__(self, url: str, settings: ConnectionSettings, progressed: Callable[[], None] | None = None) -> None:
        self.url = url
        self.settings = settings
        self.progressed = progressed
        self.losses = 0
        self.connections: set[BoundedAsyncConnection] = set()
        self.server: str | None = None

    async def follow_server(self, connection: Connection) -> None:
        """Read soft state from this server from now on. Channels that are connected to another server reconnect."""
        server = await server_of(connection)
        if self.server not in (None, server):
            self.losses += 1
        self.server = server

    def hang_up_all(self) -> None:
        """Hang up on every connection, because one does not answer."""
        self.losses += 1
        for connection in self.connections:
            hang_up(connection)


class Channel:
    """One connection and the lock that serializes its use.

    Args:
        group: the channels that reconnect together, with the database and the limits.
        name: what it is for; shown in `pg_stat_activity` behind "millpy".
        long: whether its statements fold or deploy, and may take `long_statement_s`.
        durable: whether COMMIT waits for the disk.
        listens: whether it waits for notifications, so that silence says nothing.
        serves_turns: whether turns read and commit on it: moving bytes count as the worker's progress, and it refuses a
            server that the soft state was not read from.
        prepare: called with each new connection before its first use.
    """

    def __init__(
        self,
        group: ConnectionGroup,
        name: str,
        *,
        long: bool = False,
        durable: bool = True,
        listens: bool = False,
        serves_turns: bool = False,
        prepare: Callable[[Connection], Awaitable[None]] | None = None,
    ) -> None:
        settings = group.settings
        self._group = group
        self._name = name
        self._plans = "force_custom_plan" if long else "force_generic_plan"
        self._statement_s = settings.long_statement_s if long else settings.statement_s
        self._synchronous_commit = "on" if durable else "off"
        self._answer_s = None if listens else settings.answer_s
        self._serves_turns = serves_turns
        self._prepare = prepare
        self._losses_seen = 0
        self._connection: BoundedAsyncConnection | None = None
        self._lock = asyncio.Lock()

    @asynccontextmanager
    async def use(self) -> AsyncIterator[Connection]:
        """Yield the connection, in autocommit mode, to one task at a time, and translate psycopg's errors."""
        try:
            async with self.use_raw() as connection:
                yield connection
        except psycopg.Error as error:
            raise translate(error) from error

    @asynccontextmanager
    async def use_raw(self) -> AsyncIterator[Connection]:
        """Yield the connection, and pass psycopg's errors through for the commit, which reads more from them."""
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
        """Return the live connection. Reconnect when it, or that of another channel, was lost.

        Raises:
            ConfigError: only an operator can correct the cause, such as a pooler that shares connections.
            StoreUnavailableError: the database cannot be reached now.
        """
        if self._losses_seen != self._group.losses:
            await self.drop()
        if self._connection is not None and not self._connection.closed:
            return self._connection
        self._losses_seen = self._group.losses
        timeout_ms = int(self._statement_s * 1000)
        try:
            connection = await BoundedAsyncConnection.connect(
                self._group.url,
                autocommit=True,
                connect_timeout=max(2, int(self._group.settings.connect_s)),
                application_name=f"millpy {self._name}",
                prepare_threshold=self._group.settings.prepare_threshold,
                **KEEPALIVES,
                # Not less: a busy server that does not read does not acknowledge new data either.
                tcp_user_timeout=timeout_ms,
                client_encoding=ENCODING,
            )
        except psycopg.Error as error:
            raise connect_error(error) from error
        try:
            # A pooler without a free process accepts the connection but does not answer: all channels bound that wait.
            connection.answer_s = self._group.settings.answer_s
            connection.prepared_max = 500
            register_arrays(connection)
            # Before any setting is made: on a connection that a pooler shares, it would reach other clients.
            process = await (await connection.execute(_PROCESS, prepare=False)).fetchone()
            if process != (connection.info.backend_pid,) and await asyncio.to_thread(pooler_shares, self._group.url):
                raise pooler_error()
            await pin_async(connection, self._own_settings())
            if self._prepare is not None:
                await self._prepare(connection)
            known = self._group.server
            if self._serves_turns and known is not None and await server_of(connection) != known:
                raise StoreUnavailableError("the database was restarted or replaced: soft state must be read again")
            if self._answer_s is not None:  # a user's function may LISTEN, and psycopg keeps what comes for ever
                connection.add_notify_handler(_forget)
            connection.answer_s, connection.on_silence = self._answer_s, self._group.hang_up_all
            connection.works = partial(self._works, connection.info.backend_pid)
            connection.on_progress = self._group.progressed if self._serves_turns else None
        except psycopg.OperationalError as error:
            await connection.close()
            raise (_no_answer() if connection.was_silent else translate(error)) from error
        except BaseException:
            await connection.close()
            raise
        self._connection = connection
        self._group.connections.add(connection)
        return connection

    def _own_settings(self) -> dict[str, str]:
        return {
            "statement_timeout": str(int(self._statement_s * 1000)),
            # A statement may be long, idling may not: a frozen process would hold its row locks.
            "idle_in_transaction_session_timeout": str(int(self._group.settings.idle_s * 1000)),
            # A server that writes to a vanished peer would hold them, too.
            "tcp_keepalives_idle": "5",
            "tcp_keepalives_interval": "2",
            "tcp_keepalives_count": "3",
            "synchronous_commit": self._synchronous_commit,
            "plan_cache_mode": self._plans,
        }

    async def _works(self, backend_pid: int) -> bool:
        """Ask over another connection whether the server is at work for a connection of this channel."""
        try:
            async with asyncio.timeout(self._group.settings.answer_s):
                asking = await AsyncConnection.connect(
                    self._group.url,
                    autocommit=True,
                    connect_timeout=max(2, int(self._group.settings.connect_s)),
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
        """Disconnect at once. The caller holds the channel's lock."""
        connection, self._connection = self._connection, None
        if connection is not None:
            self._group.connections.discard(connection)
            await connection.close()

    async def _tidy(self) -> None:
        """Roll back a failed transaction. Drop a connection that is not idle otherwise: its state is unknown."""
        connection = self._connection
        if connection is None:
            return
        status = connection.info.transaction_status
        if status == TransactionStatus.UNKNOWN and self._losses_seen == self._group.losses:
            self._group.losses += 1
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
    """Return a text that identifies the database and its server's present run, in which it loses no commits."""
    rows = await all_rows(connection, statement("read_server"), {})
    return str(rows[0][0])


async def all_rows(connection: Connection, query: bytes, parameters: dict[str, Any]) -> list[TupleRow]:
    """Execute one statement, and return its rows, which are transferred in binary."""
    cursor = await connection.execute(query, parameters, binary=True)
    return await cursor.fetchall()
