"""Connections that apply the settings on which they depend (see `millpy.store.postgres.session_settings`).

session       a connection that is millpy's alone (`pin`): its settings last as long as the connection
transaction   a connection that a pooler may share (`pin_transaction`): a setting that outlived the transaction would
              reach the next client. Isolation and access mode are part of BEGIN (`plain_transactions`)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import psycopg
from psycopg import AsyncConnection, IsolationLevel
from psycopg.rows import tuple_row

from millpy.store.postgres.session_settings import ENCODING, REPLICATION_ROLE, settings_query

UNHURRIED = b"SET SESSION statement_timeout TO 0"
_UNHURRIED_HERE = b"SET LOCAL statement_timeout TO 0"
"""Runs before the other settings, which may take longer than a limit that is in force; this one takes no time."""
_TRIGGERS_FIRE = f"SELECT pg_catalog.set_config('{REPLICATION_ROLE}', 'origin', false)".encode()


async def pin_async(connection: AsyncConnection[Any], own: Mapping[str, str]) -> None:
    """Apply the settings to an autocommit connection that is millpy's alone."""
    query = settings_query(own, local=False)
    async with connection.cursor(row_factory=tuple_row) as cursor:
        await cursor.execute(UNHURRIED, prepare=False)
        row = await (await cursor.execute(query, prepare=False)).fetchone()
        if row is not None and row[-1] != "origin":
            try:
                await cursor.execute(_TRIGGERS_FIRE, prepare=False)
            except psycopg.errors.InsufficientPrivilege:
                pass  # only a superuser may: `millpy doctor` reports it, and a graph cannot be dropped


def pin(connection: psycopg.Connection[Any], own: Mapping[str, str]) -> None:
    """Apply the settings to a synchronous autocommit connection that is millpy's alone."""
    query = settings_query(own, local=False)
    with connection.cursor(row_factory=tuple_row) as cursor:
        cursor.execute(UNHURRIED, prepare=False)
        row = cursor.execute(query, prepare=False).fetchone()
        if row is not None and row[-1] != "origin":
            try:
                cursor.execute(_TRIGGERS_FIRE, prepare=False)
            except psycopg.errors.InsufficientPrivilege:
                pass


def connect(url: str, own: Mapping[str, str] | None = None, **options: Any) -> psycopg.Connection[Any]:
    """Open an autocommit connection that is millpy's alone, with its settings. `options` are psycopg's."""
    connection: psycopg.Connection[Any] = psycopg.connect(
        url, autocommit=True, prepare_threshold=None, client_encoding=ENCODING, **options
    )
    try:
        pin(connection, own or {})
    except BaseException:
        connection.close()
        raise
    return connection


def plain_transactions(connection: psycopg.Connection[Any], *, read_only: bool = False) -> None:
    """Make a connection begin every transaction as READ COMMITTED, read-only or not, whatever its defaults are."""
    connection.isolation_level = IsolationLevel.READ_COMMITTED
    connection.read_only = read_only
    connection.deferrable = False


def pin_transaction(connection: psycopg.Connection[Any], own: Mapping[str, str]) -> None:
    """Apply the settings to the current transaction, or to a new one when there is none."""
    connection.execute(_UNHURRIED_HERE, prepare=False)
    connection.execute(settings_query(own, local=True), prepare=False)
