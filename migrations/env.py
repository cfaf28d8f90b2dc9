"""Runs the migrations of millpy on the connection that `millpy.store.postgres.deployment.migrate` passes in."""

from __future__ import annotations

import logging
from typing import Any

from alembic import context
from sqlalchemy import Connection

progress = logging.getLogger("millpy.observability.status_line")


def run(connection: Connection) -> None:
    """Migrate the database to the target revision in one transaction."""
    context.configure(connection=connection, version_table_schema="mill", on_version_apply=applied)
    with context.begin_transaction():
        context.run_migrations()


def applied(*, step: Any, **_: Any) -> None:
    """Log a finished migration, and add it to the caller's list."""
    context.config.attributes.setdefault("applied", []).append(step.up_revision_id)
    progress.debug("applied migration %s: %s", step.up_revision_id, step.up_revision.doc)


run(context.config.attributes["connection"])
