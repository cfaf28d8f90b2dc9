"""Check the tables that a graph reads: what the server, the table and the role of the workers lack for that."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import psycopg

from millpy.errors import ConfigError, MillError
from millpy.graph import Graph
from millpy.model.finding import Finding, Severity
from millpy.sources.postgres.change_records import unfilled
from millpy.sources.postgres.polled import PolledTable
from millpy.sources.postgres.polled_thread import look_at_polled_table
from millpy.sources.postgres.table import NO_CHANGE_FIELDS, PostgresTable, table_name
from millpy.sources.postgres.table_checks import (
    Connection,
    check_changeable,
    look_at_table,
    may_not_publish,
    slot_prefix,
)
from millpy.sources.postgres.table_reader import database_of
from millpy.store.postgres.errors import translate
from millpy.store.postgres.session import connect
from millpy.store.postgres.statements import statement

CHECK = "source"
UNREAD = "its records are not read, and windows that depend on them stay open"
SEE_ALL = "ALTER ROLE … BYPASSRLS, for the role by which the workers log in"
RENAMED = "correct the field or its name (rename=), or remove it, if the column was renamed or dropped"
LIMITS = {"lock_timeout": "5000"}
"""From PostgreSQL 16 on, what a publication has of a table is seen under a lock on the table."""
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
            rights, columns = _examine(graph.permanent_name, node.name, source, url, worker)
        except (MillError, psycopg.Error) as error:
            wrong = error if isinstance(error, MillError) else translate(error)
            yield Finding(Severity.ERROR, CHECK, f"{node.name}: {wrong.message}", UNREAD, wrong.hint)
            continue
        filled = source.fields if isinstance(source, PostgresTable) else NO_CHANGE_FIELDS
        if lacking := unfilled(node.record_type, filled, columns):
            found = f"{node.name}: table {source.table} has no column for field {', '.join(lacking)}"
            yield Finding(Severity.WARNING, CHECK, found, "each record has the default of the field", RENAMED)
        if isinstance(source, PolledTable) and not rights.sees_all:
            found = f"{node.name}: row security of table {source.table} applies to role {rights.role}"
            yield Finding(Severity.WARNING, CHECK, found, "rows that its policies hide are not read", SEE_ALL)
        elif not lacking:
            yield Finding(Severity.OK, CHECK, f"{node.name}: {rights.role} may read table {source.table}")


def _examine(
    graph: str, stream: str, source: Table, own: str, worker: str | None
) -> tuple[_TableRights, Sequence[str]]:
    """Return what the role of the workers may do with the table, which it may read, and the columns that are read.

    Raises:
        MillError: it may not read it, or something is wrong.
        psycopg.Error: the database does not answer.
    """
    url, is_own = database_of(source.table, source.database, own)
    schema, table = table_name(source.table, type(source).__name__)
    slot = slot_prefix(graph, stream, is_own=is_own)
    named = {"schema": schema, "table": table, "role": worker if is_own else None, "slot": slot}
    with connect(url, LIMITS, application_name="millpy doctor") as connection:
        if isinstance(source, PolledTable):
            columns: Sequence[str] = look_at_polled_table(connection, source).columns
            rights = _rights(connection, named)
            _check_readable(rights.may_read_each, rights, f"{schema}.{table}")
        else:
            check_changeable(connection, source)
            facts = look_at_table(connection, source, creates=False)
            columns = facts.columns
            rights = _rights(connection, named)
            _check_followed(connection, source, rights, is_published=bool(facts.published))
        if not columns:  # all
            columns = (connection.execute(statement("look_at_polled_table"), named).fetchone() or ([],))[0]
        return rights, columns


class _TableRights(NamedTuple):
    """What a role may do with a table (`look_at_rights_on_table`)."""

    role: str
    may_read: bool
    may_read_each: bool
    sees_all: bool
    may_follow: bool
    may_publish: bool
    has_slot: bool
    is_followed: bool


def _rights(connection: Connection, named: dict[str, str | None]) -> _TableRights:
    found = connection.execute(statement("look_at_rights_on_table"), named).fetchone()
    return _TableRights(*(found or (str(named["role"]), *[False] * 7)))


def _check_readable(may_read: bool, rights: _TableRights, table: str) -> None:
    if not may_read:
        raise ConfigError(
            f"role {rights.role} may not read table {table}",
            hint="grant it USAGE on the schema and SELECT on the table",
        )


def _check_followed(connection: Connection, source: PostgresTable, rights: _TableRights, *, is_published: bool) -> None:
    """Check that a role may copy the table, where that is wanted, and follow its changes. Raises ConfigError."""
    table = f"{source.schema}.{source.name}"
    copies = source.copy and "snapshot" in source.operations
    if copies:
        _check_readable(rights.may_read, rights, table)
    if not rights.may_follow:
        raise ConfigError(
            f"role {rights.role} may not read changes",
            hint="as an administrator: ALTER ROLE … REPLICATION, for the role by which the workers log in",
        )
    if not is_published and not rights.may_publish:
        raise may_not_publish(connection, source, f"{rights.role} does not own it, or may not create in the database")
    if rights.is_followed:
        return
    if copies and not rights.sees_all:
        raise ConfigError(
            f"row security hides rows of table {table} from role {rights.role}, so it cannot be copied",
            hint=SEE_ALL,
        )
    if not rights.has_slot:
        raise ConfigError(
            "all replication slots are in use",
            hint="drop an unused one (pg_replication_slots has them), or raise max_replication_slots",
        )
