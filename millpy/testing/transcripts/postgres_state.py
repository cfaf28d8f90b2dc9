"""The committed state of a driven graph in PostgreSQL: the store of workers, and what people read through SQL."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from decimal import Decimal
from typing import Any, TypeVar

from millpy.admin.queries import Admin
from millpy.admin.results import RowFilter, newest, result_tables
from millpy.clock import random_id
from millpy.limits import Limits
from millpy.model.checkpoint import Checkpoint, DeadLetter, DedupeRun, Entries, Grant, LateRows
from millpy.model.deployment import Deployment, GraphSpec
from millpy.model.stored_windows import WindowQuery
from millpy.store.postgres.store import PostgresStore
from millpy.store.protocol import OwnerSnapshot, PollResult, SegmentQuery, WorkerInfo
from millpy.testing.kit.state import Rows
from millpy.testing.transcripts.definition import Definition
from millpy.testing.transcripts.subject import GraphSubject

LEASE_S = 600.0
"""The lease of a run, which takes a second: after a crash of this process, the graph can be dropped that much later."""
ROWS_MAX = 1_000_000
T = TypeVar("T")
_LATE = """
SELECT l.stream, l.computation, l.key::text AS key, l.payload, l.event_time, l.watermark, l.window_start, l.window_end
  FROM mill.late_records AS l JOIN mill.intervals AS i USING (interval_id)
 WHERE i.graph_id = :graph_id ORDER BY l.late_record_id
"""
_DEAD_LETTERS = """
SELECT reason, detail, payload, stream, computation, source_position FROM millpy.dead_letters
 WHERE graph = :graph ORDER BY dead_letter_id
"""


class PostgresState:
    """The state of one graph. It registers as a worker, and owns all intervals of the graph.

    Args:
        store: an open store.
        runner: runs the store's coroutines.
        admin: queries of the same database.
    """

    def __init__(self, store: PostgresStore, runner: asyncio.Runner, admin: Admin) -> None:
        self._store = store
        self._runner = runner
        self._admin = admin
        self._worker_id = random_id()
        self._grants: Sequence[Grant] = ()
        self.deployment: Deployment | None = None

    def deploy(self, spec: GraphSpec) -> Deployment:
        """Register a graph, and this process as its worker."""
        deployment = self._run(self._store.deploy(spec))
        info = WorkerInfo(self._worker_id, deployment.graph_id, deployment.version)
        self._run(self._store.register(info, LEASE_S))
        self.deployment = deployment
        return deployment

    def claim(self, interval_ids: Sequence[int]) -> Sequence[Grant]:
        """Take intervals over from their owners, whose grants are stale from now on; return the new grants."""
        self._grants = self._run(self._store.seize(self._worker_id, interval_ids))
        return self._grants

    def read(self, grant: Grant, *, state_rows_max: int) -> OwnerSnapshot:
        """Read what an interval has committed."""
        (snapshot,) = self._run(self._store.read([grant], state_rows_max=state_rows_max))
        return snapshot

    def load_state(self, grant: Grant, keys: Sequence[bytes]) -> Sequence[Entries]:
        """Read the state of these keys, given as JSON text."""
        return self._run(self._store.load_state(grant, keys))

    def load_windows(self, grant: Grant, folded_bundle: int, subkeys: Sequence[str], keys: Sequence[bytes]) -> Entries:
        """Read folded entries of windows; see `Store.load_windows`."""
        return self._run(self._store.load_windows(grant, folded_bundle, subkeys, keys))

    def query_windows(self, grant: Grant, folded_bundle: int, query: WindowQuery) -> Entries:
        """Read the folded entries that a query asks for; see `Store.query_windows`."""
        return self._run(self._store.query_windows(grant, folded_bundle, query))

    def load_dedupe_runs(self, grant: Grant) -> Sequence[DedupeRun]:
        """Read the interval's dedupe runs that have not expired, oldest first."""
        return self._run(self._store.load_dedupe_runs(grant))

    def poll(self, queries: Sequence[SegmentQuery], bytes_max: int) -> Sequence[PollResult]:
        """Answer each query with its producer's position and the segments above the consumer's cursor."""
        return self._run(self._store.poll(queries, min(bytes_max, 2**31 - 1)))

    def commit(self, checkpoints: Sequence[Checkpoint], *, graph_version: int) -> None:
        """Commit a turn in one transaction, or raise and change nothing."""
        self._run(self._store.commit(checkpoints, graph_version=graph_version))

    def rows(self, table: str) -> Rows:
        """Return the rows of a result table by column, in the order of its key."""
        assert self.deployment is not None
        deployed = next(
            found for found in result_tables(self._admin) if (found.graph, found.name) == (self.deployment.name, table)
        )
        hidden = ("emitted_at", "interval_id", "bundle", "is_final")
        rows = newest(self._admin, deployed, RowFilter(values={}, limit=ROWS_MAX))
        return [{name: _plain(name, value) for name, value in row.items() if name not in hidden} for row in rows]

    def history(self, table: str) -> Rows:
        """Raise: no transcript reads histories."""
        raise NotImplementedError(table)

    def late_rows(self) -> Sequence[LateRows]:
        """Return the stored late records, oldest first."""
        assert self.deployment is not None
        return [
            LateRows(
                row["stream"],
                row["computation"],
                keys=[row["key"].encode()],
                payloads=[bytes(row["payload"])],
                event_times=[row["event_time"]],
                watermarks=[row["watermark"]],
                window_starts=[row["window_start"]],
                window_ends=[row["window_end"]],
            )
            for row in self._admin.ask(_LATE, graph_id=self.deployment.graph_id)
        ]

    def dead_letters(self) -> Sequence[DeadLetter]:
        """Return the stored dead letters, oldest first."""
        assert self.deployment is not None
        return [
            DeadLetter(
                row["reason"],
                row["detail"],
                bytes(row["payload"]),
                row["stream"],
                row["computation"],
                row["source_position"] or "",
            )
            for row in self._admin.ask(_DEAD_LETTERS, graph=self.deployment.name)
        ]

    def unbalanced(self) -> list[str]:
        """Describe the accounts that do not add up (I8)."""
        assert self.deployment is not None
        return [str(dict(row)) for row in self._admin.accounting(self.deployment.name) if not row["balanced"]]

    def drop(self) -> None:
        """Remove the graph with everything that it has stored."""
        if self.deployment is not None:
            self._run(self._store.release(self._worker_id, self._grants))
            self._run(self._store.unregister(self._worker_id))
            self._run(self._store.drop(self.deployment.name))

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return self._runner.run(work)


