"""Does a pooler give a connection's server process to others between its statements?

Then settings, LISTEN and prepared statements of one connection end up with another (`synchronous_commit = off` of a
lane that needs no durability, with one that acknowledges to brokers), and who ends a frozen owner's recorded process
ends somebody else's transaction. A worker needs the process to itself, as a server or a pool in session mode gives it.
"""

from __future__ import annotations

from contextlib import ExitStack, suppress

import psycopg
from psycopg.rows import TupleRow

from millpy.errors import ConfigError
from millpy.store.postgres.silence import BoundedConnection

ROUNDS = 8
"""pgbouncer hands out what it got back last, and shows itself in the first; others may take turns, or choose."""
ANSWER_S = 5.0


def shares(url: str) -> bool:
    """Whether two connections that ask in turn are seen to get one process, or one of them several.

    A pool that has no process to spare answers late or never, and then nothing was seen.
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


def spare(url: str, wanted: int) -> int:
    """How many connections, of so many that are wanted at once, get a process of the server."""
    got = 0
    with suppress(psycopg.OperationalError), ExitStack() as stack:
        for _ in range(wanted):
            _process(stack.enter_context(_connected(url)))
            got += 1
    return got


def refusal() -> ConfigError:
    """Of a pool that shares."""
    return ConfigError(
        "a pool in transaction mode stands before the database: it shares a worker's connections with others",
        hint="give workers the address of the server itself, or of a pool in session mode",
    )


def _connected(url: str) -> BoundedConnection[TupleRow]:
    connection = BoundedConnection.connect(url, autocommit=True, connect_timeout=int(ANSWER_S), prepare_threshold=None)
    connection.answer_s = ANSWER_S
    return connection


def _process(connection: BoundedConnection[TupleRow]) -> int:
    """The server's process that answers."""
    ((pid,),) = connection.execute("SELECT pg_catalog.pg_backend_pid()").fetchall()
    return int(pid)
