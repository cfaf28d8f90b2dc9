"""Check the tables that a graph reads: what the server, the table and the role of the workers lack for that."""

from __future__ import annotations

from collections.abc import Iterator

import psycopg

from millpy.errors import ConfigError, MillError
from millpy.graph import Graph
from millpy.model.finding import Finding, Severity
from millpy.sources.postgres.polled import PolledTable
from millpy.sources.postgres.polled_thread import look_at_polled_table
from millpy.sources.postgres.table import PostgresTable, table_name
from millpy.sources.postgres.table_checks import Connection, check_changeable, look_at_table
from millpy.sources.postgres.table_reader import database_of
from millpy.store.postgres.errors import translate
from millpy.store.postgres.session import connect
from millpy.store.postgres.statements import statement

CHECK = "source"
UNREAD = "its records are not read, and windows that depend on them stay open"
Table = PostgresTable | PolledTable


def examine_tables(url: str, graph: Graph, worker: str | None) -> Iterator[Finding]:
    """Yield a finding for each table; nothing is created.

    Args:
        url: the workers' database.
        graph: the graph.
        worker: the role of the workers; None to check the rights of the role of the URL.
    """
    for node in graph.injectors():
        source = node.source
        if not isinstance(source, Table):
            continue
        try:
            role = _examine(source, url, worker)
        except (MillError, psycopg.Error) as error:
            wrong = error if isinstance(error, MillError) else translate(error)
            yield Finding(Severity.ERROR, CHECK, f"{node.name}: {wrong.message}", UNREAD, wrong.hint)
        else:
            yield Finding(Severity.OK, CHECK, f"{node.name}: {role} may read table {source.table}")


def _examine(source: Table, own: str, worker: str | None) -> str:
    """Return the role that may read the table.

    Raises:
        MillError: it may not, or something is wrong.
        psycopg.Error: the database does not answer.
    """
    url, is_own = database_of(source.table, source.database, own)
    with connect(url, application_name="millpy doctor") as connection:
        if isinstance(source, PolledTable):
            look_at_polled_table(connection, source)
        else:
            check_changeable(connection, source)
            look_at_table(connection, source, creates=False)
        return _role_with_rights(connection, source, worker if is_own else None)


def _role_with_rights(connection: Connection, source: Table, worker: str | None) -> str:
    schema, table = table_name(source.table, type(source).__name__)
    named = {"schema": schema, "table": table, "role": worker}
    found = connection.execute(statement("look_at_rights_on_table"), named).fetchone()
    role, may_read, may_follow = found or (worker, False, False)
    if not may_read:
        raise ConfigError(
            f"role {role} may not read table {schema}.{table}",
            hint="grant it USAGE on the schema and SELECT on the table",
        )
    if isinstance(source, PostgresTable) and not may_follow:
        raise ConfigError(
            f"role {role} may not read changes",
            hint="as an administrator: ALTER ROLE … REPLICATION, for the role by which the workers log in",
        )
    return str(role)
