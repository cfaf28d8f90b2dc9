"""Read the documented views for operators. Workers do not use this module."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import copy
from typing import TYPE_CHECKING, Any, cast
from uuid import UUID

import psycopg
from sqlalchemy import Connection, Executable, event, text
from sqlalchemy.exc import DBAPIError, SQLAlchemyError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError

from millpy.admin.loaders import load_any_value
from millpy.admin.sql import answer
from millpy.clock import SystemClock
from millpy.config.database_url import unreadable_url_error
from millpy.errors import (
    ConfigError,
    MillError,
    NotMigratedError,
    RightsError,
    SlowQueryError,
    StoreUnavailableError,
    UsageError,
)
from millpy.model.time import Instant
from millpy.store.postgres.engine import make_engine
from millpy.store.postgres.statements import statement
from millpy.store.postgres.unreachable import is_standby, standby_error, unreachable_error
from millpy.store.revision import check_revision

if TYPE_CHECKING:
    from millpy.store.archive.reader import ListedFile

Row = Mapping[str, Any]
NO_TABLE = "42P01"
OUR_SCHEMAS = ("mill", "millpy")
MISSING = {NO_TABLE, "42703", "42883", "3F000"}  # no such table, column, function, schema
NOT_ONE_COMPUTATION = {"P0002", "42P09"}  # no such computation, or in several graphs
# Text that is not a number, a time, a zone, a uuid, …
NOT_A_VALUE = {"22P02", "22P05", "22003", "22007", "22008", "22009", "22015", "22021"}
CANCELLED = "57014"
PROTOCOL_VIOLATION = "08P01"
RIGHTS_HINT = "log in as a member of a role with these rights; `millpy migrate --roles` creates the roles"
NO_RIGHTS = "42501"
NO_ROLE = {"22023", "42704"}  # of set_config, and of has_table_privilege
NO_CORRECTION = "MW010"  # of millpy.correct
REFUSED_BY_POOL = "08"
OF_CONSTRAINTS = "23"
# Everyone may look into the catalog; a reader may not read the revision itself.
MIGRATED = "SELECT FROM pg_class WHERE relname = 'alembic_version' AND relnamespace = to_regnamespace('mill')"
RESUME = "SELECT millpy.resume_source(:graph, :stream) AS n"
DRAIN = "SELECT millpy.drain_worker(:graph, :worker, :why) AS n"
RELEASE = {
    False: "SELECT millpy.release_parked(:graph, :computation, :key) AS n",
    True: "SELECT millpy.discard_parked(:graph, :computation, :key) AS n",
}
"""By whether the failed record becomes a dead letter."""
PARKED = """
SELECT * FROM millpy.parked WHERE CAST(:graph AS text) IS NULL OR graph = :graph
 ORDER BY parked_at DESC NULLS LAST, graph, computation, key LIMIT :rows_max
"""
GRAPHS_WITH_PARKED = """
SELECT DISTINCT graph FROM millpy.parked
 WHERE computation = :computation AND (CAST(:graph AS text) IS NULL OR graph = :graph) ORDER BY graph
"""
ARCHIVE_FILES = """
SELECT path, partitions, (extract(epoch FROM first_event_time) * 1000000)::bigint AS lo,
       (extract(epoch FROM last_event_time) * 1000000)::bigint AS hi
  FROM millpy.archive_files WHERE graph = :graph AND archive = :archive ORDER BY path
"""
# The view counts late records and dead letters by stream, and shows each count in every partition of the stream.
DEVICES = """
SELECT device, max(last_event_time) AS last_event_time, min(lag) AS lag, max(silent_since) AS silent_since,
       min(silent_for) AS silent_for, sum(rate) AS rate, sum(records)::bigint AS records,
       sum(duplicates)::bigint AS duplicates, max(late) AS late, max(dead_letters) AS dead_letters, graph, stream,
       array_agg(source_partition ORDER BY source_partition) AS source_partitions, key
  FROM millpy.fleet
 WHERE CAST(:graph AS text) IS NULL OR graph = :graph
 GROUP BY graph, stream, device, key
