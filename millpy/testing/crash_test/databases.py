"""The databases of a crash test.

The embedded server gets a new database for every run. A given database must be empty, takes one run after the other,
and is empty again afterwards.
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from millpy.embedded import EmbeddedPostgres
from millpy.errors import StoreUnavailableError, UsageError
from millpy.store.postgres.deployment.migrate import migrate
from millpy.testing.crash_test.database import Database, drop_database, make_database, run_file, tcp_address

TEMPLATE = "crash_test_template"


class DatabaseServer(Protocol):
    """Provides a database for each run; `description` names the server in the report."""

    description: str

    def prepare(self, name: str) -> str:
        """Return the URL of a migrated database without graphs."""
        ...

    def strike(self, url: str) -> str:
        """Take the server away from the workers as abruptly as possible; return a description."""
        ...

    def restore(self) -> None:
        """Bring the server back."""
        ...

    def close(self, *, keep: bool) -> None:
        """Release the databases; remove what the test has made in them, unless `keep`."""
        ...


class EmbeddedServer:
    """An embedded server, which may be killed."""

    def __init__(self, directory: Path, sql: Path | None = None) -> None:
        self._server = EmbeddedPostgres(directory, tcp=True)
        self._server.start()
        make_database(self._server.url(), TEMPLATE, "template1")
        migrate(self._server.url(TEMPLATE))
        if sql is not None:
            try:
                run_file(self._server.url(TEMPLATE), sql)
            except UsageError:
                self._server.release()
                raise
        self._made = ""
        self.description = f"embedded PostgreSQL {self._server.version}"

    def prepare(self, name: str) -> str:
        """Create a database for this run, remove that of the run before, and return the URL."""
        if self._made:
            drop_database(self._server.url(), self._made)
        make_database(self._server.url(), name, TEMPLATE)
        self._made = name
        return self._server.tcp_url(name)

    def strike(self, url: str) -> str:
        """Kill the server by SIGKILL."""
        self._server.kill()
        return "SIGKILL of PostgreSQL"

    def restore(self) -> None:
        """Start the server again; it recovers from its log."""
        self._server.restart()

    def close(self, *, keep: bool) -> None:
        """Release the server; the caller removes the directory."""
        self._server.release()


class GivenDatabase:
    """A database that the user has given.

    Raises:
        UsageError: it cannot be reached, holds data of a graph, or a schema that the graph would take.
    """

    def __init__(self, url: str, graph: str, sql: Path | None = None) -> None:
        self._url, self._graph = url, graph
        try:
            with Database(url) as database:
                refuse_if_used(database, graph)
            migrate(url)
            if sql is not None:
                run_file(url, sql)
        except StoreUnavailableError as error:
            raise UsageError(error.message, hint="check the URL, and that the server runs") from error
        self._used = False
        self.description = "the given database"

    def prepare(self, name: str) -> str:
        """Return the URL of the database, emptied of the run before."""
        if self._used:
            self._forget()
        self._used = True
        return self._url

    def _forget(self) -> None:
        with Database(self._url) as database:
            database.forget(self._graph)

    def strike(self, url: str) -> str:
        """Terminate every connection of the workers."""
        with Database(url) as database:
            return f"{database.terminate_workers()} connections terminated"

    def restore(self) -> None:
        """Do nothing: only connections were terminated."""

    def close(self, *, keep: bool) -> None:
        """Remove the graph of the last run."""
        if self._used and not keep:
            self._forget()


def refuse_if_used(database: Database, graph: str) -> None:
    """Refuse a database that holds other data, because a crash test empties its database.

    Raises:
        UsageError: the database holds data of a graph, or the graph's schema.
    """
    hint = "give it an empty database of its own: CREATE DATABASE crash_test"
    if graphs := database.graphs():
        raise UsageError(f"the database holds data of {', '.join(map(repr, graphs))}", hint=hint)
    if database.has_schema(graph):
        raise UsageError(f"the database has a schema {graph!r}, where the graph would write", hint=hint)


def server_for(url: str | None, graph: str, directory: Path, sql: Path | None = None) -> EmbeddedServer | GivenDatabase:
    """Return the given database, or else an embedded server in `directory`, after the statements of the file `sql`.

    Raises:
        UsageError: the given database is in use, or a statement fails.
    """
    return EmbeddedServer(directory, sql) if url is None else GivenDatabase(url, graph, sql)


def proxied_address(url: str) -> tuple[str, int]:
    """Return the address to which a proxy in front of this database forwards.

    Raises:
        UsageError: no proxy can stand in front of this database.
    """
    address = tcp_address(url)
    if address is None:
        raise UsageError(
            "cannot inject network faults: the proxy cannot connect to this database",
            hint="give a URL with one host by TCP and without required encryption, or leave `network` out of --faults",
        )
    return address
