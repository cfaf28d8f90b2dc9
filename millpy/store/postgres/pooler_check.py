"""Detects a pooler that gives a connection's server process to other clients between its statements.

With such a pooler, one connection gets the settings, LISTEN and prepared statements of another: a connection whose
commits must be durable, for example, gets `synchronous_commit = off`. And a worker that terminates the recorded process
of a frozen owner ends another client's transaction. So a worker connects to the server directly, or to a pooler in
session mode.
"""

from __future__ import annotations

from contextlib import ExitStack, suppress

import psycopg
from psycopg.rows import TupleRow

from millpy.errors import ConfigError
from millpy.store.postgres.timeouts import BoundedConnection

ROUNDS = 8
"""pgbouncer reuses the process that it got back last, so one round detects it; other poolers may rotate or choose."""
ANSWER_S = 5.0


def pooler_shares(url: str) -> bool:
    """Tell whether two connections used in turn get the same server process, or one of them gets several.

    Return False when the database does not answer, as with a pooler that has no free process.
    """
    seen: tuple[set[int], set[int]] = (set(), set())
    with suppress(psycopg.OperationalError), ExitStack() as stack:
        pair = [stack.enter_context(_connected(url)) for _ in seen]
        for _ in range(ROUNDS):
            for connection, pids in zip(pair, seen, strict=True):
                pids.add(_process(connection))
            if len(seen[0]) > 1 or len(seen[1]) > 1 or seen[0] & seen[1]:
                return True
    return False


def count_connections(url: str, wanted: int) -> int:
    """Open up to `wanted` connections. Return how many of them get a server process at the same time."""
    got = 0
    with suppress(psycopg.OperationalError), ExitStack() as stack:
        for _ in range(wanted):
            _process(stack.enter_context(_connected(url)))
            got += 1
    return got


def pooler_error() -> ConfigError:
    """Return the error for a pooler that shares connections."""
    return ConfigError(
        "the database is behind a pooler in transaction mode, which shares a worker's connections with other clients",
        hint="connect workers to the server itself, or to a pooler in session mode",
    )


def _connected(url: str) -> BoundedConnection[TupleRow]:
    connection = BoundedConnection.connect(url, autocommit=True, connect_timeout=int(ANSWER_S), prepare_threshold=None)
    connection.answer_s = ANSWER_S
    return connection


def _process(connection: BoundedConnection[TupleRow]) -> int:
    """Return the id of the server process that answers."""
    ((pid,),) = connection.execute("SELECT pg_catalog.pg_backend_pid()").fetchall()
    return int(pid)