HAVING min(silent_for) >= make_interval(secs => :silent_s)
"""
FLEET = DEVICES + " ORDER BY silent_since, key LIMIT :rows_max"

SILENCES = """
SELECT graph, computation, count(*) AS silent_devices, min(last_event_time) AS silent_since,
       (array_agg(device ORDER BY last_event_time NULLS FIRST, key))[1:5] AS longest_silent
  FROM millpy.silent_devices
 WHERE CAST(:graph AS text) IS NULL OR graph = :graph
 GROUP BY graph, computation ORDER BY graph, computation
"""


SINKS = """
SELECT graph, sink, kind, CASE WHEN bool_or(state = 'disconnected') THEN 'disconnected'
                               WHEN bool_or(state = 'running') THEN 'running' ELSE max(state) END AS state,
       sum(messages)::bigint AS messages, sum(bytes)::bigint AS bytes, min(waiting_since) AS waiting_since,
       sum(refused)::bigint AS refused, sum(parked_keys)::bigint AS parked_keys,
       coalesce(min(disconnected_because), min(refused_because)) AS why
  FROM millpy.sinks
 WHERE CAST(:graph AS text) IS NULL OR graph = :graph
 GROUP BY graph, sink, kind ORDER BY graph, sink
"""


class Admin:
    """Queries of a database, each answered by one statement and so from one snapshot.

    Args:
        database_url: a URL that libpq takes.
        statement_s_max: the seconds after which a statement is cancelled, and a transaction that waits for its client
            ends; None for no limit.
        connections_max: how many connections are kept and reused, and the maximum; None for one for each statement.
    """

    def __init__(
        self, database_url: str, *, statement_s_max: float | None = None, connections_max: int | None = None
    ) -> None:
        self.url = database_url
        self._role: str | None = None
        self._until: float | None = None
        self._shared: Connection | None = None
        self._limited = statement_s_max is not None
        limit = str(int((statement_s_max or 0) * 1000))
        own = {"statement_timeout": limit, "idle_in_transaction_session_timeout": limit} if self._limited else None
        self._engine = make_engine(database_url, own, connections_max=connections_max)
        event.listen(self._engine, "connect", lambda connection, _: load_any_value(connection))

    def acting_as(self, role: str | None) -> Admin:
        """Return the same database, with statements that run under another role; None for the login's."""
        assert self._shared is None, "the role is that of the transaction"
        other = copy(self)
        other._role = role
        return other

    @property
    def role(self) -> str | None:
        """The role that statements run under; None for the login's."""
        return self._role

    def limit_to(self, seconds: float) -> Admin:
        """Return the same database, whose statements have this long together: then each is a SlowQueryError."""
        other = copy(self)
        other._until = SystemClock().monotonic() + seconds
        other._limited = True
        return other

    @contextmanager
    def together(self) -> Iterator[Admin]:
        """Yield the same database, whose statements run in one transaction, each in a snapshot of its own.

        A transaction costs its settings, which are more work than a short statement. It changes nothing: an error, and
        the end, undo it.
        """
        with self._translating(), self._engine.connect() as connection:
            other = copy(self)
            other._shared = connection
            yield other

    def close(self) -> None:
        """Close the connections that are kept."""
        self._engine.dispose()

    def graphs(self) -> list[str]:
        """Return the names of the deployed graphs."""
        return [row["graph"] for row in self.ask("SELECT graph FROM millpy.graphs ORDER BY graph")]

    def name_of(self, family: str, generation: int) -> str | None:
        """Return the present name of a generation of a graph; None if it is not deployed."""
        statement = "SELECT graph FROM millpy.graphs WHERE family = :family AND generation = :generation"
        found = self.ask(statement, family=family, generation=generation)
        return str(found[0]["graph"]) if found else None

    def workers(self, graph: str | None = None) -> list[Row]:
        """Return the workers of one graph or of all, with their leases and intervals."""
        return self._of_graph("SELECT * FROM millpy.workers", graph)

    def accounting(self, graph: str | None = None) -> list[Row]:
        """Return the accounting (I8): the counts of each source partition, subscription and result table."""
        return self._of_graph("SELECT * FROM millpy.accounting", graph)

    def watermarks(self, graph: str | None = None) -> list[Row]:
        """Return the input and low watermarks of every interval, in the order of the computations."""
        return self._of_graph("SELECT * FROM millpy.watermarks", graph)

    def disorder(self, graph: str | None = None) -> list[Row]:
        """Return how far the records of each source partition lie behind the newest one, and how many were late."""
        return self._of_graph("SELECT * FROM millpy.disorder", graph)

    def site_watermarks(self, graph: str | None = None) -> list[Row]:
        """Return the watermark of each site, of the sources that keep one for each."""
        return self._of_graph("SELECT * FROM millpy.site_watermarks", graph)

    def sources(self, graph: str | None = None) -> list[Row]:
        """Return the source partitions with their states and counts."""
        return self._of_graph("SELECT * FROM millpy.sources", graph)

    def sinks(self, graph: str | None = None) -> list[Row]:
        """Return the sinks, one row for each: what waits, what is refused, and whether they are connected."""
        return self.ask(SINKS, graph=graph)

    def fleet(self, graph: str | None, silent_s: float, rows_max: int) -> list[Row]:
        """Return the devices that have been silent for `silent_s`, the longest silent first.

        A device has one row for each stream, whichever of its source partitions the records came through.
        """
        return self.ask(FLEET, graph=graph, silent_s=silent_s, rows_max=rows_max)

    def silences(self, graph: str | None = None) -> list[Row]:
        """Return the number of silent devices of each `silent_after` step that has some, and the first of them."""
        return self.ask(SILENCES, graph=graph)

    def refused_results(self, graph: str | None = None) -> list[Row]:
        """Return the result tables and sinks that refuse the turns of a live worker, and why."""
        return self._of_graph(f"SELECT * FROM ({statement('look_at_refused_results').decode()}) AS r", graph)  # noqa: S608 - a statement of ours

    def injections(self, graph: str | None = None) -> list[Row]:
        """Return the sources of injected records: what waits for each, and which transactions are open."""
        return self._of_graph("SELECT * FROM millpy.injections", graph)

    def archives(self, graph: str | None = None) -> list[Row]:
        """Return the archives: their files and records, and what is not archived yet."""
        return self._of_graph("SELECT * FROM millpy.archive", graph)

    def archive_files(self, graph: str, archive: str) -> list[ListedFile]:
        """Return what the manifest of an archive lists, in the order of the paths."""
        from millpy.store.archive.reader import ListedFile  # imported here: few calls need Parquet

        found = self.ask(ARCHIVE_FILES, graph=graph, archive=archive)
        return [ListedFile(row["path"], Instant(row["lo"]), Instant(row["hi"]), row["partitions"]) for row in found]

    def resume_source(self, graph: str, stream: str) -> int:
        """Resume a source; return how many of its partitions were paused."""
        return int(self.change(RESUME, graph=graph, stream=stream)[0]["n"])

    def drain_worker(self, graph: str, worker: UUID, why: str) -> int:
        """Request that a live worker drains; return 1, or 0 if that is requested already or it does not live."""
        return int(self.change(DRAIN, graph=graph, worker=worker, why=why)[0]["n"])

    def parked(self, graph: str | None, rows_max: int) -> list[Row]:
        """Return the keys that stopped last at a failing record, the newest last, and the records behind it."""
        return self.ask(PARKED, graph=graph, rows_max=rows_max)[::-1]

    def graphs_with_parked(self, graph: str | None, computation: str) -> list[str]:
        """Return the graphs, or this one, in which keys of a computation are parked."""
        return [row["graph"] for row in self.ask(GRAPHS_WITH_PARKED, graph=graph, computation=computation)]

    def release_parked(self, graph: str, computation: str, key: str | None, *, discard: bool) -> int:
        """Request the release of one parked key, or of all if `key` is None. Return the number of keys.

        With `discard`, the failed record becomes a dead letter.
        """
        return int(self.change(RELEASE[discard], graph=graph, computation=computation, key=key)[0]["n"])

    def explain_watermark(self, computation: str) -> list[Row]:
        """Explain what holds back the watermark of `computation` or `graph.computation`: one row per step upstream.

        Raises:
            UsageError: no graph has the computation, or several have.
        """
        graph, _, name = computation.rpartition(".")
        if graph:
            statement = "SELECT * FROM millpy.explain_watermark(:graph, :name)"
            return self.ask(statement, graph=graph, name=name)
        return self.ask("SELECT * FROM millpy.explain_watermark(:name)", name=name)

    def _of_graph(self, statement: str, graph: str | None) -> list[Row]:
        return self.ask(statement) if graph is None else self.ask(f"{statement} WHERE graph = :graph", graph=graph)

    def ask(self, statement: str, **parameters: Any) -> list[Row]:
        """Run one statement that changes nothing, and return its rows."""
        return self._rows(statement, parameters, commit=False)

    def change(self, statement: str, **parameters: Any) -> list[Row]:
        """Run and commit one statement, and return its rows."""
        return self._rows(statement, parameters, commit=True)

    def select(self, statement: Executable) -> list[Row]:
        """Run a SQLAlchemy statement, and return its rows."""
        return self._execute(statement, {}, commit=False)

    def read(self, statement: str) -> list[Row]:
        """Run an operator's statement, which cannot change anything (`sql.py`), and return its rows.

        Raises:
            UsageError: the text is not SQL, names something that does not exist, or would change the database.
        """
        if not statement.strip():
            raise UsageError("the statement is empty", hint='for example: millpy sql "SELECT * FROM millpy.graphs"')
        try:
            with self._engine.connect() as connection:
                connection.execute(text("SELECT"))  # begin the transaction, with its settings
                self._act(connection)
                return list(answer(cast("psycopg.Connection[Any]", connection.connection.driver_connection), statement))
        except (DBAPIError, psycopg.Error) as error:
            wrapped = error if isinstance(error, DBAPIError) else DBAPIError(None, None, error)
            state = getattr(wrapped.orig, "sqlstate", None) or ""
            if state.startswith(("22", "42", PROTOCOL_VIOLATION)) and state != NO_RIGHTS:  # a parameter, $1
                raise UsageError(
                    _first_line(wrapped), hint="correct the statement; docs/views.md describes the views"
                ) from None
            raise self._translated(wrapped) from None

    def _rows(self, statement: str, parameters: Mapping[str, Any], *, commit: bool) -> list[Row]:
        return self._execute(text(statement), parameters, commit=commit)

    def _execute(self, statement: Executable, parameters: Mapping[str, Any], *, commit: bool) -> list[Row]:
        with self._connected(commit=commit) as connection:
            result = connection.execute(statement, parameters)
            return [dict(row) for row in result.mappings()]

    @contextmanager
    def transaction(self) -> Iterator[Callable[..., list[Row]]]:
        """Yield a function that runs statements like `change`; the block is one transaction, and an error undoes it."""
        with self._connected(commit=True) as connection:

            def run(statement: str, **parameters: Any) -> list[Row]:
                result = connection.execute(text(statement), parameters)
                return [dict(row) for row in result.mappings()] if result.returns_rows else []

            yield run

    def _act(self, connection: Connection) -> None:
        if self._role is not None:
            connection.execute(text("SELECT set_config('role', :role, true)"), {"role": self._role})
        if self._until is not None:
            limit = str(max(1, int((self._until - SystemClock().monotonic()) * 1000)))
            connection.execute(text("SELECT set_config('statement_timeout', :limit, true)"), {"limit": limit})

    @contextmanager
    def _connected(self, *, commit: bool) -> Iterator[Connection]:
        with self._translating():
            if self._shared is None:
                with self._engine.begin() if commit else self._engine.connect() as connection:
                    self._act(connection)
                    yield connection
                return
            assert not commit, "what changes the database has a transaction of its own"
            try:
                if self._until is not None:
                    self._shared.rollback()  # the limit is one of a transaction: this statement has its own
                if not self._shared.in_transaction():
                    self._act(self._shared)
                yield self._shared
            except BaseException:
                self._shared.rollback()
                raise
            if self._until is not None:
                self._shared.rollback()

    @contextmanager
    def _translating(self) -> Iterator[None]:
        try:
            yield
        except (DBAPIError, psycopg.Error) as error:
            wrapped = error if isinstance(error, DBAPIError) else DBAPIError(None, None, error)
            raise self._translated(wrapped) from None
        except PoolTimeoutError:
            raise StoreUnavailableError("too many queries at once", hint="try again in some seconds") from None

    def _translated(self, error: DBAPIError) -> MillError:
        if getattr(error.orig, "sqlstate", None) == CANCELLED and not self._limited:  # an administrator did, or a limit
            return StoreUnavailableError(f"the server ended the query: {_first_line(error)}", hint="try again")
        if getattr(error.orig, "sqlstate", None) in MISSING and not _is_result_table(error):
            return self._of_other_tables(error)
        return _translated(error)

    def _of_other_tables(self, error: DBAPIError) -> ConfigError:
        """Return the error for a database that lacks what a statement reads; it says what to do."""
        try:
            with self._engine.connect() as connection:
                if connection.execute(text(MIGRATED)).first() is None:
                    return NotMigratedError("the database has no tables of millpy", hint="run `millpy migrate` first")
                check_revision(*connection.execute(text(statement("read_revision").decode())).one())
        except ConfigError as other:
            return other
        except (SQLAlchemyError, psycopg.Error):
            pass  # a reader may not know the revision
        return NotMigratedError(
            f"the database lacks what this millpy reads: {_first_line(error)}",
            hint="run `millpy migrate` as the owner; if that changes nothing, restore what was dropped, or use a new"
            " database",
        )


