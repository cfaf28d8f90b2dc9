"""Statements of sinks to SQL: a user's statement that the commit runs for each record.

A deployment lets the server parse each statement, so that a name that does not exist is refused there. An error at run
time is a fault of a record, or of what the statement names; the latter stops the turns until an operator restores it.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import psycopg
from psycopg import AsyncRawCursor
from psycopg.errors import error_from_result
from psycopg.pq import ExecStatus

from millpy.errors import GraphError, MillError, PoisonError, ResultTableError, StoreUnavailableError, TransientError
from millpy.model.checkpoint import Checkpoint
from millpy.model.deployment import GraphSpec
from millpy.store.postgres.connection import Channel, Connection
from millpy.store.postgres.errors import connection_lost, translate, translate_commit

_HINTS = {
    "42P01": "create the table, and name its schema: the search path is pg_catalog alone",
    "42883": "name the schema of the function, and cast its arguments if it has several forms",
    "3F000": "create the schema, or name another one",
    "42703": "name the columns as the table has them",
    "42P18": "write %(field)s without quotes around it, and not in a comment",
    "42501": "GRANT USAGE on the schema, and the rights that the statement needs, to this role and to the workers",
}
"""SQLSTATE -> what the author of a graph can do."""
_ENDS_TRANSACTION = "2D000"
_OF_TURN = {
    _ENDS_TRANSACTION: "do not commit or roll back in it",
    "25006": "do not make its transaction read-only",
    "26000": "do not DEALLOCATE in it the statements that others have prepared",
    "57014": "make it faster, or end what it waits for: pg_blocking_pids() tells; MILLPY_STATEMENT_S is its time limit",
}
"""SQLSTATE -> what a statement must do otherwise, if it fails by what it does to the turn in which it runs.

The transaction begins as one that writes, and with prepared statements. Later it is read-only, or they are gone, only
by what a user's code has done in it.
"""
_OF_NAMES = ("0A", "3F", "42")
"""Classes of SQLSTATE of a statement that cannot run, which functions also raise for a value."""
_NO_RIGHT = "42501"
"""A plan does not need all rights that a run does: that to a sequence, for example, is checked by `nextval`."""
_PLACE = re.compile(rb"\(\$([0-9]+)::")


@dataclass(frozen=True, slots=True)
class SinkRun:
    """The statement of a sink, and the parameters of each of its runs in a commit."""

    sink: str
    query: bytes
    rows: Sequence[tuple[str | None, ...]]


def statements_of(spec: GraphSpec) -> dict[str, bytes]:
    """Return the statements of a graph's sinks to SQL, by sink."""
    return {found.name: found.statement.encode() for found in spec.computations if found.statement}


def runs_of(checkpoints: Sequence[Checkpoint], statements: Mapping[str, bytes]) -> list[SinkRun]:
    """Return what the commit runs, by sink; the rows of an interval are in their order."""
    rows: dict[str, list[tuple[str | None, ...]]] = {}
    for checkpoint in checkpoints:
        for part in checkpoint.statements:
            rows.setdefault(part.sink, []).extend(part.rows)
    return [SinkRun(sink, statements[sink], found) for sink, found in sorted(rows.items())]


async def check_statements(connection: Connection, statements: Mapping[str, bytes]) -> None:
    """Let the server parse statements, without running them.

    Raises:
        GraphError: it cannot, for example because a table does not exist.
        TransientError: the server cannot be reached.
    """
    for sink, query in statements.items():
        # psycopg has no way to prepare a statement without running it.
        result = await asyncio.to_thread(connection.pgconn.prepare, b"", query)
        if result.status != ExecStatus.FATAL_ERROR:
            await _check_places(connection, sink, query)
            continue
        error = error_from_result(result, encoding="utf-8")
        if isinstance(translated := translate(error), TransientError):
            raise translated from error
        hint = _HINTS.get(error.sqlstate or "", "run it in psql, with values in the place of the fields")
        said = error.diag.message_primary or str(error)
        raise GraphError(f"the database refuses the statement of sink {sink!r}: {said}", hint=hint) from error


async def _check_places(connection: Connection, sink: str, query: bytes) -> None:
    """Check that the server has found each place in the statement that it has just parsed.

    Raises:
        GraphError: one is in quotes or in a comment, so the statement would get more values than it has places.
        TransientError: the server cannot be reached.
    """
    result = await asyncio.to_thread(connection.pgconn.describe_prepared, b"")
    if result.status == ExecStatus.FATAL_ERROR:
        raise translate(error_from_result(result, encoding="utf-8"))
    places = max((int(number) for number in _PLACE.findall(query)), default=0)
    if result.nparams < places:
        raise GraphError(
            f"sink {sink!r}: place {places} of the statement is in quotes or in a comment, so it is no place",
            hint=_HINTS["42P18"],
        )


async def statement_error(
    channel: Channel, error: psycopg.Error, sink: str, query: bytes, *, commit_sent: bool
) -> MillError:
    """Return what the error of a sink's statement means, of which the commit has been rolled back.

    A value may name an object that does not exist, as in a cast to regconfig, or be one that a conversion lacks, such
    as NaN for bigint. The SQLSTATE is then that of a statement that cannot run, but the server still plans it.
    """
    found = translate_statement(error, sink, commit_sent=commit_sent)
    state = error.sqlstate or ""
    is_unclear = state[:2] in _OF_NAMES and state != _NO_RIGHT and not error.diag.context
    if not isinstance(found, ResultTableError) or not is_unclear:
        return found
    async with channel.use() as connection:
        if not await _plans(connection, query):
            return found
    return PoisonError(error.diag.message_primary or str(error), table=sink, sqlstate=state)


async def _plans(connection: Connection, query: bytes) -> bool:
    """Tell whether the server plans a statement, with NULL for each value; it has no plan for a CALL."""
    nulls = [None] * max((int(number) for number in _PLACE.findall(query)), default=0)
    try:
        await AsyncRawCursor(connection).execute(b"EXPLAIN " + query, nulls, prepare=False)
    except psycopg.Error as error:
        if not error.sqlstate:
            raise
        return False
    return True


def translate_statement(error: psycopg.Error, sink: str, *, commit_sent: bool) -> MillError:
    """Translate the error of a sink's statement inside a turn's transaction."""
    found = translate_commit(error, commit_sent=commit_sent, users=True, table=sink)
    if isinstance(found, StoreUnavailableError) and connection_lost(error):
        return StoreUnavailableError(
            f"in the statement of sink {sink!r}, {found.message}",
            hint="if that happens again and again, the statement ends its session: correct it",
        )
    state = error.sqlstate or ""
    is_of_turn = state == _ENDS_TRANSACTION or (isinstance(found, TransientError) and state in _OF_TURN)
    if not is_of_turn and not isinstance(found, ResultTableError):
        return found
    said = error.diag.message_primary or " ".join(str(error).split())
    otherwise = "restore what the statement names, or deploy the graph with another statement"
    hint = _OF_TURN.get(state) or _HINTS.get(state, otherwise)
    return ResultTableError(
        f"the statement of sink {sink!r} cannot run: {said}",
        table=sink,
        hint=f"{hint}; nothing is lost, and workers try again",
    )
