"""Check the statements of `to_sql` in a graph: whether the role of the workers may run them."""

from __future__ import annotations

from collections.abc import Iterator

import psycopg
from psycopg import sql

from millpy.graph import Graph, StageNode
from millpy.model.finding import Finding, Severity
from millpy.sinks.statement import StatementLogic
from millpy.store.postgres.session_settings import settings_query

CHECK = "sink"
LIMITS = {"lock_timeout": "5000", "statement_timeout": "20000"}
"""A session that alters a table, or one that is away, must not hold up the doctor."""
CONNECT_S_MAX = 10
STOPS = "turns with its records fail until it can run, and all steps of these turns wait"


def examine_statements(url: str, graph: Graph, worker: str | None) -> Iterator[Finding]:
    """Yield a finding for each statement, which is planned and not run.

    Args:
        url: the database.
        graph: the graph.
        worker: the role of the workers; None to check the rights of the role of the URL.
    """
    for step in graph.nodes:
        if isinstance(step, StageNode) and isinstance(step.logic, StatementLogic):
            yield _examined(url, step.name, step.logic, worker)


def _examined(url: str, name: str, logic: StatementLogic, worker: str | None) -> Finding:
    if logic.is_call:
        return Finding(Severity.NOTE, CHECK, f"{name}: the rights of a CALL are not checked", "", "run it in psql")
    role = worker or "the role of the URL"
    try:
        with psycopg.connect(url, connect_timeout=CONNECT_S_MAX) as connection:
            # It also begins the transaction, with the path of a commit.
            connection.execute(settings_query(LIMITS, local=True))
            role = _become(connection, worker)
            connection.execute(b"PREPARE millpy_doctor AS " + logic.query.encode())
            places = sql.SQL(", ").join([sql.NULL] * logic.places)
            values = sql.SQL("({})").format(places) if logic.places else sql.SQL("")
            connection.execute(sql.SQL("EXPLAIN EXECUTE millpy_doctor{}").format(values))
            connection.rollback()
    except psycopg.errors.InsufficientPrivilege as error:
        said = error.diag.message_primary or str(error)
        hint = "GRANT USAGE on the schema, and the rights that the statement needs"
        return Finding(Severity.ERROR, CHECK, f"{name}: {role} may not run its statement: {said}", STOPS, hint)
    except (psycopg.errors.LockNotAvailable, psycopg.errors.QueryCanceled) as error:
        found = f"{name}: its statement was not checked: {error.diag.message_primary}"
        return Finding(Severity.WARNING, CHECK, found, "", "try again; pg_locks shows what locks its tables")
    except psycopg.Error as error:
        said = error.diag.message_primary or str(error)
        return Finding(Severity.ERROR, CHECK, f"{name}: its statement cannot run: {said}", STOPS, "correct one of them")
    return Finding(Severity.OK, CHECK, f"{name}: {role} may run its statement")


def _become(connection: psycopg.Connection[tuple[object, ...]], worker: str | None) -> str:
    """Take the role of the workers until the end of the transaction, if this one may. Return the role."""
    if worker is not None:
        try:
            with connection.transaction():
                connection.execute(sql.SQL("SET LOCAL ROLE {}").format(sql.Identifier(worker)))
            return worker
        except psycopg.errors.InsufficientPrivilege:
            pass
    ((role,),) = connection.execute("SELECT current_user::text").fetchall()
    return str(role)
