"""Connections that set for themselves what they depend on (see `millpy.session_settings`).

session       a connection that is ours alone (`pin`): its settings last as long as it does
transaction   one that a pool may share (`pin_transaction`): a setting that outlived the transaction would be the
next client's. Isolation and access mode are part of BEGIN, see `plain_transactions`
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import psycopg
from psycopg import AsyncConnection, IsolationLevel
from psycopg.rows import tuple_row

from millpy.session_settings import ENCODING, REPLICATION_ROLE, settings_query

_UNHURRIED = b"SET SESSION statement_timeout TO 0"
_UNHURRIED_HERE = b"SET LOCAL statement_timeout TO 0"
"""Goes before the rest, which may take longer than somebody's limit; this takes no time."""
_TRIGGERS_FIRE = f"SELECT pg_catalog.set_config('{REPLICATION_ROLE}', 'origin', false)".encode()


async def pin_async(connection: AsyncConnection[Any], own: Mapping[str, str]) -> None:
    """Give an autocommit connection of our own its settings."""
    query = settings_query(own, local=False)
    async with connection.cursor(row_factory=tuple_row) as cursor:
        await cursor.execute(_UNHURRIED, prepare=False)
        row = await (await cursor.execute(query, prepare=False)).fetchone()
        if row is not None and row[-1] != "origin":
            try:
                await cursor.execute(_TRIGGERS_FIRE, prepare=False)
            except psycopg.errors.InsufficientPrivilege:
                pass  # only a superuser may: `millpy doctor` tells, and dropping a graph refuses


def pin(connection: psycopg.Connection[Any], own: Mapping[str, str]) -> None:
    """The same for a connection of a thread."""
    query = settings_query(own, local=False)
    with connection.cursor(row_factory=tuple_row) as cursor:
        cursor.execute(_UNHURRIED, prepare=False)
        row = cursor.execute(query, prepare=False).fetchone()
        if row is not None and row[-1] != "origin":
            try:
                cursor.execute(_TRIGGERS_FIRE, prepare=False)
            except psycopg.errors.InsufficientPrivilege:
                pass


def connect(url: str, own: Mapping[str, str] | None = None, **options: Any) -> psycopg.Connection[Any]:
    """A connection in autocommit mode that is ours alone, with its settings; `options` as psycopg takes them."""
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
    """Begin every transaction of a connection with isolation and access mode, whatever the defaults are."""
    connection.isolation_level = IsolationLevel.READ_COMMITTED
    connection.read_only = read_only
    connection.deferrable = False


def pin_transaction(connection: psycopg.Connection[Any], own: Mapping[str, str]) -> None:
    """Give the current transaction its settings; begins one when there is none."""
    connection.execute(_UNHURRIED_HERE, prepare=False)
    connection.execute(settings_query(own, local=True), prepare=False)