def _translated(error: DBAPIError) -> MillError:
    state = getattr(error.orig, "sqlstate", None)
    if _is_result_table(error):
        return ConfigError(
            f"a result table is gone: {_first_line(error)}", hint="`millpy graphs` shows what is deployed"
        )
    detail = " ".join(str(error.orig).split())
    if isinstance(error.orig, psycopg.Error) and state in NOT_ONE_COMPUTATION:
        message = error.orig.diag.message_primary or detail
        return UsageError(message, hint="`millpy watermarks` lists them; say which with --explain GRAPH.COMPUTATION")
    if isinstance(error.orig, psycopg.Error) and state == NO_CORRECTION:
        return UsageError(error.orig.diag.message_primary or detail, hint=error.orig.diag.message_hint or "")
    if state in NOT_A_VALUE:
        return UsageError(_first_line(error), hint="write it as PostgreSQL reads it: 2026-11-20T08:00:00Z, 1.5, true")
    if state and state.startswith(OF_CONSTRAINTS):
        return ConfigError(
            f"a constraint of yours refuses a row: {_first_line(error)}",
            hint="nothing was changed: change the constraint, or what it refuses",
        )
    if state == CANCELLED:
        return SlowQueryError("the query takes too long", hint="ask for less: give a key, or a span of time")
    if state == NO_RIGHTS:
        return RightsError(f"missing rights: {_first_line(error)}", hint=RIGHTS_HINT)
    if state in NO_ROLE and isinstance(error.params, Mapping) and "role" in error.params:
        return RightsError(_first_line(error), hint="create a token with a role of the database that exists")
    if not state or state.startswith(REFUSED_BY_POOL):
        if isinstance(error.orig, psycopg.ProgrammingError):
            return unreadable_url_error()
        return unreachable_error(str(error.orig))
    if isinstance(error.orig, psycopg.Error) and is_standby(error.orig):
        return standby_error()
    return StoreUnavailableError(f"the database cannot answer: {detail}", hint="try again; its log may say more")


def _is_result_table(error: DBAPIError) -> bool:
    """Tell whether a table is missing that is not one of millpy's own."""
    state, line = getattr(error.orig, "sqlstate", None), _first_line(error)
    return state == NO_TABLE and not any(f'"{schema}.' in line for schema in OUR_SCHEMAS)


def _first_line(error: DBAPIError) -> str:
    lines = str(error.orig).strip().splitlines()
    return lines[0] if lines else type(error.orig).__name__
