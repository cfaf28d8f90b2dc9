"""Runs the statements of sinks to SQL inside a commit, and restores the session that they may have changed.

A user's statement may SET a role or a setting, or call a function that does. The commit, the later records and the next
turns depend on both, so they are restored. Normally all records of a sink run in one go, and the session is restored
behind them. If it had been changed then, or if a statement failed, the turn is rolled back, and sent again with the
session restored behind each record. This continues until a turn changes nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import psycopg
from psycopg import AsyncCursor, AsyncRawCursor
from psycopg.rows import TupleRow

from millpy.errors import StoreUnavailableError
from millpy.store.postgres.connection import Channel, Connection
from millpy.store.postgres.errors import SlotMovedError, translate_commit
from millpy.store.postgres.session import UNHURRIED
from millpy.store.postgres.session_settings import restore_query, state_query
from millpy.store.postgres.sink_statements import SinkRun

log = logging.getLogger(__name__)
DEFERRED = b"SET CONSTRAINTS ALL IMMEDIATE"
"""Runs the user's deferred constraints and triggers. What is deferred otherwise runs in COMMIT."""


REPORTED = (b"client_encoding", b"session_authorization", b"default_transaction_read_only", b"search_path", b"TimeZone",
            b"DateStyle", b"IntervalStyle", b"standard_conforming_strings")  # fmt: skip
"""Settings whose changes servers report, the fourth since PostgreSQL 18."""


class ChangedSessionError(SlotMovedError):
    """A statement ran with the role or the settings that a user's code has left: commit again."""


@dataclass(slots=True)
class CommitProgress:
    """The progress of a commit.

    Attributes:
        commit_sent: whether COMMIT may have left this machine.
        failed_statement: the statement that failed, if an error was raised.
    """

    commit_sent: bool = False
    failed_statement: bytes = b""


class StatementRunner:
    """Runs the statements of sinks on the commit channel."""

    def __init__(self) -> None:
        self._state: list[str | None] = []
        self._reported: list[bytes | None] = []
        self._restore = b""
        self._record_by_record = False
        self._is_told = False

    async def learn(self, connection: Connection) -> None:
        """Read role and settings of a new connection, which are restored later."""
        self._state = await self._read(connection)
        self._reported = _reported(connection)
        self._restore = restore_query(self._state)

    async def drop_if_changed(self, channel: Channel) -> bool:
        """Drop the connection if role or settings are not those of a new one: a user's trigger may set them, too."""
        async with channel.use_raw() as connection:
            try:
                changed = await self._read(connection) != self._state
            except psycopg.Error:
                changed = True  # for example by a time limit that is too short for anything
            if changed:
                await channel.drop()
        return changed

    def server_reports_change(self, connection: Connection) -> bool:
        """Tell whether the server has reported a changed setting: without a round trip, but it reports only some."""
        return _reported(connection) != self._reported

    def tell_change(self, error: psycopg.Error) -> None:
        """Log once that triggers leave a session that our statements cannot use: each turn costs a new connection."""
        if not self._is_told:
            log.warning("a trigger of a result table has left a role or setting: %s", " ".join(str(error).split()))
        self._is_told = True

    async def _read(self, connection: Connection) -> list[str | None]:
        row = await (await connection.execute(state_query(), prepare=False)).fetchone()
        assert row is not None
        return list(row[0])

    async def run(self, connection: Connection, runs: Sequence[SinkRun], sending: CommitProgress) -> None:
        """Run the statements of a turn.

        Raises:
            ChangedSessionError: nothing is committed; the turn has to be sent again.
        """
        has_changed = False
        for run in runs:
            sending.failed_statement = run.query
            restored = await (self._run_each if self._record_by_record else self._run_all)(connection, run)
            changed = [not (await cursor.fetchone() or (True,))[0] for cursor in restored]
            has_changed = has_changed or any(changed)
            if any(changed) and not self._record_by_record and len(run.rows) > 1:
                self._record_by_record = True
                await connection.rollback()
                raise ChangedSessionError(f"the statement of sink {run.sink!r} has changed the session")
        self._record_by_record = has_changed and self._record_by_record

    def restoring(self) -> list[tuple[bytes, list[Any]]]:
        """Return the commands that restore the session before COMMIT; deferred triggers change it, too, so they run."""
        return [(DEFERRED, []), (UNHURRIED, []), (self._restore, [])]

    def begins_again(self, error: psycopg.Error, runs: Sequence[SinkRun]) -> bool:
        """Tell whether a statement may have failed because of the session that another record has left."""
        if self._record_by_record or all(len(run.rows) < 2 for run in runs):
            return False
        found = translate_commit(error, commit_sent=False, users=True)
        self._record_by_record = bool(error.sqlstate) and not isinstance(found, StoreUnavailableError)
        return self._record_by_record

    async def _run_all(self, connection: Connection, run: SinkRun) -> list[AsyncCursor[TupleRow]]:
        async with connection.pipeline():
            await AsyncRawCursor(connection).executemany(run.query, run.rows)
            return [await self._restored(connection)]

    async def _run_each(self, connection: Connection, run: SinkRun) -> list[AsyncCursor[TupleRow]]:
        restored = []
        async with connection.pipeline():
            for row in run.rows:
                await AsyncRawCursor(connection).execute(run.query, row)
                restored.append(await self._restored(connection))
        return restored

    async def _restored(self, connection: Connection) -> AsyncCursor[TupleRow]:
        await connection.execute(UNHURRIED)
        return await connection.execute(self._restore)


def _reported(connection: Connection) -> list[bytes | None]:
    return [connection.pgconn.parameter_status(name) for name in REPORTED]
