"""SQLAlchemy's engine over connections that do not rely on defaults of the server.

The database may be behind a pooler, so settings last for one transaction only.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import psycopg
from sqlalchemy import Connection, Engine, create_engine, event
from sqlalchemy.pool import NullPool

from millpy.store.postgres.session import pin_transaction, plain_transactions
from millpy.store.postgres.session_settings import ENCODING, KEEPALIVES

CONNECT_S_MAX = 10
LOST_MS_MAX = 10_000
"""Milliseconds after which a connection is lost whose other side acknowledges nothing."""
IDLE_MS_MAX = 30_000
"""A process that hangs between two statements must not hold the locks of the first."""
WAIT_S_MAX = 5.0
"""Seconds to wait for a connection while all are in use."""


def make_engine(url: str, own: Mapping[str, str] | None = None, *, connections_max: int | None = None) -> Engine:
    """Return an engine whose transactions have the pinned settings, overridden by `own`.

    Args:
        url: passed to libpq unchanged, because SQLAlchemy does not understand every form of it.
        own: setting -> value.
        connections_max: how many connections are kept and reused, and the maximum; None for a new one each time.
    """
    given = {"idle_in_transaction_session_timeout": str(IDLE_MS_MAX), **(own or {})}

    def connected() -> psycopg.Connection[Any]:
        connection: psycopg.Connection[Any] = psycopg.connect(
            url, connect_timeout=CONNECT_S_MAX, prepare_threshold=None, client_encoding=ENCODING,
            # Of a connection that waits for its next use: a firewall or a failover may forget it without a word.
            tcp_user_timeout=LOST_MS_MAX, **KEEPALIVES,
        )  # fmt: skip
        try:
            plain_transactions(connection)
            # SQLAlchemy inspects its first connection in the transaction that this begins, and rolls it back.
            pin_transaction(connection, given)
        except BaseException:
            connection.close()
            raise
        return connection

    pool: dict[str, Any] = {"poolclass": NullPool}
    if connections_max is not None:
        pool = {"pool_size": connections_max, "max_overflow": 0, "pool_timeout": WAIT_S_MAX, "pool_pre_ping": True}
    engine = create_engine("postgresql+psycopg://", creator=connected, use_native_hstore=False, **pool)

    @event.listens_for(engine, "begin")
    def settings(connection: Connection) -> None:
        driver: psycopg.Connection[Any] = connection.connection.driver_connection  # type: ignore[assignment]
        try:
            pin_transaction(driver, given)
        except psycopg.OperationalError as error:
            connection.invalidate(error)  # lost since its last use; SQLAlchemy sees only errors of its own statements
            raise

    return engine
