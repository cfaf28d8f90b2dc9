"""Sends the commands of a commit in one round trip, and tells which of them has failed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import psycopg
from psycopg import AsyncCursor
from psycopg.rows import TupleRow

from millpy.store.postgres.connection import Connection
from millpy.store.postgres.statement_runs import CommitProgress

BEGIN = b"BEGIN ISOLATION LEVEL READ COMMITTED READ WRITE"
"""Names isolation level and access mode, because a user's trigger may have changed the session's defaults."""
COMMIT = b"COMMIT"
"""The user's deferred constraints and triggers run in this statement, or in DEFERRED."""
DURABLE = b"SET synchronous_commit TO on"
"""Comes before COMMIT: a user's trigger, or a statement of a sink, may have set it off, as functions that log do."""
_UNANSWERED = frozenset((BEGIN, DURABLE, COMMIT))
"""Commands that go with those around them; for every other one, psycopg makes a cursor and polls the socket."""

Parameters = dict[str, Any] | list[Any]
Command = tuple[bytes, Parameters]


async def send_commands(
    connection: Connection, commands: Sequence[Command], sending: CommitProgress
) -> list[AsyncCursor[TupleRow]]:
    """Send commands in one round trip, and return a cursor of each that is answered.

    Raise the first error, and set `sending.failed_statement` to its statement.
    """
    cursors: list[AsyncCursor[TupleRow] | None] = []
    try:
        async with connection.pipeline():
            for query, parameters in commands:
                if query in _UNANSWERED:
                    await connection.wait(connection._exec_command(query))  # as psycopg sends its own BEGIN
                    cursors.append(None)
                else:
                    cursors.append(await connection.execute(query, parameters or None))
    except psycopg.Error as error:
        failed = (at for at, cursor in enumerate(cursors) if cursor is not None and cursor.pgresult is None)
        sending.failed_statement = commands[min(next(failed, len(cursors)), len(commands) - 1)][0]
        raise _first(error) from None
    return [cursor for cursor in cursors if cursor is not None]


def _first(error: psycopg.Error) -> psycopg.Error:
    """Return the error that has aborted a pipeline, given what psycopg raises.

    If answers come while psycopg ends the pipeline, it raises the error of a command behind the one that failed.
    """
    while isinstance(error, psycopg.errors.PipelineAborted) and isinstance(error.__context__, psycopg.Error):
        error = error.__context__
    return error
