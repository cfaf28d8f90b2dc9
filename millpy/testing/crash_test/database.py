"""All SQL of a crash test: checks, cleaning, samples, results. No other module of the package imports psycopg."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, LiteralString
from urllib.parse import quote

import msgspec
import psycopg
from psycopg import conninfo, sql
from psycopg.types.string import TextLoader

from millpy.errors import StoreUnavailableError, UsageError
from millpy.model.deployment import PANE_INFO
from millpy.store.postgres.session import connect
from millpy.testing.crash_test.compare import ComparedTable, Results

WHO_AND_WHEN = ("interval_id", "bundle", "emitted_at")  # the bundle that committed a row: not part of a result
VARIES = {
    "windowed": ("pane_index", "pane_timing", *PANE_INFO, *WHO_AND_WHEN),  # the number of panes depends on bundling
    "records": ("ordinal", *WHO_AND_WHEN),
}
TEXTUAL = ("json", "jsonb", "timestamptz", "uuid", "numeric")

INTERVALS: LiteralString = """
    SELECT i.interval_id, c.name, c.kind = 'injector', i.bundle, i.low_watermark >= 4611686018427387904, w.pid,
           mill.alive(w.lease_deadline, w.lease_s)
      FROM mill.intervals AS i JOIN mill.computations AS c USING (computation_id)
      LEFT JOIN mill.workers AS w ON w.worker_id = i.worker_id
     ORDER BY i.interval_id
