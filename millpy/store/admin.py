"""Reads the documented views for people. Never on the hot path."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import psycopg
from psycopg.types.string import TextLoader
from sqlalchemy import Executable, event, text
from sqlalchemy.exc import DBAPIError

from millpy.database_url import unreadable
from millpy.errors import ConfigError, MillError, StoreUnavailableError, UsageError
from millpy.store.admin_question import answer
from millpy.store.engine import make_engine
from millpy.store.unreachable import unreachable

Row = Mapping[str, Any]
NO_TABLE = "42P01"
OUR_SCHEMAS = ("mill", "millpy")
NOT_MIGRATED = {NO_TABLE, "42883", "3F000"}  # no such table, function, schema
NOT_ONE_COMPUTATION = {"P0002", "42P09"}  # no such computation, or in several graphs
NOT_A_VALUE = {"22P02", "22007", "22008", "22003"}  # text that is no number, moment, uuid, …
CANCELLED = "57014"
RIGHTS_HINT = "log in as a member of a role that may: `millpy migrate --roles` makes them"
NO_RIGHTS = "42501"
REFUSED_BY_POOL = "08"


class Admin:
    """Questions about a database, each answered in one statement and so from one snapshot.

    Args:
        database_url: as libpq takes it.
        statement_s_max: a statement that takes longer is cancelled; None: none is.
    """

    def __init__(self, database_url: str, *, statement_s_max: float | None = None) -> None:
        own = {"statement_timeout": str(int((statement_s_max or 0) * 1000))}  # 0 is none
        self._engine = make_engine(database_url, own)
        event.listen(self._engine, "connect", _read_infinity)

    def graphs(self) -> list[str]:
        """Names of the deployed graphs."""
        return [row["graph"] for row in self.ask("SELECT graph FROM millpy.graphs ORDER BY graph")]

    def name_of(self, family: str, generation: int) -> str | None:
        """What a generation of a graph is called now; None when it is not deployed."""
        statement = "SELECT graph FROM millpy.graphs WHERE family = :family AND generation = :generation"
        found = self.ask(statement, family=family, generation=generation)
        return str(found[0]["graph"]) if found else None

    def workers(self, graph: str | None = None) -> list[Row]:
        """Processes with their leases and what they own; of one graph or of all."""
        return self._of_graph("SELECT * FROM millpy.workers", graph)

    def accounting(self, graph: str | None = None) -> list[Row]:
        """The sums of I8, per source partition and subscription."""
        return self._of_graph("SELECT * FROM millpy.accounting", graph)

    def watermarks(self, graph: str | None = None) -> list[Row]:
        """Input and low watermark of every computation."""
        return self._of_graph("SELECT * FROM millpy.watermarks", graph)

    def sources(self, graph: str | None = None) -> list[Row]:
        """Source partitions, and which of them stand still."""
        return self._of_graph("SELECT * FROM millpy.sources", graph)

    def fleet(self, graph: str | None, silent_s: float, rows_max: int) -> list[Row]:
        """Devices that have been silent for so long, the longest first."""
        return self.ask(
            "SELECT * FROM millpy.fleet WHERE (CAST(:graph AS text) IS NULL OR graph = :graph)"
            " AND silent_for >= make_interval(secs => :silent_s) ORDER BY silent_since, key LIMIT :rows_max",
            graph=graph,
            silent_s=silent_s,
            rows_max=rows_max,
        )

    def resume_source(self, graph: str, stream: str) -> int:
        """Let a source go on; how many of its partitions stood still."""
        found = self.change("SELECT millpy.resume_source(:graph, :stream) AS n", graph=graph, stream=stream)
        return int(found[0]["n"])

    def parked(self, graph: str | None = None) -> list[Row]:
        """Keys that stopped at a failing record, and what waits behind it."""
        return self._of_graph("SELECT * FROM millpy.parked", graph)

    def release_parked(self, graph: str, computation: str, key: str | None, *, discard: bool) -> int:
        """Let parked keys go on, without what they stopped at when it is discarded; how many were asked to."""
        statement = "SELECT millpy.release_parked(:graph, :computation, :key) AS n"
        if discard:
            statement = "SELECT millpy.discard_parked(:graph, :computation, :key) AS n"
        return int(self.change(statement, graph=graph, computation=computation, key=key)[0]["n"])

    def explain_watermark(self, computation: str) -> list[Row]:
        """What holds a computation's watermark back, and for how long; `graph.computation` says whose.

        Raises:
            UsageError: no graph has it, or several have.
        """
        graph, _, name = computation.rpartition(".")
        if graph:
            statement = "SELECT * FROM millpy.explain_watermark(:graph, :name)"
            return self.ask(statement, graph=graph, name=name)
        return self.ask("SELECT * FROM millpy.explain_watermark(:name)", name=name)

    def _of_graph(self, statement: str, graph: str | None) -> list[Row]:
        return self.ask(statement) if graph is None else self.ask(f"{statement} WHERE graph = :graph", graph=graph)

    def ask(self, statement: str, **parameters: Any) -> list[Row]:
        """Rows of one statement that changes nothing."""
        return self._rows(statement, parameters, commit=False)

    def change(self, statement: str, **parameters: Any) -> list[Row]:
        """Rows of one statement, committed."""
        return self._rows(statement, parameters, commit=True)

    def select(self, statement: Executable) -> list[Row]:
        """Rows of a statement of SQLAlchemy."""
        return self._execute(statement, {}, commit=False)

    def read(self, statement: str) -> list[Row]:
        """Rows of a person's own statement, which cannot change anything (`admin_question.py`).

        Raises:
            UsageError: it is no SQL, names what is not there, or would change something.
        """
        try:
            with self._engine.connect() as connection:
                connection.execute(text("SELECT"))  # begins the transaction, with its settings
                return list(answer(cast("psycopg.Connection[Any]", connection.connection.driver_connection), statement))
        except (DBAPIError, psycopg.Error) as error:
            wrapped = error if isinstance(error, DBAPIError) else DBAPIError(None, None, error)
            state = getattr(wrapped.orig, "sqlstate", None) or ""
            if state.startswith(("22", "42")) and state != NO_RIGHTS:
                raise UsageError(_first_line(wrapped), hint="correct the statement") from None
            raise _translated(wrapped) from None

    def _rows(self, statement: str, parameters: Mapping[str, Any], *, commit: bool) -> list[Row]:
        return self._execute(text(statement), parameters, commit=commit)

    def _execute(self, statement: Executable, parameters: Mapping[str, Any], *, commit: bool) -> list[Row]:
        try:
            with self._engine.begin() if commit else self._engine.connect() as connection:
                result = connection.execute(statement, parameters)
                return [dict(row) for row in result.mappings()]
        except DBAPIError as error:
            raise _translated(error) from None


def _read_infinity(connection: psycopg.Connection[Any], _: object) -> None:
    connection.adapters.register_loader("timestamptz", TextLoader)  # Python has no instant for it


def _translated(error: DBAPIError) -> MillError:
    state = getattr(error.orig, "sqlstate", None)
    if state == NO_TABLE and not any(f'"{schema}.' in _first_line(error) for schema in OUR_SCHEMAS):
        return ConfigError(
            f"a result table is gone: {_first_line(error)}", hint="`millpy graphs` shows what is deployed"
        )
    if state in NOT_MIGRATED:
        return ConfigError("the database has no tables of millpy", hint="run `millpy migrate` first")
    detail = " ".join(str(error.orig).split())
    if isinstance(error.orig, psycopg.Error) and state in NOT_ONE_COMPUTATION:
        message = error.orig.diag.message_primary or detail
        return UsageError(message, hint="`millpy watermarks` lists them; say which with --explain GRAPH.COMPUTATION")
    if state in NOT_A_VALUE:
        return UsageError(_first_line(error), hint="write it as PostgreSQL would")
    if state == CANCELLED:
        return UsageError("the answer takes too long to look for", hint="ask for less: name a key, or a span of time")
    if state == NO_RIGHTS:
        return ConfigError(f"missing rights: {_first_line(error)}", hint=RIGHTS_HINT)
    if not state or state.startswith(REFUSED_BY_POOL):
        return unreadable() if isinstance(error.orig, psycopg.ProgrammingError) else unreachable(str(error.orig))
    return StoreUnavailableError(f"the database does not answer: {detail}", hint="look at its log")


def _first_line(error: DBAPIError) -> str:
    lines = str(error.orig).strip().splitlines()
    return lines[0] if lines else type(error.orig).__name__
