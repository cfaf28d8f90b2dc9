"""Runs the migrations of millpy on the connection that `millpy.store.migrate` hands over."""

from __future__ import annotations

from alembic import context
from sqlalchemy import Connection, text


def run(connection: Connection) -> None:
    """Bring the database to the target revision in one transaction."""
    # The version table lives in the schema that the first migration fills.
    connection.execute(text("CREATE SCHEMA IF NOT EXISTS mill"))
    context.configure(connection=connection, version_table_schema="mill")
    with context.begin_transaction():
        context.run_migrations()


run(context.config.attributes["connection"])
