"""Place: where the runs of a crash test keep their data.

An embedded server of its own has a database for every run. A database that was given must be empty, takes one run after
the other, and is empty again afterwards.
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from millpy.embedded import EmbeddedPostgres
from millpy.errors import StoreUnavailableError, UsageError
from millpy.store.migrate import migrate
from millpy.testing.crash_test.database import Database, drop_database, make_database, tcp_address

TEMPLATE = "crash_test_template"


class Place(Protocol):
    """Databases to run in; `described` says in words where."""

    described: str

    def fresh(self, name: str) -> str:
        """URL of a migrated database without graphs."""
        ...

    def strike(self, url: str) -> str:
        """Take the server away from the workers as hard as may be; returns what was done."""
        ...

    def restore(self) -> None:
        """Bring it back."""
        ...

    def close(self, *, keep: bool) -> None:
        """Leave nothing behind, unless asked to."""
        ...


class EmbeddedPlace:
    """A server of our own, which may be killed."""

    def __init__(self, directory: Path) -> None:
        self._server = EmbeddedPostgres(directory, tcp=True)
        self._server.start()
        make_database(self._server.url(), TEMPLATE, "template1")
        migrate(self._server.url(TEMPLATE))
        self._made = ""
        self.described = f"embedded PostgreSQL {self._server.version}"

    def fresh(self, name: str) -> str:
        """URL of a database made for this run; that of the run before is gone."""
        if self._made:
            drop_database(self._server.url(), self._made)
        make_database(self._server.url(), name, TEMPLATE)
        self._made = name
        return self._server.tcp_url(name)

    def strike(self, url: str) -> str:
        """SIGKILL."""
        self._server.kill()
        return "SIGKILL of PostgreSQL"

    def restore(self) -> None:
        """Start it again; it recovers from its log."""
        self._server.restart()

    def close(self, *, keep: bool) -> None:
        """Let go of it; the directory is the caller's to remove."""
        self._server.release()


class GivenPlace:
    """A database of the user's.

    Raises:
        UsageError: it cannot be reached, holds data of a graph, or a schema that the graph would take.
    """

    def __init__(self, url: str, graph: str) -> None:
        self._url, self._graph = url, graph
        try:
            with Database(url) as database:
                refuse_if_used(database, graph)
            migrate(url)
        except StoreUnavailableError as error:
            raise UsageError(error.message, hint="is it running, and is the URL right?") from error
        self._used = False
        self.described = "the database that was given"

    def fresh(self, name: str) -> str:
        """The database, without what the run before has left."""
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
        """Nothing to bring back."""

    def close(self, *, keep: bool) -> None:
        """Remove the graph that was run."""
        if self._used and not keep:
            self._forget()


def refuse_if_used(database: Database, graph: str) -> None:
    """A crash test deletes what it has made; so nothing else may be there.

    Raises:
        UsageError: somebody's data is.
    """
    hint = "give it an empty database of its own: CREATE DATABASE crash_test"
    if graphs := database.graphs():
        raise UsageError(f"the database holds data of {', '.join(map(repr, graphs))}", hint=hint)
    if database.has_schema(graph):
        raise UsageError(f"the database has a schema {graph!r}, where the graph would write", hint=hint)


def place_for(url: str | None, graph: str, directory: Path) -> EmbeddedPlace | GivenPlace:
    """The given database, else an embedded server in a directory.

    Raises:
        UsageError: the given one is in use.
    """
    return EmbeddedPlace(directory) if url is None else GivenPlace(url, graph)


def proxied_address(url: str) -> tuple[str, int]:
    """Where a proxy has to forward to.

    Raises:
        UsageError: no proxy can stand before this database.
    """
    address = tcp_address(url)
    if address is None:
        raise UsageError(
            "no proxy can stand before this database, so there are no network faults",
            hint="give a URL with one host by TCP and without required encryption, or leave `network` out of --faults",
        )
    return address
