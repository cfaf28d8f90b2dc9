"""Fresh, migrated databases on one server, for tests and for the crash matrix."""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg
from psycopg import sql

from millpy.embedded import EmbeddedPostgres

TEMPLATE = "millpy_template"
_numbers = itertools.count(1)
_migrating = threading.Lock()  # Alembic keeps its state in globals


def make_template(server: EmbeddedPostgres) -> None:
    """Migrate once; every database is a copy."""
    from millpy.store.postgres.deployment.migrate import migrate  # here: tests without a database need not pay for it

    with psycopg.connect(server.url(), autocommit=True) as connection:
        connection.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(TEMPLATE)))
    with _migrating:
        migrate(server.url(TEMPLATE))


@contextmanager
def passing_server(directory: Path) -> Iterator[EmbeddedPostgres]:
    """A server with the template, which has ended when this ends: the directory may be removed then."""
    with EmbeddedPostgres(directory, tcp=True) as server:
        make_template(server)
        try:
            yield server
        finally:
            server.kill()


@contextmanager
def fresh_database(server: EmbeddedPostgres, template: str = TEMPLATE) -> Iterator[str]:
    """Name of a database that is dropped at the end."""
    name = sql.Identifier(text := f"test_{os.getpid()}_{next(_numbers)}")
    with psycopg.connect(server.url(), autocommit=True) as connection:
        connection.execute(sql.SQL("CREATE DATABASE {} TEMPLATE {}").format(name, sql.Identifier(template)))
    try:
        yield text
    finally:
        with psycopg.connect(server.url(), autocommit=True) as connection:
            connection.execute(sql.SQL("DROP DATABASE IF EXISTS {} WITH (FORCE)").format(name))