"""
INJECTED: LiteralString = """
    SELECT e.interval_id, e.namespace, (e.value #>> '{}')::bigint FROM mill.entries AS e
     WHERE e.kind = 'counter' AND e.interval_id = ANY (%s) AND e.namespace IN ('injected', 'duplicate')
"""
# Behind a keyed stage lateness is judged by the bundle, so only a source-fed table must have the same late_count.
TABLES: LiteralString = """
    SELECT t.name, t.kind, t.key_columns,
           (SELECT bool_and(p.kind = 'injector') FROM mill.subscriptions AS u JOIN mill.streams AS s USING (stream_id)
              JOIN mill.computations AS p ON p.computation_id = s.producer_id
             WHERE u.consumer_id = t.computation_id)
      FROM mill.result_tables AS t JOIN mill.graphs AS g USING (graph_id) WHERE g.name = %s ORDER BY t.name
"""
LATE: LiteralString = """
    SELECT stream, computation, key, event_time, window_start, window_end, payload FROM mill.late_records
"""
DEAD: LiteralString = "SELECT stream, computation, reason, key, payload FROM mill.dead_letters"
UNBALANCED: LiteralString = (
    "SELECT stream, source_partition, consumer, result_table FROM millpy.accounting WHERE NOT balanced"
)
PENDING: LiteralString = """
    SELECT coalesce(sum(injected), 0)::bigint, coalesce(sum(duplicate), 0)::bigint,
           coalesce(sum(dead_lettered), 0)::bigint FROM millpy.accounting WHERE source_partition IS NOT NULL
"""
TERMINATE: LiteralString = """
    SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity
     WHERE datname = current_database() AND application_name LIKE 'millpy %%' AND pid <> pg_backend_pid()
"""


@dataclass(frozen=True, slots=True)
class Interval:
    """An interval at one moment. `pid` is its owner's, or None; `live` tells whether the owner's lease is valid."""

    interval_id: int
    computation: str
    is_injector: bool
    bundle: int
    finished: bool
    pid: int | None
    live: bool


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The state of a run's database at one moment.

    Attributes:
        workers: process ids of registered workers.
        injected: records that the injectors have read and committed.
        duplicates: how many of them were dropped as duplicates.
    """

    intervals: tuple[Interval, ...]
    workers: tuple[int, ...]
    injected: int
    duplicates: int


def run_file(url: str, path: Path) -> None:
    """Run the SQL of a user's file.

    Raises:
        UsageError: a statement fails, or the file is not text.
    """
    try:
        with connect(url) as connection:
            connection.execute(path.read_bytes().decode().encode())
    except (psycopg.Error, UnicodeDecodeError) as error:
        said = error.diag.message_primary if isinstance(error, psycopg.Error) else None
        raise UsageError(f"{path}: {said or error}", hint="correct the statements of --sql") from error


class Database:
    """A connection to one database, which is reopened after a loss."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._connection: psycopg.Connection[Any] | None = None

    def __enter__(self) -> Database:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Disconnect."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def rows(self, statement: LiteralString | sql.Composed, parameters: Iterable[Any] = ()) -> list[tuple[Any, ...]]:
        """Return all rows of one statement.

        Raises:
            StoreUnavailableError: the database does not answer.
        """
        try:
            if self._connection is None or self._connection.closed:
                self._connection = _connect(self.url)
            cursor = self._connection.execute(statement, list(parameters))
            return cursor.fetchall() if cursor.description is not None else []
        except psycopg.OperationalError as error:
            self.close()
            raise StoreUnavailableError(f"the database does not answer: {' '.join(str(error).split())}") from error
        except psycopg.errors.InsufficientPrivilege as error:
            raise UsageError(
                f"missing rights: {error}", hint="run the crash test as the owner of the database"
            ) from error

    def snapshot(self) -> Snapshot | None:
        """Return the present state; None before the graph is deployed."""
        if self.rows("SELECT to_regclass('mill.intervals')")[0][0] is None:
            return None
        intervals = tuple(Interval(*row) for row in self.rows(INTERVALS))
        if not intervals:
            return None
        sources = [interval.interval_id for interval in intervals if interval.is_injector]
        counts = self.rows(INJECTED, [sources])
        workers = tuple(pid for (pid,) in self.rows("SELECT pid FROM mill.workers"))
        injected, duplicates = (
            sum(count for _, counter, count in counts if counter == name) for name in ("injected", "duplicate")
        )
        return Snapshot(intervals, workers, injected, duplicates)

    def graphs(self) -> list[str]:
        """Return the names of the graphs that are deployed here; none without our tables."""
        if self.rows("SELECT to_regclass('mill.graphs')")[0][0] is None:
            return []
        return [name for (name,) in self.rows("SELECT name FROM mill.graphs ORDER BY name")]

    def has_schema(self, name: str) -> bool:
        """Tell whether a schema of this name exists."""
        return bool(self.rows("SELECT to_regnamespace(quote_ident(%s)) IS NOT NULL", [name])[0][0])

    def forget(self, graph: str) -> None:
        """Remove everything that a crash test of this graph has left.

        Raises:
            UsageError: another graph has been deployed into the database meanwhile; nothing is removed.
        """
        if others := [name for name in self.graphs() if name != graph]:
            raise UsageError(
                f"graph {others[0]!r} was deployed into the database of the crash test",
                hint="give a crash test a database of its own",
            )
        self.rows(sql.SQL("DROP SCHEMA IF EXISTS {} CASCADE").format(sql.Identifier(graph)))
        tables = self.rows(
            "SELECT c.relname FROM pg_class AS c WHERE c.relnamespace = 'mill'::regnamespace"
            " AND c.relkind IN ('r', 'p') AND NOT c.relispartition AND c.relname NOT IN ('epochs', 'alembic_version')"
        )
        names = sql.SQL(", ").join(sql.Identifier("mill", name) for (name,) in tables)
        self.rows(sql.SQL("TRUNCATE {} RESTART IDENTITY CASCADE").format(names))

    def results(self, graph: str) -> Results:
        """Return every result table, late records, dead letters, and the accounting."""
        tables = [
            self._table(graph, name, kind, [column[0] for column in msgspec.json.decode(keys)], source_fed)
            for name, kind, keys, source_fed in self.rows(TABLES, [graph])
        ]
        tables.append(_records_of("late records", LATE, self.rows(LATE)))
        tables.append(_records_of("dead letters", DEAD, self.rows(DEAD)))
        injected, duplicates, dead = self.rows(PENDING)[0]
        return Results(
            tables={table.name: table for table in tables},
            unbalanced=tuple(" ".join(filter(None, row)) for row in self.rows(UNBALANCED)),
            injected=injected,
            duplicates=duplicates,
            dead_lettered=dead,
        )

    def _table(self, graph: str, name: str, kind: str, keys: list[str], source_fed: bool) -> ComparedTable:
        names = [
            column
            for (column,) in self.rows(
                "SELECT attname FROM pg_attribute WHERE attrelid = %s::regclass AND attnum > 0 AND NOT attisdropped"
                " ORDER BY attnum",
                [f'"{graph}"."{name}"'],
            )
        ]
        if kind == "windowed":
            keys = [*keys, "window_start", "window_end"]
        varies = VARIES.get(kind, WHO_AND_WHEN) + (() if source_fed else ("late_count",))
        values = [column for column in names if column not in keys and column not in varies]
        chosen = sql.SQL(", ").join(map(sql.Identifier, [*keys, *values]))
        rows = self.rows(sql.SQL("SELECT {} FROM {}").format(chosen, sql.Identifier(graph, name)))
        return ComparedTable(name, tuple(keys), tuple(values), rows)

    def events(self) -> list[tuple[str, int]]:
        """Return the number of events of each kind that the engine has written."""
        return [
            (kind, count) for kind, count in self.rows("SELECT kind, count(*) FROM mill.events GROUP BY 1 ORDER BY 1")
        ]

    def terminate_workers(self) -> int:
        """Terminate every connection of the workers; return the number of connections."""
        return int(self.rows(TERMINATE)[0][0])


def make_database(url: str, name: str, template: str) -> None:
    """Create a database on the server of a URL, and write it to disk, so that a crash has little to recover."""
    make = sql.SQL("CREATE DATABASE {} TEMPLATE {} STRATEGY file_copy")
    with connect(url) as connection:
        connection.execute(make.format(sql.Identifier(name), sql.Identifier(template)))
        connection.execute("CHECKPOINT")


def drop_database(url: str, name: str) -> None:
    """Drop a database on the server of a URL."""
    with connect(url) as connection:
        connection.execute(sql.SQL("DROP DATABASE {} WITH (FORCE)").format(sql.Identifier(name)))


def tcp_address(url: str) -> tuple[str, int] | None:
    """Return host and port of a URL, if a proxy can stand in front of it, else None (a socket, several hosts or
    required encryption).
    """
    parts = conninfo.conninfo_to_dict(url)
    host, port = str(parts.get("host") or ""), str(parts.get("port") or "5432")
    plain = parts.get("sslmode") in (None, "disable", "allow", "prefer")
    return (host, int(port)) if host and not host.startswith("/") and "," not in host + port and plain else None


def url_through_proxy(url: str, port: int) -> str:
    """Return the URL with its server replaced by a proxy on this machine, without encryption."""
    parts = conninfo.conninfo_to_dict(url)
    parts.pop("hostaddr", None)
    parts |= {"host": "127.0.0.1", "port": str(port), "sslmode": "disable"}
    user, database = parts.pop("user", None), parts.pop("dbname", "postgres")
    password = parts.pop("password", None)
    secret = f":{quote(str(password), safe='')}" if password else ""
    login = f"{quote(str(user), safe='')}{secret}@" if user else ""
    rest = "&".join(
        f"{name}={quote(str(value), safe='')}" for name, value in parts.items() if name not in ("host", "port")
    )
    return f"postgresql://{login}127.0.0.1:{port}/{quote(str(database), safe='')}?{rest}"


def _records_of(name: str, statement: str, rows: list[tuple[Any, ...]]) -> ComparedTable:
    columns = statement.split("SELECT")[1].split("FROM")[0].replace("\n", " ").split(",")
    return ComparedTable(name, (), tuple(column.strip() for column in columns), rows)


def _connect(url: str) -> psycopg.Connection[Any]:
    connection = connect(url, {"statement_timeout": "60s"}, connect_timeout=3, application_name="crash-test")
    for name in TEXTUAL:
        connection.adapters.register_loader(name, TextLoader)
    return connection
