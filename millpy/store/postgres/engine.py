"""SQLAlchemy's engine over connections that do not rely on defaults of the server.

The database may be behind a pooler, so settings last for one transaction only.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import psycopg
from sqlalchemy import Connection, Engine, create_engine, event
from sqlalchemy.pool import NullPool, QueuePool

from millpy.store.postgres.session import pin_transaction, plain_transactions
from millpy.store.postgres.session_settings import ENCODING

CONNECT_S_MAX = 10


def make_engine(url: str, own: Mapping[str, str] | None = None, *, kept: bool = False) -> Engine:
    """Return an engine whose transactions have the pinned settings, overridden by `own`.

    Args:
        url: passed to libpq unchanged, because SQLAlchemy does not understand every form of it.
        own: setting -> value.
        kept: whether one connection stays open between statements, rather than one for each statement. It is idle then,
            without a transaction, and is replaced when it is lost.
    """
    given = own or {}

    def connected() -> psycopg.Connection[Any]:
        connection: psycopg.Connection[Any] = psycopg.connect(
            url, connect_timeout=CONNECT_S_MAX, prepare_threshold=None, client_encoding=ENCODING
        )
        try:
            plain_transactions(connection)
            # SQLAlchemy inspects its first connection in the transaction that this begins, and rolls it back.
            pin_transaction(connection, given)
        except BaseException:
            connection.close()
            raise
        return connection

    url_of_dialect = "postgresql+psycopg://"
    if kept:
        pool = QueuePool(connected, pool_size=1, max_overflow=0)
        engine = create_engine(url_of_dialect, pool=pool, use_native_hstore=False)
    else:
        engine = create_engine(url_of_dialect, creator=connected, poolclass=NullPool, use_native_hstore=False)

    @event.listens_for(engine, "begin")
    def settings(connection: Connection) -> None:
        driver: psycopg.Connection[Any] = connection.connection.driver_connection  # type: ignore[assignment]
        try:
            pin_transaction(driver, given)
        except psycopg.OperationalError as error:
            connection.invalidate(error)  # lost since its last use; SQLAlchemy sees only errors of its own statements
            raise

    return engine
