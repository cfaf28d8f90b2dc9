"""SQLAlchemy's engine over connections that trust no defaults.

A pool may stand before the database, so no setting outlasts a transaction.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import psycopg
from sqlalchemy import Connection, Engine, create_engine, event
from sqlalchemy.pool import NullPool

from millpy.session_settings import ENCODING
from millpy.store.postgres.session import pin_transaction, plain_transactions

CONNECT_S_MAX = 10


def make_engine(url: str, own: Mapping[str, str] | None = None) -> Engine:
    """An engine whose transactions have our settings, and these of their own.

    Args:
        url: goes to libpq as it is: SQLAlchemy would not understand every form of it.
        own: setting -> value.
    """
    given = own or {}

    def connected() -> psycopg.Connection[Any]:
        connection: psycopg.Connection[Any] = psycopg.connect(
            url, connect_timeout=CONNECT_S_MAX, prepare_threshold=None, client_encoding=ENCODING
        )
        try:
            plain_transactions(connection)
            # SQLAlchemy asks its first connection what that is, in the transaction that this begins, and rolls it back.
            pin_transaction(connection, given)
        except BaseException:
            connection.close()
            raise
        return connection

    engine = create_engine("postgresql+psycopg://", creator=connected, poolclass=NullPool, use_native_hstore=False)

    @event.listens_for(engine, "begin")
    def settings(connection: Connection) -> None:
        driver: psycopg.Connection[Any] = connection.connection.driver_connection  # type: ignore[assignment]
        pin_transaction(driver, given)

    return engine