class PostgresSubject(GraphSubject):
    """A graph hosted over PostgreSQL; it is dropped when the run ends."""

    def __init__(self, definition: Definition, state: PostgresState) -> None:
        self._stored = state
        try:
            super().__init__(definition, f"transcript_{random_id().hex[:12]}", state)
        except BaseException:
            state.drop()
            raise

    def close(self) -> None:
        """Drop the graph."""
        self._stored.drop()


class PostgresSubjects:
    """Makes subjects in one database, with one store after the other.

    Args:
        store: an open store.
        runner: runs its coroutines.
        url: the URL of its database.
    """

    def __init__(self, store: PostgresStore, runner: asyncio.Runner, url: str) -> None:
        self._store = store
        self._runner = runner
        self._admin = Admin(url)

    def __call__(self, definition: Definition) -> PostgresSubject:
        """Return a new subject."""
        return PostgresSubject(definition, PostgresState(self._store, self._runner, self._admin))


@contextmanager
def postgres_subjects(url: str) -> Iterator[PostgresSubjects]:
    """Yield what makes subjects in a migrated database.

    Raises:
        NotMigratedError, StoreUnavailableError: the database is not migrated, or cannot be reached.
    """
    with asyncio.Runner() as runner:
        store = PostgresStore(url, limits=Limits())
        try:
            runner.run(store.open())
            yield PostgresSubjects(store, runner, url)
        finally:
            runner.run(store.close())


def _plain(name: str, value: Any) -> Any:
    if name in ("window_start", "window_end"):
        return datetime.fromisoformat(value)
    return int(value) if isinstance(value, Decimal) and value == value.to_integral_value() else value
